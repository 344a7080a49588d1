"""A report says what the ledgers say: each form of it, of runs that passed, failed, were cut or were compared."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.case import Case
from harness.cli import main
from harness.ledger import Ledger, Line, Writer, plain, read, read_all
from harness.merge import Merged, merge, merge_ledgers
from harness.profiles import PROFILES
from harness.report import html as html_module
from harness.report import progress
from harness.report.html import LARGEST, html
from harness.report.junit import junit
from harness.report.markdown import LONGEST, append_to_summary, markdown
from harness.report.model import Report, make_report
from harness.run import Result
from harness.verdict import Measurements, Verdict
from tests import report_run

#: Text that would be markup, a table's end, a fence's end, or no XML, if it were not escaped.
HOSTILE = "<script>alert('x')</script> | ``` <!-- ]]> \x00\x1b[31m & @everyone"


def result(kind: str = "PASS", *, case: str = "v1:H=1:S=1:N=3:end", phase: str = "search", **fields: Any) -> Line:
    measured = {"ratios": {"row": 0.5, "hard": 0.25}, "rho": 1.1, "rows": 1, "z": 0.1, "element": 1.0}
    line = {
        "kind": "result", "phase": phase, "case": case, "relation": None, "backend": "b", "regime": "r", "verdict": kind,
        "fault": "mismatch" if kind == "FAIL" else None, "message": "m", "measurements": measured, "seconds": 0.5,
        "run_seconds": 0.1, "compiled": 0, "what_ran": {},
    }  # fmt: skip
    return {**line, **fields}


def merged(lines: Iterable[Line]) -> Merged:
    """Merge one ledger with these lines between the beginning and the end of a run of one row."""
    planned = {"kind": "planned", "backend": "b", "regime": "r", "demanding": False}
    gated = {"kind": "gated", "backend": "b", "regime": "r"}
    header = {"started": "2026-01-01T00:00:00+0000", "seed": 0, "profile": "smoke", "process": "main", "command": ["x"]}
    whole = (planned, *lines, gated, {"kind": "end"})
    return merge_ledgers([Ledger(path=Path("a.jsonl"), header=header, lines=whole, damaged=0)])


def report_of(*lines: Line) -> Report:
    return make_report(merged(lines))


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_run.run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def three(ledgers: Path) -> Report:
    return make_report(merge([ledgers]))


def test_each_failure_stands_in_every_form_with_the_command_that_replays_it(three: Report, ledgers: Path) -> None:
    assert [one.fault for one in three.failures] == ["mismatch", "unwritten", "guard-touched"]
    forms = (html(three), markdown(three).replace("\\", ""), junit(three, merge([ledgers])))
    for one in three.failures:
        assert one.shown["command"].startswith(f"mla-gate replay {one.case} --backend {one.backend}")
        for text in forms:
            assert one.kind.removeprefix("FAIL ") in text
            assert one.shown["command"] in text
            assert all(look.strip().split(":")[0] in text for look in one.shown["looks"])


def test_the_page_shows_of_a_failure_what_it_takes_to_mend_it(three: Report) -> None:
    first = three.failures[0]
    text = html(three)
    assert first.rho is not None and first.rho_limit is not None and first.rho > first.rho_limit > 1
    assert first.spread is not None and 1 <= sum(first.spread.counts) <= three.parts[0].row.executed
    assert first.shown["neighbour"] in text and "this case" in text
    assert "tokens 32 missing" in text
    roles = {(grid["role"], grid["what"]) for grid in first.shown["grids"]}
    assert {("smallest", "error"), ("smallest", "share"), ("first", "error")} <= roles
    script = first.shown["script"]
    assert script.startswith("#!/usr/bin/env python3") and script.splitlines()[-1] in text


def test_the_page_asks_for_nothing_and_runs_only_its_own_script(three: Report) -> None:
    text = html(three)
    assert re.findall(r"""(?:src|href)=["'](?!#|data:,)""", text) == []
    assert not re.search(r"url\(|@import", text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in text


def test_a_failure_without_its_evidence_is_told_with_what_there_is() -> None:
    failing = result("FAIL", phase="pinned", message="it is wrong")
    report = report_of(failing)
    (one,) = report.failures
    assert not one.shown["command"] and not report.passed
    assert "it is wrong" in html(report) and "it is wrong" in markdown(report)
    assert "<failure" in junit(report, merged([failing]))


def test_a_failure_counts_once_however_many_lines_speak_of_it() -> None:
    finding = {**result("FAIL", phase="shrink"), "kind": "finding", "first": None, "neighbour": None, "difference": ""}
    lines = [result("FAIL"), result("FAIL", phase="shrink"), finding, finding, result("FAIL", phase="pinned")]
    assert len(report_of(*lines).failures) == 1


def test_what_a_baseline_excuses_is_no_failure_of_the_report() -> None:
    assert report_of(result("FAIL", phase="pinned", excused=True)).failures == ()


def test_our_own_errors_are_told_as_errors() -> None:
    lines = [result("ERROR", message="Traceback: ours")]
    report = report_of(*lines)
    assert report.failures[0].kind == "ERROR"
    assert "<error" in junit(report, merged(lines))


def test_a_run_that_was_cut_or_executed_nothing_is_no_pass(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl", {"seed": 0})
    writer.write("planned", backend="b", regime="r", demanding=False)
    writer.close()
    report = make_report(merge([tmp_path]))
    assert not report.passed
    assert any("ends before its run did" in remark for remark in report.remarks)
    for text in (html(report), markdown(report)):
        assert "FAIL" in text and "no case executed" in text and "ends before its run did" in text
    root = ElementTree.fromstring(junit(report, merge([tmp_path])))
    assert root.get("failures") == "1"


def test_a_run_that_passed_says_so() -> None:
    lines = [result(), result(case="v1:H=2:S=1:N=3:end")]
    report = report_of(*lines)
    assert report.passed and not report.failures
    assert "✔ PASS" in html(report) and "✘" not in html(report)
    assert "PASS" in markdown(report) and "FAIL" not in markdown(report)
    assert ElementTree.fromstring(junit(report, merged(lines))).get("failures") == "0"


@pytest.mark.parametrize("field", ["message", "backend", "case"])
def test_no_text_becomes_markup(field: str) -> None:
    line = result("FAIL", phase="pinned", **{field: HOSTILE})
    report = report_of(line)
    page = html(report)
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", markdown(report), flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    assert "<script>" not in outside and "@everyone" not in outside.replace("\\@", "")
    root = ElementTree.fromstring(junit(report, merged([line])))
    assert any("alert" in text for text in root.itertext()) or any("alert" in str(node.attrib) for node in root.iter())


def test_a_long_report_stays_within_a_comment_and_says_what_is_left_out() -> None:
    lines = [result("FAIL", phase="pinned", case=f"v1:H={n}:S=1:N=3:end", message="x" * 5000) for n in range(1, 200)]
    text = markdown(report_of(*lines))
    assert len(text) < LONGEST + 5000 < 65_536
    left = re.search(r"… and (\d+) more failures", text)
    assert left and text.count("### ✘") + int(left[1]) == 199


def test_the_page_of_ten_thousand_cases_and_many_failures_stays_small() -> None:
    script = "print('wrong')\n" * 6000
    lines: list[Line] = []
    for row in range(10):
        named = {"backend": f"backend-{row}", "regime": f"regime-{row}"}
        lines.append({"kind": "domain", **named, "heads": list(range(1, 257)), "content": ["gaussian", "slots", "edges"]})
        for n in range(1000):
            case = f"v1:H={1 + n % 256}:S={1 + n % 16}:N={n}+{n // 2}:T=16:c=e4m3fn:seed={n}:end"
            lines.append({**result(case=case), **named})
        for n in range(12):
            case = f"v1:H=9:S=1:N={n}:T=16:end"
            grid = {
                "what": "error", "case": case, "role": "smallest", "title": "t", "rows": "r", "columns": "c",
                "row_names": [str(place) for place in range(32)], "column_names": [str(place) for place in range(32)],
                "values": [[1.25] * 32] * 32, "broken": [[True] * 32] * 32,
            }  # fmt: skip
            shown = {"looks": [], "notes": [], "grids": [grid] * 2, "first": None, "neighbour": None, "complete": True,
                     "difference": "", "others": [], "command": "c", "script": script}  # fmt: skip
            lines += [
                {**result("FAIL", case=case, phase="pinned"), **named},
                {"kind": "failure", **named, "case": case, **shown},
            ]
    report = report_of(*lines)
    text = html(report)
    assert report.executed >= 10_000 and len(report.failures) == 120
    assert len(text.encode()) < LARGEST
    assert "more failures are listed without their details" in text
    assert all(one.case in text for one in report.failures)


def test_that_bound_is_what_keeps_it_small(monkeypatch: pytest.MonkeyPatch, three: Report) -> None:
    whole = len(html(three).encode())
    monkeypatch.setattr(html_module, "LARGEST", whole - 1)
    assert len(html(three).encode()) < whole - 50_000  # the scripts are gone


def test_a_comparison_with_a_baseline_has_a_section_in_every_form() -> None:
    against = {"kind": "against", "backend": "b", "regime": "r", "baseline": "b@old"}
    answers = [
        {**result(case="v1:H=3:S=1:N=5:end"), "kind": "baseline", "backend": "b@old", "of": "b"},
        {**result(), "kind": "baseline", "backend": "b@old", "of": "b"},
    ]
    newly = result("FAIL", case="v1:H=3:S=1:N=5:end", phase="pinned")
    lines = [against, *answers, newly, result()]
    report = report_of(*lines)
    (one,) = report.comparisons
    assert one.failing == ("v1:H=3:S=1:N=5:end",) and not report.passed
    page = html(report)
    assert 'id="baseline"' in page and "WORSE" in page and "b@old" in page
    assert "### Base against change" in markdown(report) and "fails newly: `v1:H=3:S=1:N=5:end`" in markdown(report)
    suites = ElementTree.fromstring(junit(report, merged(lines))).findall("testsuite")
    assert [suite.get("failures") for suite in suites if "against" in str(suite.get("name"))] == ["1"]


def test_without_a_baseline_there_is_no_such_section() -> None:
    report = report_of(result())
    assert 'id="baseline"' not in html(report) and "Base against change" not in markdown(report)


def test_junit_skips_what_is_neither_right_nor_wrong_and_fails_what_was_not_run() -> None:
    lines = [
        result("UNTRUSTED", phase="pinned"),
        result("UNSUPPORTED", phase="pinned", case="v1:H=2:S=1:N=3:end", message="too little memory"),
        result("PASS", phase="pinned", case="v1:H=3:S=1:N=3:end"),
        {"kind": "beyond", "backend": "b", "regime": "large", "reason": "too large"},
    ]
    root = ElementTree.fromstring(junit(report_of(*lines), merged(lines)))
    ends = {str(test.get("name")): [child.tag for child in test] for test in root.iter("testcase")}
    assert ends["pinned v1:H=1:S=1:N=3:end"] == ["skipped"]
    assert ends["pinned v1:H=2:S=1:N=3:end"] == ["error"]
    assert ends["pinned v1:H=3:S=1:N=3:end"] == []
    assert {"too large"} == {str(skip.get("message")) for skip in root.iter("skipped")} - {"m"}
    assert (root.get("tests"), root.get("skipped"), root.get("errors")) == ("5", "2", "1")


def test_the_same_report_comes_of_a_run_and_of_its_shards(ledgers: Path, tmp_path: Path) -> None:
    (whole,) = read_all([ledgers])
    parts = [
        replace(whole, lines=tuple(line for line in whole.lines if line.get("backend", "") in own)) for own in halves(whole)
    ]
    one, two = make_report(merge_ledgers([whole])), make_report(merge_ledgers(parts))
    assert [plain(part.row) for part in one.parts] == [plain(part.row) for part in two.parts]
    assert [failure.case for failure in one.failures] == [failure.case for failure in two.failures]


def halves(ledger: Ledger) -> tuple[set[str], set[str]]:
    """Part the backends of a ledger; the end of the run, which has none, goes with both."""
    backends = sorted({line["backend"] for line in ledger.lines if "backend" in line})
    return {"", *backends[:2]}, {"", *backends[2:]}


def test_the_summary_of_a_ci_step_is_appended_to_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    for text in ("one", "two"):
        assert append_to_summary(text, {"GITHUB_STEP_SUMMARY": str(path)}) is None
    assert path.read_text() == "one\ntwo\n"
    assert append_to_summary("three", {}) is None
    assert "cannot be written" in str(append_to_summary("four", {"GITHUB_STEP_SUMMARY": str(tmp_path)}))


def test_the_command_writes_every_form_and_its_status_is_that_of_the_rows(
    ledgers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    files = {name: tmp_path / "out" / f"report.{name}" for name in ("html", "markdown", "junit")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert main(["report", str(ledgers), *options]) == 1
    assert all(f"report: {path}" in capsys.readouterr().out or path.exists() for path in files.values())
    assert files["html"].read_text().startswith("\n") is False
    assert (tmp_path / "summary.md").read_text().strip() == files["markdown"].read_text().strip()
    assert ElementTree.parse(files["junit"]).getroot().get("failures") == "3"


def test_a_report_that_cannot_be_written_is_said_and_costs_nothing_else(
    ledgers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    status = main(["report", str(ledgers), "--html", str(tmp_path / "file" / "a.html"), "--junit", str(tmp_path / "b.xml")])
    assert status == 1 and (tmp_path / "b.xml").exists()
    assert "a.html cannot be written" in capsys.readouterr().out


def test_the_ledger_of_a_run_with_evidence_stays_small(ledgers: Path) -> None:
    (ledger,) = read_all([ledgers])
    lines = [line for line in read(ledger.path).lines if line["kind"] == "failure"]
    grids = [len(json.dumps(line["grids"])) for line in lines]
    assert len(lines) == 3 and max(grids) < 40_000


def test_progress_says_how_far_a_search_is_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    told = progress.Progress("b × r", PROFILES["smoke"], last_word=-1.0)
    case = Case(heads=1, lengths=(3,))

    def heard(kind: str, phase: str, ratio: float) -> str:
        fault = "mismatch" if kind == "FAIL" else None
        verdict = Verdict(kind=kind, fault=fault, message="m", measurements=Measurements(ratios={"row": ratio}))
        return str(told.heard(Result(case=case, backend="b", regime="r", verdict=verdict), phase))

    assert re.fullmatch(
        r"mla-gate: b × r: 1 of 100 cases; 1 PASS; worst 0\.5 row; about \d+ s left", heard("PASS", "search", 0.5)
    )
    assert heard("FAIL", "search", 7.0).startswith("mla-gate: b × r: 2 of 100 cases; 1 PASS, 1 FAIL; worst 7 row")
    # Shrinking is no progress, and how long it takes is not known.
    assert heard("FAIL", "shrink", 9.0) == "mla-gate: b × r: 2 of 100 cases; 1 PASS, 1 FAIL, 1 shrink; worst 7 row"
    monkeypatch.setattr(progress, "SECONDS", 60.0)
    assert heard("PASS", "search", 0.5) == "None"


def test_a_failing_serving_trace_is_told_step_by_step_and_a_broken_relation_by_its_name() -> None:
    trace = "trace1:H=1:pages=5:layers=1:admit,a,1:decode,a:end"
    finding = {**result("FAIL", phase="shrink", case="v1:H=1:S=1:N=2:end", relation=trace), "kind": "finding", "first": trace}
    lines = [finding, result("FAIL", phase="pinned", relation="repeat"), result("FAIL", phase="pinned", relation="trace1:gone")]
    report = report_of(*lines)
    served, repeated, newer = report.failures
    assert served.steps == ("a pool of 5 pages of 1 token, 1 layer a page", "1  admit a 1", "2  decode a")
    assert newer.steps == ("trace1:gone",) and not repeated.steps
    for text in (html(report), markdown(report), junit(report, merged(lines))):
        assert "1  admit a 1\n2  decode a" in text and "the last decode of a serving trace" in text
        assert "One run is held to another, repeat: the same call again." in text
    assert "No smaller case nearby passes" not in html(report)
