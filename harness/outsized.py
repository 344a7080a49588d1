"""Regimes whose smallest case outgrows a profile: the shapes in which they are asked all the same.

1. Where a contract asks for many requests of many tokens, the bounds of a profile leave one shape. Here every batch, head
   count and number of query tokens comes with the shortest request that the contract takes beside them: fewer splits or
   more rows let requests be shorter, so that most shapes cost what the smallest costs.
2. A shape that costs more than LARGEST times the smallest is left to a larger profile; one that costs no more than CHEAP
   times as much stands in the table oftener.
3. A few requests are longer than the shortest, anywhere in the batch.

Source: AITER's bh64: 64 requests or a multiple, 64 or 128 heads, three tiles for each of one, two or four splits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from harness.acceptance import Accepts
from harness.case import Case, CaseError
from harness.profiles import Profile

#: Times the scores of the smallest shape that a shape may have, and up to which it stands in the table OFTEN times.
LARGEST, CHEAP, OFTEN = 2.1, 1.25, 4
#: How many requests of a case may be longer than the shortest, and how many times as long they may be: a case then has at
#: most a third more tokens than the smallest of 64 requests.
LONGER, TIMES = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A batch, heads and query tokens, with the shortest request that goes with them."""

    batch: int
    heads: int
    query_tokens: int
    #: Cached tokens of the shortest request, where all are as short.
    shortest: int

    @property
    def scores(self) -> int:
        """Scores of its smallest case."""
        return self.batch * self.heads * self.query_tokens * self.shortest

    def lengths(self, index: Callable[[int], int], table: Iterable[int]) -> tuple[int, ...]:
        """Draw the lengths of its requests: the shortest, but for a few that are longer.

        Args:
            index: draws an index below a number.
            table: lengths that may be drawn, ascending.
        """
        longer = [length for length in (self.shortest + 1, *table) if self.shortest < length <= TIMES * self.shortest]
        drawn = [self.shortest] * self.batch
        # As many choices as there are longer requests, so that fewer of them is simpler.
        for _ in range(index(LONGER + 1) if longer else 0):
            drawn[index(self.batch)] = longer[index(len(longer))]
        return tuple(drawn)


def shapes(
    plain: Case,
    profile: Profile,
    accepts: Accepts,
    *,
    batches: Sequence[int],
    heads: Sequence[int],
    query_tokens: Sequence[int],
) -> tuple[Shape, ...]:
    """List the shapes of a regime, plainest first, weighted by repetition; none where the plainest one fits the profile.

    Args:
        plain: the plainest case that is accepted.
        profile: how large cases may be.
        accepts: whether a case may be asked; of two lengths, if the shorter is taken so is the longer.
        batches, heads, query_tokens: what may be drawn.
    """
    smallest = _shape(plain, accepts, plain.batch, plain.heads, plain.query_tokens)
    if smallest is None or (smallest.batch * smallest.shortest <= profile.tokens and smallest.scores <= profile.scores):
        return ()
    choices = product(*(sorted(set(values)) for values in (batches, heads, query_tokens)))
    found = [shape for choice in choices if (shape := _shape(plain, accepts, *choice)) is not None]
    least = min(shape.scores for shape in found)
    most = max(LARGEST * least, profile.scores)
    return tuple(
        shape
        for shape in found
        if shape.scores <= most
        for _ in range(OFTEN if shape.scores <= max(CHEAP * least, profile.scores) else 1)
    )


def _shape(plain: Case, accepts: Accepts, batch: int, heads: int, query_tokens: int) -> Shape | None:
    def taken(length: int) -> bool:
        try:
            return accepts(plain.replace(lengths=(length,) * batch, heads=heads, query_tokens=query_tokens))
        except CaseError:
            return False

    longest = max(plain.lengths)
    if not taken(longest):
        return None
    shortest = bisect_left(range(longest), True, key=taken)
    return Shape(batch=batch, heads=heads, query_tokens=query_tokens, shortest=shortest)
