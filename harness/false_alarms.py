"""False alarms: legal variants of the correct model through the gate, each under its own regime.

1. The cases are those that the gate draws; none is left out, and each variant has draws of its own. A FAIL is a false alarm,
   an ERROR is a fault of ours.
2. A long run may be made of several with seeds of their own: each keeps what it found in a folder, and ``--sum`` adds them
   up. A case that was drawn twice counts once.
3. The upper confidence limit is that of Clopper and Pearson: with no alarm in n cases, 1 - 0.05^(1/n).

Source: C. Clopper, E. Pearson, "The use of confidence or fiducial limits", 1934.

Usage: ``python -m harness.false_alarms [--cases N] [--seed N] [--profile NAME] [--variants NAME …] [--out DIR]``, then
``python -m harness.false_alarms --sum DIR``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from harness.calibrate import LINES
from harness.faults.backend import Planted
from harness.faults.variant import VARIANTS
from harness.hunt import draw
from harness.inputs import make_inputs
from harness.judge import judge
from harness.memory import NotEnoughMemory
from harness.profiles import PROFILES
from harness.regimes import load

#: Confidence of the upper limit.
CONFIDENCE = 0.95


@dataclass(frozen=False, slots=True, kw_only=True)
class Tally:
    """What became of the cases of one variant."""

    variant: str
    #: Id of a case that was executed -> what was measured of it, by the lines of ``harness.calibrate``.
    cases: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Id of a case that was a FAIL or an ERROR -> what was said.
    alarms: dict[str, str] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Take in what another run found of the same variant."""
        self.cases |= other.cases
        self.alarms |= other.alarms

    def quantiles(self, line: str) -> str:
        """Write the median, the 99 % quantile and the largest of what was measured of the cases."""
        values = sorted(found[line] for found in self.cases.values() if found) or [0.0]
        return ", ".join(f"{values[min(len(values) - 1, int(share * len(values)))]:.3g}" for share in (0.5, 0.99, 1.0))


def upper_limit(alarms: int, cases: int, confidence: float = CONFIDENCE) -> float:
    """Find the largest rate under which so few alarms are as likely as 1 - confidence."""
    if alarms >= cases:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        logs = [
            math.lgamma(cases + 1)
            - math.lgamma(count + 1)
            - math.lgamma(cases - count + 1)
            + count * math.log(rate)
            + (cases - count) * math.log1p(-rate)
            for count in range(alarms + 1)
        ]
        low, high = (rate, high) if math.fsum(map(math.exp, logs)) > 1 - confidence else (low, rate)
    return high


def tally(variant: str, *, count: int, profile: str, seed: int) -> Tally:
    """Gate one variant on as many cases."""
    found, began = Tally(variant=variant), time.perf_counter()
    regime = load().named(f"model-{variant}")
    backend = Planted(name=f"model:{variant}", variant=VARIANTS[variant])
    # The variants' domains are much the same: with one seed for all of them their cases would be, too.
    own = seed * len(VARIANTS) + list(VARIANTS).index(variant)
    for case in draw(regime, backend, PROFILES[profile], count, own):
        try:
            inputs = make_inputs(case, output_format=regime.arithmetic.output)
        except NotEnoughMemory:
            continue
        verdict = judge(inputs, backend.run(inputs), regime, models=False)
        measured = verdict.measurements
        found.cases[str(case)] = {name: take(measured) for name, take in LINES.items()} if measured.rows else {}
        if verdict.kind != "PASS":
            found.alarms[str(case)] = f"{verdict.kind}: {verdict.message}"
    print(
        f"false alarms: {variant}: {len(found.alarms)} in {len(found.cases)} cases, {time.perf_counter() - began:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return found


def table(tallies: Iterable[Tally]) -> str:
    """Print the alarms and measurements of each variant, and the limit of the rate of all."""
    tallies = list(tallies)
    lines = ["| variant | cases | alarms | " + " | ".join(LINES) + " |", "|---" * (3 + len(LINES)) + "|"]
    for one in tallies:
        lines.append(
            f"| {one.variant} | {len(one.cases)} | {len(one.alarms)} | " + " | ".join(map(one.quantiles, LINES)) + " |"
        )
    alarms, cases = sum(len(one.alarms) for one in tallies), sum(len(one.cases) for one in tallies)
    limit = upper_limit(alarms, cases)
    lines += ["", f"{alarms} false alarms in {cases} cases; upper limit of the rate at {CONFIDENCE:.0%}: {limit:.2e}"]
    lines.append("columns are median, 99 % quantile and largest of a case")
    for one in tallies:
        lines += [f"{one.variant}: {case}\n    {said}" for case, said in one.alarms.items()]
    return "\n".join(lines)


def keep(folder: Path, name: str, tallies: Iterable[Tally]) -> None:
    """Write what a run found."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(one) for one in tallies]
    (folder / f"{name}.json").write_text(json.dumps(records, indent=0) + "\n", encoding="utf-8")


def added(folder: Path) -> list[Tally]:
    """Add up what the runs of a folder found, in the order of the variants."""
    total = {name: Tally(variant=name) for name in VARIANTS}
    for path in sorted(folder.glob("*.json")):
        for record in json.loads(path.read_text(encoding="utf-8")):
            total[record["variant"]].add(Tally(**record))
    return [one for one in total.values() if one.cases]


def _work(job: tuple[str, int, str, int]) -> Tally:
    torch.set_num_threads(1)
    variant, count, profile, seed = job
    return tally(variant, count=count, profile=profile, seed=seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Gate the variants, or add earlier runs up, and print the table; 1 if there is an alarm."""
    parser = argparse.ArgumentParser(prog="python -m harness.false_alarms", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="of all variants together")
    parser.add_argument("--profile", choices=list(PROFILES), default="gate")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="folder to keep what was found in, to be added up")
    parser.add_argument("--sum", type=Path, help="run nothing: add up what is kept in this folder")
    options = parser.parse_args(arguments)
    if options.sum:
        tallies = added(options.sum)
    else:
        each = -(-options.cases // len(options.variants))
        jobs = [(variant, each, options.profile, options.seed) for variant in options.variants]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            tallies = pool.map(_work, jobs, chunksize=1)
        if options.out:
            keep(options.out, f"{options.profile}-{options.seed}", tallies)
    print(table(tallies))
    return 1 if any(one.alarms for one in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
