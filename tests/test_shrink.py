"""The walk ends at a case whose every neighbour passes, and says which neighbour is nearest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from harness.case import Case
from harness.shrink import difference, neighbours, shrink, size, steps

BIG = Case(
    heads=12,
    query_tokens=3,
    lengths=(200, 131, 77),
    page_size=16,
    cache_format="e4m3fn",
    cache_scale=0.37,
    placement="scattered",
    query_layout="fused",
    table="ragged",
    token_padding=64,
    content="needle",
    amplitude=10.0,
    seed=12345,
)


def test_a_fault_of_long_requests_shrinks_to_the_shortest_that_shows_it() -> None:
    walk = shrink(BIG, lambda case: max(case.lengths) >= 70, seconds=10)
    assert walk.case == Case(heads=1, lengths=(70,), cache_format="e4m3fn")
    assert walk.neighbour == Case(heads=1, lengths=(69,), cache_format="e4m3fn")
    assert walk.difference == "lengths 69 instead of 70"
    assert walk.complete


@pytest.mark.parametrize(
    ("needs", "kept"),
    [
        (lambda case: case.page_size > 1 and case.placement != "identity", {"page_size": 2, "placement": "permuted"}),
        (lambda case: case.query_tokens >= 2 and case.heads >= 2, {"query_tokens": 2, "heads": 2}),
        (lambda case: case.cache_scale != 1.0, {"cache_scale": 0.37}),
        (lambda case: case.content == "needle", {"content": "needle"}),
        (lambda case: case.batch >= 2, {"lengths": (0, 0)}),
    ],
)
def test_only_what_the_fault_needs_stays(needs: Callable[[Case], bool], kept: dict[str, object]) -> None:
    walk = shrink(BIG, needs, seconds=10)
    plain = Case(**{"heads": 1, "lengths": (0,), "cache_format": "e4m3fn", **kept})  # type: ignore[arg-type]
    assert walk.case == plain
    assert all(not needs(near) for near in neighbours(walk.case))


def test_steps_and_neighbours_are_never_larger() -> None:
    for near in (*steps(BIG), *neighbours(BIG)):
        assert size(near) < size(BIG), difference(BIG, near)


def test_a_case_is_asked_once() -> None:
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        return max(case.lengths) >= 70

    walk = shrink(BIG, fails, seconds=10)
    assert len(asked) == len(set(asked)) == walk.asked


def test_cases_that_may_not_be_asked_are_neither_failing_nor_passing() -> None:
    walk = shrink(BIG, lambda case: None if case.heads < 12 else max(case.lengths) >= 70, seconds=10)
    assert walk.case.heads == 12
    assert walk.neighbour is not None
    assert walk.neighbour.heads == 12


def test_the_time_limit_ends_the_walk_with_what_it_has() -> None:
    def slow(case: Case) -> bool:
        time.sleep(0.02)
        return max(case.lengths) >= 70

    walk = shrink(BIG, slow, seconds=0.05)
    assert not walk.complete
    assert max(walk.case.lengths) >= 70


def test_a_length_counts_for_more_than_plain_content() -> None:
    """This fault shows from 75 tokens on with plain content, by luck of the data, and from the edge on with rising scores."""
    walk = shrink(BIG, lambda case: max(case.lengths) >= (65 if case.content == "rising" else 75), seconds=10)
    assert walk.case == Case(heads=1, lengths=(65,), cache_format="e4m3fn", content="rising")


def test_a_neighbour_that_asks_nothing_of_the_kernel_is_named_last() -> None:
    walk = shrink(BIG, lambda case: case.cache_scale != 1.0 and max(case.lengths) > 0, seconds=10)
    assert walk.case == Case(heads=1, lengths=(1,), cache_format="e4m3fn", cache_scale=0.37)
    assert walk.difference == "cache scale 1.0 instead of 0.37"
    assert walk.others == ("lengths 0 instead of 1",)


def test_no_passing_neighbour_is_said_to_be_none() -> None:
    walk = shrink(BIG, lambda case: True, seconds=10)
    assert walk.neighbour is None
    assert walk.difference == ""


def test_every_field_of_a_case_can_shrink() -> None:
    """A field added to Case and forgotten here would stay in every shrunk case."""
    plain = Case(heads=1, lengths=(0,))
    strange = dataclasses.replace(
        BIG, latent=128, rope=32, table_padding=5, pool_rows=9999, page_padding=64, lse=False, poison="large",
        softmax_scale=1.0, query_scale=2.0,
    )  # fmt: skip
    walk = shrink(strange, lambda case: True, seconds=10)
    formats = {"cache_format": strange.cache_format}
    assert walk.case == dataclasses.replace(plain, **formats)  # type: ignore[arg-type]
