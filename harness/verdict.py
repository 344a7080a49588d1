"""What judging a case ends with.

1. A verdict is one of five words; a FAIL has a kind of fault, the others have none.
2. What was measured is data: numbers for tables, worst rows and elements for reports. The message says the same in words.

Source: the words are those of the README's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Verdicts: right; wrong; right but the check could not have failed; outside the backend's contract; the fault is ours.
KINDS = ("PASS", "FAIL", "UNTRUSTED", "UNSUPPORTED", "ERROR")
FAULTS = (
    "mismatch",
    "inaccurate",
    "non-finite",
    "unwritten",
    "input-changed",
    "guard-touched",
    "nondeterministic",
    "variant",
    "crash",
    "hang",
    "refused",
    "accepted-unsupported",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFinding:
    """A row that went far."""

    #: Request, query token, head.
    index: tuple[int, int, int]
    #: The check it went furthest in, and how far of its limit.
    check: str
    ratio: float
    #: Root mean square error in units of the budget's.
    rho: float
    #: (ρ² - 1) over its standard deviation, and the limit of that.
    z: float
    z_limit: float
    #: Error over truth, 2-norms.
    relative: float
    #: Log-sum-exp, natural log; None where none came back.
    lse_expected: float
    lse_actual: float | None

    def __str__(self) -> str:
        lse = "" if self.lse_actual is None else f", lse {self.lse_actual:.7g} for {self.lse_expected:.7g}"
        return (
            f"row {list(self.index)}: {self.check} {self.ratio:.3g} of its limit; rho {self.rho:.3g}, "
            f"z {self.z:.3g} (limit {self.z_limit:.3g}), relative error {self.relative:.3g}{lse}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFinding:
    """An element that went far."""

    #: Request, query token, head, element.
    index: tuple[int, int, int, int]
    #: The truth.
    oracle: float
    #: The truth rounded to the output format.
    expected: float
    #: What came back.
    actual: float
    #: Actual less expected, units in the last place of the truth.
    ulps: float
    #: Hard bound and standard deviation of a correct kernel's error.
    hard: float
    deviation: float

    def __str__(self) -> str:
        return (
            f"element {list(self.index)}: expected {self.expected:.6g} (oracle {self.oracle:.9g}), actual {self.actual:.6g}: "
            f"{self.ulps:+.3g} ulp; bound {self.hard:.3g}, deviation {self.deviation:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was measured of a case; empty where judging ended before measuring."""

    #: Rows and elements looked at.
    rows: int = 0
    elements: int = 0
    #: Check -> worst ratio to its limit.
    ratios: Mapping[str, float] = field(default_factory=dict)
    #: Largest ρ, z, |e|/√V and ‖e‖/‖o‖.
    rho: float = 0.0
    z: float = 0.0
    element: float = 0.0
    relative: float = 0.0
    #: Null model -> "seen", "passed", or "same" as the truth.
    nulls: Mapping[str, str] = field(default_factory=dict)
    #: Sensitivity -> whether it would have been seen; one that does not apply is not here.
    sensitivities: Mapping[str, bool] = field(default_factory=dict)
    #: Worst rows and elements, worst first; of a failure only.
    worst_rows: tuple[RowFinding, ...] = ()
    worst_elements: tuple[ElementFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a case ended."""

    #: One of KINDS.
    kind: str
    #: One of FAULTS for a FAIL, else None.
    fault: str | None = None
    #: The case's id, the regime, what was found against which limit.
    message: str
    #: What was measured.
    measurements: Measurements = field(default_factory=Measurements)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a verdict is one of {', '.join(KINDS)}, not {self.kind!r}")
        if (self.kind == "FAIL") != (self.fault is not None) or (self.fault is not None and self.fault not in FAULTS):
            raise ValueError(f"a FAIL has one of {', '.join(FAULTS)} and nothing else has: {self.kind}, {self.fault!r}")
