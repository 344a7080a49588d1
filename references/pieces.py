"""A request's context in pieces, and its softmax: the first pass of the budget.

1. Rows are the S*H query rows of one request. Scores, weights and output are fp64.
2. A context that fits one piece is decoded once and kept; a longer one is decoded again in each pass.

Source: the equations in ``decode``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.formats import decode, find
from references.problem import Problem, gather, visible

#: Bytes that the temporaries of a piece may take.
_PIECE_BYTES = 160 << 20
#: Smallest normal exponent of a format whose values span few enough powers of two for fp32 sums of their squares.
_NARROW = -20
#: Powers of two that V may span for the same: squares of 2^-40 times squares of errors of 2^-20 are fp32 values.
_SPAN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens start … stop - 1 of a request."""

    start: int
    stop: int
    #: Decoded rows, fp64 [n, D].
    keys: Tensor
    #: Scores, fp64 [rows, n]; minus infinity where a query row does not see a token.
    scores: Tensor


#: Changes decoded values that are multiplied by a scale: (values fp64, scale) to fp64.
Change = Callable[[Tensor, float], Tensor]


class Context:
    """One request's context, its decoded query and rows changed on the way if asked for."""

    def __init__(self, problem: Problem, request: int, query: Change | None = None, keys: Change | None = None) -> None:
        self.problem, self.request, self._change = problem, request, keys
        self.length = problem.lengths[request]
        self.rows = problem.query_tokens * problem.heads
        #: Decoded query, fp64 [rows, D].
        self.query = decode(problem.query[request], find(problem.query_format)).double().view(self.rows, problem.width)
        if query:
            self.query = query(self.query, problem.query_scale)
        seen = torch.tensor(visible(self.length, problem.query_tokens), device=self.query.device)
        #: Tokens that each row sees, int64 [rows, 1].
        self.seen = seen.repeat_interleave(problem.heads)[:, None]
        # About twenty arrays of [rows, n] and five of [n, D] live at once.
        per_token = 8 * (20 * self.rows + 5 * problem.width)
        self._tokens = max(64, min(self.length, _PIECE_BYTES // per_token))
        self._kept: Piece | None = None

    def pieces(self) -> Iterator[Piece]:
        """Yield the context piece by piece."""
        if self._kept:
            yield self._kept
            return
        offset = self.problem.starts[self.request]
        for start in range(0, self.length, self._tokens):
            stop = min(start + self._tokens, self.length)
            codes = gather(self.problem, self.problem.slots[offset + start : offset + stop])
            keys = decode(codes, find(self.problem.cache_format)).double()
            if self._change:
                keys = self._change(keys, self.problem.cache_scale)
            scores = (self.query @ keys.T).mul_(self.problem.score_scale)
            if stop > self.length - self.problem.query_tokens + 1:
                scores.masked_fill_(torch.arange(start, stop, device=keys.device) >= self.seen, -torch.inf)
            piece = Piece(start=start, stop=stop, keys=keys, scores=scores)
            if start == 0 and stop == self.length:
                self._kept = piece
            yield piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """The truth about a request's rows; zeros for rows that see nothing."""

    #: Largest score, fp64 [rows, 1].
    maximum: Tensor
    #: Sum of exponentials relative to it, fp64 [rows, 1].
    total: Tensor
    #: Output before the cache scale, fp64 [rows, L].
    out: Tensor
    #: Largest magnitude in V, at least the smallest normal fp32 value.
    height: float
    #: Type in which V over its height and its square can be added up: fp32, or fp64 where V spans too many powers of two.
    dtype: torch.dtype

    @property
    def lse(self) -> Tensor:
        """Natural logarithm of the sum of exponentials, fp64 [rows, 1]."""
        return self.maximum + self.total.log()


def softmax(context: Context) -> Softmax:
    """Run the first pass over a context."""
    latent = context.problem.latent
    maximum = context.query.new_full((context.rows, 1), -torch.inf)
    total, out = torch.zeros_like(maximum), context.query.new_zeros((context.rows, latent))
    height, depth = 2.0**-126, math.inf
    wide = find(context.problem.cache_format).exponent_min < _NARROW
    for piece in context.pieces():
        values = piece.keys[:, :latent]
        new = torch.maximum(maximum, piece.scores.amax(1, keepdim=True))
        pivot = new.masked_fill(new == -torch.inf, 0.0)
        weights = (piece.scores - pivot).exp_()
        shrink = (maximum - pivot).exp_()
        total = total * shrink + weights.sum(1, keepdim=True)
        out = out.mul_(shrink).addmm_(weights, values)
        maximum = new
        low, high = values.aminmax()
        height = max(height, -float(low), float(high))
        if wide:
            depth = min(depth, float(values.abs().masked_fill(values == 0, torch.inf).amin()))
    empty = total == 0
    return Softmax(
        maximum=maximum.masked_fill(empty, 0.0),
        total=total.masked_fill(empty, 1.0),
        out=(out / total).masked_fill(empty, 0.0),
        height=height,
        dtype=torch.float64 if depth < height * 2.0**-_SPAN else torch.float32,
    )
