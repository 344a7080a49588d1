"""The softmax weights of one request, and sums over its tokens.

1. What the judge asks of a request beside its truth (wrong answers, spread of the roundings) is weights and sums here.
2. Rows are (query token, head) pairs, token-major: R = S·H. Tokens that a row does not see have score -inf, weight 0.
3. Values are decoded in pieces, so a long context needs memory for its weights only.
4. Everything is fp64: squares of squares of small weights leave fp32's range.

Source: the equations of docs/numerics.md, section Truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.formats import FORMATS, decode
from references.problem import Problem, gather

#: Tokens decoded at a time: 16384 rows of 576 fp64 values are 72 MiB.
PIECE = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One request seen row by row."""

    problem: Problem
    #: Index of the request.
    request: int
    #: Decoded query with its scale, fp64 [R, D].
    query: Tensor
    #: Decoded cache rows without the scale, fp64 [N, D]; None where the context is decoded in pieces.
    rows: Tensor | None
    #: Tokens that each row sees, int64 [R].
    visible: Tensor
    #: Scores, natural-log units, fp64 [R, N].
    scores: Tensor
    #: Log-sum-exp of the scores, fp64 [R].
    lse: Tensor
    #: Softmax of the scores, fp64 [R, N].
    probabilities: Tensor

    @property
    def size(self) -> int:
        """Count the bytes of its tensors."""
        tensors = (self.query, self.rows, self.scores, self.probabilities)
        return sum(part.numel() * part.element_size() for part in tensors if part is not None)

    @property
    def length(self) -> int:
        """N."""
        return self.problem.lengths[self.request]

    def pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        """Walk over the decoded cache rows, without their scale: start, stop, fp64 [stop - start, D]."""
        if self.rows is not None:
            yield 0, self.length, self.rows
            return
        for start in range(0, self.length, PIECE):
            stop = min(start + PIECE, self.length)
            yield start, stop, _decode(self.problem, self.request, start, stop)

    def sum_values(self, weights: Tensor) -> Tensor:
        """Sum V over tokens: fp64 weights [M, N] to [M, L], scale applied."""
        latent, scale = self.problem.latent, self.problem.cache_scale
        total = weights.new_zeros(weights.shape[0], latent)
        for start, stop, rows in self.pieces():
            total.addmm_(weights[:, start:stop], rows[:, :latent], alpha=scale)
        return total

    def magnitudes(self) -> Tensor:
        """Find the largest sum of magnitudes among a row's scores: max_j of factor · Σ_d |q_d k_jd|, fp64 [R]."""
        factor = self.problem.softmax_scale * self.problem.cache_scale
        sizes = [(self.query.abs() @ rows.abs().T).amax(-1) for _, _, rows in self.pieces()]
        return torch.stack(sizes).amax(0).mul_(factor)

    def norms(self) -> Tensor:
        """Square the norm of every V: fp64 [N], scale applied."""
        latent, scale = self.problem.latent, self.problem.cache_scale
        return torch.cat([rows[:, :latent].square().sum(-1) for _, _, rows in self.pieces()]).mul_(scale * scale)

    def values(self, tokens: Tensor) -> Tensor:
        """Fetch V of some tokens: int64 [n] to fp64 [n, L], scale applied."""
        latent, scale = self.problem.latent, self.problem.cache_scale
        if self.rows is not None:
            return self.rows[tokens, :latent] * scale
        return fetch(self.problem, self.request, tokens)[:, :latent] * scale


def weigh(problem: Problem, request: int) -> Weights:
    """Compute the scores and softmax weights of a request that has tokens."""
    length, tokens, heads = problem.lengths[request], problem.query_tokens, problem.heads
    query = decode(problem.query[request].reshape(-1, problem.width), FORMATS[problem.query_format]).double()
    query = query * problem.query_scale
    device = query.device
    counts = torch.arange(length - tokens + 1, length + 1, device=device).clamp_(min=0)
    visible = counts.repeat_interleave(heads)
    rows = _decode(problem, request, 0, length) if length <= PIECE else None
    factor = problem.softmax_scale * problem.cache_scale
    scores = query.new_empty(len(query), length)
    if rows is not None:
        torch.mm(query, rows.T, out=scores)
    else:
        for start in range(0, length, PIECE):
            stop = min(start + PIECE, length)
            scores[:, start:stop] = query @ _decode(problem, request, start, stop).T
    scores *= factor
    if tokens > 1 or length < tokens:
        last = torch.arange(max(0, length - tokens), length, device=device)
        tail = scores[:, max(0, length - tokens) :]
        tail.masked_fill_(last[None, :] >= visible[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse.nan_to_num(neginf=0.0)[:, None])
    return Weights(
        problem=problem,
        request=request,
        query=query,
        rows=rows,
        visible=visible,
        scores=scores,
        lse=lse,
        probabilities=probabilities,
    )


def fetch(problem: Problem, request: int, tokens: Tensor) -> Tensor:
    """Decode the cache rows of some tokens of a request, without their scale: int64 [n] to fp64 [n, D]."""
    slots = problem.slots[problem.starts[request] + tokens]
    return decode(gather(problem, slots), FORMATS[problem.cache_format]).double()


def _decode(problem: Problem, request: int, start: int, stop: int) -> Tensor:
    begin = problem.starts[request]
    return decode(gather(problem, problem.slots[begin + start : begin + stop]), FORMATS[problem.cache_format]).double()
