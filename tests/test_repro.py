"""A repro is read back as it was written, refused with a reason where it cannot be, and never costs a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.backends import registry
from harness.case import Case
from harness.cli import main
from harness.plan import Pair
from harness.regimes import Regimes, load
from harness.report.failure import panel
from harness.repro import ReproError, replay_command, save
from harness.repro import load as load_repro
from harness.run import Result, run_case
from harness.search import Finding
from harness.shrink import Shrunk
from tests.stubs import make, write_regimes

WRONG = make("python:tests.stubs:wrong")
CASE = Case(heads=2, lengths=(70, 3))


@pytest.fixture
def regimes(tmp_path: Path) -> Regimes:
    return load(write_regimes(tmp_path))


@pytest.fixture
def failing(regimes: Regimes) -> Result:
    result = run_case(CASE, WRONG, regimes)
    assert result.verdict.kind == "FAIL"
    return result


def finding(result: Result) -> Finding:
    walk = Shrunk(
        case=CASE, neighbour=Case(heads=2, lengths=(69, 3)), difference="lengths 69+3 instead of 70+3", asked=9, complete=True
    )
    return Finding(result=result, first=Case(heads=4, lengths=(100, 3)), walk=walk)


def test_a_repro_is_read_back_as_it_was_written(failing: Result, regimes: Regimes, tmp_path: Path) -> None:
    notes = save(failing, WRONG, regimes, tmp_path / "repros", device="cpu", finding=finding(failing))
    (path,) = (tmp_path / "repros").glob("*.json")
    assert f"repro: {path}" in notes
    repro = load_repro(path)
    assert (repro.case, repro.backend, repro.regime, repro.fault) == (CASE, WRONG.name, "few-heads", "mismatch")
    assert repro.neighbour == "v1:H=2:S=1:N=69+3:end"
    assert repro.environment["torch"]
    assert json.loads(path.read_text())["command"] == repro.command


def test_a_repro_and_its_command_name_the_regimes_file_it_was_judged_by(
    failing: Result, regimes: Regimes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(failing, WRONG, regimes, tmp_path / "repros", device="cpu")
    (path,) = (tmp_path / "repros").glob("*.json")
    repro = load_repro(path)
    assert repro.rules == str(regimes.path) and repro.command.endswith(f"--regimes-file {regimes.path}")
    assert panel(failing, device="cpu", rules=regimes.option).endswith(repro.command)
    assert main(["replay", str(path), "--isolation", "off"]) == 1
    assert f"--regimes-file {regimes.path}" in capsys.readouterr().out
    assert load().option is None


def test_every_failure_has_a_script_beside_its_repro(failing: Result, regimes: Regimes, tmp_path: Path) -> None:
    notes = save(failing, WRONG, regimes, tmp_path / "repros", device="cpu")
    assert [path.suffix for path in sorted((tmp_path / "repros").iterdir())] == [".json", ".py"]
    assert any(note.startswith("script: ") for note in notes)


def test_a_folder_that_cannot_be_written_is_said_and_nothing_is_raised(
    failing: Result, regimes: Regimes, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    notes = save(failing, WRONG, regimes, tmp_path / "file", device="cpu")
    assert all("not saved" in note and "--repro-dir" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda body: {**body, "version": 2}, "is of version 2, this mla-gate reads 1"),
        (lambda body: {**body, "case": body["case"][:-6]}, "cut off"),
        (lambda body: {**body, "case": "v9:H=1:N=1:end"}, "version v9"),
        (lambda body: {name: body[name] for name in body if name != "backend"}, "lacks backend"),
        (lambda body: {"mla-gate": "ledger"}, "is no repro"),
        (lambda body: [1], "is no repro"),
    ],
)
def test_a_repro_that_cannot_be_read_is_refused_with_the_reason(
    failing: Result, regimes: Regimes, tmp_path: Path, change: object, said: str
) -> None:
    save(failing, WRONG, regimes, tmp_path / "repros", device="cpu")
    (path,) = (tmp_path / "repros").glob("*.json")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))  # type: ignore[operator]
    with pytest.raises(ReproError, match=said):
        load_repro(path)


def test_a_truncated_or_missing_repro_is_refused(failing: Result, regimes: Regimes, tmp_path: Path) -> None:
    save(failing, WRONG, regimes, tmp_path / "repros", device="cpu")
    (path,) = (tmp_path / "repros").glob("*.json")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ReproError, match="cut off or no JSON"):
        load_repro(path)
    with pytest.raises(ReproError, match="cannot be read"):
        load_repro(tmp_path / "none.json")


def test_the_panel_goes_from_verdict_to_the_command_that_replays_it(failing: Result) -> None:
    lines = panel(failing, device="cpu", finding=finding(failing), notes=["repro: r.json"]).splitlines()
    assert lines[0] == f"FAIL mismatch: {WRONG.name} × few-heads"
    assert lines[-1] == replay_command(CASE, WRONG.name, "cpu")
    text = "\n".join(lines)
    assert "requests        2, cached tokens 70, 3" in text
    assert "of its limit" in text  # metric against limit
    assert "row [0, 0, 1]" in text  # the worst row: request, query token, head
    assert "element [0, 0, 1, " in text
    for word in ("oracle", "expected", "actual", "ulp"):
        assert word in text
    assert "first seen as v1:H=4:S=1:N=100+3:end" in text
    assert "passes with lengths 69+3 instead of 70+3: v1:H=2:S=1:N=69+3:end" in text
    assert "repro: r.json" in text


def test_the_panel_says_when_nothing_smaller_passes_and_when_time_ended_first(failing: Result) -> None:
    walk = Shrunk(case=CASE, neighbour=None, difference="", asked=1, complete=False)
    text = panel(failing, device="cpu", finding=Finding(result=failing, first=CASE, walk=walk))
    assert "no smaller case nearby passes" in text
    assert "the time for shrinking ended first" in text


def test_the_command_survives_a_shell(failing: Result) -> None:
    assert "'triton-splitkv!x'" in replay_command(CASE, "triton-splitkv!x", "cpu")


def test_a_pair_is_named_by_backend_and_regime(regimes: Regimes) -> None:
    backend = registry.make("python:tests.stubs:right")
    assert str(Pair(backend=backend, regime=regimes.named("few-heads"))) == "python:tests.stubs:right-few-heads"
