"""Parts about single cases on a GPU: what isolation costs, where time goes, captured graphs, large pools."""

from __future__ import annotations

import dataclasses
import itertools
import time

import torch

from cases.pins import pinned
from harness.backends import registry
from harness.backends.protocol import Capabilities
from harness.case import Case
from harness.graphs import run_graph
from harness.inputs import make_inputs
from harness.judge import judge
from harness.regimes import load
from harness.run import run_case
from harness.worker import Worker
from tests.native.asked import Asked, say


def isolation(given: Asked) -> bool:
    """Measure what the worker costs a case."""
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


def parts_of_a_case(given: Asked) -> bool:
    """Say where the time of a case of the gate's usual size goes."""
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


def graphs(given: Asked) -> bool:
    """Capture a backend that may be captured, and one that keeps the host's lengths."""

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


def pools(given: Asked) -> bool:
    """Run the pinned large pools and one that no GPU holds."""
    good = True
    for name in ("torch-sdpa", "triton-splitkv"):
        for pin in pinned():
            if pin.name.startswith("pools-"):
                torch.cuda.reset_peak_memory_stats()
                result = run_case(pin.case, registry.make(name), load(), device="cuda:0")
                good = good and result.verdict.kind == "PASS"
                most = torch.cuda.max_memory_allocated() / 2**30
                say(f"  {name} {pin.name}: {result.verdict.kind} in {result.seconds:.2f} s, {most:.1f} GiB")
                if result.verdict.kind != "PASS":
                    say(f"    {result.verdict.message[:600]}")
    huge = Case(heads=1, lengths=(5,), placement="high", pool_rows=300_000_000)
    verdict = run_case(huge, registry.make("torch-sdpa"), load(), device="cuda:0").verdict
    say(f"a pool beyond the GPU: {verdict.kind}: {verdict.message}")
    torch.cuda.empty_cache()
    return good and verdict.kind == "UNSUPPORTED"
