"""Detection power: every known mistake before the gate, and the gate beside its peers.

1. A fault is asked the gate's own cases, those of the ``gate`` profile with one seed, one after another until one is a FAIL.
   A backend lives through its cases, so that mistakes which outlive a call can show.
2. What is found is shrunk and explained. The explanation is right where it names the fault, or one whose answer is the same.
3. The peers' rules see the same outputs on the first of these cases, and outputs on inputs of their owners' recipes.
4. A rule that rejects the correct model too has found nothing: its false rejections stand beside.

Source: rocm-libraries #11003 proved a check vacuous by faults planted before it; the recipes are those of ``cases/peers.toml``.

Usage: ``python -m harness.detect [--processes N] [--out DIR] [--only NAME …] [--no-peers] [--no-shrink]``;
``python -m harness.detect limits …`` and ``python -m harness.detect false-alarms …`` are ``harness.limits`` and
``harness.false_alarms``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from harness import false_alarms, limits
from harness.faults.backend import Planted
from harness.faults.catalogue import FAULTS
from harness.faults.variant import VARIANTS
from harness.hunt import draw, hunt
from harness.kills import Kill, table
from harness.profiles import PROFILES
from harness.regimes import load

#: What else of detection power can be asked for by a word.
_OTHERS: Mapping[str, Callable[[Sequence[str]], int]] = {"limits": limits.main, "false-alarms": false_alarms.main}


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


def _work(job: tuple[list[str], int, int, bool]) -> list[Kill]:
    torch.set_num_threads(1)
    names, count, seed, walk = job
    return hunt_all(names, count=count, seed=seed, walk=walk)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hunt and print the kill matrix; 1 if a fault is not found."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in _OTHERS:
        return _OTHERS[given[0]](given[1:])
    parser = argparse.ArgumentParser(prog="python -m harness.detect", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(FAULTS), help="names of faults; all by default")
    parser.add_argument("--cases", type=int, default=PROFILES["gate"].examples, help="cases a fault is asked at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-shrink", action="store_true", help="do not walk to minimal repros")
    parser.add_argument("--no-peers", action="store_true", help="leave out what the peers' rules would have said")
    parser.add_argument("--out", type=Path, help="folder for detect.md and detect.json")
    options = parser.parse_args(given)
    unknown = set(options.only) - set(FAULTS)
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    began = time.perf_counter()
    jobs = [
        (options.only[part :: options.processes], options.cases, options.seed, not options.no_shrink)
        for part in range(options.processes)
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        kills = [kill for part in pool.map(_work, jobs) for kill in part]
    kills.sort(key=lambda kill: options.only.index(kill.name))
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in spent)
    text = table(kills)
    text += f"\n\n{time.perf_counter() - began:.0f} s on {options.processes} processes, {cpu:.0f} s of CPU time"
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
