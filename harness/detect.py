"""Detection power: every known mistake before the gate, and the gate beside its peers.

1. A fault is asked the gate's own cases, those of the ``gate`` profile with one seed, one after another until one is a FAIL.
   A backend lives through its cases, so that mistakes which outlive a call can show.
2. What is found is shrunk and explained. The explanation is right where it names the fault, or one whose answer is the same.
3. The peers' rules see the same outputs on the first of these cases, and outputs on inputs of their owners' recipes.
4. A rule that rejects the correct model too has found nothing: its false rejections stand beside.

Source: rocm-libraries #11003 proved a check vacuous by faults planted before it; the recipes are those of ``cases/peers.toml``.

Usage: ``python -m harness.detect [--processes N] [--out DIR] [--only NAME …] [--no-peers] [--no-shrink]``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

from harness.acceptance import acceptance
from harness.backends.protocol import Output
from harness.case import Case
from harness.explain import CALLS, explain, explain_crash, explain_violations
from harness.faults.backend import Planted, planted
from harness.faults.catalogue import FAULTS
from harness.faults.record import KINDS
from harness.faults.variant import VARIANTS
from harness.inputs import Inputs, make_inputs
from harness.judge import Known, judge
from harness.memory import GUARD_BYTE, NotEnoughMemory
from harness.profiles import PROFILES, Profile
from harness.regimes import Regime, load
from harness.relations import between, run_relation
from harness.shrink import shrink
from harness.strategies import cases
from harness.verdict import Verdict

#: Seconds that the walk to a minimal repro may take, a fault.
WALK_SECONDS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What became of one fault."""

    name: str
    #: Whether a case was a FAIL, after how many cases and seconds.
    found: bool
    cases: int
    seconds: float
    #: Fault word of the verdict, and the measured checks that were broken.
    fault: str = ""
    checks: tuple[str, ...] = ()
    #: First failing case, and the smallest.
    first: str = ""
    smallest: str = ""
    #: Requests, cached tokens, heads and query tokens of the smallest.
    size: tuple[int, int, int, int] = (0, 0, 0, 0)
    #: First name of the explanation, whether it is right (or its answer the same), whether its kind is.
    named: str = ""
    right: bool = False
    right_kind: bool = False
    explain_seconds: float = 0.0


@dataclass(slots=True)
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


def draw(regime: Regime, backend: Planted, profile: Profile, count: int, seed: int) -> list[Case]:
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
    seconds = dict.fromkeys(names, 0.0)
    kills = []
    for count, case in enumerate(drawn, start=1):
        began = time.perf_counter()
        output_format = regime.arithmetic.output
        try:
            inputs = make_inputs(case, output_format=output_format)
        except NotEnoughMemory:
            continue
        known, made = Known(), time.perf_counter() - began
        for name, bed in list(beds.items()):
            inputs = fresh(inputs)
            began = time.perf_counter()
            verdict, _, output = bed.answer(inputs, known)
            seconds[name] += made + time.perf_counter() - began
            if verdict.kind == "FAIL":
                kills.append(_found(bed, case, verdict, inputs, output, count, seconds[name], walk))
                say(f"{name}: found after {count} cases")
                del beds[name]
        if not beds:
            break
    for name in beds:
        say(f"{name}: not found in {len(drawn)} cases")
    return kills + [Kill(name=name, found=False, cases=len(drawn), seconds=seconds[name]) for name in beds]


def fresh(inputs: Inputs) -> Inputs:
    """Give the outputs back as they were before a run; inputs that a run has changed are made anew."""
    if inputs.violations():
        return make_inputs(inputs.case, output_format={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[inputs.out.dtype])
    for buffer in (inputs.out, inputs.lse):
        if buffer is not None:
            buffer.view(torch.uint8).fill_(GUARD_BYTE)
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
    kill = Kill(
        name=name,
        found=True,
        cases=count,
        seconds=seconds,
        fault=verdict.fault or "",
        checks=tuple(check for check, ratio in verdict.measurements.ratios.items() if ratio > 1),
        first=str(case),
        smallest=str(smallest),
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
    began = time.perf_counter()
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
        explain_seconds=time.perf_counter() - began,
    )


def hunt_all(names: Iterable[str], *, count: int, seed: int, walk: bool) -> list[Kill]:
    """Hunt some faults, each in the regime of the variant it is planted in."""
    regimes, profile = load(), PROFILES["gate"]
    by_variant: dict[str, list[str]] = {}
    for name in names:
        by_variant.setdefault(FAULTS[name].variant, []).append(name)
    kills = []
    for variant, members in by_variant.items():
        regime = regimes.named(f"model-{variant}")
        drawn = draw(regime, Planted(name=f"model:{variant}", variant=VARIANTS[variant]), profile, count, seed)
        kills += hunt(members, drawn, regime, walk=walk)
    return kills


def table(kills: Sequence[Kill]) -> str:
    """Print the kill matrix as a Markdown table, with its summary."""
    lines = [
        "| fault | kind | found by | cases | seconds | smallest: B, ΣN, H, S | explained as |",
        "|---|---|---|---|---|---|---|",
    ]
    for kill in kills:
        by = kill.fault + (f" ({', '.join(kill.checks)})" if kill.checks else "") if kill.found else "**not found**"
        said = kill.named if kill.right and kill.named == kill.name else f"{kill.named or 'nothing'}{' (same answer)' if kill.right else ' (wrong)'}"
        size = ", ".join(map(str, kill.size))
        lines.append(f"| {kill.name} | {FAULTS[kill.name].kind} | {by} | {kill.cases} | {kill.seconds:.1f} | {size} | {said if kill.found else ''} |")
    return "\n".join([*lines, "", *summary(kills)])


def summary(kills: Sequence[Kill]) -> list[str]:
    """Sum a hunt up."""
    found = [kill for kill in kills if kill.found]
    if not found:
        return [f"0 of {len(kills)} faults found"]
    middle = len(found) // 2
    counts, seconds = sorted(kill.cases for kill in found), sorted(kill.seconds for kill in found)
    alone: dict[str, int] = {}
    for kill in found:
        key = kill.checks[0] if len(kill.checks) == 1 else ("" if kill.checks else kill.fault)
        if key:
            alone[key] = alone.get(key, 0) + 1
    return [
        f"{len(found)} of {len(kills)} faults of {len({FAULTS[kill.name].kind for kill in kills})} of {len(KINDS)} kinds found; "
        f"median after {counts[middle]} cases and {seconds[middle]:.2f} s, at most {counts[-1]} cases",
        f"explained rightly (or by a fault with the same answer): {sum(kill.right for kill in found)} of {len(found)}, "
        f"right kind {sum(kill.right_kind for kill in found)}; longest explanation {max(kill.explain_seconds for kill in found):.1f} s",
        "seen at first by one check alone: " + ", ".join(f"{name} {count}" for name, count in sorted(alone.items())),
    ]


def _work(job: tuple[list[str], int, int, bool]) -> list[Kill]:
    torch.set_num_threads(1)
    names, count, seed, walk = job
    return hunt_all(names, count=count, seed=seed, walk=walk)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hunt and print the kill matrix; 1 if a fault is not found."""
    parser = argparse.ArgumentParser(prog="python -m harness.detect", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(FAULTS), help="names of faults; all by default")
    parser.add_argument("--cases", type=int, default=PROFILES["gate"].examples, help="cases a fault is asked at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-shrink", action="store_true", help="do not walk to minimal repros")
    parser.add_argument("--no-peers", action="store_true", help="leave out what the peers' rules would have said")
    parser.add_argument("--out", type=Path, help="folder for detect.md and detect.json")
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(FAULTS)
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    began = time.perf_counter()
    jobs = [(options.only[part :: options.processes], options.cases, options.seed, not options.no_shrink) for part in range(options.processes)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        kills = [kill for part in pool.map(_work, jobs) for kill in part]
    kills.sort(key=lambda kill: options.only.index(kill.name))
    text = table(kills) + f"\n\n{time.perf_counter() - began:.0f} s on {options.processes} processes"
    if not options.no_peers:
        from harness.beside import beside

        text += "\n\n" + beside(kills, processes=options.processes, seed=options.seed)
    print(text)
    if options.out:
        _write(options.out, text, kills)
    return 0 if all(kill.found for kill in kills) else 1


def _write(folder: Path, text: str, kills: Sequence[Kill]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "detect.md").write_text(text + "\n", encoding="utf-8")
    records: list[Mapping[str, object]] = [dataclasses.asdict(kill) for kill in kills]
    (folder / "detect.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
