"""Everything that only a GPU can show, in one run: the gate, its speed, isolation, graphs, large pools, faults, the reference.

1. Each part has a time limit and prints a few lines; one that fails does not end the others.
2. The gate runs twice over the same cases: the first time compiles, the second is the rate once compiled.
3. The exit status is the number of parts that did not come out as they should.

Run ``python -m tests.native.all [PART ...] [--processes N] [--examples N] [--aiter-source DIR]`` from the root of the
repository; parts are those of PARTS, all unless named.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
REGIMES = ROOT / "tests" / "faulty.toml"
#: What each fault must be reported as on a GPU.
FAULTS = {
    "illegal-access": "crash", "segfault": "crash", "abort": "crash", "raise": "crash", "eat-device-memory": "crash",
    "write-past": "guard-touched", "write-cache": "input-changed", "leave-a-row": "unwritten",
    "read-workspace": "non-finite", "position": "mismatch", "spin": "hang", "hang": "hang",
}  # fmt: skip


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


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


def gate(given: Any) -> bool:
    """Gate the default backends twice; print the table once and both rates."""
    import harness.ledger

    good = True
    sources = [text for text in (given.aiter_source, os.environ.get("MLA_GATE_AITER_SOURCE")) if text]
    backends = ["torch-sdpa", "triton-splitkv"]
    backends += ["aiter-triton-mla", "aiter-triton-grouped", "aiter-triton-rope"] if sources else []
    for turn in ("compiling", "compiled"):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "harness.plugin", "-qq",
                "cases", "--device", "cuda", "--profile", "gate", "--examples", str(given.examples),
                "-n", str(given.processes), "--dist", "worksteal", "--tb", "short",
                "--ledger-dir", f"{folder}/run", "--repro-dir", f"{folder}/repros", *given.option,
                *(f"--aiter-source={text}" for text in sources[:1]), *(f"--backend={name}" for name in backends),
            ]  # fmt: skip
            began = time.monotonic()
            with Watch() as watch:
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, cwd=ROOT, timeout=given.gate_seconds, check=False
                    )
                    text, status = done.stdout + done.stderr, done.returncode
                except subprocess.TimeoutExpired as late:
                    text, status = f"cut after {late.timeout} s", -1
            wall = time.monotonic() - began
            lines = [line for ledger in harness.ledger.read_all([f"{folder}/run"]) for line in ledger.lines]
            results = [line for line in lines if line["kind"] == "result"]
            seconds = sum(line["seconds"] for line in results)
            compiled = sum(line["compiled"] for line in results)
            cold = sum(line["seconds"] for line in results if line["compiled"])
            busy = len(results) * given.processes / max(seconds, 1e-9)
            say(
                f"gate, {turn}: status {status}, {len(results)} cases in {wall:.0f} s = {len(results) / wall:.1f} a second; "
                f"{seconds:.0f} s in cases over {given.processes} processes = {busy:.1f} a second; {compiled} kernels compiled "
                f"({cold:.0f} s of cases that did); {watch.most / 2**30:.1f} GiB taken at most"
            )
            slow = sorted(results, key=lambda line: -line["seconds"])[:3]
            for line in slow if turn == "compiled" else ():
                where = f"{line['seconds']:.2f} s ({line['run_seconds']:.2f} in the backend)"
                say(f"  slowest: {where} {line['backend']} {line['case'][:110]}")
            if turn == "compiled" or status not in (0, 1):
                command = [sys.executable, "-m", "harness.cli", "report", f"{folder}/run"]
                report = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
                say(report.stdout[-3000:] if results else text[-1500:])
            if turn == "compiling":
                failures = [line for line in lines if line["kind"] == "finding" or line.get("verdict") == "ERROR"]
                failures += [line for line in results if line["verdict"] == "FAIL" and line["phase"] != "search"]
                for line in failures[:6]:
                    what = f"{line['verdict']} {line['fault']}: {line['backend']} {line['relation'] or ''}"
                    say(f"  {what} {line['message'][:420]}")
                good = status == 0
    return good


def isolation(given: Any) -> bool:
    """Measure what the worker costs a case."""
    from harness.backends import registry
    from harness.case import Case
    from harness.regimes import load
    from harness.run import run_case
    from harness.worker import Worker

    backend, regimes = registry.make("triton-splitkv"), load()
    cases = [Case(heads=16, lengths=(130, 64), placement="permuted", seed=seed) for seed in range(60)]
    with Worker(device="cuda:0") as worker:
        began = time.perf_counter()
        worker.run(cases[0], "triton-splitkv")
        first = time.perf_counter() - began
        costs, inside = [], []
        for case in cases:
            began = time.perf_counter()
            result = worker.run(case, "triton-splitkv")
            costs.append(time.perf_counter() - began - result.seconds)
            inside.append(result.seconds)
    here = []
    for case in cases:
        began = time.perf_counter()
        run_case(case, backend, regimes, device="cuda:0")
        here.append(time.perf_counter() - began)
    middle = [sorted(times)[len(times) // 2] * 1000 for times in (costs, inside, here)]
    say(
        f"isolation: first case {first:.1f} s; then median {middle[0]:.2f} ms a case above the case's own {middle[1]:.1f} ms "
        f"({middle[2]:.1f} ms without a worker)"
    )
    return middle[0] <= 5


def parts_of_a_case(given: Any) -> bool:
    """Say where the time of a case of the gate's usual size goes."""
    from harness.backends import registry
    from harness.case import Case
    from harness.inputs import make_inputs
    from harness.judge import judge
    from harness.regimes import load

    backend, regimes = registry.make("triton-splitkv"), load()
    for lengths in ((300,), (130, 64, 200, 1000), (102, 16, 160, 28, 58, 83, 8192, 15)):
        case = Case(heads=16, lengths=lengths, page_size=16, cache_format="e4m3fn", cache_scale=1.7, placement="permuted")
        regime = regimes.of(backend.name, case)
        told = []
        for _ in range(6):
            marks = [time.perf_counter()]
            inputs = make_inputs(case, device="cuda:0")
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            output = backend.run(inputs)
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            verdict = judge(inputs, output, regime)
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            told.append([1000 * (stop - start) for start, stop in itertools.pairwise(marks)])
        inputs_ms, run_ms, judge_ms = (min(column) for column in zip(*told[1:], strict=True))
        say(f"a case of {len(lengths)} requests, {sum(lengths)} tokens: inputs {inputs_ms:.1f} ms, backend {run_ms:.2f} ms, "
            f"judge {judge_ms:.1f} ms; {verdict.kind}")  # fmt: skip
    return True


def faults(given: Any) -> bool:
    """Hold every faulty backend to its verdict, and the next case to passing."""
    from harness.case import Case
    from harness.worker import TimeLimits, Worker

    case, wrong = Case(heads=2, lengths=(5, 3)), []
    with Worker(device="cuda:0", share=0.2, regimes=REGIMES, limits=TimeLimits(first=15.0, least=6.0)) as worker:
        for name, fault in FAULTS.items():
            began = time.monotonic()
            verdict = worker.run(case, f"python:tests.native.faulty:{name}").verdict
            took = time.monotonic() - began
            after = worker.run(case, "python:tests.native.faulty:right").verdict
            if verdict.fault != fault or after.kind != "PASS":
                said = f"{verdict.message[:300]} | {after.message[:200]}"
                wrong.append(f"{name}: {verdict.kind} {verdict.fault}, then {after.kind}: {said}")
            elif name == "illegal-access":
                said = next((line for line in verdict.message.splitlines() if "rror" in line), verdict.message[:150])
                say(f"illegal-access: {verdict.fault} in {took:.1f} s: {said[:160]}; the next case: {after.kind}")
    say(f"faults: {len(FAULTS) - len(wrong)} of {len(FAULTS)} reported as what they are, the next case unharmed")
    for line in wrong:
        say(f"  {line}")
    return not wrong


def graphs(given: Any) -> bool:
    """Capture a backend that may be captured, and one that keeps the host's lengths."""
    from harness.backends import registry
    from harness.backends.protocol import Capabilities
    from harness.case import Case
    from harness.graphs import run_graph
    from harness.regimes import load

    class KeepsLengths:
        """torch-sdpa, which cuts its requests on the host, said to be capturable."""

        def __init__(self) -> None:
            self.inner = registry.make("torch-sdpa")
            self.name, self.why_not, self.run = self.inner.name, self.inner.why_not, self.inner.run
            self.capabilities: Capabilities = dataclasses.replace(self.inner.capabilities, graphs=True)

    good = True
    asked = {
        "padded": Case(heads=16, lengths=(700, 130, 64, 9), page_size=16, placement="permuted", table_padding=1),
        "ragged": Case(heads=12, query_tokens=2, lengths=(2050, 40), table="ragged", cache_format="e4m3fn", cache_scale=0.5),
    }
    for name, case in asked.items():
        result = run_graph(case, registry.make("triton-splitkv"), load(), device="cuda:0")
        good = good and result.verdict.kind in ("PASS", "UNTRUSTED")
        said = result.verdict.message[:500] if result.verdict.kind != "PASS" else ""
        say(f"graph, {name}: {result.verdict.kind} in {result.seconds:.2f} s {said}")
    result = run_graph(asked["padded"], KeepsLengths(), load(), device="cuda:0")
    say(f"graph of a backend that keeps the host's lengths: {result.verdict.kind} {result.verdict.fault}: "
        f"{result.verdict.message.splitlines()[0][:200]}")  # fmt: skip
    return good and result.verdict.fault in ("variant", "crash")


def pools(given: Any) -> bool:
    """Run the pinned large pools and one that no GPU holds."""
    from cases.pins import pinned
    from harness.backends import registry
    from harness.case import Case
    from harness.regimes import load
    from harness.run import run_case

    good, said = True, []
    for name in ("torch-sdpa", "triton-splitkv"):
        for pin in pinned():
            if pin.name.startswith("pools-"):
                torch.cuda.reset_peak_memory_stats()
                result = run_case(pin.case, registry.make(name), load(), device="cuda:0")
                good = good and result.verdict.kind == "PASS"
                most = torch.cuda.max_memory_allocated() / 2**30
                said.append(f"{result.verdict.kind} {result.seconds:.2f} s {most:.1f} GiB")
                if result.verdict.kind != "PASS":
                    say(f"  {name} {pin.name}: {result.verdict.message[:300]}")
    say(f"large pools: {'; '.join(said)}")
    huge = Case(heads=1, lengths=(5,), placement="high", pool_rows=300_000_000)
    verdict = run_case(huge, registry.make("torch-sdpa"), load(), device="cuda:0").verdict
    say(f"a pool beyond the GPU: {verdict.kind}: {verdict.message}")
    torch.cuda.empty_cache()
    return good and verdict.kind == "UNSUPPORTED"


def reference(given: Any) -> bool:
    """Measure the reference beside a plain product, and hold its pieces on two streams to the oracle."""
    from functools import partial

    from harness.bench import LATENT, ROPE, best_times, describe, make_problem, rate_against_product
    from harness.case import Case
    from harness.inputs import make_inputs
    from references.decode import mla_decode
    from references.oracle import oracle

    finding = rate_against_product()
    say(describe(finding))
    problem = make_problem(batch=64, heads=128, length=8192, cache_format="e4m3fn", device="cuda")
    work = 2 * 64 * 128 * 8192 * (LATENT + ROPE + LATENT) / 1e12
    for dtype in (torch.float32, torch.float64):
        for pieces in (160, 320, 640, 1280, 2560):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run = partial(mla_decode, problem, piece_bytes=pieces << 20, working=dtype)
            (seconds,) = best_times(run, rounds=3, device="cuda")
            most = (torch.cuda.max_memory_allocated() - before) / 2**30
            say(f"  reference in {str(dtype)[6:]}, pieces of {pieces} MiB: {work / seconds:.1f} TFLOP/s, {most:.1f} GiB")
    codes = problem.cache.view(-1)
    wide = torch.empty(codes.shape, dtype=torch.float32, device="cuda")
    half = torch.empty(codes.shape, dtype=torch.float16, device="cuda")
    table = torch.arange(1 << 16, device="cuda")
    pairs = codes.view(torch.int16)
    ways: dict[str, Callable[[], object]] = {
        "to fp32": lambda: wide.copy_(codes),
        "to fp16": lambda: half.copy_(codes),
        "fp16 to fp32": lambda: wide.copy_(half),
        "by a table of pairs": lambda: torch.index_select(table, 0, pairs.to(torch.int32).add_(1 << 15)),
        "gather": lambda: problem.cache.view(torch.uint8)[:, 0].index_select(0, problem.slots),
    }
    times = best_times(*ways.values(), rounds=3, device="cuda")
    say("  decoding 302 M codes: " + ", ".join(f"{name} {1000 * time:.2f} ms" for name, time in zip(ways, times, strict=True)))
    strays = []
    for seed in range(12):
        case = Case(heads=3, query_tokens=2, lengths=(9000, 700, 0, 3, 2500), page_size=4, placement="permuted", seed=seed,
                    cache_format=("e4m3fn", "e4m3fnuz", "e5m2", "bf16")[seed % 4])  # fmt: skip
        given_to = make_inputs(case, device="cuda:0").problem()
        truth = oracle(given_to).out
        for pieces in (1 << 19, 1 << 21, 1 << 23):
            strays.append(float((mla_decode(given_to, piece_bytes=pieces).out - truth).abs().max() / truth.abs().max()))
    say(f"  on two streams it strays {max(strays):.2g} of the largest output from the oracle at most")
    torch.cuda.empty_cache()
    return finding.met is True and max(strays) < 1e-5


#: The parts, in order; the gate last, since it takes what time is left.
PARTS: dict[str, Callable[[Any], bool]] = {
    "reference": reference,
    "isolation": isolation,
    "case": parts_of_a_case,
    "graphs": graphs,
    "pools": pools,
    "faults": faults,
    "gate": gate,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.native.all", description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", help=f"which: {', '.join(PARTS)} (all unless named)")
    parser.add_argument("--processes", type=int, default=6, help="processes of the gate (default: 6)")
    parser.add_argument("--examples", type=int, default=120, help="random cases of each pair (default: 120)")
    parser.add_argument("--gate-seconds", type=float, default=150, help="time limit of each of the two gates (default: 150)")
    parser.add_argument("--aiter-source", help="checkout of AITER, to gate its Triton kernels too")
    parser.add_argument("--option", action="append", default=[], help="a further option of the gates")
    given = parser.parse_args(arguments)
    if torch.cuda.is_available():
        import triton

        devices = f"{torch.cuda.get_device_name(0)} x {torch.cuda.device_count()}"
        say(f"{devices}, torch {torch.__version__}, triton {triton.__version__}")
    failed = []
    for name in given.part or PARTS:
        began = time.monotonic()
        try:
            good = PARTS[name](given)
        except Exception:
            good = False
            say(f"{name}: {traceback.format_exc(limit=-4)[-1200:]}")
        say(f"-- {name}: {'as it should be' if good else 'NOT as it should be'}, {time.monotonic() - began:.0f} s")
        failed += [] if good else [name]
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
