"""Crash after crash: does every case get its verdict, and does anything stay behind?

1. Cases crash by turns in every way the faulty backends know; every hundredth is right and must pass.
2. Processes are counted among this one's descendants, files among its open ones, in its folder and in /dev/shm.
3. The exit status is 1 if a verdict is missing or wrong, or if anything has stayed.

Run ``python -m tests.slow.crashes [COUNT]`` from the root of the repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from harness.case import Case
from harness.worker import TimeLimits, Worker

REGIMES = Path(__file__).parents[1] / "faulty.toml"
#: Faulty backends that take their process along.
WAYS = ("segfault", "abort", "exit")


def descendants() -> set[int]:
    """List the processes below this one."""
    out = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    below: dict[int, list[int]] = {}
    for line in out.splitlines():
        pid, parent = map(int, line.split())
        below.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        waiting += (children := below.get(waiting.pop(), []))
        found |= set(children)
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}


def held() -> dict[str, int]:
    """Count what may leak: processes, open files, shared memory and folders of the gate."""
    folders = list(Path(tempfile.gettempdir()).glob(f"mla-gate-{os.getpid()}-*"))
    return {
        "processes": len(descendants()),
        "open files": len(os.listdir("/proc/self/fd")),
        "shared memory": len(os.listdir("/dev/shm")),
        "folders": len(folders),
    }


def main(count: int = 1000) -> int:
    """Run the cases and print what became of them."""
    case, seen, took = Case(heads=2, lengths=(5, 3)), Counter[str](), []
    with Worker(regimes=REGIMES, limits=TimeLimits(first=30.0)) as worker:
        worker.run(case, "python:tests.faulty:segfault")
        worker.run(case, "python:tests.faulty:right")
        before = held()
        began = time.monotonic()
        for number in range(count):
            name = "right" if number % 100 == 99 else WAYS[number % len(WAYS)]
            start = time.monotonic()
            verdict = worker.run(case.replace(seed=number), f"python:tests.faulty:{name}").verdict
            took.append(time.monotonic() - start)
            wanted = ("PASS", None) if name == "right" else ("FAIL", "crash")
            seen["right verdict" if (verdict.kind, verdict.fault) == wanted else f"{name}: {verdict.kind}"] += 1
        seconds = time.monotonic() - began
        worker.run(case, "python:tests.faulty:right")
        after = held()
    closed = held()
    grown = {name: after[name] - before[name] for name in before if after[name] > before[name]}
    print(f"{count} cases in {seconds:.1f} s, {1000 * sorted(took)[count // 2]:.0f} ms each: {dict(seen)}")
    print(f"before {before}, after {after}, closed {closed}; grown: {grown or 'nothing'}")
    return 1 if grown or seen["right verdict"] != count else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
