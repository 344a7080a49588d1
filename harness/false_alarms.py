"""False alarms: legal variants of the correct model through the gate, each under its own regime.

1. The cases are those that the gate draws; none is left out. A FAIL is a false alarm, an ERROR is a fault of ours.
2. The upper confidence limit is that of Clopper and Pearson: with no alarm in n cases, 1 - 0.05^(1/n).

Source: C. Clopper, E. Pearson, "The use of confidence or fiducial limits", 1934.

Usage: ``python -m harness.false_alarms [--cases N] [--profile NAME] [--variants NAME …] [--processes N]``.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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
    executed: int = 0
    #: Ids of cases that were a FAIL or an ERROR, with the first line of what was said.
    alarms: list[tuple[str, str]] = field(default_factory=list)
    #: Check -> largest ratio to its limit.
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


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
    for case in draw(regime, backend, PROFILES[profile], count, seed):
        try:
            inputs = make_inputs(case, output_format=regime.arithmetic.output)
        except NotEnoughMemory:
            continue
        verdict = judge(inputs, backend.run(inputs), regime, models=False)
        found.executed += 1
        if verdict.kind != "PASS":
            found.alarms.append((str(case), f"{verdict.kind}: {verdict.message.splitlines()[-1].strip()}"))
        for name, ratio in verdict.measurements.ratios.items():
            found.worst[name] = max(found.worst.get(name, 0.0), ratio)
    found.seconds = time.perf_counter() - began
    print(
        f"false alarms: {variant}: {len(found.alarms)} in {found.executed} cases, {found.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return found


def _work(job: tuple[str, int, str, int]) -> Tally:
    torch.set_num_threads(1)
    variant, count, profile, seed = job
    return tally(variant, count=count, profile=profile, seed=seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Gate the variants and print the table; 1 if there is an alarm."""
    parser = argparse.ArgumentParser(prog="python -m harness.false_alarms", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="of all variants together")
    parser.add_argument("--profile", choices=list(PROFILES), default="gate")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    each = -(-options.cases // len(options.variants))
    jobs = [(variant, each, options.profile, options.seed) for variant in options.variants]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        tallies = pool.map(_work, jobs, chunksize=1)
    checks = ("hard", "row", "element", "lse", "accuracy")
    print("| variant | cases | alarms | " + " | ".join(checks) + " |\n" + "|---" * (3 + len(checks)) + "|")
    for one in tallies:
        ratios = " | ".join(f"{one.worst.get(check, 0.0):.2f}" for check in checks)
        print(f"| {one.variant} | {one.executed} | {len(one.alarms)} | {ratios} |")
    alarms, cases = sum(len(one.alarms) for one in tallies), sum(one.executed for one in tallies)
    print(
        f"\n{alarms} false alarms in {cases} cases; "
        f"upper limit of the rate at {CONFIDENCE:.0%}: {upper_limit(alarms, cases):.2e}"
    )
    print(f"columns are the largest ratio to the limit; {time.perf_counter() - began:.0f} s on {options.processes} processes")
    for one in tallies:
        for case, said in one.alarms:
            print(f"{one.variant}: {case}\n    {said}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
