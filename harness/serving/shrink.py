"""Shorter and plainer traces near a failing one.

1. Steps are taken out, longest runs first; what can then not be done is left out too. Then steps become plainer, one number
   or request at a time; then the pool does.
2. The history is tried without its turns: each request admitted as long as it is at the end, and the last decode.
3. A trace is asked once. The walk ends where no shorter or plainer one fails, or when its time does.

Source: delta debugging (Zeller, Hildebrandt 2002) on a list of records; ``harness/shrink.py`` does the same for a case.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.case import Case, CaseError
from harness.serving.steps import NAMES, VERBS, Step, StepError
from harness.serving.trace import Setup, Trace, TraceError, mended

#: Fields of the shape and their plain values, in the order in which they are tried.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "heads": (1, 2, 4, 8, 16),
    "page_size": (1, 2, 4, 8, 16),
    "table": ("padded",),
    "token_padding": (0,),
    "cache_format": ("bf16",),
    "query_format": ("bf16",),
    "cache_scale": (1.0,),
    "query_scale": (1.0,),
    "softmax_scale": (192**-0.5,),
    "amplitude": (1.0,),
    "lse": (True,),
    "latent": (512,),
    "rope": (64,),
    "seed": (0,),
}
_LAYERS = ((1,), (2,), (1, 1), (2, 1), (1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkTrace:
    """Where a walk ended."""

    #: The shortest trace that fails.
    trace: Trace
    #: Traces asked.
    asked: int
    #: Whether the walk came to its end; False where the time ended first.
    complete: bool


def size(trace: Trace) -> tuple[Any, ...]:
    """Order traces from short and plain to long and strange."""
    numbers = sum(step.tokens + step.draft + step.keep + step.rows for step in trace.steps)
    shape, setup = trace.setup.shape, trace.setup
    strange = sum(getattr(shape, name) != values[0] for name, values in _PLAIN.items())
    verbs = tuple(list(VERBS).index(step.verb) for step in trace.steps)
    names = tuple(NAMES.index(name) for step in trace.steps for name in step.requests)
    return (
        len(trace.steps), sum(setup.layers), len(setup.layers), numbers, shape.heads, shape.page_size, strange, setup.pages,
        verbs, names, shape.seed,
    )  # fmt: skip


def shrink(trace: Trace, fails: Callable[[Trace], bool | None], *, seconds: float) -> ShrunkTrace:
    """Walk from a failing trace to a shortest one.

    Args:
        trace: a trace that fails.
        fails: whether a trace fails in the same way; None if it may not be asked.
        seconds: how long the walk may take.
    """
    answers: dict[Trace, bool | None] = {trace: True}
    end = time.monotonic() + seconds
    while True:
        for near in nearby(trace):
            if near not in answers and time.monotonic() > end:
                return ShrunkTrace(trace=trace, asked=len(answers) - 1, complete=False)
            if near not in answers:
                answers[near] = fails(near)
            if answers[near]:
                trace = near
                break
        else:
            return ShrunkTrace(trace=trace, asked=len(answers) - 1, complete=True)


def nearby(trace: Trace) -> Iterator[Trace]:
    """List shorter and plainer traces, large steps first."""
    own, seen = size(trace), {trace}
    for make in (_plain_pools, _shorter, _plainer_steps, _plainer_pools):
        for near in make(trace):
            if near not in seen and any(step.decodes for step in near.steps) and size(near) < own:
                seen.add(near)
                yield near


def _plain_pools(trace: Trace) -> Iterator[Trace]:
    """Try the steps on the plainest pools at once: what is asked after it is then asked in less time."""
    plain = Setup.of(Case(heads=1, lengths=(1,), page_size=2))
    for layers in _LAYERS:
        yield mended(dataclasses.replace(plain, layers=layers), trace.steps)


def _shorter(trace: Trace) -> Iterator[Trace]:
    setup, steps = trace.setup, trace.steps
    last = max((index for index, step in enumerate(steps) if step.decodes), default=-1)
    yield mended(setup, steps[: last + 1])
    if last > 0:
        yield _without_turns(trace, last)
    length = len(steps) // 2
    while length:
        for start in range(len(steps) - length, -1, -1):
            yield mended(setup, steps[:start] + steps[start + length :])
        length //= 2
    for index, step in enumerate(steps):
        if step.verb == "fork":  # the source in the fork's stead
            names = {step.requests[1]: step.requests[0]}
            later = [_renamed(each, names) for each in steps[index + 1 :] if len({*step.requests} & {*each.requests}) < 2]
            yield mended(setup, [*steps[:index], *later])
    for one, two in itertools.combinations(range(len(steps)), 2) if len(steps) <= 12 else ():
        yield mended(setup, [step for index, step in enumerate(steps) if index not in (one, two)])


def _without_turns(trace: Trace, last: int) -> Trace:
    """Admit each request of a decode as long as it is, and decode."""
    truth = trace.setup.truth()
    for step in trace.steps[:last]:
        truth.take(step)
    step = trace.steps[last]
    admits = [Step(verb="admit", requests=(name,), tokens=len(truth.tokens[name])) for name in step.requests]
    return mended(trace.setup, [*admits, step])


def _plainer_steps(trace: Trace) -> Iterator[Trace]:
    steps = trace.steps
    for index, step in enumerate(steps):
        for plainer in _plainer(step):
            yield mended(trace.setup, [*steps[:index], plainer, *steps[index + 1 :]])
    for one, two in itertools.combinations(NAMES, 2):
        yield mended(trace.setup, [_renamed(step, {one: two, two: one}) for step in steps])


def _renamed(step: Step, names: dict[str, str]) -> Step:
    return dataclasses.replace(step, requests=tuple(names.get(name, name) for name in step.requests))


def _plainer(step: Step) -> Iterator[Step]:
    """List plainer steps in a step's place."""
    changes: list[dict[str, Any]] = []
    if step.verb == "speculate":
        changes.append({"verb": "decode", "draft": 0, "keep": 0})
        changes += [{"draft": draft, "keep": min(step.keep, draft)} for draft in range(2, step.draft)]
        changes += [{"keep": keep} for keep in range(1, step.keep)]
    if step.verb == "append":
        changes.append({"verb": "decode", "tokens": 0})
    if step.pad:
        changes += [{"pad": pad} for pad in (0, *range(len(step.requests), step.pad))]
    if step.decodes and len(step.requests) > 1:
        changes += [{"requests": step.requests[:at] + step.requests[at + 1 :]} for at in range(len(step.requests))]
        changes.append({"requests": tuple(sorted(step.requests))})
    changes += [{"tokens": count} for count in sorted({1, 2, 3, step.tokens // 2, step.tokens - 1}) if 0 < count < step.tokens]
    for change in changes:
        try:
            yield dataclasses.replace(step, **change)
        except StepError:
            continue


def _plainer_pools(trace: Trace) -> Iterator[Trace]:
    setup = trace.setup
    changes: list[dict[str, Any]] = [{"layers": layers} for layers in _LAYERS if layers != setup.layers]
    changes += [{"pages": pages} for pages in (2, 3, 4, 6) if pages < setup.pages]
    for name, values in _PLAIN.items():
        for value in values:
            if value != getattr(setup.shape, name):
                with_it = _shape(setup, name, value)
                changes += [{"shape": with_it}] if with_it is not None else []
    for change in changes:
        try:
            yield mended(dataclasses.replace(setup, **change), trace.steps)
        except TraceError:
            continue


def _shape(setup: Setup, name: str, value: Any) -> Any:
    try:
        return setup.shape.replace(**{name: value})
    except CaseError:
        return None
