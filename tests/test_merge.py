"""Ledgers merge into one record, whichever order they come in, and what a reader must know of them is said."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from harness.ledger import LedgerError, Writer, read, result_line
from harness.merge import Merged, merge, merge_ledgers
from tests.test_ledger import result

UNITS = [["b", "one"], ["b", "two"], ["c", "one"], ["b", "(contract)"]]


def ledger(path: Path, *rows: str, backend: str = "b", end: bool = True, split: Any = None, **header: Any) -> Path:
    """Write a ledger with one passing case in each row."""
    writer = Writer(path, {"seed": 0, "started": "2026-01-01T00:00:00", "profile": "smoke", **header})
    if split:
        writer.write("split", shard=split[0], of=split[1], units=UNITS)
    for row in rows:
        writer.write("planned", backend=backend, regime=row, demanding=False)
        writer.write("result", **result_line(result(backend=backend, regime=row), "search"))
        writer.write("gated", backend=backend, regime=row)
    if end:
        writer.write("end")
    writer.close()
    return path


def said(merged: Merged) -> list[tuple[str, str, int, str | None]]:
    return [(row.backend, row.regime, row.executed, row.reason) for row in merged.rows]


def test_the_order_of_the_ledgers_means_nothing(tmp_path: Path) -> None:
    paths = [
        ledger(tmp_path / "1.jsonl", "two", split=(2, 3)),
        ledger(tmp_path / "2.jsonl", "one", split=(1, 3)),
        ledger(tmp_path / "3.jsonl", "one", backend="c", split=(3, 3), started="2025"),
    ]
    for order in itertools.permutations(paths):
        assert [row[:2] for row in said(merge(order))] == [("b", "one"), ("b", "two"), ("c", "one")]


def test_a_ledger_counts_once_and_a_copy_cut_short_not_at_all(tmp_path: Path) -> None:
    path = ledger(tmp_path / "a.jsonl", "one")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "copy.jsonl").write_bytes(path.read_bytes()[:-40])
    assert said(merge([path, tmp_path, tmp_path / "deeper"])) == [("b", "one", 1, None)]
    (tmp_path / "other.jsonl").write_bytes(path.read_bytes().replace(b'"started"', b'"begun"'))
    assert said(merge([tmp_path])) == [("b", "one", 2, None)]


def test_a_missing_shard_fails_its_rows(tmp_path: Path) -> None:
    path = ledger(tmp_path / "1.jsonl", "one", split=(1, 3))
    assert said(merge_ledgers([read(path)], whole=False)) == [("b", "one", 1, None)]
    merged = merge([path])
    assert said(merged) == [
        ("b", "one", 1, None),
        ("b", "two", 0, "no case executed"),
        ("c", "one", 0, "no case executed"),
    ]
    assert [remark for remark in merged.remarks if "shard" in remark] == [
        "shard 2 of 3 is missing, and with it b × two",
        "shard 3 of 3 is missing, and with it c × one",
    ]


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    two, three = ledger(tmp_path / "1.jsonl", split=(1, 2)), ledger(tmp_path / "2.jsonl", split=(2, 3))
    with pytest.raises(LedgerError, match="shards of 2 and 3 parts"):
        merge([two, three])
    three.write_text(two.read_text().replace('"two"', '"three"'))
    with pytest.raises(LedgerError, match="different lists of rows"):
        merge([two, three])


def test_what_numbers_depend_on_is_said_where_it_differs(tmp_path: Path) -> None:
    one = {"torch": "2.13", "commit": "aa", "device": "cuda:0", "platform": "x"}
    first = ledger(tmp_path / "1.jsonl", "one", environment=one)
    same = ledger(tmp_path / "2.jsonl", "two", environment=one | {"device": "cuda:1", "platform": "y"})
    assert merge([first, same]).remarks == ()
    other = ledger(tmp_path / "3.jsonl", "two", seed=1, profile="gate", environment=one | {"commit": "bb", "device": "cpu"})
    assert merge([first, same, other]).remarks == (
        "the ledgers have several seeds: 0, 1",
        "the ledgers have several profiles: smoke, gate",
        "the ledgers have several values of commit: aa, bb",
        "the ledgers have several values of device: cuda, cpu",
    )


def test_a_ledger_cut_short_counts_up_to_the_cut(tmp_path: Path) -> None:
    whole = ledger(tmp_path / "1.jsonl", "one")
    cut = ledger(tmp_path / "2.jsonl", "two", end=False)
    cut.write_bytes(cut.read_bytes()[:-20])  # through the line that says that the search ended
    merged = merge([whole, cut])
    assert said(merged) == [("b", "one", 1, None), ("b", "two", 1, "not finished")]
    assert merged.cut == (cut,)
    assert merged.remarks[-2:] == (
        f"{cut} ends before its run did: what it holds is counted",
        f"{cut} has 1 lines that cannot be read",
    )


def test_nothing_is_nothing_to_merge(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        merge([])
    assert merge_ledgers([read(ledger(tmp_path / "1.jsonl"))]).rows == []
