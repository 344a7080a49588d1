"""Random cases of every regime of every backend."""

from __future__ import annotations

import pytest

from harness.gate import Gate
from harness.plan import Pair
from harness.strategies import NoSuchCase


def test_backend_agrees_with_the_reference(mla_gate: Gate, pair: Pair, part: int, request: pytest.FixtureRequest) -> None:
    try:
        outcome = mla_gate.search(pair, part=part)
    except NoSuchCase as error:
        pytest.fail(f"{pair}: {error}", pytrace=False)
    # Not by record_property, which warns where JUnit's newer schema is chosen.
    request.node.user_properties += [("executed", outcome.executed), ("seed", mla_gate.options.seed)]
    said = [mla_gate.failed(finding.result, pair.backend, finding) for finding in outcome.findings]
    said += [mla_gate.failed(result, pair.backend) for result in outcome.errors]
    if said:
        pytest.fail("\n\n".join(said), pytrace=False)
    if not outcome.executed:
        pytest.fail(f"{pair}: no case was executed, so nothing is known", pytrace=False)
