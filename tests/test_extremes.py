"""Limits of the largest of many statistics: they hold their probability, and no more."""

from __future__ import annotations

import math

import pytest
import torch

from harness.extremes import element_limit, quantile, row_limit


@pytest.mark.parametrize("count", [1, 24, 100_000])
@pytest.mark.parametrize("probability", [1e-2, 1e-9])
def test_a_quantile_is_exceeded_with_its_probability(count: int, probability: float) -> None:
    limit = quantile(probability, count)
    assert count * math.erfc(limit / math.sqrt(2)) / 2 == pytest.approx(probability, rel=1e-6)


@pytest.mark.parametrize(("freedom", "least"), [(2, 1 / 40), (8, 1 / 4), (100, 1 / 1.2), (1000, 1 / 1.2)])
def test_a_row_limit_is_a_quantile_of_chi_square(freedom: int, least: float) -> None:
    # For even degrees of freedom the tail of chi-square is a Poisson sum.
    probability = 1e-9
    spread = torch.tensor([math.sqrt(2 / freedom)], dtype=torch.float64)
    square = 1 + row_limit(spread, probability, 1).item() * spread.item()
    half = freedom * square / 2
    terms = [math.exp(-half + k * math.log(half) - math.lgamma(k + 1)) for k in range(freedom // 2)]
    assert probability * least < sum(terms) < probability * 1.2


def test_a_row_of_many_errors_is_limited_like_a_normal_number() -> None:
    limit = row_limit(torch.tensor([1e-3], dtype=torch.float64), 1e-9, 24).item()
    assert limit == pytest.approx(quantile(1e-9, 24), rel=0.01)


def test_limits_grow_with_what_is_looked_at() -> None:
    spread = torch.tensor([0.1, 1.0], dtype=torch.float64)
    assert (row_limit(spread, 1e-9, 1000) > row_limit(spread, 1e-9, 10)).all()
    assert element_limit(10_000, 1e-9) > element_limit(100, 1e-9)
    assert element_limit(100, 1e-9) > element_limit(100, 1e-6)


def test_a_row_without_spread_has_a_limit() -> None:
    assert row_limit(torch.zeros(1, dtype=torch.float64), 1e-9, 1).isfinite().all()
