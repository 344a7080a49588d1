"""The other side of a backend's contract: cases that it must refuse.

1. Cases are one field, or two, off a case that the backend accepts, and only those that its ``why_not`` rejects.
2. A refusal is an exception. An answer, right or wrong, is ``accepted-unsupported``.
3. A backend that rejects nothing among what is tried has nothing to refuse; that is no failure.

Source: a cell that a kernel's table lacks has returned garbage in the field; see ``docs/why.md``.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import torch

from harness.axes import AXES, HEADS
from harness.backends.protocol import Backend, Unsupported
from harness.case import Case, CaseError
from harness.inputs import make_inputs
from harness.memory import NotEnoughMemory
from harness.regimes import REFUSAL
from harness.run import Listener, Result, why_not
from harness.verdict import Verdict

#: Axes of numbers, beside those of ``strategies.AXES``.
_NUMBERS = {
    "heads": tuple(dict.fromkeys(HEADS)),
    "query_tokens": tuple(range(1, 17)),
    "lengths": ((0,), (1,), (64,), (0, 64), (64, 65), (1000,), (64,) * 3, (130,) * 64),
}


def rejected(backend: Backend, device: torch.device, count: int, *, seed: int) -> list[Case]:
    """Choose cases that the backend says it cannot do; at most ``count``, each reason once before any twice."""
    groups: dict[str, list[Case]] = {}
    for case in _around():
        reason = why_not(backend, case, device)
        if isinstance(reason, str):  # a contract that raises is no word on it: the searches ask such cases, and say so
            groups.setdefault(_shape(reason), []).append(case)
    draw = random.Random(seed)
    for cases in groups.values():
        draw.shuffle(cases)
    turns = itertools.zip_longest(*groups.values())
    return list(itertools.islice((case for turn in turns for case in turn if case is not None), count))


def refusal(case: Case, backend: Backend, device: torch.device, *, on_stage: Listener = lambda stage: None) -> Result:
    """Ask a backend for a case that it rejects; ``on_stage`` hears "run" before the backend runs and "judge" after."""
    began = time.perf_counter()
    reason = why_not(backend, case, device)
    if isinstance(reason, Verdict):
        return _refused(case, backend, reason, began)
    if reason is None:
        return _refused(
            case, backend, Verdict(kind="UNSUPPORTED", message="it can do this case: there is nothing to refuse"), began
        )
    try:
        inputs = make_inputs(case, device=device, output_format=backend.capabilities.output_format)
        on_stage("run")
        backend.run(inputs)
    except NotEnoughMemory as short:
        verdict = Verdict(kind="UNSUPPORTED", message=str(short))
    except Unsupported as refused:
        verdict = Verdict(kind="UNSUPPORTED", message=f"refused: {refused}")
    except Exception as error:
        # Not our word for it, but an error and no answer.
        verdict = Verdict(kind="UNSUPPORTED", message=f"refused with {type(error).__name__}: {error}")
    else:
        message = f"{case}\n  {backend.name} says it cannot do this ({reason}) and answered instead of raising Unsupported"
        verdict = Verdict(kind="FAIL", fault="accepted-unsupported", message=message)
    on_stage("judge")
    return _refused(case, backend, verdict, began)


def _refused(case: Case, backend: Backend, verdict: Verdict, began: float) -> Result:
    seconds = time.perf_counter() - began
    return Result(case=case, backend=backend.name, regime=None, relation=REFUSAL, verdict=verdict, seconds=seconds)


def _around() -> Iterator[Case]:
    """List cases around the plainest, in one axis and in pairs of axes, formats with everything."""
    plain = Case(heads=16, lengths=(64,))
    axes = [(axis.fields, axis.values) for axis in AXES]
    axes += [((name,), tuple((value,) for value in values)) for name, values in _NUMBERS.items()]
    choices = [[dict(zip(fields, value, strict=True)) for value in values] for fields, values in axes]
    formats = choices[0]
    for changes in itertools.chain(
        ({**one} for axis in choices for one in axis),
        ({**kind, **one} for kind in formats for axis in choices[1:] for one in axis),
    ):
        try:
            yield plain.replace(**changes)
        except CaseError:
            continue


def _shape(reason: str) -> str:
    """Strip the numbers of a reason: what is left tells reasons apart."""
    return "".join(mark for mark in reason if not mark.isdigit())
