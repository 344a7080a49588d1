"""How large the largest of many statistics of a correct kernel becomes.

1. A false alarm has a probability for a whole case: it is shared by the rows, or elements, that were looked at.
2. ρ² of a row is a sum of squares of mean 1 and standard deviation sd: it is taken for χ²/ν with ν = 2/sd², whose quantiles
   Wilson and Hilferty's cube root gives. For many degrees of freedom the limit of z is the normal quantile; for few it is
   larger, as it must be.
3. Elements are taken for normal. Roundings have thinner tails (they are bounded), sums of them approach it.

Source: E. Wilson, M. Hilferty, "The distribution of chi-square", 1931; the union bound.
Error: at a probability of 1e-9 the limit of ρ² is right within 2 % for ν ≥ 8 and a sixth too high for ν = 2, where the errors
that make up ρ² are few and bounded, so that none comes near it.
"""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor

#: A spread below this is none at all: two parts in a million of ρ².
NARROW = 1e-6


def quantile(probability: float, count: int) -> float:
    """Find what the largest of ``count`` standard normal numbers exceeds with a probability."""
    return -NormalDist().inv_cdf(probability / max(count, 1))


def row_limit(spread: Tensor, probability: float, rows: int) -> Tensor:
    """Find the largest z = (ρ² - 1)/sd among ``rows`` of a correct kernel: sd of each row to its limit, any shape."""
    normal = quantile(probability, rows)
    narrow = spread.clamp_min(NARROW)
    variance = narrow.square() / 9  # 2/(9ν)
    return ((1 - variance + normal * variance.sqrt()) ** 3 - 1) / narrow


def element_limit(count: int, probability: float) -> float:
    """Find the largest |e|/√V among ``count`` elements of a correct kernel."""
    return quantile(probability / 2, count)
