"""The paired test says what moved, by how much and how surely, and is silent where nothing did."""

from __future__ import annotations

import math
import random

import pytest

from harness.paired import CONFIDENCE, moved, paired, tail


def test_the_tail_is_that_of_fair_coins() -> None:
    exact = [sum(math.comb(20, heads) for heads in range(least, 21)) / 2**20 for least in range(21)]
    assert [tail(20, least) for least in range(21)] == pytest.approx(exact, rel=1e-9)
    assert tail(0, 0) == 1.0
    assert tail(20_000, 10_000) == pytest.approx(0.5, rel=0.02)


def test_equal_errors_say_nothing() -> None:
    test = paired("rho", [(1.0, 1.0), (0.0, 0.0), (2.5, 2.5)] * 100)
    assert (test.grew, test.shrank, test.ratio, test.chance) == (0, 0, 1.0, 1.0)
    assert not moved([test])
    assert not moved([paired("rho", [])])


def test_an_error_that_grows_a_little_and_always_has_moved() -> None:
    draw = random.Random(0)
    pairs = [(base, base * 1.01) for base in (draw.lognormvariate(0, 1) for _ in range(50))]
    test = paired("rho", pairs)
    assert (test.grew, test.shrank) == (50, 0)
    assert test.chance == pytest.approx(2 / 2**50)
    assert (test.low, test.ratio, test.high) == pytest.approx((1.01, 1.01, 1.01))
    assert moved([test]) == [test]
    assert str(test).startswith("rho is 1.01 times the baseline's in the median (99.9% between 1.01 and 1.01); of 50 cases")
    assert moved([paired("rho", [(change, base) for base, change in pairs])])[0].ratio == pytest.approx(1 / 1.01)


def test_few_cases_are_too_few_to_say() -> None:
    test = paired("rho", [(1.0, 9.0)] * 8)
    assert not moved([test])
    assert (test.low, test.high) == (0.0, math.inf)


def test_versions_that_err_alike_have_moved_no_more_often_than_is_said() -> None:
    """400 comparisons of three errors over 40 cases each, with a fixed seed."""
    draw = random.Random(1)

    def errors() -> list[tuple[float, float]]:
        return [(draw.lognormvariate(0, 1), draw.lognormvariate(0, 1)) for _ in range(40)]

    alarms = sum(bool(moved([paired(name, errors()) for name in ("a", "b", "c")])) for _ in range(400))
    assert alarms <= 400 * (1 - CONFIDENCE) + 1


def test_the_interval_holds_the_median_as_often_as_is_said() -> None:
    draw = random.Random(2)
    held = 0
    for _ in range(1000):
        test = paired("rho", [(1.0, draw.lognormvariate(0.1, 1)) for _ in range(30)])
        held += test.low <= math.exp(0.1) <= test.high
    assert held >= 996  # 999 on average, and never less than it says but for luck


def test_what_is_no_number_is_left_out_and_infinity_is_worse_than_any() -> None:
    test = paired("rho", [(math.nan, 1.0), (1.0, math.nan), (1.0, math.inf), (0.0, 1.0)])
    assert (test.cases, test.grew) == (2, 2)


def test_several_tests_share_one_level() -> None:
    level = 1 - CONFIDENCE
    sure = paired("sure", [(1.0, 2.0)] * 40)
    near = next(test for n in range(5, 40) if (test := paired("near", [(1.0, 2.0)] * n)).chance <= level)
    assert moved([near]) == [near]
    quiet = [paired("quiet", [(1.0, 1.0)])] * 20
    assert moved([near, *quiet]) == []
    assert moved([sure, *quiet]) == [sure]
