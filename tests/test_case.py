"""Cases: their ids and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.case import CONTENTS, PLACEMENTS, QUERY_LAYOUTS, TABLES, Case, CaseError
from references.formats import FORMATS

positive = st.floats(min_value=1e-6, max_value=1e6, allow_subnormal=False)
any_case = st.builds(
    Case,
    heads=st.integers(1, 256),
    query_tokens=st.integers(1, 16),
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=8).map(tuple),
    latent=st.integers(1, 1024),
    rope=st.integers(0, 128),
    page_size=st.integers(1, 480),
    query_format=st.sampled_from(list(FORMATS)),
    cache_format=st.sampled_from(list(FORMATS)),
    query_scale=positive,
    cache_scale=positive,
    softmax_scale=positive,
    lse=st.booleans(),
    table=st.sampled_from(TABLES),
    table_padding=st.integers(0, 4),
    placement=st.sampled_from(PLACEMENTS),
    pool_rows=st.integers(0, (1 << 31) - 1),
    token_padding=st.integers(0, 64),
    page_padding=st.integers(0, 4096),
    query_layout=st.sampled_from(QUERY_LAYOUTS),
    content=st.sampled_from(list(CONTENTS)),
    amplitude=positive,
    poison=st.sampled_from(["nan", "large"]),
    seed=st.integers(0, (1 << 63) - 1),
)


@given(any_case)
def test_an_id_parses_back_to_its_case(case: Case) -> None:
    assert Case.parse(str(case)) == case


@given(any_case, st.data())
def test_a_truncated_id_is_refused(case: Case, data: st.DataObject) -> None:
    text = str(case)
    with pytest.raises(CaseError):
        Case.parse(text[: data.draw(st.integers(0, len(text) - 1))])


def test_an_id_shows_only_what_is_unusual() -> None:
    assert str(Case(heads=12, lengths=(130, 64, 64))) == "v1:H=12:S=1:N=130+64x2:end"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v2:H=12:S=1:N=130:end", "version v2"),
        ("H=12:N=1:end", "starts with v1"),
        ("v1:H=12:N=1", "cut off"),
        ("v1:H=12:N=1:Q=3:end", "'Q=3'"),
        ("v1:H=12:H=13:N=1:end", "twice"),
        ("v1:H=twelve:N=1:end", "'H=twelve'"),
        ("v1:H=12:end", "lacks N"),
        ("v1:H=12:N=1x:end", "130+64x3"),
        ("v1:H=0:N=1:end", "heads must be"),
        ("v1:H=1:N=1:lse=2:end", "0 or 1"),
    ],
)
def test_a_malformed_id_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(CaseError) as refused:
        Case.parse(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heads", 257),
        ("heads", True),
        ("query_tokens", 0),
        ("lengths", ()),
        ("lengths", (-1,)),
        ("lengths", (1 << 32,)),
        ("page_size", 0),
        ("query_format", "int8"),
        ("cache_scale", 0.0),
        ("query_scale", float("nan")),
        ("softmax_scale", 1),
        ("content", "noise"),
        ("placement", "nowhere"),
        ("pool_rows", 1 << 33),
        ("lse", 1),
    ],
)
def test_an_impossible_case_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(CaseError, match=field.replace("_rows", "")):
        Case(**({"heads": 1, "lengths": (1,)} | {field: value}))  # type: ignore[arg-type]


def test_a_case_is_frozen_and_hashable() -> None:
    case = Case(heads=1, lengths=(1,))
    assert hash(case) == hash(Case(heads=1, lengths=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.heads = 2  # type: ignore[misc]
