"""One case on one backend: inputs, run, judge, one Result.

1. Every way that a case can end is a verdict: the backend's refusal, its exception, our lack of memory and our own faults
   included. Nothing but an interrupt leaves ``run_case``.
2. A wrong answer that is right the next time is nondeterministic, whatever was wrong with it.
3. A case outside the backend's contract is not run; one that was not run is never a pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.backends.protocol import Backend, Output, Unsupported
from harness.case import Case
from harness.compilations import compiled
from harness.inputs import PLAIN, Arrangement, Inexact, Inputs, make_inputs
from harness.judge import Verdict, judge
from harness.memory import NotEnoughMemory, filled
from harness.regimes import NoRegime, Regime, Regimes
from references.formats import FORMATS

#: Faults of an answer's numbers.
WRONG = frozenset({"mismatch", "inaccurate", "non-finite", "unwritten"})
#: Characters that a backend's exception may add to a verdict.
LONGEST_MESSAGE = 20_000
#: Hears of the stages of a run: "run" before the backend's own, "judge" after it.
Listener = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one case on one backend."""

    case: Case
    #: Name of the backend.
    backend: str
    #: Name of the regime; None where the case was outside the contract or no regime covers it.
    regime: str | None
    verdict: Verdict
    #: The relation between runs that was asked; None for a plain run.
    relation: str | None = None
    #: Wall time of the backend's run, and of everything, seconds.
    run_seconds: float = 0.0
    seconds: float = 0.0
    #: Kernels that were compiled for it, its other runs' included.
    compiled: int = 0
    #: What the backend says ran.
    what_ran: Mapping[str, str | int] = field(default_factory=dict)
    #: Fingerprint of the answer's bits, for comparing two answers; None where there is no well-formed one.
    bits: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of a backend, judged; what relations between runs are made of."""

    verdict: Verdict
    regime: Regime | None = None
    inputs: Inputs | None = None
    output: Output | None = None
    #: Wall time of the backend's run, seconds.
    run_seconds: float = 0.0
    #: Kernels that were compiled for it.
    compiled: int = 0

    def result(self, case: Case, backend: Backend, seconds: float, *, relation: str | None = None) -> Result:
        """State the attempt as a result."""
        return Result(
            case=case,
            backend=backend.name,
            regime=self.regime.name if self.regime else None,
            verdict=self.verdict,
            relation=relation,
            run_seconds=self.run_seconds,
            seconds=seconds,
            compiled=self.compiled,
            what_ran=_words(self.output.what_ran) if self.output else {},
            bits=self._bits(case, backend),
        )

    def _bits(self, case: Case, backend: Backend) -> str | None:
        if self.inputs is None or self.output is None or self.verdict.kind == "ERROR":
            return None
        return None if malformed(self.inputs, self.output, backend) else fingerprint(case, self.output)


def fingerprint(case: Case, output: Output) -> str:
    """Hash the bits of a well-formed answer, output and log-sum-exp, in the rows that see a token."""
    newest = torch.tensor(case.lengths)[:, None] - case.query_tokens + torch.arange(case.query_tokens)
    seen = (newest >= 0).to(output.out.device)
    made = hashlib.blake2b(digest_size=8)
    for tensor in (output.out, output.lse):
        if tensor is not None:
            made.update(tensor[seen].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _words(what_ran: Mapping[str, Any]) -> dict[str, str | int]:
    return {str(key): value if type(value) in (str, int) else str(value) for key, value in what_ran.items()}


def run_case(
    case: Case,
    backend: Backend,
    regimes: Regimes,
    *,
    device: torch.device | str = "cpu",
    on_stage: Listener = lambda stage: None,
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

    def run() -> Attempt:
        return attempt(case, backend, regimes, device=torch.device(device), on_stage=on_stage)

    tried = settled(run(), run)
    return tried.result(case, backend, time.perf_counter() - start)


def settled(tried: Attempt, again: Callable[[], Attempt]) -> Attempt:
    """Run a wrong answer once more: where the second is right, what is wrong is that they differ."""
    if tried.verdict.fault not in WRONG:
        return tried
    second = again()
    if second.verdict.kind not in ("PASS", "UNTRUSTED"):
        return tried
    message = f"{tried.verdict.message}\n  and right when the same call is made again"
    verdict = replace(tried.verdict, fault="nondeterministic", message=message)
    return replace(tried, verdict=verdict, compiled=tried.compiled + second.compiled)


def attempt(
    case: Case,
    backend: Backend,
    regimes: Regimes,
    *,
    device: torch.device,
    arrangement: Arrangement = PLAIN,
    on_stage: Listener = lambda stage: None,
) -> Attempt:
    """Run an arrangement of a case and judge it.

    Raises:
        Inexact: if the arrangement would change a value.
        torch.OutOfMemoryError: if the GPU has no room for the inputs or the judging; what the backend asks for is its own.
    """
    regime: Regime | None = None
    before = compiled()
    try:
        arranged = arrangement.arrange(case)
        reason = why_not(backend, arranged, device)
        if isinstance(reason, Verdict):
            return Attempt(regime=_regime(regimes, backend, arranged), verdict=reason)
        if reason is not None:
            return Attempt(verdict=Verdict(kind="UNSUPPORTED", message=reason))
        regime = regimes.of(backend.name, arranged)
        output_format = backend.capabilities.output_format
        inputs = make_inputs(case, device=device, output_format=output_format, arrangement=arrangement)
    except Inexact:
        raise
    except NotEnoughMemory as short:
        return Attempt(regime=regime, verdict=Verdict(kind="UNSUPPORTED", message=str(short)))
    except torch.OutOfMemoryError:  # ours, not the backend's: answer() sees to it
        raise
    except Exception:
        return Attempt(regime=regime, verdict=Verdict(kind="ERROR", message=traceback.format_exc()))
    output, failed, seconds = run_backend(lambda: backend.run(inputs), inputs, on_stage)
    if failed is not None or output is None:
        assert failed is not None
        return Attempt(regime=regime, inputs=inputs, verdict=failed, run_seconds=seconds, compiled=compiled() - before)
    verdict = judged(inputs, output, backend, regime)
    return Attempt(
        regime=regime, inputs=inputs, output=output, verdict=verdict, run_seconds=seconds, compiled=compiled() - before
    )


def why_not(backend: Backend, case: Case, device: torch.device) -> str | Verdict | None:
    """Ask a backend why it cannot do a case; a contract that raises instead of answering is the backend's crash."""
    try:
        return backend.why_not(case, device)
    except Exception as error:
        where = "".join(traceback.format_exception(error, limit=-4))
        said = f"{backend.name} does not say whether it can do {case}: its why_not raised {type(error).__name__}: {error}"
        return Verdict(kind="FAIL", fault="crash", message=f"{clipped(said)}\n{clipped(where)}")


def _regime(regimes: Regimes, backend: Backend, case: Case) -> Regime | None:
    with contextlib.suppress(NoRegime):
        return regimes.of(backend.name, case)
    return None


def judged(inputs: Inputs, output: Output, backend: Backend, regime: Regime) -> Verdict:
    """Judge an answer, its form first; a fault of ours is an ERROR, but for a GPU's memory, which the caller sees to."""
    try:
        wrong = malformed(inputs, output, backend)
        if wrong is not None:
            return Verdict(kind="FAIL", fault="mismatch", message=wrong)
        return judge(inputs, output, regime, empty_rows=backend.capabilities.empty_rows)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return Verdict(kind="ERROR", message=traceback.format_exc())


def run_backend(call: Callable[[], Output], inputs: Inputs, on_stage: Listener) -> tuple[Output | None, Verdict | None, float]:
    """Make a call that runs a backend; its answer or the verdict of its failure, and the seconds it took."""
    on_stage("run")
    began = time.perf_counter()
    try:
        with filled():
            output = call()
        if inputs.device.type == "cuda":
            torch.cuda.synchronize(inputs.device)
        if isinstance(output, Output):
            return output, None, time.perf_counter() - began
        made = "None" if output is None else f"a {type(output).__name__}"
        verdict = Verdict(kind="FAIL", fault="mismatch", message=f"run must return an Output, it returned {made}")
    except Unsupported as refusal:
        verdict = Verdict(kind="FAIL", fault="refused", message=f"refused a case inside its contract: {refusal}")
    except Exception as error:
        # An emulator's finding knows what it is; anything else that a backend raises is a crash.
        kind = getattr(error, "verdict_kind", "FAIL")
        fault = getattr(error, "verdict_fault", "crash") if kind == "FAIL" else None
        where = "".join(traceback.format_exception(error, limit=-4))
        message = f"{clipped(f'{type(error).__name__}: {error}')}\n{clipped(where)}"
        verdict = Verdict(kind=kind, fault=fault, message=message)
    finally:
        on_stage("judge")
    return None, verdict, time.perf_counter() - began


def clipped(text: str) -> str:
    """Keep both ends of a long text, and of what is no text (half a surrogate pair) its code."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    half = LONGEST_MESSAGE // 4
    if len(text) <= 2 * half:
        return text
    return f"{text[:half]} … {len(text) - 2 * half} characters left out … {text[-half:]}"


def malformed(inputs: Inputs, output: Output, backend: Backend) -> str | None:
    """Say what is wrong with the shapes and types of an answer, or None."""
    case = inputs.case
    rows = (case.batch, case.query_tokens, case.heads)
    dtype = FORMATS[backend.capabilities.output_format].storage
    for name, tensor in (("out", output.out), ("lse", output.lse)):
        if not isinstance(tensor, torch.Tensor) and (name == "out" or tensor is not None):
            return f"{name} must be a tensor, it is a {type(tensor).__name__}"
        if tensor is not None and tensor.device != inputs.out.device:
            return f"{name} must be on {inputs.out.device}, it is on {tensor.device}"
    if tuple(output.out.shape) != (*rows, case.latent) or output.out.dtype != dtype:
        return f"out must be {dtype} {[*rows, case.latent]}, it is {output.out.dtype} {list(output.out.shape)}"
    if case.lse and backend.capabilities.returns_lse and output.lse is None:
        return "the case asks for the log-sum-exp and the backend returned none"
    if output.lse is not None and (tuple(output.lse.shape) != rows or output.lse.dtype != torch.float32):
        return f"lse must be torch.float32 {list(rows)}, it is {output.lse.dtype} {list(output.lse.shape)}"
    return None
