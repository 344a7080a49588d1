"""Graphs captured on a GPU and replayed over inputs that change in place, of every backend that can be captured."""

from __future__ import annotations

import pytest

from harness.gate import Gate
from harness.plan import Pair
from harness.regimes import GRAPH


def test_backend_agrees_when_its_graph_is_replayed(mla_gate: Gate, graphed: Pair) -> None:
    outcome = mla_gate.search(graphed, GRAPH)
    said = [mla_gate.failed(finding.result, graphed.backend, finding) for finding in outcome.findings]
    said += [mla_gate.failed(result, graphed.backend) for result in outcome.errors]
    if said:
        pytest.fail("\n\n".join(said), pytrace=False)
    if not outcome.executed:
        pytest.fail(f"{graphed}: no graph was captured, so nothing is known", pytrace=False)
