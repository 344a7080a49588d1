"""The serving traces and production shapes that a run asks, and what it says of those that it does not."""

from __future__ import annotations

import zlib

from harness.acceptance import acceptance
from harness.backends.protocol import Backend
from harness.gate import Gate
from harness.ledger import result_line
from harness.plan import Pair
from harness.run import Result
from harness.serving import search
from harness.serving.trace import Trace
from harness.shapes import Shape, ShapeRow, left_of, sort


def why_no_traces(gate: Gate, pair: Pair) -> str | None:
    """Say why a pair is asked for no serving traces, or None."""
    return search.why_no_traces(pair.regime, acceptance(pair.regime, pair.backend, gate.plan.device))


def serve(gate: Gate, pair: Pair) -> search.Served:
    """Ask a pair for serving traces, until one fails."""
    seed = zlib.crc32(f"{gate.options.seed} {pair} serving".encode())

    def run(trace: Trace) -> Result:
        # Not by gate.run, which asks the case alone where a relation does not apply.
        return gate.isolation.run(trace.case, pair.backend, str(trace))

    served = search.serve(pair, gate.profile, run, gate.record, device=gate.plan.device, seed=seed, excuses=gate.excuses)
    if served.finding is not None:
        line, shared = result_line(served.finding.result, "shrink"), gate.baselines.shares(served.finding.result)
        gate.ledger.write("finding", **line, first=str(served.finding.first), shared=shared)
    return served


def shapes(gate: Gate, row: ShapeRow, backend: Backend) -> list[Shape]:
    """List the production shapes of a row that are asked of a backend."""
    return sort(row, backend, gate.plan, gate.profile, gate.options.seed).chosen


def say_what_is_left(gate: Gate, *, traces: bool, shapes: bool) -> None:
    """Write down which pairs are asked for no traces, and which shapes are not asked for, so that the table says so."""
    for pair in gate.plan.pairs if traces else ():
        reason = why_no_traces(gate, pair)
        if reason is not None and gate.beyond(pair) is None:
            gate.ledger.write("untraced", backend=pair.backend.name, regime=pair.regime.name, reason=reason)
    for backend in gate.plan.backends if shapes else ():
        for regime, (count, needs) in left_of(backend, gate.plan, gate.profile, gate.options.seed).items():
            gate.ledger.write("unasked", backend=backend.name, regime=regime, cases=count, reason=needs)
