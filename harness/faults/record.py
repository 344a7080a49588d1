"""A fault as a record: one known mistake, where it acts and which cases can show it.

1. A fault is a few lines at named points of the correct model, so that a wrong answer is wrong in one way only.
2. ``kind`` is a letter of the catalogue in ``docs/why.md``; ``report`` is the public report that the fault models, or the
   reason for which it stands here.
3. ``shows`` says which cases can show it at all. It is a promise that tests hold: where it is false the fault answers
   as the correct model does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.case import Case
from harness.faults.scene import POINTS, Act
from harness.faults.variant import BASE, VARIANTS

#: The kinds of faults that a decode kernel can have.
KINDS: Mapping[str, str] = {
    "A": "offsets that overflow",
    "B": "strides ignored",
    "C": "page size, last page, tile edges",
    "D": "block table",
    "E": "heads padded, folded or swapped",
    "F": "several query tokens",
    "G": "dispatch and eligibility",
    "H": "splits and their merge",
    "I": "log-sum-exp",
    "J": "dead slots that leak",
    "K": "rows of length zero",
    "L": "metadata, scheduling, workspace",
    "M": "stale state from an earlier call",
    "N": "fp8 scales",
    "O": "fp8 formats",
    "P": "probabilities in low precision",
    "Q": "softmax scale and score semantics",
    "R": "leading and windowed tokens",
    "S": "races",
    "T": "pipeline depth and launch limits",
    "U": "compiler and rounding",
    "V": "ports to another tile or device",
}


def always(case: Case) -> bool:
    """Hold for every case that has a token to attend to."""
    return max(case.lengths) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One wrong kernel."""

    #: What the backend ``fault:NAME`` is called; words and hyphens.
    name: str
    #: A key of KINDS.
    kind: str
    #: Public report that it models.
    report: str
    #: What the kernel does wrong, one clause.
    what: str
    #: What a case needs to show it, in words.
    needs: str
    #: Whether a case can show it.
    shows: Callable[[Case], bool] = always
    #: Point -> what happens there.
    acts: Mapping[str, Act]
    #: Variant of the correct model that it is planted in.
    variant: str = BASE
    #: Whether it answers from what an earlier call left behind, so that a single fresh call may be right.
    history: bool = False
    #: Names of faults that no output can tell from this one on most cases.
    twins: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.name}: kind must be one of {' '.join(KINDS)}, not {self.kind!r}")
        if self.variant not in VARIANTS:
            raise ValueError(f"fault {self.name}: no variant {self.variant!r}; one of {', '.join(VARIANTS)}")
        unknown = set(self.acts) - set(POINTS)
        if unknown or not self.acts:
            raise ValueError(f"fault {self.name}: acts at {sorted(unknown) or 'no point'}; points are {', '.join(POINTS)}")

    @property
    def where(self) -> str:
        """Points at which it acts."""
        return ", ".join(point for point in POINTS if point in self.acts)
