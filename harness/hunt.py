"""The hunt for one fault: the gate's cases, the first FAIL, the walk to the smallest, the explanation.

1. Faults of one variant are asked the same case one after another: inputs, truth and yardstick are made once, and that time
   is counted for each of them. The correct model goes first: a case that it fails says nothing of faults.
2. A mistake that outlives a call is asked through the relation ``repeat``, as the gate does, and each case is then fresh.
3. A fault that one check alone has seen is asked more cases, until another check sees it: one that none does needs that check.
4. Seconds are those of CPU time, so that a busy machine measures what a quiet one does.
5. An explanation is right where it names the fault, or one that reproduces the same output within rounding.

Source: the cases are those of ``harness.strategies``.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis
from hypothesis import HealthCheck, Phase

from harness.acceptance import acceptance
from harness.backends.protocol import Backend, Output
from harness.case import Case
from harness.explain import explain, explain_crash, explain_violations
from harness.faults.backend import Planted, planted
from harness.faults.catalogue import FAULTS
from harness.inputs import Inputs, make_inputs
from harness.judge import Known, judge
from harness.kills import Kill
from harness.likeness import CALLS, format_of
from harness.memory import NotEnoughMemory, empty
from harness.profiles import Profile
from harness.regimes import Regime, load
from harness.relations import between, run_relation
from harness.shrink import shrink
from harness.strategies import cases
from harness.verdict import Verdict

#: Seconds that the walk to a minimal repro may take, a fault.
WALK_SECONDS = 8.0
#: Cases that a fault is asked after its first FAIL, where one check alone has seen it.
WATCHED = 60


@dataclass(frozen=False, slots=True, kw_only=True)
class Bed:
    """A fault in its regime, with the cases it is asked."""

    backend: Planted
    regime: Regime
    #: Whether it is asked through the relation ``repeat``, for mistakes that outlive a call.
    history: bool

    def ask(self, case: Case) -> tuple[Verdict, Inputs, Output | None]:
        """Run and judge a case; crashes are verdicts."""
        inputs = make_inputs(case, output_format=self.backend.capabilities.output_format)
        return self.answer(inputs, Known())

    def before(self, case: Case) -> tuple[Inputs, ...]:
        """Make the inputs of the call before."""
        output_format = self.backend.capabilities.output_format
        return (make_inputs(between(case), output_format=output_format),) if self.history else ()

    def answer(self, inputs: Inputs, known: Known) -> tuple[Verdict, Inputs, Output | None]:
        """Run and judge on inputs that are there; ``known`` is what is known of them."""
        if self.history:
            return self._repeat(inputs.case)
        try:
            output = self.backend.run(inputs)
        except Exception as error:
            fault = getattr(error, "verdict_fault", "crash")
            return Verdict(kind="FAIL", fault=fault, message=f"{type(error).__name__}: {error}"), inputs, None
        return judge(inputs, output, self.regime, models=False, known=known), inputs, output

    def _repeat(self, case: Case) -> tuple[Verdict, Inputs, Output | None]:
        """Ask a case through ``repeat``; where that fails, call after the call between until an output is wrong."""
        inputs = make_inputs(case, output_format=self.backend.capabilities.output_format)
        verdict = run_relation(case, "repeat", self.backend, load()).verdict
        if verdict.kind == "FAIL":
            (earlier,) = self.before(case)
            for _ in range(CALLS):
                self.backend.run(earlier)
                output = self.backend.run(fresh(inputs))
                if judge(inputs, output, self.regime, models=False).kind == "FAIL":
                    break
        return verdict, inputs, inputs_output(inputs)


def inputs_output(inputs: Inputs) -> Output:
    """State what lies in the outputs as an answer."""
    return Output(out=inputs.out, lse=inputs.lse)


def draw(regime: Regime, backend: Backend, profile: Profile, count: int, seed: int) -> list[Case]:
    """Draw the first cases that a gate of this profile and seed asks of a backend."""
    drawn: list[Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases(regime, profile, backend))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    return drawn


def hunt(names: Sequence[str], drawn: Sequence[Case], regime: Regime, *, walk: bool = True) -> list[Kill]:
    """Ask faults of one variant their cases, each until one is a FAIL; shrink and explain that."""
    beds = {name: Bed(backend=planted(name), regime=regime, history=FAULTS[name].history) for name in names}
    variant = beds[names[0]].backend.variant
    correct = Bed(backend=Planted(name=f"model:{variant.name}", variant=variant), regime=regime, history=False)
    seconds = dict.fromkeys(names, 0.0)
    kills: dict[str, Kill] = {}
    for count, case in enumerate(drawn, start=1):
        began = time.thread_time()
        try:
            inputs = make_inputs(case, output_format=regime.arithmetic.output)
        except NotEnoughMemory:
            continue
        known = Known()
        right, _, _ = correct.answer(inputs, known)
        if right.kind != "PASS":
            say(f"the correct model is a {right.kind} of {case}, which says nothing of faults: {right.message}")
            continue
        made = time.thread_time() - began
        for name, bed in list(beds.items()):
            inputs = fresh(inputs)
            began = time.thread_time()
            verdict, _, output = bed.answer(inputs, known)
            if verdict.kind == "FAIL" and name in kills:
                if signs(verdict) != {kills[name].needs}:
                    kills[name] = dataclasses.replace(kills[name], needs="")
            elif name not in kills:
                seconds[name] += made + time.thread_time() - began
                if verdict.kind == "FAIL":
                    kills[name] = _found(bed, case, verdict, inputs, output, count, seconds[name], walk)
                    say(f"{name}: found after {count} cases")
            if name in kills and (not kills[name].needs or count >= kills[name].cases + WATCHED):
                del beds[name]
        if not beds:
            break
    for name in beds.keys() - kills.keys():
        say(f"{name}: not found in {len(drawn)} cases")
        kills[name] = Kill(name=name, found=False, cases=len(drawn), seconds=seconds[name])
    return list(kills.values())


def signs(verdict: Verdict) -> set[str]:
    """Name what shows a failure: the measured checks that are broken, or else the fault."""
    return {check for check, ratio in verdict.measurements.ratios.items() if ratio > 1} or {verdict.fault or ""}


def fresh(inputs: Inputs) -> Inputs:
    """Give the outputs back as they were before a run; inputs that a run has changed are made anew."""
    if inputs.violations():
        return make_inputs(inputs.case, output_format=format_of(inputs.out))
    return emptied(inputs)


def emptied(inputs: Inputs) -> Inputs:
    """Give the outputs back as they were before a run."""
    for buffer in (inputs.out, inputs.lse):
        if buffer is not None:
            empty(buffer)
    return inputs


def say(line: str) -> None:
    """Show progress."""
    print(f"detect: {line}", file=sys.stderr, flush=True)


def _found(
    bed: Bed, case: Case, verdict: Verdict, inputs: Inputs, output: Output | None, count: int, seconds: float, walk: bool
) -> Kill:
    """Shrink and explain what was found."""
    name = _name(bed.backend)
    if walk:
        smallest = _walk(bed, case, verdict)
        for _ in range(CALLS):
            verdict_of, inputs, output = bed.ask(smallest)
            if verdict_of.kind == "FAIL":
                break
    else:
        smallest, verdict_of = case, verdict
    seen = signs(verdict)
    kill = Kill(
        name=name,
        found=True,
        cases=count,
        seconds=seconds,
        fault=verdict.fault or "",
        checks=tuple(check for check, ratio in verdict.measurements.ratios.items() if ratio > 1),
        first=str(case),
        smallest=str(smallest),
        needs=seen.pop() if len(seen) == 1 else "",
        size=(smallest.batch, sum(smallest.lengths), smallest.heads, smallest.query_tokens),
    )
    return _explained(kill, bed, verdict_of, inputs, output)


def _walk(bed: Bed, case: Case, verdict: Verdict) -> Case:
    """Walk to the smallest case that fails in the same way."""
    accepts = acceptance(bed.regime, bed.backend)
    crash = verdict.fault in ("crash", "hang")
    calls = CALLS if bed.history else 1

    def fails(near: Case) -> bool | None:
        if not accepts(near):
            return None
        for _ in range(calls):
            found, _, _ = bed.ask(near)
            if found.kind == "FAIL" and (found.fault in ("crash", "hang")) == crash:
                return True
        return False

    return shrink(case, fails, seconds=WALK_SECONDS).case


def _name(backend: Planted) -> str:
    return backend.name.removeprefix("fault:").partition("@")[0]


def _explained(kill: Kill, bed: Bed, verdict: Verdict, inputs: Inputs, output: Output | None) -> Kill:
    """Explain a failure, and tell whether the explanation is right."""
    began = time.thread_time()
    arithmetic, case, name = bed.regime.arithmetic, inputs.case, kill.name
    if output is None:
        names = explain_crash(case, arithmetic)
        # Faults that crash on the same case cannot be told apart by it.
        named, right = (names[0], name in names) if names else ("", False)
        kinds = {FAULTS[one].kind for one in names}
    elif verdict.fault in ("input-changed", "guard-touched"):
        touched = [(violation.fault, violation.buffer) for violation in inputs.violations()]
        names = explain_violations(case, arithmetic, touched)
        named, right = (names[0], name in names) if names else ("", False)
        kinds = {FAULTS[one].kind for one in names}
    else:
        rerun = None if bed.history else bed.backend.run
        found = explain(inputs, output, arithmetic, before=bed.before(case), rerun=rerun)
        singles = [one for one in found.candidates if len(one.names) == 1]
        named = "+".join(found.candidates[0].names) if found.candidates else ""
        exact = [one.names[0] for one in singles if one.within_rounding]
        right = named == name or (name in exact and named in exact)
        kinds = {FAULTS[one].kind for one in named.split("+") if one} | ({FAULTS[name].kind} if right else set())
    return dataclasses.replace(
        kill,
        named=named,
        right=right,
        right_kind=FAULTS[name].kind in kinds,
        explain_seconds=time.thread_time() - began,
    )
