"""A trace on a backend: every step is done, every decode judged, one Result.

1. The first thing that is wrong ends the trace; ``machine.py`` says what is looked at.
2. A trace with a decode that the backend does not take, or that no regime covers, is UNSUPPORTED and not run: half a trace
   would look like a whole one.
3. The result is about the decode at which the trace ended; its message names the step, and its numbers are the worst of all.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping

import torch

from harness.backends.protocol import Backend
from harness.compilations import compiled
from harness.memory import NotEnoughMemory
from harness.regimes import NoRegime, Regimes
from harness.run import Listener, Result
from harness.serving.engine import Act
from harness.serving.machine import Machine
from harness.serving.trace import Trace
from harness.verdict import Verdict


def run_trace(
    trace: Trace,
    backend: Backend,
    regimes: Regimes,
    *,
    device: torch.device | str = "cpu",
    on_stage: Listener = lambda stage: None,
    acts: Mapping[str, Act] | None = None,
    watched: bool = True,
) -> Result:
    """Run a trace on a backend.

    Args:
        trace: the pool and the steps.
        backend: who decodes.
        regimes: the rules it is judged by.
        device: where the pool lies.
        on_stage: hears "run" before each run of the backend and "judge" after.
        acts: a fault planted in the engine; none in a right one.
        watched: whether each step is held to what it owns; without, only the answers are judged.
    """
    start, device, before = time.perf_counter(), torch.device(device), compiled()
    reason = why_not(trace, backend, regimes, device)
    machine: Machine | None = None
    if reason is not None:
        verdict = Verdict(kind="UNSUPPORTED", message=f"not run: {reason}")
    else:
        try:
            machine = Machine.of(trace, backend, regimes, device, on_stage, acts or {}, watched)
            verdict = machine.run()
        except NotEnoughMemory as short:
            verdict = Verdict(kind="UNSUPPORTED", message=str(short))
        except Exception:
            verdict = Verdict(kind="ERROR", message=traceback.format_exc())
    return Result(
        case=trace.case,
        backend=backend.name,
        regime=_regime(trace, backend, regimes),
        verdict=verdict,
        relation=str(trace),
        run_seconds=machine.run_seconds if machine else 0.0,
        seconds=time.perf_counter() - start,
        compiled=compiled() - before,
        what_ran=machine.what_ran if machine else {},
    )


def why_not(trace: Trace, backend: Backend, regimes: Regimes, device: torch.device) -> str | None:
    """Say why a trace cannot be asked of a backend, or None."""
    asked = 0
    for index, cases in trace.decodes():
        for case in cases:
            asked += 1
            reason = backend.why_not(case, device)
            try:
                regimes.of(backend.name, case)
            except NoRegime as none:
                reason = reason or str(none)
            if reason is not None:
                return f"step {index + 1} ({trace.steps[index]}): {reason}"
    return None if asked else "it decodes nothing"


def _regime(trace: Trace, backend: Backend, regimes: Regimes) -> str | None:
    try:
        return regimes.of(backend.name, trace.case).name
    except NoRegime:
        return None
