"""Which backends, regimes and cases the gate's tests are asked about."""

from __future__ import annotations

import pytest

from cases.pinned import pinned
from harness.plugin import gate_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its pairs of backend and regime, its backends, or its pinned cases."""
    wanted = set(metafunc.fixturenames)
    if not wanted & {"pair", "backend", "pin"}:
        return
    plan = gate_of(metafunc.config).plan
    if "pair" in wanted:
        metafunc.parametrize("pair", plan.pairs, ids=str)
    elif "pin" in wanted:
        chosen = {(pair.backend.name, pair.regime.name) for pair in plan.pairs}
        made = []
        for backend in plan.backends:
            for pin in pinned():
                # What lies outside the contract is the contract check's; it is not collected here, so it cannot look green.
                if backend.why_not(pin.case, plan.device) is None and (regime := _regime(plan, backend, pin.case)):
                    if (backend.name, regime) in chosen:
                        made.append(pytest.param(backend, pin, id=f"{backend.name}-{pin.name}"))
        metafunc.parametrize(("backend", "pin"), made)
    else:
        metafunc.parametrize("backend", plan.backends, ids=lambda backend: backend.name)
