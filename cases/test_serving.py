"""Serving traces of every regime of every backend: pages that are shared, copied, taken away, moved and used again."""

from __future__ import annotations

import pytest

from cases.served import serve
from harness.gate import Gate
from harness.plan import Pair


def test_backend_agrees_with_the_reference_while_an_engine_serves(mla_gate: Gate, served: Pair) -> None:
    found = serve(mla_gate, served)
    said = [mla_gate.failed(found.finding.result, served.backend, found.finding)] if found.finding else []
    said += [mla_gate.failed(result, served.backend) for result in found.errors]
    if said:
        pytest.fail("\n\n".join(said), pytrace=False)
    if not found.executed:
        pytest.fail(f"{served}: no trace was executed, so nothing is known", pytrace=False)
