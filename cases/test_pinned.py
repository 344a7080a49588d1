"""Pinned cases on every backend whose contract they lie in."""

from __future__ import annotations

import pytest

from cases.pins import Pin
from harness.backends.protocol import Backend
from harness.gate import Gate


def test_backend_agrees_on_the_pinned_case(mla_gate: Gate, backend: Backend, pin: Pin) -> None:
    result = mla_gate.ask(pin.case, backend, "pinned")
    if result.verdict.kind in ("FAIL", "ERROR") and not mla_gate.excuses(result):
        pytest.fail(f"{pin.why}\n{mla_gate.failed(result, backend)}", pytrace=False)
    if result.verdict.kind == "UNSUPPORTED":
        pytest.fail(f"{pin.name}: not run: {result.verdict.message}", pytrace=False)
