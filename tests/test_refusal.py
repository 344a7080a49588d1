"""Outside its contract a backend refuses; one that answers there is caught, and so is one that refuses inside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.case import Case
from harness.refusal import refusal, rejected
from harness.regimes import load
from harness.run import run_case
from tests.stubs import make, write_regimes

CPU = torch.device("cpu")
RIGHT, ANSWERING, REFUSING = (make(f"python:tests.stubs:{kind}") for kind in ("right", "answering", "refusing"))


def test_only_rejected_cases_are_asked_and_each_reason_before_any_twice() -> None:
    cases = rejected(RIGHT, CPU, 6, seed=0)
    reasons = [RIGHT.why_not(case, CPU) for case in cases]
    assert len(cases) == 6
    assert all(reasons)
    assert any("heads" in str(reason) for reason in reasons)
    assert len(set(reasons)) == 6


def test_the_same_seed_chooses_the_same_cases() -> None:
    assert rejected(RIGHT, CPU, 10, seed=1) == rejected(RIGHT, CPU, 10, seed=1)
    assert rejected(RIGHT, CPU, 10, seed=1) != rejected(RIGHT, CPU, 10, seed=2)


def test_a_refusal_is_no_failure() -> None:
    (case,) = rejected(RIGHT, CPU, 1, seed=0)
    assert refusal(case, RIGHT, CPU).verdict.kind == "UNSUPPORTED"


def test_an_answer_outside_the_contract_is_accepted_unsupported() -> None:
    (case,) = rejected(ANSWERING, CPU, 1, seed=0)
    result = refusal(case, ANSWERING, CPU)
    assert (result.verdict.kind, result.verdict.fault) == ("FAIL", "accepted-unsupported")
    assert str(case) in result.verdict.message


def test_a_refusal_inside_the_contract_is_refused(tmp_path: Path) -> None:
    regimes = load(write_regimes(tmp_path))
    result = run_case(Case(heads=1, lengths=(100,)), REFUSING, regimes)
    assert (result.verdict.kind, result.verdict.fault) == ("FAIL", "refused")


def test_too_little_memory_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.inputs.free_bytes", lambda device: 0)
    (case,) = rejected(ANSWERING, CPU, 1, seed=0)
    result = refusal(case, ANSWERING, CPU)
    assert result.verdict.kind == "UNSUPPORTED"
    assert "not run" in result.verdict.message
