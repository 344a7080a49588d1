"""A call in a process of its own gives its answer, and costs nobody anything where it does not."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.apart import Lost, apart
from harness.case import Case
from harness.regimes import load
from harness.report.look import look_again
from harness.run import run_case
from tests.faulty import make

CASE = Case(heads=2, lengths=(5,))


def leave(code: int) -> None:
    os._exit(code)


def test_an_answer_comes_back() -> None:
    assert apart(partial(max, 2, 3), seconds=60) == 3


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(RuntimeError, match=r"ValueError: invalid literal"):
        apart(partial(int, "x"), seconds=60)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (partial(leave, 3), "ended with code 3"),
        (partial(signal.raise_signal, signal.SIGSEGV), "killed by signal 11"),
    ],
)
def test_a_process_that_is_lost_is_said_to_be(call: Any, said: str) -> None:
    with pytest.raises(Lost, match=said):
        apart(call, seconds=60)


def test_a_process_that_does_not_end_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(Lost, match="no answer in 1 s"):
        apart(partial(time.sleep, 600), seconds=1)
    assert time.monotonic() - began < 30


def test_a_kernel_that_dies_when_it_is_looked_at_again_costs_the_explanation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_GATE_TEST_SAFE", str(os.getpid()))
    regimes = load(Path(__file__).parent / "faulty.toml")
    result = run_case(CASE, make("python:tests.faulty:wrong-then-fatal"), regimes)
    assert result.verdict.fault == "mismatch"
    looked = look_again(result, regimes, device="cpu")
    assert not looked.grids
    assert looked.lines == (
        "no explanation: the kernel was run once more in a process of its own, and the process was killed by signal 11",
    )
