"""The backends ``model:VARIANT``, right on purpose, and ``fault:NAME``, wrong on purpose.

1. Both are the same model; a fault adds its acts. A fault claims the contract of the correct model.
2. A backend keeps what a fault keeps from call to call, and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.backends.protocol import Capabilities, Output, UnknownBackend, Unsupported
from harness.case import Case
from harness.faults.catalogue import FAULTS
from harness.faults.model import Act, run
from harness.faults.variant import VARIANTS, Variant
from harness.inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """The model with the acts of no fault, of one, or of several."""

    #: Name in the registry.
    name: str
    variant: Variant
    #: Point -> acts in the order they are passed.
    acts: Mapping[str, Sequence[Act]] = field(default_factory=dict)
    #: What the acts keep from call to call.
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def capabilities(self) -> Capabilities:
        """What holds for every case."""
        return Capabilities(output_format=self.variant.output, devices=frozenset({"cpu"}), empty_rows="zeros")

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract, or None."""
        if device.type != "cpu":
            return f"the model runs on the CPU, not on {device.type}"
        if self.variant.partial == "fp16" and case.content == "edges":
            return "fp16 partial outputs cannot hold the largest codes of wider formats"
        return None

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises:
            Unsupported: if the case lies outside the contract.
            IllegalAccess: if a fault made it read outside the allocations.
        """
        reason = self.why_not(inputs.case, inputs.device)
        if reason is not None:
            raise Unsupported(f"{self.name} does not answer {inputs.case}: {reason}")
        out, lse = run(inputs, self.variant, self.acts, self.memory)
        return Output(out=out, lse=lse, what_ran={"kernel": self.variant.name, "splits": self.variant.splits})


def together(*names: str) -> Mapping[str, Sequence[Act]]:
    """Put the acts of several faults together."""
    acts: dict[str, list[Act]] = {}
    for name in names:
        for point, act in FAULTS[name].acts.items():
            acts.setdefault(point, []).append(act)
    return acts


def planted(*names: str, variant: Variant | None = None) -> Planted:
    """Make the model with the named faults in it, in the first one's variant unless another is given."""
    return Planted(
        name="fault:" + "+".join(names),
        variant=variant or VARIANTS[FAULTS[names[0]].variant],
        acts=together(*names),
    )


def names() -> list[str]:
    """List the backends of both families."""
    return [*(f"model:{name}" for name in VARIANTS), *(f"fault:{name}" for name in FAULTS)]


def make(name: str, label: str | None = None) -> Planted:
    """Make ``model:VARIANT`` or ``fault:NAME``; several faults are joined by plus signs.

    Raises:
        UnknownBackend: if there is no such variant or fault; the message names what is near.
    """
    family, _, rest = name.partition(":")
    known: Mapping[str, object] = VARIANTS if family == "model" else FAULTS
    parts = [rest] if family == "model" else rest.split("+")
    for part in parts:
        if part not in known:
            near = difflib.get_close_matches(part, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise UnknownBackend(f"no {family} is called {part!r}: {hint}")
    if family == "model":
        return Planted(name=name, variant=VARIANTS[rest])
    return planted(*parts)
