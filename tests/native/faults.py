"""Faulty backends on a GPU: each is reported as what it is, and the case after it passes."""

from __future__ import annotations

import time
from pathlib import Path

from harness.case import Case
from harness.worker import TimeLimits, Worker
from tests.native.asked import Asked, ends_of, say

REGIMES = Path(__file__).parents[1] / "faulty.toml"
#: What each fault must be reported as on a GPU.
FAULTS = {
    "illegal-access": "crash", "segfault": "crash", "abort": "crash", "raise": "crash", "eat-device-memory": "crash",
    "write-past": "guard-touched", "write-cache": "input-changed", "leave-a-row": "unwritten",
    "read-workspace": "non-finite", "position": "mismatch", "spin": "hang", "hang": "hang",
}  # fmt: skip
#: Until a backend has hung once a case may take so long: a child that starts imports torch and makes a context.
LIMITS = TimeLimits(first=15.0, least=6.0)


def faults(given: Asked) -> bool:
    """Hold every faulty backend to its verdict, and the next case to passing."""
    case, wrong = Case(heads=2, lengths=(5, 3)), []
    with Worker(device="cuda:0", share=0.2, regimes=REGIMES, limits=LIMITS) as worker:
        began = time.monotonic()
        first = worker.run(case, "python:tests.native.faulty:right").verdict
        say(f"  right: {first.kind} in {time.monotonic() - began:.1f} s")
        if first.kind != "PASS":
            say(f"    {ends_of(first.message)}")
        for name, fault in FAULTS.items():
            say(f"  {name} …")
            began = time.monotonic()
            verdict = worker.run(case, f"python:tests.native.faulty:{name}").verdict
            took = time.monotonic() - began
            after = worker.run(case, "python:tests.native.faulty:right").verdict
            later = time.monotonic() - began - took
            say(f"  {name}: {verdict.kind} {verdict.fault} in {took:.1f} s; the next case: {after.kind} in {later:.1f} s")
            if verdict.fault != fault or after.kind != "PASS":
                wrong.append(name)
                say(f"    expected {fault}; {ends_of(verdict.message)} | {ends_of(after.message)}")
            elif name == "illegal-access":
                said = next((line for line in verdict.message.splitlines() if "rror" in line), "")
                say(f"    {said[:200]}")
    say(f"faults: {len(FAULTS) - len(wrong)} of {len(FAULTS)} reported as what they are, the next case unharmed")
    return not wrong and first.kind == "PASS"
