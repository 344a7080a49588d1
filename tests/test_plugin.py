"""A session of the gate: its options, its table, its exit status, and what is left when it ends early."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from harness import gate as gate_module  # noqa: F401  loaded here, or each inner session would load it anew
from harness.cli import CASES
from harness.ledger import Writer, read_all
from harness.plugin import home
from tests import stubs

pytest_plugins = ["pytester"]
STUB = "python:tests.stubs:"


@pytest.fixture
def gate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setenv("PYTHONPATH", str(CASES.parent))
    return Gate(pytester)


class Gate:
    """Runs sessions of the gate in a folder of their own."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester, self.path = pytester, pytester.path
        pytester.makeini("[pytest]\n")
        self.regimes = stubs.write_regimes(pytester.path)

    def arguments(self, kind: str, *options: str) -> list[str]:
        return [
            "-p", "harness.plugin", "-c", "tox.ini", "--rootdir", ".", str(CASES), "--backend", STUB + kind,
            "--regimes-file", str(self.regimes), "--device", "cpu", "--examples", "30", *options,
        ]  # fmt: skip

    def run(self, kind: str, *options: str) -> pytest.RunResult:
        """Run a session inside this process, cases too."""
        arguments = self.arguments(kind, "--isolation", "off", *options)
        return self.pytester.runpytest_inprocess(*arguments, no_reraise_ctrlc=True)

    def spawn(self, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a session in a process of its own."""
        command = [sys.executable, "-m", "pytest", *self.arguments(kind, *options)]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.path, timeout=400, check=False)


def test_a_right_backend_passes_and_the_table_says_what_was_executed(gate: Gate) -> None:
    done = gate.run("right", "--junitxml", "junit.xml")
    assert done.ret == 0
    done.stdout.fnmatch_lines([
        f"mla-gate: {STUB}right on cpu, profile smoke, --seed 0",
        "*= mla-gate =*",
        "backend * regime * cases * failures * untrusted * worst ratio * never seen * time * verdict",
        f"{STUB}right  few-heads *  0 *  PASS",
        f"{STUB}right  more-heads *  0 *  PASS, * not run",
        f"{STUB}right  (contract)  *12 *  0 *  PASS",
        "mla-gate: PASS, * cases executed",
        "profile smoke, --seed 0, ledger .mla-gate/runs/*",
    ])  # fmt: skip
    suite = ElementTree.parse(gate.path / "junit.xml").getroot()
    properties = {item.get("name") for item in suite.iter("property")}
    assert properties == {"executed", "seed"}
    lines = [line for ledger in read_all((gate.path / ".mla-gate" / "runs").iterdir()) for line in ledger.lines]
    kinds = [line["kind"] for line in lines]
    assert kinds.count("planned") == kinds.count("gated") == 2
    assert kinds[-1] == "end"
    assert sum(line["kind"] == "result" and line["phase"] == "search" for line in lines) > 40


def test_a_wrong_backend_fails_with_a_panel_a_repro_and_the_command_that_replays_it(gate: Gate) -> None:
    done = gate.run("wrong", "-k", "random and few-heads", "--repro-dir", "out", "--junitxml", "junit.xml", "--seed", "1")
    assert done.ret == 1
    done.stdout.fnmatch_lines([
        f"FAIL mismatch: {STUB}wrong × few-heads",
        "*requests        1, cached tokens 70",
        "*passes with lengths 69 instead of 70: v1:H=1:S=1:N=69:end",
        "*repro: *out/python-tests.stubs-wrong-mismatch-*.json",
        "*script: *out/python-tests.stubs-wrong-mismatch-*.py",
        f"mla-gate replay v1:H=1:S=1:N=70:end --backend {STUB}wrong --device cpu --regimes-file *",
        f"{STUB}wrong  few-heads * 1 * FAIL: failures",
        "mla-gate: FAIL after * cases: * × few-heads (failures)",
    ])  # fmt: skip
    (failure,) = ElementTree.parse(gate.path / "junit.xml").getroot().iter("failure")
    assert f"mla-gate replay v1:H=1:S=1:N=70:end --backend {STUB}wrong" in str(failure.text)
    assert json.loads(next((gate.path / "out").glob("*.json")).read_text())["case"] == "v1:H=1:S=1:N=70:end"


def test_a_run_writes_its_report_and_the_summary_of_a_ci_step(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(gate.path / "summary.md"))
    done = gate.run("wrong", "-k", "random and few-heads", "--report-html", "out/report.html", "--seed", "1")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["report: out/report.html"])
    page = (gate.path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"mla-gate replay v1:H=1:S=1:N=70:end --backend {STUB}wrong --device cpu" in page
    assert "✘ mla-gate: FAIL" in (gate.path / "summary.md").read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_costs_no_verdict(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(gate.path))
    done = gate.run("right", "-k", "random and few-heads", "--report-html", "tox.ini/report.html")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["tox.ini/report.html cannot be written: *", "GITHUB_STEP_SUMMARY=* cannot be written: *"])


def test_two_faults_are_two_panels(gate: Gate) -> None:
    done = gate.run("two", "-k", "random and few-heads")
    lines = [line for ledger in read_all((gate.path / ".mla-gate" / "runs").iterdir()) for line in ledger.lines]
    found = sorted(line["fault"] for line in lines if line["kind"] == "finding")
    assert found == ["crash", "mismatch"]
    assert all(f"FAIL {fault}: {STUB}two × few-heads" in done.stdout.str() for fault in found)
    done.stdout.fnmatch_lines([f"{STUB}two  few-heads * 2 * FAIL: failures"])


def test_a_repro_folder_that_cannot_be_written_costs_no_verdict(gate: Gate) -> None:
    (gate.path / "out").write_text("a file")
    done = gate.run("wrong", "-k", "random and few-heads", "--repro-dir", "out")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*repro not saved: *", f"{STUB}wrong  few-heads * FAIL: failures"])


def test_a_ledger_folder_that_cannot_be_written_costs_no_verdict(gate: Gate) -> None:
    (gate.path / "out").write_text("a file")
    done = gate.run("right", "-k", "random and few-heads", "--ledger-dir", "out/ledger")
    assert done.ret == 0
    done.stdout.fnmatch_lines([f"{STUB}right  few-heads * PASS"])
    done.stderr.fnmatch_lines(["*cannot be written*the ledger is in*"])


def test_an_answer_outside_the_contract_fails_the_run(gate: Gate) -> None:
    done = gate.run("answering", "-k", "contract")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*answered instead of raising Unsupported*", f"{STUB}answering  (contract) * FAIL: failures"])


def test_a_backend_that_takes_its_process_along_instead_of_refusing_fails_and_the_run_goes_on(gate: Gate) -> None:
    done = gate.spawn("aborting", "-k", "contract or one-token")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "killed by SIGABRT in the backend" in done.stdout
    assert re.search(rf"{STUB}aborting  \(contract\) +12 +12 .* FAIL: failures", done.stdout)
    assert re.search(rf"{STUB}aborting  few-heads +1 +0 .* PASS", done.stdout)
    (command,) = {line for line in done.stdout.splitlines() if "--relation refusal" in line and "H=9" in line} or {""}
    assert command.startswith("mla-gate replay ")


def test_a_contract_that_raises_is_a_crash_of_its_backend_and_the_others_go_on(gate: Gate) -> None:
    done = gate.run(
        "unsure", "--backend", f"{STUB}right", "--examples", "12", "-k", "few-heads or contract or pinned and lengths"
    )
    assert done.ret == 1
    done.stdout.fnmatch_lines([
        f"FAIL crash: {STUB}unsure × few-heads",
        f"*{STUB}unsure does not say whether it can do v1:H=1:S=1:N=71:end: its why_not raised KeyError: 71",
        f"mla-gate replay v1:H=1:S=1:N=71:end --backend {STUB}unsure --device cpu --regimes-file *",
    ])  # fmt: skip
    table = {tuple(line.split()[:2]): line for line in done.stdout.lines if line.startswith(STUB)}
    assert "FAIL: failures" in table[f"{STUB}unsure", "few-heads"]
    assert all("PASS" in line for (backend, _), line in table.items() if backend == f"{STUB}right")


def test_a_refusal_inside_the_contract_fails_the_run(gate: Gate) -> None:
    done = gate.run("refusing", "-k", "random and few-heads")
    assert done.ret == 1
    done.stdout.fnmatch_lines([f"FAIL refused: {STUB}refusing × few-heads"])


def test_an_interrupt_prints_the_verdicts_so_far(gate: Gate) -> None:
    done = gate.run("interrupted", "-k", "random")
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines([
        "*= mla-gate =*",
        f"{STUB}interrupted  few-heads *",
        f"{STUB}interrupted  more-heads * FAIL: no case executed",
    ])  # fmt: skip


def test_a_regime_that_executed_nothing_fails_and_says_why(gate: Gate) -> None:
    gate.regimes.write_text(gate.regimes.read_text().replace("min = 5, max = 256", "min = 9, max = 256"))
    done = gate.run("right", "-k", "random and more-heads")
    assert done.ret == 1
    done.stdout.fnmatch_lines([
        "*no case of this regime lies in the backend's contract*",
        f"{STUB}right  more-heads *0 * FAIL: no case executed",
    ])  # fmt: skip


def test_a_failing_row_fails_a_session_whose_tests_passed(gate: Gate) -> None:
    writer = Writer(gate.path / "ledger" / "other.jsonl", {})
    writer.write("planned", backend="b", regime="r", demanding=True)
    writer.close()
    done = gate.run("right", "-k", "pinned and one-token", "--ledger-dir", "ledger")
    done.assert_outcomes(passed=1, deselected=done.parseoutcomes().get("deselected", 0))
    assert done.ret == 1
    done.stdout.fnmatch_lines(["mla-gate: FAIL after * b × r (no case executed)"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "torch-sdp"], "*no backend is called 'torch-sdp': did you mean torch-sdpa*"),
        (["--backend", "python:no.such.module"], "*needs the module no.such.module*"),
        (["--regime", "few-hands"], "*no regime is called 'few-hands': did you mean few-heads*"),
        (["--regimes-file", "none.toml"], "*none.toml: cannot be read as TOML*"),
        (["--device", "tpu"], "*no device is called 'tpu'*"),
        (["--examples", "0"], "*--examples: a number from 1 on, not '0'*"),
        (["--profile", "huge"], "*invalid choice: 'huge'*"),
    ],
)
def test_a_wrong_name_is_one_clear_line_before_anything_runs(gate: Gate, options: list[str], said: str) -> None:
    done = gate.run("right", *options)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([said])
    assert "Traceback" not in done.stderr.str() + done.stdout.str()
    assert not (gate.path / ".mla-gate").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that is missed here")
def test_a_gpu_that_is_not_there_is_one_clear_line(gate: Gate) -> None:
    done = gate.run("right", "--device", "cuda")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*sees no GPU*--device cpu*"])


def test_a_faulty_regimes_file_is_found_also_where_nothing_is_named(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = gate.path / "bad.toml"
    bad.write_text("schema = 1\n")
    monkeypatch.setattr("harness.regimes.RULES", bad)
    monkeypatch.setattr("harness.regimes._load_own", lambda: __import__("harness.regimes").regimes._load(bad))
    done = gate.pytester.runpytest_inprocess("-p", "harness.plugin", "-c", "tox.ini", "--rootdir", ".", str(CASES))
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*bad.toml: the file lacks limits, regime*"])


def test_the_seed_decides_which_cases_are_asked(gate: Gate) -> None:
    asked = []
    for number, seed in enumerate(("3", "3", "4")):
        folder = gate.path / str(number)
        gate.run("right", "-k", "random and few-heads", "--examples", "10", "--seed", seed, "--ledger-dir", str(folder))
        asked.append([line["case"] for ledger in read_all([folder]) for line in ledger.lines if line["kind"] == "result"])
    assert asked[0] == asked[1] != asked[2]


def test_a_session_that_gates_nothing_leaves_no_trace(gate: Gate) -> None:
    gate.pytester.makepyfile("def test_nothing(): pass")
    done = gate.pytester.runpytest_inprocess("-p", "harness.plugin")
    assert done.ret == 0
    # pytest itself names an installed plugin's package and version in its header.
    said = [line for line in done.stdout.lines if not line.startswith("plugins:")]
    assert "mla-gate" not in "\n".join(said)
    assert not (gate.path / ".mla-gate").exists()


def test_collecting_only_leaves_no_trace(gate: Gate) -> None:
    done = gate.run("right", "--collect-only", "-q")
    done.stdout.fnmatch_lines(["*test_backend_agrees_with_the_reference[[]*few-heads[]]"])
    assert not (gate.path / ".mla-gate").exists()


def test_processes_of_pytest_xdist_make_one_table(gate: Gate) -> None:
    done = gate.spawn("wrong", "-n", "2", "-k", "random", "--isolation", "off")
    assert done.returncode == 1, done.stdout + done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith(f"{STUB}wrong")]
    assert [line.split()[1] for line in table] == ["few-heads", "more-heads"]
    assert all("FAIL: failures" in line for line in table)
    (folder,) = (gate.path / ".mla-gate" / "runs").iterdir()
    assert {path.stem for path in folder.iterdir()} == {"gw0", "gw1"}


def test_a_kernel_that_takes_its_process_along_is_found_and_shrunk(gate: Gate) -> None:
    done = gate.spawn("dying", "-k", "random and few-heads", "--isolation", "worker")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAIL crash: {STUB}dying × few-heads" in done.stdout
    assert f"mla-gate replay v1:H=1:S=1:N=71:end --backend {STUB}dying --device cpu" in done.stdout


def test_the_plugin_may_be_named_also_where_it_is_installed() -> None:
    """pytest refuses one module under two names: the entry point has the name that ``-p`` gives it."""
    project = tomllib.loads((CASES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"harness.plugin": "harness.plugin"}


def test_a_long_run_shows_progress(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.report.progress.SECONDS", 0.0)
    done = gate.run("right", "-k", "random and few-heads")
    line = f"mla-gate: {STUB}right × few-heads: * of 30 cases; * PASS*; worst * *; about * s left"
    done.stderr.fnmatch_lines([line])


def test_a_run_that_is_killed_leaves_a_ledger_that_tells_what_ran(gate: Gate) -> None:
    command = [sys.executable, "-m", "pytest", *gate.arguments("right", "-k", "random", "--examples", "5000")]
    folder = gate.path / ".mla-gate" / "runs"
    run = subprocess.Popen(command, cwd=gate.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while sum(path.read_text().count('"kind": "result"') for path in folder.glob("*/*.jsonl")) < 20:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.wait()
    (ledger,) = folder.iterdir()
    command = [sys.executable, "-m", "harness.cli", "report", str(ledger)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parent, timeout=60, check=False)
    executed = sum(line["kind"] == "result" for part in read_all([ledger]) for line in part.lines)
    assert executed >= 20
    assert f"{STUB}right  few-heads" in done.stdout and f" {executed} " in done.stdout
    assert "more-heads" in done.stdout and "no case executed" in done.stdout
    assert "ends before its run did: what it holds is counted" in done.stdout
    assert done.returncode == 1


def test_an_installed_gate_writes_where_it_is_called_from(tmp_path: Path) -> None:
    called = SimpleNamespace(rootpath=tmp_path / "site-packages", invocation_params=SimpleNamespace(dir=tmp_path))
    called.inipath = None
    assert home(called) == tmp_path  # type: ignore[arg-type]
    called.inipath = called.rootpath / "pyproject.toml"
    assert home(called) == called.rootpath  # type: ignore[arg-type]
