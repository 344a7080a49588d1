"""Both sides of every backend's contract: what it says it cannot do it must refuse, with an error and not an answer."""

from __future__ import annotations

import pytest

from harness.backends.protocol import Backend
from harness.gate import Gate
from harness.refusal import rejected


def test_backend_refuses_what_it_says_it_cannot_do(mla_gate: Gate, backend: Backend) -> None:
    answered = []
    device = mla_gate.plan.device
    for case in rejected(backend, device, mla_gate.profile.refusals, seed=mla_gate.options.seed):
        result = mla_gate.refuse(case, backend)
        if result.verdict.kind != "UNSUPPORTED" and not mla_gate.excuses(result):
            answered.append(f"{result.verdict.message}\n{mla_gate.command(result)}")
    if answered:
        pytest.fail("\n\n".join(answered), pytrace=False)
