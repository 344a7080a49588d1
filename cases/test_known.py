"""Known failures: each must still fail, and each has a day on which it ends."""

from __future__ import annotations

import datetime

import pytest

from harness.backends.protocol import Backend
from harness.gate import Gate
from harness.known import KnownFailure


def test_known_failure_still_fails(mla_gate: Gate, backend: Backend, known: KnownFailure) -> None:
    today = datetime.date.today()
    if known.overdue(today):
        pytest.fail(
            f"known failure {known.name} ended on {known.expires} ({known.issue}): mend it, or extend it with a reason",
            pytrace=False,
        )
    if not known.launch:
        pytest.skip(f"known failure {known.name} may take the process down and is not launched ({known.issue})")
    result = mla_gate.run(known.case, backend)
    verdict = result.verdict
    if verdict.kind != "FAIL":
        pytest.fail(
            f"known failure {known.name} of {backend.name} did not fail, it was {verdict.kind} on {known.case}: "
            f"take the entry out, or narrow its backends ({known.issue})",
            pytrace=False,
        )
    if verdict.fault not in known.faults:
        pytest.fail(
            f"known failure {known.name} of {backend.name} fails as {verdict.fault}, not as {' or '.join(known.faults)}: "
            f"it has another cause now\n{verdict.message}",
            pytrace=False,
        )
