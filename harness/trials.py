"""Mutants of a kernel before the gate, each in a process of its own.

1. A mutant is caught by its first FAIL: a wrong answer, a crash, a hang, an access or a race that the emulator names. One that
   does not compile, or that uses what the emulator refuses, is *stillborn*.
2. A process may be lost: that is a crash, and silence is a hang.
3. The truth of a case is worked out once for all mutants. A mutant is asked the cases that execute its line, those first that
   caught most others in least time.

Source: the cases are those that the gate draws.
"""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from harness.backends.protocol import Backend
from harness.case import Case
from harness.hunt import draw, fresh
from harness.inputs import Inputs, make_inputs
from harness.judge import Known, judge
from harness.measure import recentre
from harness.mutants import Mutant
from harness.profiles import PROFILES, Profile
from harness.reached import reached, statements
from harness.regimes import Regime, load
from harness.targets import TARGETS, Target
from references.oracle import oracle

#: Seconds a mutant may take for one case before it is a hang, and of CPU time for all its cases before its budget ends.
CASE_SECONDS, MUTANT_SECONDS = 60.0, 120.0
#: Where cases come from, as many from each: of every mutant, and of those that outlive these. Under emulation the largest
#: cases of the gate profile take seconds.
FIRST, MORE = (
    (PROFILES["smoke"], dataclasses.replace(PROFILES["gate"], tokens=5000, batch=40, scores=60_000)),
    (PROFILES["gate"],),
)
#: prctl's option that names the signal a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1
#: How long the loss of a process, or the end of its time, may go unseen.
_TICK = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A case with its inputs and what is known of it."""

    inputs: Inputs
    regime: Regime
    known: Known
    #: CPU time that the correct kernel took for it, seconds.
    seconds: float
    #: Lines of the kernel's file that it reaches.
    lines: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of a mutant."""

    mutant: Mutant
    #: "caught", "survived", "stillborn", or "unreached" where no case executes its line.
    end: str
    #: By what, and after how many cases and seconds.
    by: str
    cases: int
    seconds: float


def questions(
    backend: Backend,
    path: Path,
    *,
    count: int,
    seed: int,
    regimes: Collection[str] | None = None,
    profiles: Sequence[Profile] = FIRST,
) -> list[Question]:
    """Make the cases that mutants are asked, of each profile the cheap ones first.

    Args:
        backend: the correct kernel.
        path: the kernel's file.
        count: how many cases, of all regimes together.
        seed: of the draw.
        regimes: names of the backend's regimes that are asked; None for all.
        profiles: how large cases are, as many of each.

    Raises:
        ValueError: if the backend has no such regime.
        RuntimeError: if the correct kernel fails a case.
    """
    rows = [row for row in load().for_backend(backend.name) if regimes is None or row.name in regimes]
    if not rows:
        raise ValueError(f"no regime of {backend.name} is called {', '.join(regimes or ())}")
    each = -(-count // (len(profiles) * len(rows)))
    drawn: list[tuple[Case, Regime]] = []
    for profile in profiles:
        part = [(case, regime) for regime in rows for case in draw(regime, backend, profile, each, seed)]
        drawn += sorted(part, key=lambda pair: (sum(pair[0].lengths) + 64) * pair[0].heads * pair[0].query_tokens)
    made, whole = [], statements(path.read_text(encoding="utf-8"))
    for case, regime in dict(drawn).items():
        inputs, known = make_inputs(case, output_format=backend.capabilities.output_format), Known()
        began = time.process_time()
        with reached(path) as lines:
            output = backend.run(inputs)
        seconds = time.process_time() - began
        verdict = judge(inputs, output, regime, empty_rows=backend.capabilities.empty_rows, models=False, known=known)
        if verdict.kind != "PASS":
            raise RuntimeError(
                f"the kernel itself is a {verdict.kind} of {case}: nothing can be said of its mutants\n{verdict.message}"
            )
        if known.yardstick is not None:  # none where no row sees a token
            known.certain = recentre(known.yardstick, oracle(inputs.problem()))
        full = frozenset(line for part in lines for line in whole.get(part, ()))
        made.append(Question(inputs=inputs, regime=regime, known=known, seconds=seconds, lines=full))
    return made


def best_first(asked: Sequence[Question], catches: Mapping[Case, int]) -> list[Question]:
    """Put the questions first that caught most in least time; the others stay in their order."""
    return sorted(asked, key=lambda question: -catches.get(question.inputs.case, 0) / question.seconds)


def _ask(build: Callable[[Path], Backend], path: Path, asked: Sequence[Question], pipe: Connection) -> None:
    """Run a mutant in this process until it is caught; tell each step through the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    # What the mutant prints is not ours to show.
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    try:
        backend = build(path)
    except BaseException as error:
        pipe.send(("stillborn", f"{type(error).__name__}: {error}"[:200]))
        return
    began = time.process_time()
    for question in asked:
        pipe.send(("next", ""))
        try:
            inputs = fresh(question.inputs)
            output = backend.run(inputs)
        except BaseException as error:
            refused = getattr(error, "verdict_kind", "FAIL") == "ERROR"
            kind = getattr(getattr(error, "finding", None), "kind", type(error).__name__)
            pipe.send(("stillborn" if refused else "caught", f"{getattr(error, 'verdict_fault', 'crash')}: {kind}"))
            return
        policy = backend.capabilities.empty_rows
        verdict = judge(inputs, output, question.regime, empty_rows=policy, models=False, known=question.known)
        if verdict.kind == "FAIL":
            checks = [name for name, ratio in verdict.measurements.ratios.items() if ratio > 1]
            pipe.send(("caught", f"{verdict.fault}{' (' + ', '.join(checks) + ')' if checks else ''}"))
            return
        if time.process_time() - began > MUTANT_SECONDS:
            break
    pipe.send(("survived", ""))


class _Trial:
    """A mutant under way in its process."""

    def __init__(self, mutant: Mutant, target: Target, asked: Sequence[Question], folder: Path) -> None:
        self.mutant, self.asked, self.began, self.cases = mutant, asked, time.monotonic(), 0
        self.path = folder / f"mutant_{abs(hash(mutant.source))}.py"
        self.path.write_text(mutant.source, encoding="utf-8")
        self.pipe, far = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")  # the questions are shared with the child, not copied
        self.process = context.Process(target=_ask, args=(target.build, self.path, asked, far), daemon=True)
        self.process.start()
        far.close()
        self.step = time.monotonic()

    def fate(self) -> Fate | None:
        """Tell what became of it, or None while it runs."""
        end, by = "", ""
        try:
            while not end and self.pipe.poll():
                word, by = self.pipe.recv()
                self.step = time.monotonic()
                self.cases += word == "next"
                end = "" if word == "next" else word
        except EOFError:
            self.process.join()
            end, by = "caught", f"crash: the process ended with {self.process.exitcode}"
        if not end and time.monotonic() - self.step > CASE_SECONDS:
            end, by = "caught", f"hang: more than {CASE_SECONDS:.0f} s a case"
        if not end:
            return None
        self.process.kill()  # it has nothing more to say
        self.process.join()
        self.pipe.close()
        self.path.unlink()
        return Fate(mutant=self.mutant, end=end, by=by, cases=self.cases, seconds=time.monotonic() - self.began)


def run(
    backend_name: str,
    chosen: Sequence[Mutant],
    *,
    count: int,
    seed: int,
    processes: int,
    regimes: Collection[str] | None = None,
    profiles: Sequence[Profile] = FIRST,
) -> list[Fate]:
    """Run mutants of a backend's kernel, several at a time."""
    target = TARGETS[backend_name]
    path = target.path()
    asked = questions(target.build(path), path, count=count, seed=seed, regimes=regimes, profiles=profiles)
    folder = Path(tempfile.mkdtemp(prefix="mla-gate-mutants-"))
    everywhere = frozenset(line for question in asked for line in question.lines)
    fates = [
        Fate(mutant=mutant, end="unreached", by="", cases=0, seconds=0.0) for mutant in chosen if mutant.line not in everywhere
    ]
    waiting = [mutant for mutant in reversed(chosen) if mutant.line in everywhere]
    running, catches = list[_Trial](), Counter[Case]()
    told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                mutant = waiting.pop()
                able = [question for question in asked if mutant.line in question.lines]
                running.append(_Trial(mutant, target, best_first(able, catches), folder))
            wait([trial.pipe for trial in running], timeout=_TICK)
            for trial in list(running):
                fate = trial.fate()
                if fate is not None:
                    running.remove(trial)
                    fates.append(fate)
                    if fate.end == "caught" and fate.cases:
                        catches[trial.asked[fate.cases - 1].inputs.case] += 1
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(
                    f"mutate: {len(fates)} of {len(chosen)} done, {sum(f.end == 'survived' for f in fates)} survive",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        for trial in running:
            trial.process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(fates, key=lambda fate: fate.mutant.line)
