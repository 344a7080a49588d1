"""Everything that only a GPU can show: parts, each in a process of its own with a time limit.

1. What a part prints is shown and written to the file at once, so that a run which is cut off keeps it.
2. A part that outlives its limit prints its stacks and is ended with every process it started; the others run all the same.
3. The exit status is the number of parts that did not come out as they should.

Run ``python -m tests.native.all [PART ...]`` from the root of the repository; README.md beside this file has the commands.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO

from tests.native.asked import Asked, say

ROOT = Path(__file__).parents[2]
#: Seconds before its limit at which a part prints its stacks.
STACKS_BEFORE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a native run."""

    #: Module and function that hold it: called with an Asked, it tells whether all came out as it should.
    place: tuple[str, str]
    #: Time limit, seconds.
    seconds: float


#: The parts, in order; the gate last, since it takes what time is left. Its limit stands for each of its two turns.
PARTS: dict[str, Part] = {
    "compare": Part(place=("compare", "compared"), seconds=150),
    "isolation": Part(place=("engine", "isolation"), seconds=60),
    "case": Part(place=("engine", "parts_of_a_case"), seconds=60),
    "graphs": Part(place=("engine", "graphs"), seconds=90),
    "pools": Part(place=("engine", "pools"), seconds=120),
    "faults": Part(place=("faults", "faults"), seconds=200),
    "reference": Part(place=("reference", "reference"), seconds=120),
    "gate": Part(place=("gate", "gate"), seconds=60),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for."""
    given = sys.argv[1:] if arguments is None else arguments
    asked, names, limit, file, inside = _read(given)
    if inside:
        return 0 if _here(names[0], asked, limit) else 1
    failed = []
    with open(file, "a", encoding="utf-8") if file else open(os.devnull, "w", encoding="utf-8") as log:
        for name in names:
            seconds = limit or PARTS[name].seconds + (2 * asked.seconds if name == "gate" else 0)
            began = time.monotonic()
            good = _apart(name, given, seconds, log)
            took = time.monotonic() - began
            _tell(f"-- {name}: {'as it should be' if good else 'NOT as it should be'}, {took:.0f} s", log)
            failed += [] if good else [name]
        _tell(
            f"{len(names) - len(failed)} of {len(names)} parts are as they should be; not: {', '.join(failed) or 'none'}", log
        )
    return len(failed)


def _read(arguments: list[str]) -> tuple[Asked, list[str], float | None, Path | None, bool]:
    parser = argparse.ArgumentParser(prog="python -m tests.native.all", description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", help=f"which: {', '.join(PARTS)} (all unless named)")
    parser.add_argument("--processes", type=int, default=6, help="processes of the gate (default: 6)")
    parser.add_argument("--examples", type=int, help="random cases of each backend and regime (default: the profile's)")
    parser.add_argument("--seconds", type=float, default=120, help="time of each of the gate's two turns (default: 120)")
    parser.add_argument("--limit", type=float, help="time limit of each part (default: its own)")
    parser.add_argument("--aiter-source", help="checkout of AITER, to gate its Triton kernels too")
    parser.add_argument("--device", default="cuda", help="device of the gate (default: cuda)")
    parser.add_argument("--backend", action="append", default=[], help="gate only this backend; may be repeated")
    parser.add_argument("--log", type=Path, help="file that everything is written to as well, as it comes")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.part) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}: there are {', '.join(PARTS)}")
    asked = Asked(
        processes=given.processes,
        examples=given.examples,
        seconds=given.seconds,
        aiter_source=given.aiter_source,
        device=given.device,
        backends=tuple(given.backend),
    )
    return asked, given.part or list(PARTS), given.limit, given.log, given.inside


def _here(name: str, asked: Asked, limit: float | None) -> bool:
    """Run a part in this process."""
    if limit is not None:
        faulthandler.dump_traceback_later(max(limit - STACKS_BEFORE, 1), file=sys.stdout)
    module, function = PARTS[name].place
    try:
        return bool(getattr(import_module(f"tests.native.{module}"), function)(asked))
    except Exception:
        say(traceback.format_exc())
        return False


def _apart(name: str, arguments: list[str], seconds: float, log: IO[str]) -> bool:
    """Run a part in a process of its own and group; what it prints is passed on line by line."""
    # The last of an option counts; the first positional is taken by the part itself.
    options = [text for text in arguments if text not in PARTS]
    command = [sys.executable, "-u", "-m", "tests.native.all", name, *options, "--inside", "--limit", str(seconds)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    ended = threading.Timer(seconds, _end, (process, name, seconds, log))
    ended.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            _tell(line.rstrip("\n"), log)
        return process.wait() == 0
    finally:
        ended.cancel()
        _kill(process)


def _end(process: subprocess.Popen[str], name: str, seconds: float, log: IO[str]) -> None:
    _tell(f"{name}: ended after {seconds:.0f} s", log)
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a part's whole group; children of the gate's workers die with their parents."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _tell(text: str, log: IO[str]) -> None:
    say(text)
    log.write(text + "\n")
    log.flush()


if __name__ == "__main__":
    sys.exit(main())
