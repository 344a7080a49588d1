"""A trace under way: every step is done on the pool and every decode is judged.

1. After each step nothing that it does not own has changed. A kernel's run owns its outputs only, which the guard bands and
   copies of every decode hold it to.
2. A decode is judged in every layer, as any other case is, by the truth's rows.
3. A wrong answer that is right when the same call is made again is nondeterministic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness.backends.protocol import Backend
from harness.case import Case
from harness.memory import Arena
from harness.regimes import Regimes
from harness.run import WRONG, Listener, judged, run_backend
from harness.serving.batch import Buffers, judged_by
from harness.serving.engine import Act, Batch, Engine
from harness.serving.memory import PoolMemory
from harness.serving.ownership import trespass
from harness.serving.rows import Rows
from harness.serving.steps import Step
from harness.serving.trace import Trace
from harness.serving.truth import DEVICE, Truth
from harness.verdict import Measurements, Verdict

#: Verdicts of a decode after which the trace goes on.
_RIGHT = ("PASS", "UNTRUSTED")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decode:
    """A decoding step in one layer."""

    #: Index of the step, the group of layers, and the layer in it.
    index: int
    group: int
    layer: int
    #: What the kernel is told, and its case by the engine's lengths.
    batch: Batch
    told: Case
    #: The case by the truth, and each request's tokens.
    meant: Case
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=False, slots=True, kw_only=True)
class Machine:
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
    #: The worst of what was measured so far, and the answers it was measured on.
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
    ) -> Machine:
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
        setup = self.trace.setup
        cases, numbers = setup.cases(step, self.truth), self.truth.written(step)
        tokens = [self.truth.tokens[name] + numbers[name] for name in step.requests]
        for group, layers in enumerate(setup.layers):
            batch = self.engine.batch(step, group)
            told = setup.case(group, step.query_tokens, batch.lengths)
            for layer in range(layers):
                one = _Decode(index=index, group=group, layer=layer, batch=batch, told=told, meant=cases[group], tokens=tokens)
                verdict = self._ask(one)
                if verdict.fault in WRONG and self._ask(one).kind in _RIGHT:
                    message = f"{verdict.message}\n  and right when the same call is made again"
                    verdict = dataclasses.replace(verdict, fault="nondeterministic", message=message)
                if verdict.kind not in _RIGHT:
                    message = f"{where}, layer {layer} of group {group}: {verdict.message}"
                    return dataclasses.replace(verdict, message=message)
                self._keep(verdict)
        return None

    def _ask(self, one: _Decode) -> Verdict:
        rows = (one.meant.batch, one.meant.query_tokens)
        query = self.rows.queries(one.index, one.group, one.layer, *rows)
        given = self.buffers.lay(one.told, one.batch, self.engine.view(one.group, one.layer), query)
        meant = judged_by(given, one.meant, one.tokens, self.rows, one.group, one.layer)
        self.arena.seal()
        output, failed, seconds = run_backend(lambda: self.backend.run(given), given, self.on_stage)
        self.run_seconds += seconds
        if failed is not None:
            return failed
        assert output is not None, "a run without a verdict has an answer"
        self.what_ran = {key: value if type(value) in (str, int) else str(value) for key, value in output.what_ran.items()}
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
