"""Captured graphs: a run recorded once on a GPU and replayed over inputs that change in place.

1. A backend is captured on one case and replayed on others that lie in the same memory: other values and tables, longer and
   shorter contexts, and requests of length zero, as engines pad a batch to the size of a graph.
2. What a graph cannot change stays: shapes, formats, scales, the pool and the width of its table.
3. Each replay is judged as a run of its own case. The last one is the captured case again, and must be the same bits as the
   first run where the regime promises that of the same call.
4. Only a GPU captures graphs. On a CPU, and of a backend that does not say that it may be captured, nothing is asked.

Source: torch.cuda.graph; vLLM and SGLang capture decode at fixed batch sizes and the longest context.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from harness.backends.protocol import Backend, Output, accepts
from harness.cache import pool_pages
from harness.case import Case
from harness.compilations import compiled
from harness.inputs import Inputs, make_inputs
from harness.memory import NotEnoughMemory
from harness.regimes import GRAPH, NoRegime, Regimes
from harness.run import Listener, Result, judged, run_backend
from harness.verdict import Verdict

#: Records a run: the answer's tensors, and what runs it again.
Capture = Callable[[Callable[[], Output]], tuple[Output, Callable[[], object]]]


def record(run: Callable[[], Output]) -> tuple[Output, Callable[[], object]]:
    """Capture a run into a CUDA graph on the current device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return output, graph.replay


def replays(case: Case) -> list[tuple[str, Case]]:
    """List the cases of a graph, each with what is otherwise in it: the captured one first and last."""
    half = tuple(-(-length // 2) for length in case.lengths)
    served = case.batch // 2
    made = [
        ("the case it was captured on", half),
        ("other values and other pages", half),
        ("longer contexts", case.lengths),
        ("shorter contexts", tuple(length // 4 for length in case.lengths)),
        ("padded requests of length zero", case.lengths[:served] + (0,) * (case.batch - served)),
        ("the case it was captured on", half),
    ]
    pages = [max(1, *(-(-length // case.page_size) for length in lengths)) for _, lengths in made]
    width = max(pages) + case.table_padding
    found = [
        (about, case.replace(lengths=lengths, table_padding=width - own, seed=case.seed ^ (turn % (len(made) - 1))))
        for turn, ((about, lengths), own) in enumerate(zip(made, pages, strict=True))
    ]
    rows = case.page_size * max(pool_pages(each) for _, each in found)
    return [(about, each.replace(pool_rows=rows)) for about, each in found]


def run_graph(
    case: Case,
    backend: Backend,
    regimes: Regimes,
    *,
    device: torch.device | str = "cuda",
    on_stage: Listener = lambda stage: None,
    capture: Capture | None = None,
) -> Result:
    """Capture a backend on a case, replay it on the others that fit its memory, and judge each.

    Args:
        case: the problem with the longest contexts.
        backend: what is captured.
        regimes: the rules it is judged by.
        device: where it runs.
        on_stage: hears "run" before the backend runs and "judge" after.
        capture: records a run; by default into a CUDA graph.
    """
    device, start, before = torch.device(device), time.perf_counter(), compiled()
    told: list[Result] = []

    def result(verdict: Verdict, regime: str | None = None, seconds: float = 0.0, ran: Output | None = None) -> Result:
        told.append(
            Result(
                case=case,
                backend=backend.name,
                regime=regime,
                verdict=verdict,
                relation=GRAPH,
                run_seconds=seconds,
                seconds=time.perf_counter() - start,
                compiled=compiled() - before,
                what_ran=dict(ran.what_ran) if ran else {},
            )
        )
        return told[-1]

    reason = why_not_graph(backend, device if capture is None else torch.device("cuda"))
    asked = replays(case)
    kept = [(about, each) for about, each in asked if _accepted(each, backend, regimes, device)]
    if reason is None and (len(kept) < 3 or kept[0] != asked[0]):
        reason = "its shorter and longer cases lie outside the contract or the regimes"
    if reason is not None:
        return result(Verdict(kind="UNSUPPORTED", message=f"{GRAPH} does not apply to this case: {reason}"))
    regime = regimes.of(backend.name, kept[0][1])
    try:
        memory = _memory([each for _, each in kept], backend, device)
        inputs = _lay(memory, kept[0][1], backend, device)
    except NotEnoughMemory as short:
        return result(Verdict(kind="UNSUPPORTED", message=str(short)), regime.name)
    first, failed, seconds = run_backend(lambda: backend.run(inputs), inputs, on_stage)
    verdict = failed or judged(inputs, _sure(first), backend, regime)
    if verdict.kind not in ("PASS", "UNTRUSTED"):
        return result(verdict, regime.name, seconds, first)
    kept_out = _sure(first).out.clone()
    replay: list[Callable[[], object]] = []

    def captured() -> Output:
        output, again = (capture or record)(lambda: backend.run(inputs))
        replay.append(again)
        return output

    output, failed, _ = run_backend(captured, inputs, on_stage)
    if failed is not None:
        return result(_told(failed, f"{case}: right, but cannot be captured"), regime.name, seconds, first)
    answer = _sure(output)

    def again() -> Output:
        replay[0]()
        return answer

    for about, each in kept[1:]:
        try:
            laid = _lay(memory, each, backend, device)
        except NotEnoughMemory as short:  # what the graph keeps is missing now
            return result(Verdict(kind="UNSUPPORTED", message=f"{about}: {short}"), regime.name, seconds, first)
        _, failed, _ = run_backend(again, laid, on_stage)
        found = failed or judged(laid, answer, backend, regimes.of(backend.name, each))
        if found.kind not in ("PASS", "UNTRUSTED"):
            what = f"{case}: captured on lengths {list(kept[0][1].lengths)} and right there, wrong when replayed on {about}"
            return result(_told(found, what), regime.name, seconds, first)
    if "repeat" in regime.exact and kept[-1][1] == kept[0][1] and not _same(kept_out, answer.out):
        what = f"{case}: the captured case has other bits when it is replayed"
        return result(Verdict(kind="FAIL", fault="nondeterministic", message=what), regime.name, seconds, first)
    return result(verdict, regime.name, seconds, first)


def why_not_graph(backend: Backend, device: torch.device) -> str | None:
    """Say why a backend is asked for no graph on a device, or None."""
    if device.type != "cuda":
        return "only a GPU captures graphs"
    if not backend.capabilities.graphs:
        return f"{backend.name} does not say that its runs can be captured"
    return None


def _accepted(case: Case, backend: Backend, regimes: Regimes, device: torch.device) -> bool:
    try:
        regimes.of(backend.name, case)
    except NoRegime:
        return False
    return accepts(backend, case, device)


def _memory(cases: list[Case], backend: Backend, device: torch.device) -> Inputs:
    """Make the memory of a graph: that of the case whose tables are the longest."""
    largest = max(cases, key=lambda case: sum(-(-length // case.page_size) for length in case.lengths))
    return make_inputs(largest, device=device, output_format=backend.capabilities.output_format)


def _lay(memory: Inputs, case: Case, backend: Backend, device: torch.device) -> Inputs:
    """Lay a case into the memory of a graph, in place."""
    fresh = make_inputs(case, device=device, output_format=backend.capabilities.output_format)
    memory.arena.take(fresh.arena)
    return dataclasses.replace(memory, case=case, slots=fresh.slots)


def _told(verdict: Verdict, what: str) -> Verdict:
    """Say of a verdict that it came of a graph."""
    fault = "variant" if verdict.kind == "FAIL" and verdict.fault != "crash" else verdict.fault
    return Verdict(kind=verdict.kind, fault=fault, message=f"{what}:\n{verdict.message}", measurements=verdict.measurements)


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two outputs are the same numbers, zeros of either sign alike; rows left unwritten alike too."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _sure(output: Output | None) -> Output:
    assert output is not None, "a run without a verdict has an answer"
    return output
