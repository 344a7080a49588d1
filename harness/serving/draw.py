"""Hypothesis strategies of serving traces.

1. A trace is built step by step beside the truth, out of steps that can be done and decodes that the backend and the regime
   accept; it is never drawn anywhere and filtered.
2. The shape is that of a drawn case of the regime. Pools are small, so that pages are used again.
3. Steps are drawn as a list of records and not as rules of a ``RuleBasedStateMachine``: a trace must be a value, to be sent to
   a process that may be lost, printed, saved and replayed; and ``shrink`` can take a step out of the middle without
   changing what the later ones mean, which a sequence of draws cannot.

Source: Hypothesis's composite strategies; the tables put numbers about the edges of pages and tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hypothesis import strategies as st

from harness.acceptance import Accepts
from harness.case import Case, CaseError
from harness.serving.steps import NAMES, Step
from harness.serving.trace import Setup, Trace
from harness.serving.truth import DEVICE, HOST, NOWHERE, Truth
from harness.strategies import draw_index

#: How often each verb stands in the table of those that can be done.
WEIGHTS = {
    "admit": 4, "decode": 6, "append": 2, "speculate": 4, "fork": 3, "free": 2, "preempt": 2, "resume": 8, "offload": 3,
    "restore": 8,
}  # fmt: skip
#: Layers of each group, plainest first.
LAYERS = ((1,), (2,), (1, 1), (2, 1), (1, 2), (3,))
#: Lengths that requests usually have: the first one that may be decoded, else the drawn one.
USUAL = (5, 17, 65, 130, 300)
#: Pages of a pool, and rows that it has at most.
PAGES, ROWS = (3, 4, 5, 6, 8, 12), 2048
#: Query tokens and padded batches that are tried; only accepted ones are drawn.
DRAFTS, PADS = (2, 3, 4, 5, 8), (0, 0, 0, 1, 2, 4, 8)


def traces(shapes: st.SearchStrategy[Case], accepts: Accepts, *, most: int) -> st.SearchStrategy[Trace]:
    """Make the strategy of the traces of a regime that a backend accepts.

    Args:
        shapes: cases of the regime; a trace has the shape of one.
        accepts: whether a case may be asked.
        most: steps of a trace.
    """

    @st.composite
    def build(draw: st.DrawFn) -> Trace:
        place = itertools.count(1000)  # past the places of the case's own draws

        def pick(count: int) -> int:
            return draw_index(draw, next(place), count)

        setup, length = _setup(draw(shapes), accepts, pick)
        truth, steps = setup.truth(), []
        for left in reversed(range(2 + pick(most - 1))):
            step = _last(setup, truth, accepts) if not left else None
            step = step or _step(setup, truth, accepts, pick, length)
            if step is not None:
                truth.take(step)
                steps.append(step)
        if not any(step.decodes for step in steps):
            only = NAMES[:1]
            steps = [Step(verb="admit", requests=only, tokens=length), Step(verb="decode", requests=only)]
        return Trace(setup=setup, steps=tuple(steps))

    return build()


def _setup(case: Case, accepts: Accepts, pick: Callable[[int], int]) -> tuple[Setup, int]:
    """Draw the pool, and find a length of requests that may be decoded."""
    size, own = case.page_size, max(*case.lengths, 1)
    length = next((each for each in USUAL if each <= own and _fits(case, (1,), own, each, accepts)), own)
    most = max(ROWS // size, -(-length // size) + 2)
    pages = [min(count + 2 * (length // size), most) for count in PAGES]
    chosen = pages[pick(len(pages))]
    layers = [each for each in LAYERS if _fits(case, each, chosen, length, accepts)] or [(1,)]
    return Setup.of(case, pages=chosen, layers=layers[pick(len(layers))]), length


def _last(setup: Setup, truth: Truth, accepts: Accepts) -> Step | None:
    """Decode all requests that can be, so that nothing that was done stays unseen."""
    names = tuple(sorted(name for name, here in truth.where.items() if here == DEVICE))
    for batch in (names, names[:1]):
        step = Step(verb="decode", requests=batch) if batch else None
        if step is not None and truth.why_not(step) is None and _accepted(setup, truth, step, accepts):
            return step
    return None


def _fits(case: Case, layers: tuple[int, ...], pages: int, length: int, accepts: Accepts) -> bool:
    """Tell whether a decode of the drawn length is accepted in every group."""
    setup = Setup.of(case, pages=pages, layers=layers)
    try:
        return all(accepts(setup.case(group, 1, (length,))) for group in range(len(layers)))
    except CaseError:
        return False


def _step(setup: Setup, truth: Truth, accepts: Accepts, pick: Callable[[int], int], length: int) -> Step | None:
    """Draw one of the steps that can be done."""
    at = {place: sorted(name for name, here in truth.where.items() if here == place) for place in (DEVICE, HOST, NOWHERE)}
    new = [name for name in NAMES if name not in truth.where]
    whose = {
        "admit": new[:1], "fork": at[DEVICE] if new else [], "resume": at[NOWHERE], "restore": at[HOST],
        "free": sorted(truth.where),
    }  # fmt: skip
    table = [verb for verb, weight in WEIGHTS.items() if whose.get(verb, at[DEVICE]) for _ in range(weight)]
    while table:
        verb = table[pick(len(table))]
        names = whose.get(verb, at[DEVICE])
        for step in _tries(setup, verb, names, new, pick, length):
            if truth.why_not(step) is None and _accepted(setup, truth, step, accepts):
                return step
        table = [other for other in table if other != verb]
    return None


def _tries(
    setup: Setup, verb: str, names: list[str], new: list[str], pick: Callable[[int], int], length: int
) -> Iterator[Step]:
    """Draw a step of a verb, and smaller ones where it cannot be done."""
    name, size = names[pick(len(names))], setup.shape.page_size
    if verb in ("decode", "speculate"):
        mask = 1 + pick((1 << len(names)) - 1)
        batch = [each for index, each in enumerate(names) if mask >> index & 1]
        turn = pick(len(batch))
        batch = batch[turn:] + batch[:turn]
        pads = [pad for pad in PADS if not pad or pad >= len(batch)]
        pad = pads[pick(len(pads))]
        draft = DRAFTS[pick(len(DRAFTS))] if verb == "speculate" else 0
        keep = 1 + pick(draft) if draft else 0
        for own in ((pad, batch), (0, batch), (0, batch[:1])):
            yield Step(verb=verb, requests=tuple(own[1]), draft=draft, keep=keep, pad=own[0])
    elif verb in ("admit", "append"):
        edges = {1, 2, 3, size - 1, size, size + 1, 2 * size + 1, 65, 130, length}
        numbers = sorted(number for number in edges if 1 <= number <= ROWS)
        count = numbers[pick(len(numbers))]
        yield from (Step(verb=verb, requests=(name,), tokens=each) for each in dict.fromkeys((count, length, 1)))
    elif verb == "fork":
        yield Step(verb=verb, requests=(name, new[0]))
    else:
        yield Step(verb=verb, requests=(name,))


def _accepted(setup: Setup, truth: Truth, step: Step, accepts: Accepts) -> bool:
    try:
        return not step.decodes or all(accepts(case) for case in setup.cases(step, truth))
    except CaseError:
        return False
