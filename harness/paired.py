"""The paired test: whether one of two versions errs more than the other on the same cases.

1. A case counts by the sign of ln(change / base) of a measured error. Equal errors say nothing and are left out.
2. The test is the exact two-sided sign test: with n unequal pairs, k of which grew and m = max(k, n - k),
   p = min(1, 2 · Σ_{i ≥ m} C(n, i) / 2^n). It takes no shape of the distribution for granted.
3. How far it moved is the median ratio over all pairs, with the interval between the order statistics x_(r) and x_(n+1-r),
   r the largest with Σ_{i < r} C(n, i) / 2^n ≤ (1 - CONFIDENCE) / 2.
4. Of several tests at once the level holds for all together: Holm's sequence.

Source: Conover, Practical Nonparametric Statistics (sign test, confidence interval of a quantile); Holm 1979.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: One minus the chance that a comparison of versions which err alike says that any error moved; also of each interval.
CONFIDENCE = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """A measured error of one version beside that of another, over the same cases."""

    #: Name of the measurement.
    metric: str
    #: Cases measured on both; those of them where it grew, and where it shrank.
    cases: int
    grew: int
    shrank: int
    #: Median of change over base, and the ends of its interval; 0 and infinity where the cases are too few to say.
    ratio: float
    low: float
    high: float
    #: Two-sided probability of signs as unequal as these if the versions err alike.
    chance: float

    def __str__(self) -> str:
        chance = f"p = {self.chance:.2g}" if self.chance else "p < 1e-300"
        return (
            f"{self.metric} is {self.ratio:.4g} times the baseline's in the median ({CONFIDENCE:.1%} between {self.low:.4g} "
            f"and {self.high:.4g}); of {self.cases} cases it grew in {self.grew} and shrank in {self.shrank}, "
            f"{chance} (sign test)"
        )


def paired(metric: str, pairs: Sequence[tuple[float, float]]) -> Paired:
    """Test a measurement over pairs of (base, change), neither negative; a pair without two numbers is left out."""
    kept = [(base, change) for base, change in pairs if not math.isnan(base + change)]
    grew, shrank = (sum(sign * (change - base) > 0 for base, change in kept if change != base) for sign in (1, -1))
    ratios = sorted(_ratio(base, change) for base, change in kept)
    low, high = _interval(ratios)
    return Paired(
        metric=metric,
        cases=len(kept),
        grew=grew,
        shrank=shrank,
        ratio=statistics.median(ratios) if ratios else 1.0,
        low=low,
        high=high,
        chance=min(1.0, 2 * tail(grew + shrank, max(grew, shrank))),
    )


def moved(tests: Sequence[Paired]) -> list[Paired]:
    """Choose the tests that say that an error moved, by Holm's sequence."""
    ordered = sorted(tests, key=lambda test: test.chance)
    found = []
    for place, test in enumerate(ordered):
        if test.chance > (1 - CONFIDENCE) / (len(ordered) - place):
            break
        found.append(test)
    return found


def tail(count: int, least: int) -> float:
    """Give the probability that of ``count`` fair coins at least ``least`` fall heads.

    Error: relative 1e-9 up to a million coins, from lgamma.
    """
    whole = math.lgamma(count + 1) - count * math.log(2)
    return sum(math.exp(whole - math.lgamma(heads + 1) - math.lgamma(count - heads + 1)) for heads in range(least, count + 1))


def _ratio(base: float, change: float) -> float:
    return 1.0 if change == base else change / base if base else math.inf


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    count, outside, rank = len(ratios), 0.0, 0
    whole = math.lgamma(count + 1) - count * math.log(2)
    while rank < count // 2:
        outside += math.exp(whole - math.lgamma(rank + 1) - math.lgamma(count - rank + 1))
        if outside > (1 - CONFIDENCE) / 2:
            break
        rank += 1
    return (ratios[rank - 1], ratios[count - rank]) if rank else (0.0, math.inf)
