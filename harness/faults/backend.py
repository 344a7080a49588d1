"""The backends ``model:VARIANT``, right on purpose, and ``fault:NAME``, wrong on purpose.

1. Both are the same model; a fault adds its acts. A fault claims the contract of the correct model.
2. A backend keeps what a fault keeps from call to call, and nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from harness.backends.protocol import Capabilities, Output, UnknownBackend, Unsupported
from harness.case import Case
from harness.faults.catalogue import FAULTS
from harness.faults.model import run
from harness.faults.scene import Act
from harness.faults.variant import VARIANTS, Variant
from harness.inputs import Inputs

Known = TypeVar("Known")


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
        return Capabilities(output_format=self.variant.arithmetic.output, devices=frozenset({"cpu"}), empty_rows="zeros")

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract, or None."""
        if device.type != "cpu":
            return f"the model runs on the CPU, not on {device.type}"
        arithmetic = self.variant.arithmetic
        if "fp16" in (arithmetic.partial, arithmetic.output) and case.content == "edges":
            return "fp16 outputs cannot hold the largest codes of wider formats"
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
        return Output(out=out, lse=lse, what_ran={"kernel": self.variant.name, "splits": self.variant.arithmetic.splits.count})


def together(*names: str) -> Mapping[str, Sequence[Act]]:
    """Put the acts of several faults together."""
    acts: dict[str, list[Act]] = {}
    for name in names:
        for point, act in FAULTS[name].acts.items():
            acts.setdefault(point, []).append(act)
    return acts


def planted(*names: str, variant: Variant | None = None) -> Planted:
    """Make the model with the named faults in it, in the first one's variant unless another is given."""
    variant = variant or VARIANTS[FAULTS[names[0]].variant]
    return Planted(name=f"fault:{'+'.join(names)}@{variant.name}", variant=variant, acts=together(*names))


def names() -> list[str]:
    """List the backends of both families."""
    return [*(f"model:{name}" for name in VARIANTS), *(f"fault:{name}" for name in FAULTS)]


def make(name: str, label: str | None = None) -> Planted:
    """Make ``model:VARIANT``, or ``fault:NAME`` planted in the variant that the label names; plus signs join several.

    Raises:
        UnknownBackend: if there is no such variant or fault; the message names what is near.
    """
    family, _, rest = name.partition(":")
    if family == "model":
        return Planted(name=name, variant=_known("variant", rest, VARIANTS))
    for part in rest.split("+"):
        _known("fault", part, FAULTS)
    return planted(*rest.split("+"), variant=_known("variant", label, VARIANTS) if label else None)


def _known(what: str, name: str, known: Mapping[str, Known]) -> Known:
    """Look a name up.

    Raises:
        UnknownBackend: if it is not there; the message names what is near.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(known)}"
        raise UnknownBackend(f"no {what} is called {name!r}: {hint}")
    return known[name]
