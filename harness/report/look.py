"""A failing case looked at once more: where the answer is wrong, what it looks like, and grids of its error.

1. The kernel runs again for it, in a process that may be lost: one that answers now and then, or that has just written where
   it must not, may take its process with it the next time.
2. A kernel that was lost, or that did not end, is not run again.
3. An explanation and a picture are worth no verdict: what cannot be made is left out, and said.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from harness.apart import Lost, apart
from harness.backends import registry
from harness.backends.protocol import Backend
from harness.case import Case
from harness.explain import explain, explain_crash, explain_violations, told
from harness.inputs import make_inputs
from harness.regimes import Regimes
from harness.relations import between
from harness.report.evidence import Grid, grids
from harness.run import Result

#: How long looking again may take, seconds: a process that imports torch, three runs of the kernel, the known mistakes.
SECONDS = 120.0
#: Faults of an answer, which can be looked at; the others left none, or are not about numbers.
_ANSWERS = frozenset({"mismatch", "inaccurate", "non-finite", "unwritten"})
#: Faults that left no answer, and those of memory that the kernel does not own.
_LOST, _TOUCHED = frozenset({"crash", "hang"}), frozenset({"input-changed", "guard-touched"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a second look at a failing case found."""

    #: Lines about where it is wrong and what it looks like.
    lines: tuple[str, ...] = ()
    #: Grids of the error of the smallest case and of the first one.
    grids: tuple[Grid, ...] = ()


def look_again(
    result: Result, regimes: Regimes, *, device: str, first: Case | None = None, pictures: bool = True, child: bool = True
) -> Looked:
    """Look once more at a failing case.

    Args:
        result: what became of the case; its backend is made anew by its name.
        regimes: the rules it was judged by.
        device: where it ran.
        first: the first case that showed the fault, of which pictures are made too.
        pictures: whether grids are made.
        child: whether it is done in a process that may be lost, or in this one.
    """
    call = partial(_look, result, regimes, device=device, first=first, pictures=pictures)
    if not child:
        return call()
    try:
        return apart(call, seconds=SECONDS)
    except (Lost, RuntimeError) as why:
        return Looked(lines=(f"no explanation: the kernel was run once more in a process of its own, and {why}",))


def _look(result: Result, regimes: Regimes, *, device: str, first: Case | None, pictures: bool) -> Looked:
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)  # backends launch on the current device
    backend = registry.make(result.backend)
    made: list[Grid] = []
    if pictures and result.verdict.fault in _ANSWERS and result.relation is None:
        shown = {"smallest": result.case} | ({"first": first} if first is not None and first != result.case else {})
        for role, case in shown.items():
            made += _laid(case, backend, regimes, device, role)
    return Looked(lines=tuple(_lines(result, backend, regimes, device=device)), grids=tuple(made))


def _lines(result: Result, backend: Backend, regimes: Regimes, *, device: str) -> list[str]:
    """Run a wrong answer once more and say where it is wrong and which known mistake makes the like of it.

    Args:
        result: what became of the case.
        backend: who answered; it is run in this process.
        regimes: the rules it was judged by.
        device: where it ran.
    """
    fault = result.verdict.fault
    repeated = result.relation == "repeat" and fault in _ANSWERS | {"nondeterministic"}
    if not repeated and (fault not in _ANSWERS | _LOST | _TOUCHED or result.relation is not None):
        return []
    try:
        if fault in _LOST:  # the kernel is not run again: it may take this process with it
            lost = explain_crash(result.case, regimes.of(result.backend, result.case).arithmetic)
            return told(lost, "it reads outside memory, or does not end, on this case too")
        inputs = make_inputs(result.case, device=device, output_format=backend.capabilities.output_format)
        arithmetic = regimes.of(result.backend, result.case).arithmetic
        before = []
        if repeated:  # as the relation does: another call in between
            made = make_inputs(between(result.case), device=device, output_format=backend.capabilities.output_format)
            before.append(made)
            backend.run(made)
        output = backend.run(inputs)
        if fault in _TOUCHED:
            touched = [(violation.fault, violation.buffer) for violation in inputs.violations()]
            return told(explain_violations(result.case, arithmetic, touched), "it writes the same buffer on this case too")
        return str(explain(inputs, output, arithmetic, before=before, rerun=None if before else backend.run)).splitlines()
    except Exception as error:  # an explanation is worth no verdict
        return [f"no explanation: {type(error).__name__}: {error}"]


def _laid(case: Case, backend: Backend, regimes: Regimes, device: str, role: str) -> tuple[Grid, ...]:
    try:
        return grids(case, backend, regimes.of(backend.name, case), device=device, role=role)
    except Exception:  # a picture is worth no verdict
        return ()
