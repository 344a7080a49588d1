"""The gate on a GPU for a given time: cases a second, recompiles, memory, and what fails.

1. Two turns ask the same cases with one folder of compiled kernels: the first compiles, the second finds them.
2. A turn is interrupted at its time as by Ctrl-C; what it asked is counted from its ledgers.
3. A rate in cases is processes by the seconds of the cases that compiled nothing; a rate by the clock has all else in it.
4. The part is as it should be if the second turn has no failure and no error, and was at least RATE cases a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import harness.ledger
from tests.native.asked import Asked, ends_of, say

ROOT = Path(__file__).parents[2]
#: Cases a second, once compiled, that one GPU of the H200's size is to reach.
RATE = 20.0
#: Seconds that an interrupted run is given to print its table.
GRACE = 20.0
ANYWHERE = ("torch-sdpa", "triton-splitkv")
AITER = ("aiter-triton-mla", "aiter-triton-grouped", "aiter-triton-rope")


class Watch:
    """Watches how much of each GPU is taken while a block runs."""

    def __enter__(self) -> Watch:
        self.most, self.over = 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(0.5):
            for index in range(torch.cuda.device_count()):
                free, total = torch.cuda.mem_get_info(index)
                self.most = max(self.most, total - free)


def gate(given: Asked) -> bool:
    """Gate the backends that any GPU runs, twice."""
    backends = given.backends or (*ANYWHERE, *(AITER if given.aiter_source else ()))
    good = False
    with tempfile.TemporaryDirectory(prefix="native-gate-") as folder:
        for turn in ("compiling", "compiled"):
            run = Path(folder) / turn
            with Watch() as watch:
                status, wall, text = _turn(given, backends, run, Path(folder) / "kernels")
            lines = [line for ledger in harness.ledger.read_all([str(run)]) for line in ledger.lines] if run.exists() else []
            good = _tell(turn, lines, status, wall, watch.most, given.processes)
            if not lines:
                say(text[-3000:])
                return False
            if turn == "compiled":
                say(_report(run))
    return good


def _turn(given: Asked, backends: Sequence[str], run: Path, kernels: Path) -> tuple[int, float, str]:
    """Run the gate once; its status, wall seconds and what it printed."""
    command = [
        sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "harness.plugin", "-qq",
        "cases", "--device", given.device, "--profile", "gate", "-n", str(given.processes), "--dist", "worksteal",
        "--tb", "short", "--ledger-dir", str(run), "--repro-dir", f"{run}-repros",
        *((f"--examples={given.examples}",) if given.examples else ()),
        *((f"--aiter-source={given.aiter_source}",) if given.aiter_source else ()),
        *(f"--backend={name}" for name in backends),
    ]  # fmt: skip
    env = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            status = process.wait(timeout=given.seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(timeout=GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        wall = time.monotonic() - began
        output.seek(0)
        return status, wall, output.read()


def _tell(turn: str, lines: list[Any], status: int, wall: float, memory: int, processes: int) -> bool:
    """Print what a turn was; tell whether it was clean and fast enough."""
    results = [line for line in lines if line["kind"] == "result"]
    warm = [line for line in results if not line["compiled"]]
    spent = sum(line["seconds"] for line in warm)
    rate = len(warm) * processes / max(spent, 1e-9)
    say(
        f"gate, {turn}: status {status}, {len(results)} cases in {wall:.0f} s = {len(results) / wall:.1f} a second by the "
        f"clock; {rate:.1f} a second in {len(warm)} cases that compiled nothing; {len(results) - len(warm)} cases compiled "
        f"{sum(line['compiled'] for line in results)} kernels in {sum(line['seconds'] for line in results) - spent:.0f} s; "
        f"{memory / 2**30:.1f} GiB taken at most"
    )
    groups = defaultdict(list)
    for line in results:
        groups[line["backend"], line["regime"], line["relation"] == "graph"].append(line)
    for (backend, regime, graph), group in groups.items():
        seconds = sorted(line["seconds"] for line in group if not line["compiled"]) or [0.0]
        run = sum(line["run_seconds"] for line in group if not line["compiled"])
        verdicts, count = dict(Counter(line["verdict"] for line in group)), sum(line["compiled"] for line in group)
        say(
            f"  {backend} × {regime}{', graphs' if graph else ''}: {verdicts}, {count} compiled; "
            f"uncompiled: median {seconds[len(seconds) // 2] * 1000:.0f} ms, "
            f"most {seconds[-1]:.2f} s, {100 * run / max(sum(seconds), 1e-9):.0f} % of it in the backend"
        )
    wrong = [line for line in lines if line["kind"] == "finding" or line.get("verdict") == "ERROR"]
    wrong += [line for line in results if line["verdict"] == "FAIL" and line["phase"] != "search"]
    seen: set[tuple[str, ...]] = set()
    for line in wrong:
        key = (line["backend"], line["verdict"], str(line["fault"]), line["message"][:60])
        if key not in seen and len(seen) < 8:
            seen.add(key)
            say(f"  {line['verdict']} {line['fault']} {line['backend']} {line['relation'] or ''} {line['case'][:200]}")
            say(f"    {ends_of(line['message'])}")
    return not wrong and bool(results) and rate >= RATE


def _report(run: Path) -> str:
    command = [sys.executable, "-m", "harness.cli", "report", str(run)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout[-4000:]
