"""Smaller and simpler cases near a failing one.

1. Every axis of a case has an order from plain to strange; a neighbour is one step plainer in one of them.
2. ``shrink`` walks from a failing case to one whose every accepted neighbour passes: large steps first, small ones last;
   then it looks for a shorter one with content that shows more, since a length counts for more than plain content.
3. The smallest passing neighbour is the answer to "what must be there for it to fail".
4. A case is asked once, however often the walk comes by.

Source: delta debugging (Zeller, Hildebrandt 2002) on a tuple of ordered axes, after Hypothesis has done the coarse work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.case import CONTENTS, PLACEMENTS, POISONS, QUERY_LAYOUTS, TABLES, Case, CaseError

#: Fields with a plain value, in the order in which the walk tries to make them plain.
_WORDS: dict[str, tuple[Any, ...]] = {
    "placement": PLACEMENTS,
    "query_layout": QUERY_LAYOUTS,
    "table": TABLES,
    "content": tuple(CONTENTS),
    "lse": (True, False),
    "poison": POISONS,
}
#: Content that shows a fault of few tokens plainly.
SHARP = ("rising", "newest", "slots")
#: Tile, page and split sizes past which a walk that has ended looks once more.
EDGES = (0, 1, 16, 32, 64, 128, 256, 512)
_NUMBERS = ("table_padding", "token_padding", "page_padding", "pool_rows", "seed")
_FACTORS = ("cache_scale", "query_scale", "softmax_scale", "amplitude")
_COUNTS = ("heads", "query_tokens", "page_size")
_PLAIN = Case(heads=1, lengths=(1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """Where a walk ended."""

    #: The smallest case that fails.
    case: Case
    #: The smallest case next to it that passes; None where nothing next to it was accepted and passed.
    neighbour: Case | None
    #: What the neighbour has instead, in words: "lengths 64 instead of 65".
    difference: str
    #: What the other passing neighbours have instead.
    others: tuple[str, ...] = ()
    #: Cases asked.
    asked: int
    #: Whether every neighbour was asked; False where the time ended first.
    complete: bool


def size(case: Case) -> tuple[Any, ...]:
    """Order cases from plain to strange: requests, tokens, heads, query tokens, then every other axis."""
    words = tuple(order.index(getattr(case, field)) for field, order in _WORDS.items())
    numbers = tuple(getattr(case, field) for field in _NUMBERS)
    factors = tuple(getattr(case, field) != getattr(_PLAIN, field) for field in _FACTORS)
    return (
        case.batch,
        sum(case.lengths),
        case.heads,
        case.query_tokens,
        case.page_size,
        case.width,
        words,
        factors,
        numbers,
        case.lengths,
    )


def steps(case: Case) -> Iterator[Case]:
    """List smaller and plainer cases, large steps first."""
    return _changed(case, _steps(case))


def neighbours(case: Case) -> Iterator[Case]:
    """List the cases one step smaller or plainer, one axis at a time; lengths, heads and query tokens first."""
    return _changed(case, _neighbours(case))


def _changed(case: Case, changes: Iterator[dict[str, Any]]) -> Iterator[Case]:
    """Make the cases that differ in some fields, each once; those that cannot exist are left out."""
    seen = {case}
    for fields in changes:
        try:
            made = case.replace(**fields)
        except CaseError:
            continue
        if made not in seen:
            seen.add(made)
            yield made


def shrink(case: Case, fails: Callable[[Case], bool | None], *, seconds: float) -> Shrunk:
    """Walk from a failing case to one whose every accepted neighbour passes.

    Args:
        case: a case that fails.
        fails: whether a case fails in the same way; None if it may not be asked.
        seconds: how long the walk may take.
    """
    answers: dict[Case, bool | None] = {case: True}
    end = time.monotonic() + seconds

    def ask(near: Case) -> bool | None:
        if near not in answers:
            if time.monotonic() > end:
                raise TimeoutError
            answers[near] = fails(near)
        return answers[near]

    complete = True
    try:
        while (smaller := next((near for near in _smaller(case) if ask(near)), None)) is not None:
            case = smaller
    except TimeoutError:
        complete = False
    passing = [near for near in neighbours(case) if answers.get(near) is False]
    # Lengths, heads and query tokens come before the other axes; a case without a token passes whatever the kernel does.
    passing.sort(key=lambda near: max(near.lengths) == 0)
    neighbour = passing[0] if passing else None
    return Shrunk(
        case=case,
        neighbour=neighbour,
        difference=difference(case, neighbour) if neighbour else "",
        others=tuple(difference(case, near) for near in passing[1:]),
        asked=sum(answer is not None for answer in answers.values()) - 1,
        complete=complete,
    )


def _smaller(case: Case) -> Iterator[Case]:
    yield from steps(case)
    yield from neighbours(case)
    yield from sharper(case)


def sharper(case: Case) -> Iterator[Case]:
    """List cases just past shorter edges whose content shows more: plain content may need luck to show a fault there."""
    longest = max(case.lengths)
    place = case.lengths.index(longest)
    for length in (edge + 1 for edge in EDGES if edge + 1 < longest):
        lengths = (*case.lengths[:place], length, *case.lengths[place + 1 :])
        yield from (case.replace(lengths=lengths, content=content) for content in SHARP if content != case.content)


def difference(case: Case, other: Case) -> str:
    """Say in words what another case has instead."""
    parts = []
    for field in Case.__dataclass_fields__:
        one, two = getattr(case, field), getattr(other, field)
        if one != two:
            parts.append(f"{field.replace('_', ' ')} {_show(two)} instead of {_show(one)}")
    return ", ".join(parts)


def _show(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _steps(case: Case) -> Iterator[dict[str, Any]]:
    lengths = case.lengths
    if len(lengths) > 1:
        half = len(lengths) // 2
        yield from ({"lengths": kept} for kept in (lengths[:1], lengths[-1:], lengths[:half], lengths[half:]))
    for index, length in enumerate(lengths):
        for shorter in _descent(length, 0):
            yield {"lengths": (*lengths[:index], shorter, *lengths[index + 1 :])}
    for field in _COUNTS:
        yield from ({field: value} for value in _descent(getattr(case, field), 1))
    for field in (*_WORDS, *_NUMBERS, *_FACTORS):
        yield {field: getattr(_PLAIN, field)}
    yield {"latent": _PLAIN.latent, "rope": _PLAIN.rope}


def _neighbours(case: Case) -> Iterator[dict[str, Any]]:
    lengths = case.lengths
    for index, length in enumerate(lengths):
        if length:
            yield {"lengths": (*lengths[:index], length - 1, *lengths[index + 1 :])}
    if len(lengths) > 1:
        yield from ({"lengths": (*lengths[:index], *lengths[index + 1 :])} for index in range(len(lengths)))
    for field in _COUNTS:
        value = getattr(case, field)
        # A power of two steps to the next one: kernels accept few page sizes and heads between.
        yield from ({field: smaller} for smaller in (value - 1, value // 2) if smaller)
    for field, order in _WORDS.items():
        place = order.index(getattr(case, field))
        yield from ({field: value} for value in reversed(order[:place]))
    for field in (*_NUMBERS, *_FACTORS):
        yield {field: getattr(_PLAIN, field)}


def _descent(value: int, least: int) -> Iterator[int]:
    """List smaller values from the least on, each halving the distance to ``value``."""
    gap = value - least
    while gap > 0:
        yield value - gap
        gap //= 2
