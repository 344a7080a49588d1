"""A ledger holds every verdict that was reached, and is read also when it was cut short."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.case import Case
from harness.ledger import VERSION, LedgerError, Writer, number, plain, read, read_all, result_line
from harness.report.rows import CONTRACT, left_out, rows
from harness.report.terminal import table, verdict
from harness.run import Result
from harness.verdict import Measurements, Verdict


def result(kind: str = "PASS", *, backend: str = "b", regime: str | None = "r", **measured: object) -> Result:
    fault = "mismatch" if kind == "FAIL" else None
    found = Measurements(**measured)  # type: ignore[arg-type]
    made = Verdict(kind=kind, fault=fault, message="m", measurements=found)
    return Result(case=Case(heads=1, lengths=(3,)), backend=backend, regime=regime, verdict=made, seconds=0.25)


def write(path: Path, *phases: tuple[Result, str], planned: bool = True, demanding: bool = False, ended: bool = True) -> Path:
    writer = Writer(path, {"seed": 0})
    if planned:
        writer.write("planned", backend="b", regime="r", demanding=demanding)
    for made, phase in phases:
        writer.write("result", **result_line(made, phase))
    if planned and ended:
        writer.write("gated", backend="b", regime="r")
    writer.write("end")
    writer.close()
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", (result(ratios={"row": 0.5}), "search"))
    ledger = read(path)
    assert ledger.header["version"] == VERSION
    assert [line["kind"] for line in ledger.lines] == ["planned", "result", "gated", "end"]
    assert ledger.lines[1]["case"] == "v1:H=1:S=1:N=3:end"
    assert ledger.lines[1]["measurements"]["ratios"] == {"row": 0.5}
    assert ledger.complete
    assert ledger.damaged == 0


def test_a_cut_ledger_is_read_up_to_the_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", (result(), "search"), (result(), "search"))
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    ledger = read(path)
    assert [line["kind"] for line in ledger.lines] == ["planned", "result"]
    assert not ledger.complete
    assert ledger.damaged == 1


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from harness.ledger import Writer\n"
        "writer = Writer(Path(sys.argv[1]), {})\n"
        "for i in range(100): writer.write('result', i=i)\n"
        "print('written', flush=True); time.sleep(60)"
    )
    path = tmp_path / "a.jsonl"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [line["i"] for line in read(path).lines] == list(range(100))


def test_numbers_that_json_lacks_come_back(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl", {})
    writer.write("result", values=[math.inf, -math.inf, math.nan, 1.5], names=frozenset({"b", "a"}), path=tmp_path)
    writer.close()
    (line,) = read(tmp_path / "a.jsonl").lines
    found = [number(value) for value in line["values"]]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
    assert line["names"] == ["a", "b"]
    assert line["path"] == str(tmp_path)


def test_records_become_plain_data() -> None:
    assert plain(Case(heads=1, lengths=(3,)))["lengths"] == [3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no ledger"),
        ("hello\n", "is no ledger"),
        ('{"mla-gate": "repro"}\n', "is no ledger"),
        ('{"mla-gate": "ledger", "version": 99}\n', "is of version 99"),
    ],
)
def test_what_is_no_ledger_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(LedgerError, match=said):
        read(path)


def test_a_missing_ledger_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(LedgerError, match=r"no \*.jsonl"):
        read_all([tmp_path])


def test_a_ledger_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    with pytest.raises(FileExistsError):
        Writer(tmp_path / "a.jsonl", {})


def count(tmp_path: Path, *phases: tuple[Result, str], **options: bool) -> object:
    name = f"{time.monotonic_ns()}.jsonl"
    found = rows(read(write(tmp_path / name, *phases, **options)).lines)
    return found[0] if len(found) == 1 else found


def test_a_planned_regime_that_executed_nothing_fails(tmp_path: Path) -> None:
    row = count(tmp_path)
    assert row.reason == "no case executed"  # type: ignore[attr-defined]
    row = count(tmp_path, (result("UNSUPPORTED"), "search"))
    assert (row.reason, row.unrun) == ("no case executed", 1)  # type: ignore[attr-defined]


def test_a_search_that_did_not_finish_is_no_pass(tmp_path: Path) -> None:
    assert count(tmp_path, (result(), "search"), ended=False).reason == "not finished"  # type: ignore[attr-defined]


def test_a_demanding_profile_fails_a_regime_that_never_saw_a_sensitivity(tmp_path: Path) -> None:
    seen = [(result(sensitivities={"newest": True, "page": False}), "search")] * 3
    row = count(tmp_path, *seen, demanding=True)
    assert row.reason == "never seen: page"  # type: ignore[attr-defined]
    assert count(tmp_path, *seen, demanding=False).reason is None  # type: ignore[attr-defined]
    seen.append((result(sensitivities={"page": True}), "search"))
    assert count(tmp_path, *seen, demanding=True).reason is None  # type: ignore[attr-defined]


def test_shrinking_is_not_counted_and_a_finding_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", (result(), "search"), (result("FAIL"), "search"), *[(result("FAIL"), "shrink")] * 9)
    ledger = read(path)
    finding = {"kind": "finding", **result_line(result("FAIL"), "shrink")}
    (row,) = rows([*ledger.lines, finding])
    assert (row.executed, row.failures) == (2, 1)
    assert row.reason == "failures"


def test_failing_pinned_cases_and_accepted_unsupported_ones_count_as_failures(tmp_path: Path) -> None:
    accepted = Verdict(kind="FAIL", fault="accepted-unsupported", message="m")
    case = Case(heads=1, lengths=(3,))
    contract = [Result(case=case, backend="b", regime=None, verdict=accepted), result("UNSUPPORTED", regime=None)]
    path = write(tmp_path / "a.jsonl", (result("FAIL"), "pinned"), *((made, "contract") for made in contract))
    pinned, refused = rows(read(path).lines)
    assert (pinned.executed, pinned.failures) == (1, 1)
    assert (refused.regime, refused.executed, refused.failures) == (CONTRACT, 2, 1)


def test_our_errors_fail_a_row(tmp_path: Path) -> None:
    assert count(tmp_path, (result(), "search"), (result("ERROR"), "search")).reason  # type: ignore[attr-defined]


def test_the_worst_ratio_names_its_metric_and_nan_is_the_worst(tmp_path: Path) -> None:
    phases = [(result(ratios={"row": 0.5, "hard": 0.75}), "search"), (result(ratios={"row": 0.6}), "search")]
    row = count(tmp_path, *phases)
    assert (row.worst, row.metric) == (0.75, "hard")  # type: ignore[attr-defined]
    row = count(tmp_path, *phases, (result(ratios={"lse": math.nan}), "search"))
    assert row.metric == "lse"  # type: ignore[attr-defined]


def test_the_table_says_everything_a_row_knows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        (result(ratios={"row": 0.5}, sensitivities={"newest": False}), "search"),
        (result("UNTRUSTED"), "search"),
        (result("UNSUPPORTED"), "search"),
    )
    found = rows(read(path).lines)
    text = "\n".join(table(found))
    for said in ("backend", "b", "r", "2 (+1 not run)", "50.0%", "0.5 row", "newest", "0.8 s", "PASS"):
        assert said in text
    assert "PASS, 2 cases" in verdict(found)


def test_the_last_line_names_the_rows_that_fail(tmp_path: Path) -> None:
    found = rows(read(write(tmp_path / "a.jsonl")).lines)
    assert verdict(found) == "mla-gate: FAIL after 0 cases: b × r (no case executed)"
    assert verdict([]) == "mla-gate: nothing was gated"


def test_ledgers_of_several_processes_are_one_table(tmp_path: Path) -> None:
    for name in ("gw0", "gw1"):
        write(tmp_path / f"{name}.jsonl", (result(), "search"))
    (row,) = rows(line for ledger in read_all([tmp_path]) for line in ledger.lines)
    assert row.executed == 2


def test_a_row_has_ended_when_all_of_its_searches_have(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl", {})
    writer.write("planned", backend="b", regime="r", demanding=False, parts=2)
    writer.write("result", **result_line(result(), "search"))
    writer.write("gated", backend="b", regime="r", relation="graph", part=0)
    for part in (0, 0):
        writer.write("gated", backend="b", regime="r", relation=None, part=part)
        assert rows(read(tmp_path / "a.jsonl").lines)[0].reason == "not finished"
    writer.write("gated", backend="b", regime="r", relation=None, part=1)
    assert rows(read(tmp_path / "a.jsonl").lines)[0].reason is None


def test_what_a_run_left_out_is_said_once(tmp_path: Path) -> None:
    for name in ("gw0", "gw1"):
        writer = Writer(tmp_path / f"{name}.jsonl", {})
        writer.write("beyond", backend="b", regime="r", reason="too large")
        writer.close()
    lines = [line for ledger in read_all([tmp_path]) for line in ledger.lines]
    assert left_out(lines) == ["not gated: b × r: too large"]
    assert rows(lines) == []


def test_every_line_is_one_json_object(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", (result(), "search"))
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def test_a_full_disk_costs_lines_of_the_file_and_never_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "a.jsonl", {})
    writer.write("gated", backend="one")
    real, room = os.write, [10]

    def full(file: int, text: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken, room[0] = room[0], 0
        return real(file, text[:taken])

    monkeypatch.setattr("harness.ledger.os.write", full)
    writer.write("gated", backend="two")
    writer.write("gated", backend="three")
    monkeypatch.undo()
    writer.write("gated", backend="four")
    writer.close()
    kept = read(tmp_path / "a.jsonl")
    assert [line["backend"] for line in kept.lines] == ["one", "four"]
    assert not kept.damaged
    assert [line["backend"] for line in writer.lost] == ["two", "three"]
    assert "No space left" in writer.trouble


def test_a_ledger_without_a_file_is_kept_in_memory() -> None:
    writer = Writer(None, {})
    writer.write("gated", backend="one")
    writer.close()
    assert writer.lost[-1] == {"kind": "gated", "backend": "one"}
