"""Which backends, regimes and cases the gate's tests are asked about."""

from __future__ import annotations

import pytest

from cases.pins import pinned
from cases.served import say_what_is_left, shapes, why_no_traces
from harness.backends.protocol import Backend, accepts
from harness.graphs import why_not_graph
from harness.known import KnownFailure, known_failures, wholly_known
from harness.plan import Plan
from harness.plugin import planned
from harness.refusal import rejected
from harness.shapes import regime_of, shape_rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its pairs of backend and regime, its backends, or its pinned cases."""
    wanted = set(metafunc.fixturenames) & {"pair", "part", "graphed", "served", "row", "backend", "pin", "known"}
    if not wanted:
        return
    gate = planned(metafunc.config)
    if gate is None:
        metafunc.parametrize(tuple(wanted), [])
        return
    plan = gate.plan
    if "known" in wanted:
        known = [(backend, entry) for backend in plan.backends for entry in known_failures() if _concerns(plan, backend, entry)]
        metafunc.parametrize(("backend", "known"), known, ids=[f"{backend.name}-{entry.name}" for backend, entry in known])
    elif "pair" in wanted:
        whole = [pair for pair in plan.pairs if wholly_known(pair.backend.name, pair.regime.name) is None]
        asked = [pair for pair in whole if gate.beyond(pair) is None]
        several = gate.parts > 1
        found = [(pair, part) for pair in asked for part in range(gate.parts)]
        metafunc.parametrize(
            ("pair", "part"), found, ids=[f"{pair}-{part + 1}" if several else str(pair) for pair, part in found]
        )
    elif "graphed" in wanted:
        # Where none can be captured the table says so; a test that asks nothing would look green.
        asked = [pair for pair in plan.pairs if why_not_graph(pair.backend, plan.device) is None]
        asked = [pair for pair in asked if wholly_known(pair.backend.name, pair.regime.name) is None]
        metafunc.parametrize("graphed", asked, ids=str)
    elif "served" in wanted:
        whole = [pair for pair in plan.pairs if wholly_known(pair.backend.name, pair.regime.name) is None]
        asked = [pair for pair in whole if gate.beyond(pair) is None and why_no_traces(gate, pair) is None]
        metafunc.parametrize("served", asked, ids=str)
    elif "row" in wanted:
        found = [(backend, row) for backend in plan.backends for row in shape_rows() if shapes(gate, row, backend)]
        metafunc.parametrize(("backend", "row"), found, ids=[f"{backend.name}-{row.name}" for backend, row in found])
    elif "pin" in wanted:
        asked = [(backend, pin) for backend in plan.backends for pin in pinned() if regime_of(plan, backend, pin.case)]
        metafunc.parametrize(("backend", "pin"), asked, ids=[f"{backend.name}-{pin.name}" for backend, pin in asked])
    else:
        # A backend that rejects nothing has nothing to refuse, and a check of nothing must not look green.
        refusing = [backend for backend in plan.backends if rejected(backend, plan.device, 1, seed=0)]
        metafunc.parametrize("backend", refusing, ids=lambda backend: backend.name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down what is left out of the traces and shapes that are asked, so that the table says so."""
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if fixtures & {"served", "row"} and not session.config.option.collectonly:
        gate = planned(session.config)
        assert gate is not None, "what is collected was planned"
        say_what_is_left(gate, traces="served" in fixtures, shapes="row" in fixtures)


def _concerns(plan: Plan, backend: Backend, entry: KnownFailure) -> bool:
    """Tell whether a known failure is one of this run: of its backend, its regimes, and inside the contract here."""
    if not entry.names(backend.name) or not accepts(backend, entry.case, plan.device):
        return False
    regime = plan.regimes.of(backend.name, entry.case)
    return any(pair.backend is backend and pair.regime.name == regime.name for pair in plan.pairs)
