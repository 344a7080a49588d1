"""Calibration tells what was measured, and names what failed."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from harness.backends import registry
from harness.calibrate import LINES, Calibration, calibrate, main
from harness.case import Case
from harness.ledger import Writer, result_line
from harness.measure import CHECKS
from harness.profiles import PROFILES
from harness.regimes import load
from harness.run import Result
from harness.verdict import Measurements, Verdict
from tests.faulty import make

RULES = load(Path(__file__).parent / "faulty.toml")
SMALL = dataclasses.replace(PROFILES["smoke"], longest=40, tokens=60, heads=4, scores=400)


def found(name: str, examples: int = 12, *, strays: bool = False) -> Calibration:
    backend = make(f"python:tests.faulty:{name}")
    return calibrate(backend, RULES.rows[0], RULES, SMALL, examples=examples, with_strays=strays)


def test_a_right_backend_has_a_line_for_everything_measured() -> None:
    right = found("right", strays=True)
    table = right.table()
    assert len(right.results) == 12
    assert all(line in table for line in LINES)
    assert len(right.seconds) == 12 and "CPU s (" in table
    assert "reference / oracle" in table and "furthest from the oracle" in table
    assert "furthest in row" in table and "seen: newest-dropped" in table
    assert "FAIL" not in table


def test_the_same_seed_gives_the_same_cases() -> None:
    assert [one.case for one in found("right").results] == [one.case for one in found("right").results]


def test_a_wrong_backend_is_counted_and_named() -> None:
    wrong = found("write-cache")
    table = wrong.table()
    failed = [result for result in wrong.results if result.verdict.kind == "FAIL"]
    assert failed
    assert all(str(result.case) in table for result in failed)


def test_the_command_line_says_which_backend_is_unknown() -> None:
    with pytest.raises(registry.UnknownBackend, match="torch-sdap"):
        main(["--backend", "torch-sdap", "--cases", "1"])


def test_the_command_line_prints_a_table_and_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "torch-sdpa", "--cases", "3", "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "torch-sdpa in sdpa-fp32: 3 cases" in printed
    assert "seed 7, profile smoke, cpu" in printed


def test_what_was_never_seen_is_counted_as_asked() -> None:
    case = Case(heads=1, lengths=(1,))
    found = Calibration(backend="any", regime="any")
    for saw in (False, True, False):
        measured = Measurements(rows=1, ratios=dict.fromkeys(CHECKS, 0.0), sensitivities={"newest-dropped": saw})
        verdict = Verdict(kind="PASS", message="", measurements=measured)
        found.results.append(Result(case=case, backend="any", regime="any", verdict=verdict))
    assert "newest-dropped 33% of 3" in found.table()


def test_the_ledger_of_a_run_gives_the_table_of_its_random_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = found("right", examples=6)
    with contextlib.closing(Writer(tmp_path / "main.jsonl", {})) as ledger:
        for result in (*made.results, made.results[0]):
            ledger.write("result", **result_line(result, "search"))
        ledger.write("result", **result_line(dataclasses.replace(made.results[0], case=Case(heads=1, lengths=(1,))), "shrink"))
    assert main(["--ledger", str(tmp_path)]) == 0
    told = [line for line in made.table().strip().splitlines() if not line.startswith("CPU s")]
    assert capsys.readouterr().out.strip().splitlines() == told


def test_a_run_that_failed_is_told_by_the_status(tmp_path: Path) -> None:
    with contextlib.closing(Writer(tmp_path / "main.jsonl", {})) as ledger:
        for result in found("write-cache").results:
            ledger.write("result", **result_line(result, "search"))
    assert main(["--ledger", str(tmp_path)]) == 1


def test_nothing_to_calibrate_is_an_error() -> None:
    with pytest.raises(SystemExit):
        main([])
