"""A trace on a backend: every step is done, every decode judged, one Result.

1. After each step, nothing that it does not own has changed. Each decode is judged as any other case is, in every layer, by
   the truth's rows. The first thing that is wrong ends the trace.
2. A wrong answer that is right when the same call is made again is nondeterministic.
3. A trace with a decode that the backend does not take, or that no regime covers, is UNSUPPORTED and not run: half a trace
   would look like a whole one.
4. The result is about the decode at which the trace ended; its message names the step, and its numbers are the worst of all.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from harness.backends.protocol import Backend, Output
from harness.case import Case
from harness.compilations import compiled
from harness.inputs import Inputs
from harness.memory import Arena, NotEnoughMemory
from harness.regimes import SERVING, NoRegime, Regimes
from harness.run import WRONG, Listener, Result, judged, run_backend
from harness.serving.batch import Buffers, judged_by
from harness.serving.engine import Act, Engine
from harness.serving.memory import PoolMemory
from harness.serving.ownership import trespass
from harness.serving.rows import Rows
from harness.serving.steps import Step
from harness.serving.trace import Trace
from harness.serving.truth import DEVICE, Truth
from harness.verdict import Measurements, Verdict

#: Verdicts of a decode after which the trace goes on.
_RIGHT = ("PASS", "UNTRUSTED")


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
    machine: _Machine | None = None
    if reason is not None:
        verdict = Verdict(kind="UNSUPPORTED", message=f"not run: {reason}")
    else:
        try:
            machine = _Machine.of(trace, backend, regimes, device, on_stage, acts or {}, watched)
            verdict = machine.run()
        except NotEnoughMemory as short:
            verdict = Verdict(kind="UNSUPPORTED", message=str(short))
        except Exception:
            verdict = Verdict(kind="ERROR", message=traceback.format_exc())
    return Result(
        case=(machine and machine.case) or trace.case,
        backend=backend.name,
        regime=_regime(trace, backend, regimes),
        verdict=verdict,
        relation=SERVING,
        trace=str(trace),
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


@dataclass(frozen=False, slots=True, kw_only=True)
class _Machine:
    """A trace under way."""

    trace: Trace
    backend: Backend
    regimes: Regimes
    on_stage: Listener
    watched: bool
    truth: Truth
    engine: Engine
    arena: Arena
    buffers: Buffers
    rows: Rows
    #: The decode at hand, and the worst of what was measured so far.
    case: Case | None = None
    worst: Measurements = field(default_factory=Measurements)
    decoded: int = 0
    #: Answers whose pass was worth nothing, and why the first was.
    untrusted: int = 0
    doubt: str = ""
    run_seconds: float = 0.0
    what_ran: dict[str, str | int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trace: Trace,
        backend: Backend,
        regimes: Regimes,
        device: torch.device,
        on_stage: Listener,
        acts: Mapping[str, Act],
        watched: bool,
    ) -> _Machine:
        setup, arena = trace.setup, Arena(device)
        engine = Engine(setup=setup, memory=PoolMemory(setup, arena), acts=acts)
        return cls(
            trace=trace,
            backend=backend,
            regimes=regimes,
            on_stage=on_stage,
            watched=watched,
            truth=setup.truth(),
            engine=engine,
            arena=arena,
            buffers=Buffers(setup=setup, arena=arena, output_format=backend.capabilities.output_format),
            rows=Rows.of(setup.shape),
        )

    def run(self) -> Verdict:
        """Do every step; the verdict of the first that goes wrong, or of the trace."""
        for index, step in enumerate(self.trace.steps):
            where = f"step {index + 1} of {len(self.trace.steps)} ({step})"
            found = self._do(step, where) or (self._decode(index, step, where) if step.decodes else None)
            if found is not None:
                return found
            self.truth.take(step)
            if step.verb == "speculate" and step.keep < step.draft:
                for name in step.requests:
                    self.engine.reject(name, step.draft - step.keep)
        told = f"{len(self.trace.steps)} steps, {self.decoded} answers"
        if self.untrusted == self.decoded:
            return Verdict(kind="UNTRUSTED", message=f"{told}, all worth nothing: {self.doubt}", measurements=self.worst)
        worst = max(self.worst.ratios, key=lambda name: self.worst.ratios[name])
        told += f", {self.untrusted} of them worth nothing" if self.untrusted else ""
        message = f"{told}; worst is {worst} at {self.worst.ratios[worst]:.3g} of its limit"
        return Verdict(kind="PASS", message=message, measurements=self.worst)

    def _do(self, step: Step, where: str) -> Verdict | None:
        """Do what a step does to the pool, and hold it to what it owns."""
        engine, names = self.engine, step.requests
        copies = self.engine.memory.copies() if self.watched else []
        tables = {name: list(table) for name, table in engine.tables.items()}
        had = {name: len(own) for name, own in self.truth.tokens.items() if self.truth.where[name] == DEVICE}
        for name, numbers in self.truth.written(step).items():
            engine.write(name, self._rows_of(numbers))
        if step.verb == "fork":
            engine.fork(*names)
        elif step.verb == "resume":
            engine.resume(names[0], self._rows_of(self.truth.tokens[names[0]]))
        else:
            act = {"free": engine.end, "preempt": engine.drop, "offload": engine.offload, "restore": engine.restore}
            for name in names if step.verb in act else ():
                act[step.verb](name)
        if not self.watched:
            return None
        found = trespass(step, engine.memory.changes(copies), engine, tables, had)
        return None if found is None else Verdict(kind="FAIL", fault="input-changed", message=f"{where}: {found}")

    def _rows_of(self, numbers: list[int]) -> dict[tuple[int, int], torch.Tensor]:
        return {
            (group, layer): self.rows.tokens(numbers, group, layer)
            for group, layers in enumerate(self.trace.setup.layers)
            for layer in range(layers)
        }

    def _decode(self, index: int, step: Step, where: str) -> Verdict | None:
        """Decode a batch in every layer; the verdict of the first that is wrong."""
        setup, truth = self.trace.setup, self.truth.copy()
        cases = setup.cases(step, truth)
        numbers = truth.written(step)
        tokens = [truth.tokens[name] + numbers[name] if name in truth.tokens else numbers[name] for name in step.requests]
        for group, layers in enumerate(setup.layers):
            batch = self.engine.batch(step, group)
            told = setup.case(group, step.query_tokens, batch.lengths)
            for layer in range(layers):
                query = self.rows.queries(index, group, layer, step.rows, step.query_tokens)
                self.case = cases[group]

                def run(layer: int = layer, group: int = group, query: torch.Tensor = query) -> Verdict:
                    given = self.buffers.lay(told, batch, self.engine.view(group, layer), query)
                    meant = judged_by(given, cases[group], tokens, self.rows, group, layer)
                    return self._ask(given, meant)

                verdict = self._settled(run(), run)
                if verdict.kind not in _RIGHT:
                    message = f"{where}, layer {layer} of group {group}: {verdict.message}"
                    return dataclasses.replace(verdict, message=message)
                self._keep(verdict)
        return None

    def _settled(self, verdict: Verdict, again: Callable[[], Verdict]) -> Verdict:
        if verdict.fault in WRONG and again().kind in _RIGHT:
            message = f"{verdict.message}\n  and right when the same call is made again"
            return dataclasses.replace(verdict, fault="nondeterministic", message=message)
        return verdict

    def _ask(self, given: Inputs, meant: Inputs) -> Verdict:
        self.arena.seal()
        output, failed, seconds = run_backend(lambda: self.backend.run(given), given, self.on_stage)
        self.run_seconds += seconds
        if failed is not None:
            return failed
        assert isinstance(output, Output)
        self.what_ran = {str(key): value for key, value in output.what_ran.items()}
        return judged(meant, output, self.backend, self.regimes.of(self.backend.name, meant.case))

    def _keep(self, verdict: Verdict) -> None:
        """Keep the worst of what was measured, and whether a pass was worth nothing."""
        one, two = self.worst, verdict.measurements
        self.decoded += 1
        if verdict.kind == "UNTRUSTED":
            self.untrusted += 1
            self.doubt = self.doubt or verdict.message
        names = {*one.ratios, *two.ratios}
        self.worst = Measurements(
            rows=one.rows + two.rows,
            elements=one.elements + two.elements,
            ratios={name: max(one.ratios.get(name, 0.0), two.ratios.get(name, 0.0)) for name in names},
            rho=max(one.rho, two.rho),
            z=max(one.z, two.z),
            element=max(one.element, two.element),
            relative=max(one.relative, two.relative),
            nulls={**two.nulls, **{name: state for name, state in one.nulls.items() if state == "passed"}},
            sensitivities={
                name: one.sensitivities.get(name, False) or two.sensitivities.get(name, False)
                for name in {*one.sensitivities, *two.sensitivities}
            },
        )
