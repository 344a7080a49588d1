"""An arithmetic is read from a table, and cuts a context as its policy says."""

from __future__ import annotations

import tomllib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from references.arithmetic import Arithmetic, Splits

LAUNCH = {"heads": 12, "query_tokens": 1, "batch": 2}

TABLE = """
probability = "e4m3fn"
probability_scale = 256.0
pivot = "tile"
normaliser = "rounded"
operand = "exact"
partial = "bf16"
output = "bf16"
tile = 128
exponential = 1e-6
splits = { kind = "even", count = 4, tile = 64 }
"""


def test_a_table_makes_an_arithmetic() -> None:
    actual = Arithmetic.from_table(tomllib.loads(TABLE))
    assert actual == Arithmetic(
        probability="e4m3fn", probability_scale=256.0, normaliser="rounded", partial="bf16", output="bf16", tile=128,
        exponential=1e-6, splits=Splits(kind="even", count=4, tile=64),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"output": None}, "output missing"),
        ({"probabilty": "bf16"}, "unknown probabilty; known are probability,"),
        ({"probability": "fp4"}, "'fp4' is not known"),
        ({"probability_scale": 512.0}, "would overflow e4m3fn"),
        ({"probability_scale": 200.0}, "200.0 is no value of e4m3fn"),
        ({"probability_scale": "256"}, "probability_scale is a number, not '256'"),
        ({"tile": True}, "tile is a whole number, not True"),
        ({"pivot": "column"}, "pivot 'column' is not one of tile, row, normalised"),
        ({"normaliser": "none"}, "normaliser 'none'"),
        ({"splits": 4}, "splits is a table, not 4"),
        ({"splits": {"kind": "odd"}}, "split policy 'odd' is not known"),
        ({"splits": {"count": 4}}, "say 'even'"),
        ({"splits": {"kind": "even", "count": 0}}, "are 1 or more"),
        ({"splits": {"kind": "even", "size": 4}}, "arithmetic.splits: unknown size"),
    ],
)
def test_a_faulty_table_is_refused_by_name(change: dict[str, object], error: str) -> None:
    table = {key: value for key, value in (tomllib.loads(TABLE) | change).items() if value is not None}
    with pytest.raises(ValueError, match=error):
        Arithmetic.from_table(table)


@pytest.mark.parametrize(
    ("splits", "length", "edges"),
    [
        (Splits(), 1000, [0, 1000]),
        (Splits(kind="even", count=4), 1000, [0, 250, 500, 750, 1000]),
        (Splits(kind="even", count=4, tile=64), 130, [0, 64, 128, 130]),
        (Splits(kind="even", count=4), 3, [0, 1, 2, 3]),
        (Splits(kind="floor", count=4), 1003, [0, 250, 500, 750, 1003]),
        (Splits(kind="floor", count=4, tile=128), 300, [0, 128, 256, 300]),
        (Splits(kind="aiter", count=256, tile=128), 300, [0, 128, 256, 300]),
        (Splits(kind="aiter", count=8, tile=1), 10, [0, 2, 4, 6, 10]),
        (Splits(kind="even", count=4), 0, [0]),
    ],
)
def test_a_policy_cuts_where_it_says(splits: Splits, length: int, edges: list[int]) -> None:
    assert splits.edges(length, **LAUNCH) == edges


def test_a_launch_decides_how_many_splits_there_are() -> None:
    small, wide = Splits(kind="aiter", count=256), Splits(kind="aiter-bh64", count=256)
    assert small.launched(heads=16, query_tokens=1, batch=1) == 256
    assert small.launched(heads=17, query_tokens=2, batch=3) == 21
    assert small.launched(heads=16, query_tokens=1, batch=1000) == 1
    assert [wide.launched(heads=64, query_tokens=1, batch=batch) for batch in (64, 128, 256)] == [4, 2, 1]


@given(
    kind=st.sampled_from(["even", "floor", "aiter", "aiter-bh64"]),
    count=st.integers(1, 300),
    tile=st.sampled_from([1, 16, 128]),
    length=st.integers(0, 5000),
)
def test_splits_cover_a_context_without_a_gap(kind: str, count: int, tile: int, length: int) -> None:
    splits = Splits(kind=kind, count=count, tile=tile)
    edges = splits.edges(length, **LAUNCH)
    assert edges[0] == 0 and edges[-1] == length
    assert all(start < stop for start, stop in pairwise(edges))
    assert len(edges) - 1 <= max(1, splits.launched(**LAUNCH))
