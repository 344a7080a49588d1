"""One case on one backend: inputs, run, judge, one Result.

1. Every way that a case can end is a verdict: the backend's refusal, its exception, our lack of memory and our own faults
   included. Nothing but an interrupt leaves ``run_case``.
2. A case outside the backend's contract is not run; one that was not run is never a pass.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from harness.backends.protocol import Backend, Output, Unsupported
from harness.case import Case
from harness.inputs import Inputs, make_inputs
from harness.judge import Verdict, judge
from harness.memory import NotEnoughMemory
from harness.regimes import Regime, Regimes
from references.formats import FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one case on one backend."""

    case: Case
    #: Name of the backend.
    backend: str
    #: Name of the regime; None where the case was outside the contract or no regime covers it.
    regime: str | None
    verdict: Verdict
    #: Wall time of the backend's run, and of everything, seconds.
    run_seconds: float = 0.0
    seconds: float = 0.0
    #: What the backend says ran.
    what_ran: Mapping[str, str | int] = field(default_factory=dict)


def run_case(
    case: Case,
    backend: Backend,
    regimes: Regimes,
    *,
    device: torch.device | str = "cpu",
    on_stage: Callable[[str], object] = lambda stage: None,
) -> Result:
    """Run a case on a backend and judge its answer.

    Args:
        case: the problem.
        backend: what is asked.
        regimes: the rules it is judged by.
        device: where it runs.
        on_stage: hears "run" before the backend runs and "judge" after.
    """
    start = time.perf_counter()
    device = torch.device(device)
    regime: Regime | None = None
    ran: dict[str, str | int] = {}
    run_seconds = 0.0

    def result(verdict: Verdict) -> Result:
        return Result(
            case=case,
            backend=backend.name,
            regime=regime.name if regime else None,
            verdict=verdict,
            run_seconds=run_seconds,
            seconds=time.perf_counter() - start,
            what_ran=ran,
        )

    try:
        reason = backend.why_not(case, device)
        if reason is not None:
            return result(Verdict(kind="UNSUPPORTED", message=reason))
        regime = regimes.of(backend.name, case)
        inputs = make_inputs(case, device=device, output_format=backend.capabilities.output_format)
    except NotEnoughMemory as short:
        return result(Verdict(kind="UNSUPPORTED", message=str(short)))
    except Exception:
        return result(Verdict(kind="ERROR", message=traceback.format_exc()))

    began = time.perf_counter()
    on_stage("run")
    try:
        output = backend.run(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Unsupported as refusal:
        return result(Verdict(kind="FAIL", fault="refused", message=f"refused a case inside its contract: {refusal}"))
    except Exception as error:
        fault = getattr(error, "verdict_fault", "crash")
        lines = traceback.format_exception(error, limit=-4)
        return result(Verdict(kind="FAIL", fault=fault, message=f"{type(error).__name__}: {error}\n{''.join(lines)}"))
    finally:
        run_seconds = time.perf_counter() - began
        on_stage("judge")

    try:
        ran.update(output.what_ran)
        wrong = malformed(inputs, output, backend)
        if wrong is not None:
            return result(Verdict(kind="FAIL", fault="mismatch", message=wrong))
        return result(judge(inputs, output, regime, empty_rows=backend.capabilities.empty_rows))
    except Exception:
        return result(Verdict(kind="ERROR", message=traceback.format_exc()))


def malformed(inputs: Inputs, output: Output, backend: Backend) -> str | None:
    """Say what is wrong with the shapes and types of an answer, or None."""
    case = inputs.case
    rows = (case.batch, case.query_tokens, case.heads)
    dtype = FORMATS[backend.capabilities.output_format].storage
    if tuple(output.out.shape) != (*rows, case.latent) or output.out.dtype != dtype:
        return f"out must be {dtype} {[*rows, case.latent]}, it is {output.out.dtype} {list(output.out.shape)}"
    if case.lse and backend.capabilities.returns_lse and output.lse is None:
        return "the case asks for the log-sum-exp and the backend returned none"
    if output.lse is not None and (tuple(output.lse.shape) != rows or output.lse.dtype != torch.float32):
        return f"lse must be torch.float32 {list(rows)}, it is {output.lse.dtype} {list(output.lse.shape)}"
    return None
