"""Detection power of the serving machine: every planted pool fault before the traces of the gate.

1. A fault is asked the traces of one seed, one after another until one fails; that is shrunk.
2. It is hunted twice: by everything that is checked, and by the judged answers alone. A fault that only what a step owns can
   show would never reach a user as a wrong answer.
3. The right engine is asked the same traces and must pass them all.

Usage: ``python -m harness.serving.detect [--backend NAME] [--traces N] [--seed N] [--only NAME …]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.acceptance import acceptance
from harness.backends.protocol import Backend
from harness.backends.registry import make
from harness.profiles import PROFILES
from harness.regimes import Regimes, load
from harness.run import Result
from harness.search import EXECUTED
from harness.serving.draw import traces
from harness.serving.engine import Act
from harness.serving.faults import FAULTS, PoolFault
from harness.serving.run import run_trace
from harness.serving.search import draw
from harness.serving.shrink import shrink
from harness.serving.trace import Trace
from harness.strategies import cases

#: Time for shrinking one trace, seconds.
_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How a fault was found."""

    #: Traces asked until one failed; 0 where none did.
    asked: int
    #: The shortest failing trace and what became of it; None where none failed.
    trace: Trace | None = None
    result: Result | None = None


def hunt(acts: Mapping[str, Act], asked: Sequence[Trace], backend: Backend, regimes: Regimes, *, watched: bool = True) -> Found:
    """Ask traces until one fails, and shrink it.

    Args:
        acts: the fault.
        asked: the traces.
        backend: who decodes; a right one.
        regimes: the rules.
        watched: whether steps are held to what they own.
    """

    def run(trace: Trace) -> Result:
        return run_trace(trace, backend, regimes, acts=acts, watched=watched)

    for number, trace in enumerate(asked, start=1):
        if run(trace).verdict.kind == "FAIL":
            walk = shrink(trace, lambda near: run(near).verdict.kind == "FAIL", seconds=_SECONDS)
            return Found(asked=number, trace=walk.trace, result=run(walk.trace))
    return Found(asked=0)


def draw_for(backend: Backend, regimes: Regimes, *, count: int, seed: int) -> list[Trace]:
    """Draw a backend's traces, evenly over its regimes."""
    drawn: list[Trace] = []
    rows = regimes.for_backend(backend.name)
    for index, regime in enumerate(rows):
        accepts = acceptance(regime, backend)
        shapes = cases(regime, PROFILES["smoke"], backend, seed=seed)
        share = count // len(rows) + (index < count % len(rows))
        drawn += draw(traces(shapes, accepts, most=PROFILES["gate"].trace_steps), share, seed=seed) if share else []
    return drawn


def _row(fault: PoolFault, asked: Sequence[Trace], backend: Backend, regimes: Regimes) -> tuple[str, bool]:
    watched = hunt(fault.acts, asked, backend, regimes)
    judged = hunt(fault.acts, asked, backend, regimes, watched=False)
    cells = [fault.name]
    for found in (watched, judged):
        cells += ["not found", "–"] if found.trace is None else [str(found.asked), str(len(found.trace.steps))]
    steps = "; ".join(map(str, watched.trace.steps)) if watched.trace else "–"
    return " | ".join([*cells, steps]), watched.trace is not None and len(watched.trace.steps) <= 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hunt and print its table; 1 if a fault is not found, or the right engine fails."""
    parser = argparse.ArgumentParser(prog="python -m harness.serving.detect", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="torch-sdpa", help="who decodes (default: torch-sdpa)")
    parser.add_argument("--traces", type=int, default=500, help="traces that are asked at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", default=list(FAULTS), help="names of faults; all by default, none to ask the right engine"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(FAULTS)
    if unknown:
        parser.error(f"no pool fault is called {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    regimes, backend = load(), make(options.backend)
    asked = draw_for(backend, regimes, count=options.traces, seed=options.seed)
    began, fine = time.perf_counter(), True
    if options.only:
        print("fault | traces, all checks | steps | traces, answers alone | steps | shortest trace")
        for name in options.only:
            row, found = _row(FAULTS[name], asked, backend, regimes)
            fine &= found
            print(row, flush=True)
    else:
        results = [run_trace(trace, backend, regimes) for trace in asked]
        kinds = {
            kind: sum(result.verdict.kind == kind for result in results)
            for kind in ("PASS", "UNTRUSTED", "FAIL", "ERROR", "UNSUPPORTED")
        }
        steps, decodes = sum(len(trace.steps) for trace in asked), sum(1 for trace in asked for _ in trace.decodes())
        print(f"{options.backend}: {len(asked)} traces, {steps} steps, {decodes} decodes: {kinds}")
        for result in results:
            if result.verdict.kind not in EXECUTED - {"FAIL"}:
                print(result.relation, result.verdict.message, sep="\n")
        fine = kinds["PASS"] + kinds["UNTRUSTED"] == len(asked)
    print(f"{time.perf_counter() - began:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
