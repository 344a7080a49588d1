"""The command answers, or says in one line what was wrong with the question."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli import main
from harness.ledger import Writer
from tests import stubs

STUB = "python:tests.stubs:"
FAILING = "v1:H=2:S=1:N=100+3:end"


@pytest.fixture
def rules(tmp_path: Path) -> list[str]:
    return ["--regimes-file", str(stubs.write_regimes(tmp_path)), "--device", "cpu"]


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command sets it where no GPU is seen; here it must not outlive the test

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, said.err

    return run


def as_json(ask: Ask, *arguments: str) -> tuple[int, Any]:
    status, out, _ = ask(*arguments, "--json")
    return status, json.loads(out)


COMMANDS = ("backends", "demo", "regimes", "routes", "run", "replay", "shrink", "show", "report", "compare")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"mla-gate {command}" in capsys.readouterr().out


def test_the_command_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


def test_backends_says_what_can_run_here_and_why_the_others_cannot(ask: Ask) -> None:
    status, rows = as_json(ask, "backends")
    assert status == 0
    found = {row["name"]: row for row in rows}
    assert found["torch-sdpa"]["runs"]
    assert all(row["runs"] or row["why_not"] for row in rows)
    _, out, _ = ask("backends")
    assert all(name in out for name in found)


def test_regimes_says_region_arithmetic_limits_and_reason(ask: Ask, rules: list[str]) -> None:
    status, out, _ = ask("regimes", *rules[:2])
    assert status == 0
    for said in ("few-heads", "heads: 1 to 4", "probability fp32", "relative error of 0.02", "for tests"):
        assert said in out
    _, rows = as_json(ask, "regimes", *rules[:2])
    assert [row["name"] for row in rows] == ["few-heads", "more-heads"]
    _, rows = as_json(ask, "regimes", "--backend", "torch-sdpa")
    assert rows
    assert all(any("torch-sdpa" in name for name in row["backends"]) for row in rows)


def test_show_says_a_case_in_words_and_shapes(ask: Ask) -> None:
    status, out, _ = ask("show", "v1:H=12:N=130+64:T=16:layout=fused:end")
    assert status == 0
    for said in ("2, cached tokens 130, 64", "12 heads", "query_nope      [2, 1, 12, 512] bfloat16", "block_table"):
        assert said in out
    _, shown = as_json(ask, "show", "v1:H=12:N=130+64:T=16:layout=fused:end")
    assert shown["case"]["page_size"] == 16


def test_replay_of_a_right_answer_ends_with_0_and_of_a_wrong_one_with_1(ask: Ask, rules: list[str]) -> None:
    status, out, _ = ask("replay", FAILING, "--backend", f"{STUB}right", *rules)
    assert status == 0
    assert out.startswith("PASS")
    status, out, _ = ask("replay", FAILING, "--backend", f"{STUB}wrong", *rules)
    assert status == 1
    assert out.startswith("FAIL mismatch")
    assert out.splitlines()[-1] == f"mla-gate replay {FAILING} --backend {STUB}wrong --device cpu {shlex.join(rules[:2])}"
    status, line = as_json(ask, "replay", FAILING, "--backend", f"{STUB}wrong", *rules)
    assert (status, line["verdict"], line["fault"]) == (1, "FAIL", "mismatch")


def test_replay_holds_to_a_relation_where_one_is_named(ask: Ask, rules: list[str]) -> None:
    status, line = as_json(ask, "replay", FAILING, "--backend", f"{STUB}right", "--relation", "repeat", *rules)
    assert (status, line["relation"], line["verdict"]) == (0, "repeat", "PASS")


def test_replay_and_shrink_outlive_a_kernel_that_takes_its_process_along(ask: Ask, rules: list[str], tmp_path: Path) -> None:
    dying = ("--backend", f"{STUB}dying", *rules)
    status, line = as_json(ask, "replay", FAILING, *dying)
    assert (status, line["fault"]) == (1, "crash")
    _, shrunk = as_json(ask, "shrink", FAILING, "--repro-dir", str(tmp_path / "repros"), *dying)
    assert shrunk["case"] == "v1:H=1:S=1:N=71:end"


def test_shrink_walks_to_the_smallest_and_its_repro_is_replayed(ask: Ask, rules: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "repros"
    status, shrunk = as_json(ask, "shrink", FAILING, "--backend", f"{STUB}wrong", "--repro-dir", str(folder), *rules)
    assert status == 1
    assert shrunk["case"] == "v1:H=1:S=1:N=70:end"
    assert shrunk["neighbour"] == "v1:H=1:S=1:N=69:end"
    assert shrunk["complete"]
    (repro,) = folder.glob("*.json")
    status, out, _ = ask("replay", str(repro), *rules)
    assert status == 1
    assert "v1:H=1:S=1:N=70:end" in out
    assert ask("show", str(repro))[0] == 0
    status, out, _ = ask("replay", str(repro), "--backend", f"{STUB}right", *rules)
    assert status == 0


def test_shrinking_what_does_not_fail_is_a_wrong_question(ask: Ask, rules: list[str]) -> None:
    status, _, err = ask("shrink", FAILING, "--backend", f"{STUB}right", *rules)
    assert status == 2
    assert "does not fail" in err


def test_report_counts_a_ledger_that_was_cut_short(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = Writer(path, {})
    writer.write("planned", backend="b", regime="r", demanding=False)
    writer.close()
    status, out, _ = ask("report", str(path))
    assert status == 1
    assert "no case executed" in out
    assert "ends before its run did" in out
    status, counted = as_json(ask, "report", str(tmp_path))
    assert status == 1
    assert counted["rows"][0]["reason"] == "no case executed"
    assert counted["cut"] == [str(path)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "v1:H=2:N=3"], "cut off"),
        (["replay", "v2:H=2:N=3:end"], "this id is of version v2, this mla-gate reads v1"),
        (["replay", "v1:H=2:X=3:N=3:end"], "'X=3' in the id"),
        (["replay", "v1:H=0:N=3:end"], "heads must be a whole number from 1 to 256"),
        (["replay", "nonsense"], "a case id starts with v1:"),
        (["replay", "none.json"], "cannot be read"),
        (["replay", FAILING], "add --backend NAME"),
        (["replay", FAILING, "--backend", "torch-sdp"], "did you mean torch-sdpa"),
        (["replay", FAILING, "--backend", "python:no.such.module"], "does not find"),
        (["replay", FAILING, "--backend", f"{STUB}right", "--device", "tpu"], "no device is called"),
        (["replay", FAILING, "--backend", f"{STUB}right", "--regimes-file", "none.toml"], "cannot be read as TOML"),
        (["regimes", "--backend", "torch-sdp"], "did you mean torch-sdpa"),
        (["regimes", "--regimes-file", "none.toml"], "cannot be read as TOML"),
        (["show", "v1:H=2"], "cut off"),
        (["report", "none.jsonl"], "cannot be read"),
    ],
)
def test_a_wrong_question_is_one_line_and_status_2(ask: Ask, arguments: list[str], said: str) -> None:
    status, out, err = ask(*arguments)
    assert status == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_repro_of_a_newer_version_is_refused(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    path.write_text('{"mla-gate": "repro", "version": 7}')
    status, _, err = ask("replay", str(path))
    assert status == 2
    assert "is of version 7" in err


def test_too_little_memory_is_said_and_is_no_pass(ask: Ask, rules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.inputs.free_bytes", lambda device: 0)
    options = ("--backend", f"{STUB}right", "--isolation", "off", *rules)
    status, line = as_json(ask, "replay", FAILING, *options)
    assert line["verdict"] == "UNSUPPORTED"
    assert "not run: needs" in line["message"]
    assert status == 2


def test_an_option_that_a_command_does_not_know_is_a_wrong_question(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", FAILING, "--colour"])
    assert ended.value.code == 2
    assert "mla-gate show does not know --colour" in capsys.readouterr().err


def test_run_hands_its_options_to_pytest_and_its_status_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def session(arguments: list[str], plugins: list[Any], *, ends: int, by: type[BaseException] | None) -> int:
        asked.append(arguments)
        if by is not None:
            plugins[0].pytest_keyboard_interrupt(SimpleNamespace(type=by))
        return ends

    faulty = pytest.Session.Interrupted  # how pytest ends a session whose collection failed
    ways = ((0, None, 0), (1, None, 1), (2, KeyboardInterrupt, 130), (2, faulty, 2), (3, None, 2), (4, None, 2), (5, None, 2))
    for ends, by, expected in ways:
        monkeypatch.setattr(pytest, "main", partial(session, ends=ends, by=by))
        assert main(["run", "--backend", "torch-sdpa", "--seed", "3", "--profile", "gate", "--", "-k", "pinned"]) == expected
    assert asked[0][-8:] == ["--profile", "gate", "--backend", "torch-sdpa", "--seed", "3", "-k", "pinned"]
