"""Random cases of every regime of every backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.gate import Gate
from harness.plan import Pair


def test_backend_agrees_with_the_reference(
    mla_gate: Gate, pair: Pair, record_property: Callable[[str, object], None]
) -> None:
    outcome = mla_gate.search(pair)
    record_property("executed", outcome.executed)
    record_property("seed", mla_gate.options.seed)
    said = [mla_gate.failed(finding.result, pair.backend, finding) for finding in outcome.findings]
    said += [mla_gate.failed(result, pair.backend) for result in outcome.errors]
    if said:
        pytest.fail("\n\n".join(said), pytrace=False)
    if not outcome.executed:
        pytest.fail(f"{pair}: no case was executed, so nothing is known", pytrace=False)
