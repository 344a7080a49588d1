"""How measured values spread over the cases of a regime: histograms.

1. Every executed case is in exactly one bin of a histogram, one whose value is no number in the last.
2. A limit is an edge, so that no bin holds values on both of its sides.

Source: the values are those of the ledger's measurements.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.ledger import Line, number

#: Bins up to the limit of a check.
BINS = 20
#: Bins to a decade of ρ.
DECADE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of values between edges."""

    #: What was measured.
    name: str
    #: Edges, ascending, one more than counts; the outer bins take what lies beyond.
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    #: Value that must not be passed; None where each case has its own.
    limit: float | None
    #: Smallest and largest value.
    least: float
    largest: float

    def bin(self, value: float) -> int:
        """Find the bin that holds a value."""
        if math.isnan(value):
            return len(self.counts) - 1
        return min(max(bisect.bisect_right(self.edges, value) - 1, 0), len(self.counts) - 1)

    @property
    def ticks(self) -> list[float]:
        """List the values that an axis names: of ratios 0, a half and the limit, else each power of ten."""
        if self.limit is not None:
            return [0.0, self.limit / 2, self.limit]
        first, last = math.ceil(math.log10(self.edges[0])), math.floor(math.log10(self.edges[-1]))
        step = -(-(last - first + 1) // 8)
        return [10.0**power for power in range(first, last + 1, step)]

    def place(self, value: float) -> float:
        """Say where between the first and the last edge a value lies, 0 to 1; bins are equally wide."""
        found = self.bin(value)
        low, high = self.edges[found], self.edges[found + 1]
        inside = 0.5 if math.isnan(value) or math.isinf(high) else min(max((value - low) / (high - low), 0.0), 1.0)
        return (found + inside) / len(self.counts)


def _histogram(name: str, values: Sequence[float], edges: Sequence[float], limit: float | None) -> Histogram:
    made = Histogram(
        name=name,
        edges=tuple(edges),
        counts=(0,) * (len(edges) - 1),
        limit=limit,
        least=min(values, key=_order),
        largest=max(values, key=_order),
    )
    counts = [0] * len(made.counts)
    for value in values:
        counts[made.bin(value)] += 1
    return Histogram(name=name, edges=made.edges, counts=tuple(counts), limit=limit, least=made.least, largest=made.largest)


def _order(value: float) -> tuple[bool, float]:
    """Order numbers with what is none last: it is worse than any."""
    return (math.isnan(value), value)


def ratios(executed: Iterable[Line]) -> tuple[Histogram, ...]:
    """Spread each check's ratio to its limit over cases; the last bin is past the limit."""
    values: dict[str, list[float]] = {}
    for line in executed:
        for name, ratio in _measured(line, "ratios").items():
            values.setdefault(name, []).append(number(ratio))
    # A bin is closed below: the edge after 1 makes a ratio of exactly 1 one that keeps its limit.
    edges = [step / BINS for step in range(BINS)] + [math.nextafter(1.0, 2.0), math.inf]
    return tuple(_histogram(name, found, edges, 1.0) for name, found in values.items())


def rhos(executed: Iterable[Line], *marks: float) -> Histogram | None:
    """Spread the largest ρ of each case, on a logarithmic axis that also holds the marks; None where none was measured."""
    values = [number(line["measurements"]["rho"]) for line in executed if _measured(line, "ratios")]
    if not values:
        return None
    known = [value for value in (*values, *marks) if math.isfinite(value) and value > 0] or [1.0]
    first = math.floor(math.log10(min(known)) * DECADE)
    last = max(math.floor(math.log10(max(known)) * DECADE) + 1, first + DECADE)
    # Past some forty bins a bar is a hair: then each stands for several steps.
    step = -(-(last - first) // (5 * DECADE))
    edges = [10 ** (place / DECADE) for place in range(first, last + step, step)]
    return _histogram("rho", values, edges, None)


def _measured(line: Line, what: str) -> Mapping[str, float]:
    found: Mapping[str, float] = (line["measurements"] or {}).get(what) or {}
    return found


def untrusted(executed: Iterable[Line]) -> dict[str, int]:
    """Count the cases that each null model would have passed, the commonest first."""
    counts: dict[str, int] = {}
    for line in executed:
        if line["verdict"] == "UNTRUSTED":
            for name, state in ((line["measurements"] or {}).get("nulls") or {}).items():
                counts[name] = counts.get(name, 0) + (state == "passed")
    return dict(sorted(((name, count) for name, count in counts.items() if count), key=lambda item: -item[1]))
