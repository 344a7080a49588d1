"""Regions of case space: what they hold, which are empty, which overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.case import Case, CaseError
from harness.region import DOMAIN, Numbers, Region, RegionError, globs_meet

CASE = Case(heads=12, query_tokens=2, lengths=(130, 64), cache_format="e4m3fn")


def numbers() -> st.SearchStrategy[Numbers]:
    return st.builds(
        Numbers,
        minimum=st.integers(0, 12),
        maximum=st.integers(0, 12),
        multiple_of=st.integers(1, 4),
        excluded=st.frozensets(st.integers(0, 12), max_size=5),
    )


@given(one=numbers(), two=numbers())
def test_numbers_meet_as_sets_do(one: Numbers, two: Numbers) -> None:
    expected = {value for value in range(13) if value in one and value in two}
    assert one.meet(two).empty() == (not expected)
    assert {value for value in range(13) if value in one.meet(two)} == expected


@pytest.mark.parametrize(
    ("table", "inside"),
    [
        ({}, True),
        ({"heads": {"max": 96, "not": [64]}}, True),
        ({"heads": [64, 128]}, False),
        ({"heads": {"multiple_of": 5}}, False),
        ({"lengths": {"min": 64}}, True),
        ({"lengths": {"min": 65}}, False),
        ({"batch": [2]}, True),
        ({"query_format": ["bf16"], "cache_format": ["e4m3fn", "e5m2"]}, True),
        ({"query_format": ["bf16"], "cache_format": ["bf16"]}, False),
        ({"lse": [True]}, True),
    ],
)
def test_a_region_holds_the_cases_of_its_table(table: dict[str, object], inside: bool) -> None:
    region = Region.from_table(table)
    assert (CASE in region) is inside
    reason = region.why_outside(CASE)
    assert (reason is None) is inside
    if reason is not None:
        assert any(field in reason for field in table)


@pytest.mark.parametrize(
    ("one", "two", "overlap"),
    [
        ({}, {}, True),
        ({"heads": {"max": 96, "not": [64]}}, {"heads": [64, 128]}, False),
        ({"heads": {"max": 96}}, {"heads": [64, 128]}, True),
        ({"heads": {"multiple_of": 16}}, {"heads": {"multiple_of": 24, "max": 47}}, False),
        ({"heads": {"multiple_of": 16}}, {"heads": {"multiple_of": 24, "max": 48}}, True),
        ({"cache_format": ["bf16"]}, {"cache_format": ["e4m3fn"]}, False),
        ({"cache_format": ["bf16"]}, {"query_format": ["e4m3fn"]}, True),
        ({"lengths": {"max": 1000}}, {"lengths": {"min": 1001}}, False),
    ],
)
def test_overlap_is_decided_exactly(one: dict[str, object], two: dict[str, object], overlap: bool) -> None:
    assert Region.from_table(one).overlaps(Region.from_table(two)) is overlap
    assert Region.from_table(two).overlaps(Region.from_table(one)) is overlap


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"head": [1]}, "no field 'head'"),
        ({"heads": 12}, "takes a list of numbers"),
        ({"heads": []}, "takes a list of numbers"),
        ({"heads": {"least": 3}}, "no key least"),
        ({"heads": {"min": 9, "max": 4}}, "leaves no value"),
        ({"heads": {"max": 1, "not": [1]}}, "leaves no value"),
        ({"heads": [400]}, "leaves no value"),
        ({"heads": {"min": 2.5}}, "whole numbers"),
        ({"heads": {"multiple_of": 0}}, "multiples from 1"),
        ({"cache_format": ["fp9"]}, "cannot be 'fp9'"),
        ({"cache_format": "bf16"}, "takes a list of words"),
        ({"content": ["gausian"]}, "cannot be 'gausian'"),
    ],
)
def test_a_region_that_no_case_can_lie_in_is_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(RegionError, match=message):
        Region.from_table(table)


@pytest.mark.parametrize("field", [name for name, rule in DOMAIN.items() if isinstance(rule, Numbers)])
def test_the_domain_of_a_field_is_what_cases_accept(field: str) -> None:
    rule = DOMAIN[field]
    assert isinstance(rule, Numbers)

    def make(value: int) -> Case:
        if field == "lengths":
            return CASE.replace(lengths=(value,), page_size=1 << 20)
        if field == "pool_rows":
            return CASE.replace(pool_rows=value, page_size=1 << 20)
        return CASE.replace(lengths=(1,) * value) if field == "batch" else CASE.replace(**{field: value})

    for value in (rule.minimum, rule.maximum):
        make(value)
    for value in (rule.minimum - 1, rule.maximum + 1):
        with pytest.raises(CaseError):
            make(value)


@pytest.mark.parametrize(
    ("one", "two", "meet"),
    [
        ("torch-sdpa", "torch-sdpa", True),
        ("torch-sdpa", "torch-sdp", False),
        ("aiter-gluon*", "aiter-gluon@main", True),
        ("aiter-gluon*", "aiter-triton*", False),
        ("fault:*@splits", "fault:*@single", False),
        ("fault:*", "fault:*@single", True),
        ("*-mla", "aiter-*", True),
    ],
)
def test_patterns_meet_where_a_name_matches_both(one: str, two: str, meet: bool) -> None:
    assert globs_meet(one, two) is meet
    assert globs_meet(two, one) is meet
