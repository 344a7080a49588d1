"""The pinned cases are readable, differ from each other, and cover what their themes say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases.pins import FOLDER, PinError, pinned
from harness.case import CONTENTS, PLACEMENTS, QUERY_LAYOUTS, TABLES


def test_every_pinned_case_has_a_name_a_reason_and_a_case_of_its_own() -> None:
    pins = pinned()
    assert len({pin.name for pin in pins}) == len({pin.case for pin in pins}) == len(pins) > 30
    assert all(pin.why.endswith(".") for pin in pins)


def test_every_placement_layout_table_and_content_is_pinned() -> None:
    cases = [pin.case for pin in pinned()]
    assert {case.placement for case in cases} >= set(PLACEMENTS) - {"high"}
    assert {case.query_layout for case in cases} == set(QUERY_LAYOUTS)
    assert {case.table for case in cases} == set(TABLES)
    assert {case.content for case in cases} >= set(CONTENTS) - {"decorrelated"}


def test_pinned_cases_are_small() -> None:
    assert all(sum(pin.case.lengths) * pin.case.heads * pin.case.query_tokens < 70_000 for pin in pinned())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "cannot be read as JSON"),
        ('{"mla-gate": "pinned", "version": 2, "cases": []}', '"version": 1'),
        ('{"mla-gate": "pinned", "version": 1, "cases": []}', "holds no case"),
        ('{"mla-gate": "pinned", "version": 1, "cases": [{"name": "a", "case": "v1:H=1:N=1:end"}]}', "lacks why"),
        ('{"mla-gate": "pinned", "version": 1, "cases": [{"name": "a", "case": "v1:H=1", "why": "w"}]}', "cut off"),
    ],
)
def test_a_file_at_fault_is_an_error_that_names_it(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "bad.json").write_text(body)
    with pytest.raises(PinError, match=said) as caught:
        pinned(tmp_path)
    assert "bad.json" in str(caught.value)


def test_the_files_are_written_as_json_writes_them() -> None:
    for path in FOLDER.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
