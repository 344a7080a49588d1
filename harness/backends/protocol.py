"""What a backend is to the harness.

1. ``why_not`` states the contract. Inside it ``run`` must answer right; outside it ``run`` must raise, never answer.
2. ``run`` may write to ``inputs.out`` and ``inputs.lse`` and to memory of its own, and to nothing else.
3. An answer says what ran: the kernel and its split count where the backend can tell.
4. A backend that is misspelt, one that is not installed and one that cannot do a case are three different errors.
5. An adaptor of somebody else's public function may say so: ``public`` (its module and name), ``arguments(inputs)`` (the
   keyword arguments of a case) and ``preface(inputs)`` (what must be called before, see ``calling.Step``). A script of a
   failing case then calls that function itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from harness.case import Case
from harness.inputs import Inputs
from references.formats import FORMATS

#: What a backend does with rows that see no token (N - S + t < 0, or N = 0): out 0 and lse -inf; nothing is written; either.
EMPTY_ROWS = ("zeros", "untouched", "undefined")


class UnknownBackend(LookupError):
    """No backend has this name."""


class NotInstalled(RuntimeError):
    """The backend exists but cannot run here; the message says what is missing and how to get it."""


class Unsupported(ValueError):
    """The case lies outside the backend's contract; nothing was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What holds for every case of a backend."""

    #: Number format of the output.
    output_format: str = "bf16"
    #: Device types it runs on, "cpu" and "cuda" (which is also what ROCm's torch calls its devices).
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    #: What it does with rows that see no token: one of EMPTY_ROWS.
    empty_rows: str = "zeros"
    #: Whether it can return the log-sum-exp.
    returns_lse: bool = True
    #: Fields of Case for whose values it compiles kernels anew on a GPU; cases of a search share few of them there.
    compiled: frozenset[str] = frozenset()
    #: Whether its runs on a GPU can be captured into a graph and replayed over other lengths, values and tables.
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.output_format not in FORMATS:
            raise ValueError(f"output_format must be one of {', '.join(FORMATS)}, not {self.output_format!r}")
        if self.empty_rows not in EMPTY_ROWS:
            raise ValueError(f"empty_rows must be one of {', '.join(EMPTY_ROWS)}, not {self.empty_rows!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a backend answered."""

    #: [B, S, H, L] in the backend's output format; values, scales applied.
    out: Tensor
    #: Log-sum-exp of the scaled scores, natural log, fp32 [B, S, H]; None if not asked for or not returned.
    lse: Tensor | None = None
    #: What ran: "kernel", "splits" and whatever else tells one path from another.
    what_ran: Mapping[str, str | int] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """A kernel under test behind its adaptor."""

    @property
    def name(self) -> str:
        """Its name in the registry, with ``@LABEL`` where several versions stand side by side."""

    @property
    def capabilities(self) -> Capabilities:
        """What holds for all its cases."""

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Say why a case lies outside the contract on a device, or None."""

    def run(self, inputs: Inputs) -> Output:
        """Compute the decode.

        Raises:
            Unsupported: if the case lies outside the contract.
        """


def accepts(backend: Backend, case: Case, device: torch.device) -> bool:
    """Tell whether a backend accepts a case.

    One whose ``why_not`` raises has not said no: the case is asked, and the verdict on it says what was raised.
    """
    try:
        return backend.why_not(case, device) is None
    except Exception:
        return True
