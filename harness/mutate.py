"""Mutation of the kernel under test: does the gate catch every small change that somebody could make to it?

1. The correct kernel goes first, through the same cases; where it fails there, nothing can be said of its mutants.
2. A mutant is caught by its first FAIL: a wrong answer, a crash, a hang, an access or a race that the emulator names. One that
   does not compile, or that uses what the emulator refuses, is *stillborn*: it is listed, and counts for nothing.
3. Each mutant runs in a process of its own, which may be lost.
4. A survivor is a hole in the gate, unless it computes the same as the kernel: such a one is recorded with its reason in
   ``cases/equivalent_mutants.toml``, by the line it stands in. A record that no mutant matches is an error.

Source: R. DeMillo, R. Lipton, F. Sayward, 1978, for the score: caught over all that are neither equivalent nor stillborn.

Usage: ``python -m harness.mutate --backend NAME [--cases N] [--processes N] [--operator NAME …] [--sample N] [--list]``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from harness.backends.protocol import Backend
from harness.case import Case
from harness.hunt import draw, fresh
from harness.inputs import Inputs, make_inputs
from harness.judge import Known, judge
from harness.mutants import OPERATORS, Key, Mutant, mutants
from harness.profiles import PROFILES
from harness.regimes import Regime, load
from harness.targets import TARGETS, Target

EQUIVALENT = Path(__file__).resolve().parent.parent / "cases" / "equivalent_mutants.toml"
#: Seconds a mutant may take for one case before it is a hang, and for all its cases before its budget ends.
CASE_SECONDS, MUTANT_SECONDS = 60.0, 120.0
#: How long the loss of a process may go unseen.
_TICK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A case with its inputs and what is known of it."""

    inputs: Inputs
    regime: Regime
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of a mutant."""

    mutant: Mutant
    #: "caught", "survived" or "stillborn".
    end: str
    #: By what, and after how many cases and seconds.
    by: str
    cases: int
    seconds: float
    #: Why it is equivalent; empty where it is not recorded so.
    equivalent: str = ""


def questions(backend: Backend, *, count: int, seed: int) -> list[Question]:
    """Make the cases that mutants are asked: half as the smoke profile draws them, half as the gate's, cheap ones first.

    Raises:
        RuntimeError: if the correct kernel fails one of them.
    """
    rows = load().for_backend(backend.name)
    each = -(-count // (2 * len(rows)))
    drawn: list[tuple[Case, Regime]] = []
    for name in ("smoke", "gate"):
        part = [(case, regime) for regime in rows for case in draw(regime, backend, PROFILES[name], each, seed)]
        drawn += sorted(part, key=lambda pair: (sum(pair[0].lengths) + 64) * pair[0].heads * pair[0].query_tokens)
    made = []
    for case, regime in drawn:
        inputs, known = make_inputs(case, output_format=backend.capabilities.output_format), Known()
        verdict = judge(
            inputs, backend.run(inputs), regime, empty_rows=backend.capabilities.empty_rows, models=False, known=known
        )
        if verdict.kind != "PASS":
            raise RuntimeError(
                f"the kernel itself is a {verdict.kind} of {case}: nothing can be said of its mutants\n{verdict.message}"
            )
        made.append(Question(inputs=inputs, regime=regime, known=known))
    return made


def _ask(build: Callable[[Path], Backend], path: Path, asked: Sequence[Question], pipe: Connection) -> None:
    """Run a mutant in this process until it is caught; tell each step through the pipe."""
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
    began = time.monotonic()
    for question in asked:
        pipe.send(("next", ""))
        try:
            output = backend.run(fresh(question.inputs))
        except BaseException as error:
            refused = getattr(error, "verdict_kind", "FAIL") == "ERROR"
            kind = getattr(getattr(error, "finding", None), "kind", type(error).__name__)
            pipe.send(("stillborn" if refused else "caught", f"{getattr(error, 'verdict_fault', 'crash')}: {kind}"))
            return
        policy = backend.capabilities.empty_rows
        verdict = judge(question.inputs, output, question.regime, empty_rows=policy, models=False, known=question.known)
        if verdict.kind == "FAIL":
            checks = [name for name, ratio in verdict.measurements.ratios.items() if ratio > 1]
            pipe.send(("caught", f"{verdict.fault}{' (' + ', '.join(checks) + ')' if checks else ''}"))
            return
        if time.monotonic() - began > MUTANT_SECONDS:
            break
    pipe.send(("survived", ""))


class _Trial:
    """A mutant under way in its process."""

    def __init__(self, mutant: Mutant, target: Target, asked: Sequence[Question], folder: Path) -> None:
        self.mutant, self.began, self.cases = mutant, time.monotonic(), 0
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
        if self.process.is_alive():
            self.process.join(timeout=0.2)
            self.process.kill()
        self.process.join()
        self.pipe.close()
        self.path.unlink()
        return Fate(mutant=self.mutant, end=end, by=by, cases=self.cases, seconds=time.monotonic() - self.began)


def run(backend_name: str, chosen: Sequence[Mutant], *, count: int, seed: int, processes: int) -> list[Fate]:
    """Run mutants of a backend's kernel, several at a time."""
    target = TARGETS[backend_name]
    asked = questions(target.build(target.path()), count=count, seed=seed)
    folder = Path(tempfile.mkdtemp(prefix="mla-gate-mutants-"))
    waiting, fates = list(reversed(chosen)), list[Fate]()
    running: list[_Trial] = []
    told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(_Trial(waiting.pop(), target, asked, folder))
            for trial in list(running):
                fate = trial.fate()
                if fate is not None:
                    running.remove(trial)
                    fates.append(fate)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(
                    f"mutate: {len(fates)} of {len(chosen)} done, {sum(f.end == 'survived' for f in fates)} survive",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_TICK)
    finally:
        for trial in running:
            trial.process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(fates, key=lambda fate: fate.mutant.line)


def equivalents(backend_name: str, path: Path = EQUIVALENT) -> dict[Key, str]:
    """Read the recorded equivalent mutants of a backend: key -> reason.

    Raises:
        ValueError: if a record lacks its reason.
    """
    if not path.exists():
        return {}
    found = {}
    for row in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        if row["backend"] == backend_name:
            if not row.get("why", "").strip():
                raise ValueError(
                    f"{path}: the mutant {row['old']!r} -> {row['new']!r} of {backend_name} needs a reason: why = …"
                )
            for new, place in itertools.product(_listed(row["new"]), _listed(row.get("place", 1))):
                found[row["line"], place, row["old"], new] = row["why"]
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def report(backend_name: str, fates: Sequence[Fate], known: Mapping[Key, str]) -> tuple[str, float]:
    """Print the score and the survivors; with the score."""
    survivors = [fate for fate in fates if fate.end == "survived"]
    open_ones = [fate for fate in survivors if fate.mutant.key not in known]
    stillborn = [fate for fate in fates if fate.end == "stillborn"]
    counted = len(fates) - len(stillborn) - (len(survivors) - len(open_ones))
    caught = [fate for fate in fates if fate.end == "caught"]
    score = len(caught) / max(1, counted)
    lines = [
        f"{backend_name}: {len(caught)} of {counted} mutants caught, {score:.1%}; "
        f"{len(survivors) - len(open_ones)} equivalent, {len(stillborn)} stillborn, {len(open_ones)} survive",
        "",
        "| operator | caught | survive | equivalent | stillborn |",
        "|---|---|---|---|---|",
    ]
    for name in OPERATORS:
        own = [fate for fate in fates if fate.mutant.operator == name]
        ends = [
            sum(fate.end == "caught" for fate in own),
            sum(fate in open_ones for fate in own),
            sum(fate.end == "survived" and fate not in open_ones for fate in own),
            sum(fate.end == "stillborn" for fate in own),
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, ends)) + " |")
    by = Counter(fate.by.partition(" (")[0] for fate in caught)
    cases = sorted(fate.cases for fate in caught)
    lines += ["", "caught by: " + ", ".join(f"{name} {number}" for name, number in by.most_common())]
    if cases:
        lines.append(f"median after {cases[len(cases) // 2]} cases, at most {cases[-1]}")
    lines += [f"survives: {fate.mutant}\n    {fate.mutant.text}" for fate in open_ones]
    wrong = [fate for fate in caught if fate.mutant.key in known]
    lines += [f"recorded as equivalent, yet caught by {fate.by}: {fate.mutant}" for fate in wrong]
    return "\n".join(lines), score


def main(arguments: Sequence[str] | None = None) -> int:
    """Mutate a backend's kernel and print the score; 1 if a mutant survives that is not recorded as equivalent."""
    parser = argparse.ArgumentParser(prog="python -m harness.mutate", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=list(TARGETS), default="gluon-splitkv")
    parser.add_argument("--cases", type=int, default=60, help="cases a mutant is asked at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--operator", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--kernel", nargs="+", help="only mutants of these functions")
    parser.add_argument("--sample", type=int, help="only so many mutants, chosen by the seed")
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    options = parser.parse_args(arguments)
    target = TARGETS[options.backend]
    source = target.path().read_text(encoding="utf-8")
    chosen = [one for one in mutants(source) if one.operator in options.operator]
    if options.kernel:
        chosen = [one for one in chosen if one.kernel in options.kernel]
    known = equivalents(options.backend)
    stale = set(known) - {one.key for one in mutants(source)}
    if stale:
        parser.error(f"{EQUIVALENT.name} records mutants that the kernel no longer has: {sorted(stale)}")
    if options.sample and options.sample < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    if options.list:
        print("\n".join(map(str, chosen)))
        return 0
    began = time.monotonic()
    fates = run(options.backend, chosen, count=options.cases, seed=options.seed, processes=options.processes)
    text, _ = report(options.backend, fates, known)
    print(f"{text}\n\n{time.monotonic() - began:.0f} s on {options.processes} processes")
    return 1 if any(fate.end == "survived" and fate.mutant.key not in known for fate in fates) else 0


if __name__ == "__main__":
    sys.exit(main())
