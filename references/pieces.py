"""Contexts of some requests in pieces, and their softmax: the first pass of the budget.

1. Requests are laid out side by side, [G, ...], and the tokens of each in lanes, split by split: n = splits x lanes. What a
   shorter request or split lacks is filled up with its last row, hidden.
2. Rows are the R = S*H query rows of a request. Scores, weights and output are fp64.
3. A context that fits one piece is decoded once and kept; a longer one is decoded again in each pass. Pieces are whole splits,
   or whole tiles of one split.

Source: the equations in ``decode``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from references.arithmetic import Arithmetic
from references.formats import decode, find
from references.problem import Problem, gather, pick, place, visible

#: Bytes that the temporaries of a piece may take.
_PIECE_BYTES = 160 << 20
#: What filling up may cost to spare the operations of one more group, by kind of device; see ``lay_out``.
_SPARE = {"cpu": 1_000_000, "cuda": 30_000_000}
#: Smallest normal exponent of a format whose values span few enough powers of two for fp32 sums of their squares.
_NARROW = -20
#: Powers of two that V may span for the same: squares of 2^-40 times squares of errors of 2^-20 are fp32 values.
_SPAN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the tokens of some requests lie."""

    requests: tuple[int, ...]
    #: Of each request: 0, where its splits begin, and its length.
    edges: tuple[tuple[int, ...], ...]
    #: Tokens between two updates of the running maximum; 0 for whole splits at once.
    tile: int
    #: Whether splits are merged, be it a single one.
    merges: bool

    @property
    def splits(self) -> int:
        """Splits of the request that has the most."""
        return max(len(edges) for edges in self.edges) - 1

    @property
    def lanes(self) -> int:
        """Tokens of the longest split."""
        return max(stop - start for edges in self.edges for start, stop in pairwise(edges))


def lay_out(problem: Problem, arithmetic: Arithmetic) -> list[Layout]:
    """Put the requests that have tokens together, so that filling up costs less than a launch does."""
    launch = {"heads": problem.heads, "query_tokens": problem.query_tokens, "batch": problem.batch}
    merges = arithmetic.splits.launched(**launch) > 1
    # What filling up costs a lane: its row, and in each query row some tens of values and their share of the products.
    cost = problem.width + 10 * problem.query_tokens * problem.heads
    spare = _SPARE.get(problem.query.device.type, _SPARE["cpu"])
    found: list[Layout] = []
    real = 0
    order = sorted((b for b, length in enumerate(problem.lengths) if length), key=lambda b: -problem.lengths[b])
    for request in order:
        length = problem.lengths[request]
        edges = tuple(arithmetic.splits.edges(length, **launch))
        alone = Layout(requests=(request,), edges=(edges,), tile=arithmetic.tile, merges=merges)
        if found:
            last = found[-1]
            requests, together = (*last.requests, request), (*last.edges, edges)
            joined = Layout(requests=requests, edges=together, tile=arithmetic.tile, merges=merges)
            filled = len(requests) * joined.splits * joined.lanes
            if (filled - real - length) * cost <= spare and filled <= _tokens(problem):
                found[-1], real = joined, real + length
                continue
        found.append(alone)
        real = length
    return found


def _tokens(problem: Problem) -> int:
    """Count the lanes of a piece: about twenty arrays of [R, n] and five of [n, D] live at once."""
    return max(64, _PIECE_BYTES // (8 * (20 * problem.query_tokens * problem.heads + 5 * problem.width)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Lanes of some splits: n = splits x lanes."""

    #: First split, and splits.
    first: int
    splits: int
    #: First lane of each, and the one after the last.
    start: int
    stop: int
    #: Whether the splits end here.
    closes: bool
    #: Decoded rows, fp64 [G, n, D].
    keys: Tensor
    #: Scores, fp64 [G, R, n]; minus infinity where a query row does not see a token.
    scores: Tensor

    def by_split(self, values: Tensor) -> Tensor:
        """View [..., n] as [..., splits, lanes]."""
        return values.view(*values.shape[:-1], self.splits, self.stop - self.start)


#: Changes decoded values that are multiplied by a scale: (values fp64, scale) to fp64.
Change = Callable[[Tensor, float], Tensor]


class Context:
    """The contexts of some requests, decoded queries and rows changed on the way if asked for."""

    def __init__(self, problem: Problem, layout: Layout, query: Change | None = None, keys: Change | None = None) -> None:
        self.problem, self.layout, self._change = problem, layout, keys
        device, requests = problem.query.device, layout.requests
        self.rows = problem.query_tokens * problem.heads
        self.at = pick(requests, device)
        #: Decoded query, fp64 [G, R, D].
        self.query = (
            decode(problem.query[self.at], find(problem.query_format)).double().reshape(len(requests), self.rows, problem.width)
        )
        if query:
            self.query = query(self.query, problem.query_scale)
        seen = [visible(problem.lengths[request], problem.query_tokens) for request in requests]
        #: Tokens that each row sees, int64 [G, R, 1].
        self.seen = place(seen, device).repeat_interleave(problem.heads, 1)[..., None]
        # First token of each split, and the one after its last, [G, K]; then the request's first slot.
        count = layout.splits
        spans = [
            [[*edges[:-1], *[edges[-1]] * (count + 1 - len(edges))], [*edges[1:], *[edges[-1]] * (count + 1 - len(edges))]]
            for edges in layout.edges
        ]
        self._begin, self._end = place(spans, device).unbind(1)
        self._offset = place([[problem.starts[request]] for request in requests], device)
        self._kept: Piece | None = None

    def pieces(self) -> Iterator[Piece]:
        """Yield the contexts piece by piece."""
        if self._kept:
            yield self._kept
            return
        splits, lanes, tokens = self.layout.splits, self.layout.lanes, _tokens(self.problem) // len(self.layout.requests)
        together = max(1, tokens // lanes)
        tile = self.layout.tile or 1
        step = lanes if tokens >= lanes else max(1, tokens // tile) * tile
        for first in range(0, splits, together):
            for start in range(0, lanes, step):
                piece = self._piece(first, min(together, splits - first), start, min(start + step, lanes))
                if together >= splits and step >= lanes:
                    self._kept = piece
                yield piece

    def _piece(self, first: int, splits: int, start: int, stop: int) -> Piece:
        problem = self.problem
        begin, end = self._begin[:, first : first + splits, None], self._end[:, first : first + splits, None]
        token = begin + torch.arange(start, stop, device=begin.device)
        # Lanes past the end of their split are no tokens of any row, and read the request's last.
        token = token.masked_fill(token >= end, torch.iinfo(torch.int64).max).flatten(1)
        slots = torch.minimum(token, self._end[:, -1:] - 1) + self._offset
        codes = gather(problem, problem.slots[slots.view(-1)])
        keys = decode(codes, find(problem.cache_format)).double().view(*slots.shape, problem.width)
        if self._change:
            keys = self._change(keys, problem.cache_scale)
        scores = (self.query @ keys.mT).mul_(problem.score_scale).masked_fill_(token[:, None] >= self.seen, -torch.inf)
        closes = stop == self.layout.lanes
        return Piece(first=first, splits=splits, start=start, stop=stop, closes=closes, keys=keys, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """The truth about the rows of some requests; zeros for rows that see nothing."""

    #: Largest score, fp64 [G, R, 1].
    maximum: Tensor
    #: Sum of exponentials relative to it, fp64 [G, R, 1].
    total: Tensor
    #: Output before the cache scale, fp64 [G, R, L].
    out: Tensor
    #: Largest score of each split, minus infinity where none is seen, fp64 [G, R, K].
    tops: Tensor
    #: Largest magnitude of a score, fp64 [G, R, 1].
    largest: Tensor
    #: Largest magnitude in V, at least the smallest normal fp32 value, fp64 [G, 1, 1].
    height: Tensor
    #: Type in which V over its height and its square can be added up: fp32, or fp64 where V spans too many powers of two.
    dtype: torch.dtype

    @property
    def lse(self) -> Tensor:
        """Natural logarithm of the sum of exponentials, fp64 [G, R, 1]."""
        return self.maximum + self.total.log()


def softmax(context: Context) -> Softmax:
    """Run the first pass over contexts."""
    latent, groups = context.problem.latent, len(context.layout.requests)
    maximum = context.query.new_full((groups, context.rows, 1), -torch.inf)
    lowest = torch.full_like(maximum, torch.inf)
    tops = maximum.repeat(1, 1, context.layout.splits)
    total, out = torch.zeros_like(maximum), context.query.new_zeros((groups, context.rows, latent))
    height, depth = context.query.new_full((groups, 1, 1), 2.0**-126), context.query.new_full((groups, 1, 1), math.inf)
    wide = find(context.problem.cache_format).exponent_min < _NARROW
    for piece in context.pieces():
        values = piece.keys[..., :latent]
        part = tops[..., piece.first : piece.first + piece.splits]
        torch.maximum(part, piece.by_split(piece.scores).amax(-1), out=part)
        new = torch.maximum(maximum, part.amax(-1, keepdim=True))
        pivot = new.masked_fill(new == -torch.inf, 0.0)
        weights = (piece.scores - pivot).exp_()
        shrink = (maximum - pivot).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out.mul_(shrink).baddbmm_(weights, values)
        maximum = new
        lowest = torch.minimum(lowest, piece.scores.masked_fill(piece.scores == -torch.inf, torch.inf).amin(-1, keepdim=True))
        for size in (values.amax((1, 2), keepdim=True), -values.amin((1, 2), keepdim=True)):
            height = torch.maximum(height, size)
        if wide:
            depth = torch.minimum(depth, values.abs().masked_fill_(values == 0, torch.inf).amin((1, 2), keepdim=True))
    empty = total == 0
    narrow = not (wide and bool((depth < height * 2.0**-_SPAN).any()))
    maximum, total = maximum.masked_fill(empty, 0.0), total.masked_fill(empty, 1.0)
    return Softmax(
        maximum=maximum,
        total=total,
        out=(out / total).masked_fill(empty, 0.0),
        tops=tops,
        largest=torch.maximum(maximum.abs(), lowest.abs()).masked_fill(empty, 0.0),
        height=height,
        dtype=torch.float32 if narrow else torch.float64,
    )
