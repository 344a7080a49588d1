"""A regime whose smallest case outgrows the profile is asked in every shape that costs about as much, at differing lengths."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from harness.case import Case
from harness.outsized import CHEAP, LARGEST, Shape, shapes
from harness.profiles import PROFILES
from harness.regimes import load
from harness.strategies import cases
from tests.stubs import make

GATE = PROFILES["gate"]
PLAIN = Case(heads=64, lengths=(1024,) * 64)
DRAWABLE = {"batches": (64, 128), "heads": (64, 128), "query_tokens": (1, 1, 2, 3, 4, 8)}


def splits(case: Case) -> int:
    """Count splits as AITER's bh64 does: as many as fill 256 workgroups."""
    grid = case.heads // 64 * case.query_tokens * case.batch
    return 1 << max(0, -(-256 // grid) - 1).bit_length()


def accepts(case: Case) -> bool:
    """Take what AITER's bh64 takes: more than three tiles of 64 for each split."""
    return (
        case.batch % 64 == 0
        and case.heads in (64, 128)
        and case.cache_format == case.query_format == "bf16"
        and min(case.lengths) > splits(case) * (192 + splits(case))
    )


def test_each_shape_has_the_shortest_request_that_the_contract_takes() -> None:
    found = shapes(PLAIN, GATE, accepts, **DRAWABLE)
    assert {(one.batch, one.heads, one.query_tokens): one.shortest for one in found} == {
        (64, 64, 1): 785, (64, 64, 2): 389, (64, 64, 3): 389, (64, 64, 4): 194, (64, 64, 8): 194,
        (64, 128, 1): 389, (64, 128, 2): 194, (64, 128, 3): 194, (64, 128, 4): 194,
        (128, 64, 1): 389, (128, 64, 2): 194, (128, 64, 3): 194, (128, 64, 4): 194,
        (128, 128, 1): 194, (128, 128, 2): 194,
    }  # fmt: skip
    assert found[0] == Shape(batch=64, heads=64, query_tokens=1, shortest=785)


def test_what_costs_much_is_rare_and_what_costs_too_much_is_left_out() -> None:
    found = shapes(PLAIN, GATE, accepts, **DRAWABLE)
    least = min(shape.scores for shape in found)
    assert max(shape.scores for shape in found) <= LARGEST * least
    for shape in set(found):
        assert (found.count(shape) > 1) == (shape.scores <= CHEAP * least)
    assert not [shape for shape in found if (shape.heads, shape.query_tokens) == (128, 8)]
    wide = dataclasses.replace(GATE, scores=64 * 128 * 8 * 194, tokens=10_000)
    assert [one for one in shapes(PLAIN, wide, accepts, **DRAWABLE) if (one.heads, one.query_tokens) == (128, 8)]


def test_a_regime_whose_requests_may_be_short_enough_has_no_shapes() -> None:
    for plain in (Case(heads=64, lengths=(200,)), PLAIN):
        assert shapes(plain, GATE, lambda case, batch=plain.batch: case.batch == batch, **DRAWABLE) == ()


@pytest.fixture(scope="module")
def strategy() -> hypothesis.strategies.SearchStrategy[Case]:
    class Bh64:
        """A backend with the contract of AITER's bh64."""

        name = "aiter-gluon"
        capabilities = make("python:tests.stubs:right").capabilities

        def why_not(self, case: Case, device: object) -> str | None:
            """Refuse what it does not take."""
            return None if accepts(case) else "outside"

        run = None

    return cases(load().named("bh64"), GATE, Bh64())  # type: ignore[arg-type]


def test_drawn_cases_have_many_shapes_and_ragged_lengths(strategy: hypothesis.strategies.SearchStrategy[Case]) -> None:
    drawn: list[Case] = []

    @hypothesis.seed(1)
    @settings(max_examples=120, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    assert all(accepts(case) for case in drawn)
    assert len({(case.batch, case.heads, case.query_tokens) for case in drawn}) >= 12
    assert {splits(case) for case in drawn} == {1, 2, 4}
    assert sum(len(set(case.lengths)) > 2 for case in drawn) > 60
    assert any(case.pool_rows > 1_864_135 for case in drawn)
    cost = sorted(case.heads * case.query_tokens * sum(case.lengths) for case in drawn)
    assert cost[len(cost) // 2] < 1.4 * cost[0]


def test_a_drawn_case_shrinks_to_the_smallest_shape(strategy: hypothesis.strategies.SearchStrategy[Case]) -> None:
    smallest = find(strategy, lambda case: case.heads == 128, settings=settings(database=None, max_examples=50))
    assert (smallest.batch, smallest.heads, smallest.query_tokens) == (64, 128, 1)
    assert smallest.lengths == (389,) * 64
