"""What a backend may do that is no answer costs it the case, and never the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import harness.run
from harness.answer import answer
from harness.backends.protocol import Backend, Capabilities, NotInstalled, Output, UnknownBackend
from harness.backends.registry import make
from harness.case import Case
from harness.inputs import Inputs
from harness.ledger import Writer, read, result_line
from harness.regimes import Regimes, load
from harness.repro import load as load_repro
from harness.repro import save
from harness.run import LONGEST_MESSAGE, Result, run_case
from tests.faulty import make as make_faulty

CASE = Case(heads=2, lengths=(5,))
RIGHT = make_faulty("python:tests.faulty:right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Right, but for what it does with its answer."""

    then: Callable[[Output], Any]
    name: str = "python:tests.faulty:odd"
    capabilities: Capabilities = RIGHT.capabilities

    def why_not(self, case: Case, device: torch.device) -> str | None:
        return None

    def run(self, inputs: Inputs) -> Any:
        return self.then(RIGHT.run(inputs))


def fail(error: BaseException) -> Callable[[Output], Any]:
    def then(output: Output) -> Any:
        raise error

    return then


@pytest.fixture(scope="module")
def regimes() -> Regimes:
    return load(Path(__file__).parent / "faulty.toml")


def ask(then: Callable[[Output], Any], regimes: Regimes) -> Result:
    backend: Backend = Odd(then=then)
    return run_case(CASE, backend, regimes)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (lambda output: None, "returned None"),
        (lambda output: (output.out, output.lse), "returned a tuple"),
        (lambda output: replace(output, out=output.out.tolist()), "out must be"),
        (lambda output: replace(output, out=output.out[0]), "out must be"),
        (lambda output: replace(output, lse=1.0), "lse must be"),
        (lambda output: replace(output, out=output.out.to("meta")), "out must be on cpu"),
    ],
    ids=["none", "tuple", "list", "short", "number", "elsewhere"],
)
def test_an_answer_of_another_kind_is_the_backend_s_failure(then: Callable[[Output], Any], said: str, regimes: Regimes) -> None:
    verdict = ask(then, regimes).verdict
    assert (verdict.kind, verdict.fault) == ("FAIL", "mismatch")
    assert said in verdict.message


def test_what_ran_is_kept_as_words_and_numbers(regimes: Regimes, tmp_path: Path) -> None:
    result = ask(lambda output: replace(output, what_ran={"splits": torch.tensor(3), "kernel": "a", 4: 5}), regimes)
    assert result.verdict.kind == "PASS"
    assert result.what_ran == {"splits": "tensor(3)", "kernel": "a", "4": 5}


def test_a_long_message_keeps_its_ends(regimes: Regimes) -> None:
    message = ask(fail(RuntimeError("begin" + "x" * 1_000_000 + "end")), regimes).verdict.message
    assert len(message) < LONGEST_MESSAGE + 200
    assert message.startswith("RuntimeError: begin")
    assert "characters left out" in message


def test_a_message_that_is_no_text_reaches_the_ledger_and_the_repro(regimes: Regimes, tmp_path: Path) -> None:
    result = ask(fail(RuntimeError("\udcff\x00")), regimes)
    assert result.verdict.fault == "crash"
    ledger = Writer(tmp_path / "a.jsonl", {"command": ["\udcfe"]})
    ledger.write("result", **result_line(result, "pinned"))
    ledger.close()
    assert "udcff" in read(tmp_path / "a.jsonl").lines[0]["message"]
    for note in save(result, RIGHT, regimes, tmp_path, device="cpu"):
        assert "not saved" not in note
    (repro,) = tmp_path.glob("*.json")
    assert load_repro(repro).case == CASE


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module of a backend's author."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "somebodys_backend.py").write_text(text)
        return "python:somebodys_backend"

    yield write
    sys.modules.pop("somebodys_backend", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package_of_theirs", "no_such_package_of_theirs"),
        ("def make(:", "SyntaxError.*somebodys_backend.py"),
        ("import ctypes\nctypes.CDLL('libno.so')", "OSError: libno.so"),
        ("def make(name, label):\n    raise RuntimeError('no driver')", "RuntimeError: no driver.*somebodys_backend.py:2"),
    ],
    ids=["import", "syntax", "library", "make"],
)
def test_a_backend_that_cannot_be_made_says_why(module: Callable[[str], str], text: str, said: str) -> None:
    with pytest.raises(NotInstalled, match=said):
        make(module(text))


def test_a_module_that_makes_no_backend_is_said_to(module: Callable[[str], str]) -> None:
    with pytest.raises(UnknownBackend, match="made None, which is no backend"):
        make(module("def make(name, label):\n    return None"))


@pytest.mark.parametrize("place", ["make_inputs", "judge"])
@pytest.mark.parametrize(("times", "expected"), [(1, "PASS"), (2, "UNSUPPORTED")])
def test_a_gpu_without_room_for_the_judging_is_no_verdict_on_the_backend(
    place: str, times: int, expected: str, regimes: Regimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = getattr(harness.run, place), [times]

    def short(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.53 GiB.")
        return real(*given, **named)

    monkeypatch.setattr(harness.run, place, short)
    result = answer(CASE, None, RIGHT, regimes)
    assert result.verdict.kind == expected and result.regime == "faulty"
    assert expected == "PASS" or result.verdict.message.startswith("not run: judging it needs more memory than cpu has")


def test_a_gpu_without_room_for_what_the_backend_takes_is_the_backend_s_crash(regimes: Regimes) -> None:
    result = answer(CASE, None, Odd(then=fail(torch.OutOfMemoryError("Tried to allocate 400 GiB."))), regimes)
    assert result.verdict.fault == "crash" and "400 GiB" in result.verdict.message
