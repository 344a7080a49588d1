"""Mutation of the kernel under test: does the gate catch every small change that somebody could make to it?

1. The correct kernel goes first, through the same cases; where it fails there, nothing can be said of its mutants.
2. What lives through the first cases, and is not recorded as equivalent, is asked others as large as the gate profile has.
3. A *stillborn* mutant, one that does not compile or that uses what the emulator refuses, counts for nothing.
4. A survivor is a hole in the gate, unless it computes the same as the kernel: such a one is recorded with its reason in
   ``cases/equivalent_mutants.toml``, by the line it stands in. A record that no mutant matches is an error.

Source: R. DeMillo, R. Lipton, F. Sayward, 1978, for the score: caught over all that are neither equivalent nor stillborn.

Usage: ``python -m harness.mutate --backend NAME [--cases N] [--processes N] [--operator NAME …] [--regime NAME …]
[--sample N] [--list]``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.mutants import OPERATORS, Key, Mutant, mutants
from harness.profiles import Profile
from harness.targets import TARGETS
from harness.trials import FIRST, MORE, Fate, run

#: Ends of mutants that nothing caught.
ALIVE = ("survived", "unreached")
EQUIVALENT = Path(__file__).resolve().parent.parent / "cases" / "equivalent_mutants.toml"


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


def report(backend_name: str, fates: Sequence[Fate], known: Mapping[Key, str], *, part: bool = False) -> tuple[str, float]:
    """Print the score and the survivors; with the score.

    Args:
        backend_name: whose kernel.
        fates: of the mutants.
        known: recorded equivalents, by key, with their reason.
        part: whether only some regimes were asked, so that a line which no case executes may be another regime's.
    """
    unreached = [fate for fate in fates if fate.end == "unreached"]
    survivors = [fate for fate in fates if fate.end == "survived" or (fate.end == "unreached" and not part)]
    open_ones = [fate for fate in survivors if fate.mutant.key not in known]
    stillborn = [fate for fate in fates if fate.end == "stillborn"]
    counted = len(fates) - len(stillborn) - (len(survivors) - len(open_ones)) - len(unreached) * part
    caught = [fate for fate in fates if fate.end == "caught"]
    score = len(caught) / max(1, counted)
    lines = [
        f"{backend_name}: {len(caught)} of {counted} mutants caught, {score:.1%}; "
        f"{len(survivors) - len(open_ones)} equivalent, {len(stillborn)} stillborn, {len(open_ones)} survive"
        + (f"; {len(unreached)} stand in lines that no case executes" if unreached else ""),
        "",
        "| operator | caught | survive | equivalent | stillborn |",
        "|---|---|---|---|---|",
    ]
    for name in OPERATORS:
        own = [fate for fate in fates if fate.mutant.operator == name]
        ends = [
            sum(fate.end == "caught" for fate in own),
            sum(fate in open_ones for fate in own),
            sum(fate in survivors and fate not in open_ones for fate in own),
            sum(fate.end == "stillborn" for fate in own),
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, ends)) + " |")
    by = Counter(fate.by.partition(" (")[0] for fate in caught)
    cases = sorted(fate.cases for fate in caught)
    lines += ["", "caught by: " + ", ".join(f"{name} {number}" for name, number in by.most_common())]
    if cases:
        lines.append(f"median after {cases[len(cases) // 2]} cases, at most {cases[-1]}")
    for fate in open_ones:
        lines.append(f"survives{' unreached' * (fate.end == 'unreached')}: {fate.mutant}\n    {fate.mutant.text}")
    wrong = [fate for fate in caught if fate.mutant.key in known]
    lines += [f"recorded as equivalent, yet caught by {fate.by}: {fate.mutant}" for fate in wrong]
    return "\n".join(lines), score


def _hunted(options: argparse.Namespace, chosen: Sequence[Mutant], known: Mapping[Key, str]) -> list[Fate]:
    """Run mutants, and those that live and are not recorded once more on other and larger cases."""

    def ask(some: Sequence[Mutant], count: int, seed: int, profiles: Sequence[Profile]) -> list[Fate]:
        return run(
            options.backend,
            some,
            count=count,
            seed=seed,
            processes=options.processes,
            regimes=options.regime,
            profiles=profiles,
        )

    fates = ask(chosen, options.cases, options.seed, FIRST)
    alive = {fate.mutant: fate for fate in fates if fate.end in ALIVE and fate.mutant.key not in known}
    if not alive or not options.more:
        return fates
    again = ask(list(alive), options.more, options.seed + 1, MORE)
    longer = [replace(fate, cases=fate.cases + alive[fate.mutant].cases) for fate in again]
    return sorted(
        [fate for fate in fates if fate.mutant not in alive] + longer, key=lambda fate: (fate.mutant.line, fate.mutant.old)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Mutate a backend's kernel and print the score; 1 if a mutant survives that is not recorded as equivalent."""
    parser = argparse.ArgumentParser(prog="python -m harness.mutate", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=list(TARGETS), default="gluon-splitkv")
    parser.add_argument("--cases", type=int, default=60, help="cases a mutant is asked at most")
    parser.add_argument(
        "--more", type=int, default=60, help="further and larger cases for those that live, and are not recorded"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--operator", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--kernel", nargs="+", help="only mutants of these functions")
    parser.add_argument("--regime", nargs="+", help="only cases of these regimes of the backend; all of them by default")
    parser.add_argument("--sample", type=int, help="only so many mutants, chosen by the seed")
    parser.add_argument("--list", action="store_true", help="list the mutants and run none")
    options = parser.parse_args(arguments)
    target = TARGETS[options.backend]
    source = target.path().read_text(encoding="utf-8")
    every = mutants(source)
    chosen = [one for one in every if one.operator in options.operator]
    if options.kernel:
        chosen = [one for one in chosen if one.kernel in options.kernel]
    known = equivalents(options.backend)
    stale = set(known) - {one.key for one in every}
    if stale:
        parser.error(f"{EQUIVALENT.name} records mutants that the kernel no longer has: {sorted(stale)}")
    if options.sample and options.sample < len(chosen):
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    if options.list:
        print("\n".join(map(str, chosen)))
        return 0
    began = time.monotonic()
    fates = _hunted(options, chosen, known)
    text, _ = report(options.backend, fates, known, part=bool(options.regime))
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in spent)
    print(f"{text}\n\n{time.monotonic() - began:.0f} s on {options.processes} processes, {cpu:.0f} s of CPU time")
    counted = ("survived",) if options.regime else ALIVE
    return 1 if any(fate.end in counted and fate.mutant.key not in known for fate in fates) else 0


if __name__ == "__main__":
    sys.exit(main())
