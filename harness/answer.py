"""One question put to one backend: a plain run, a relation, a captured graph, a case to refuse, or a serving trace.

1. Every question ends in a result, whatever it is; what does not apply to a case is UNSUPPORTED, with the reason.
2. A question whose tensors or whose judging a GPU has no room for was not run; no verdict on the backend comes of it. It is
   asked once more with what torch keeps for itself given back.
"""

from __future__ import annotations

import gc

import torch

from harness.backends.protocol import Backend
from harness.case import Case
from harness.graphs import run_graph
from harness.refusal import refusal
from harness.regimes import GRAPH, REFUSAL, NoRegime, Regimes
from harness.relations import run_relation
from harness.run import Listener, Result, clipped, run_case
from harness.serving.run import run_trace
from harness.serving.trace import trace_of
from harness.verdict import Verdict


def answer(
    case: Case,
    relation: str | None,
    backend: Backend,
    regimes: Regimes,
    *,
    device: torch.device | str = "cpu",
    on_stage: Listener = lambda stage: None,
) -> Result:
    """Answer a question.

    Args:
        case: the problem.
        relation: a key of relations.ALL, GRAPH for a captured graph, REFUSAL for a case outside the contract, the id of a
            serving trace, or None for a plain run.
        backend: who is asked.
        regimes: the rules it is judged by.
        device: where it runs.
        on_stage: hears "run" before the backend runs and "judge" after.
    """
    device = torch.device(device)

    def ask() -> Result:
        if relation is None:
            return run_case(case, backend, regimes, device=device, on_stage=on_stage)
        if relation == GRAPH:
            return run_graph(case, backend, regimes, device=device, on_stage=on_stage)
        if relation == REFUSAL:
            return refusal(case, backend, device, on_stage=on_stage)
        trace = trace_of(relation)
        if trace is not None:
            return run_trace(trace, backend, regimes, device=device, on_stage=on_stage)
        return run_relation(case, relation, backend, regimes, device=device, on_stage=on_stage)

    for _ in range(2):
        try:
            return ask()
        except torch.OutOfMemoryError as short:
            message = f"not run: judging it needs more memory than {device} has for this process: {clipped(str(short))}"
        gc.collect()
        torch.cuda.empty_cache()
    try:
        regime = regimes.of(backend.name, case).name
    except NoRegime:
        regime = None
    verdict = Verdict(kind="UNSUPPORTED", message=message)
    return Result(case=case, backend=backend.name, regime=regime, verdict=verdict, relation=relation)
