"""The softmax weights of some requests, and sums over their tokens.

1. What wrong answers are made of is weights and sums here. Requests lie side by side, the tokens of a shorter one filled up
   with its last, which no row sees.
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
from references.problem import Problem, gather, pick, place

#: Rows decoded at a time: 16384 rows of 576 fp64 values are 72 MiB.
PIECE = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Some requests seen row by row; N is the length of the longest."""

    problem: Problem
    #: Which requests, G of them.
    requests: tuple[int, ...]
    #: Decoded query with its scale, fp64 [G, R, D].
    query: Tensor
    #: Slots of the tokens, int64 [G, N].
    slots: Tensor
    #: Decoded cache rows without the scale, fp64 [G, N, D]; None where the contexts are decoded in pieces.
    rows: Tensor | None
    #: Tokens that each row sees, int64 [G, R].
    visible: Tensor
    #: Scores, natural-log units, fp64 [G, R, N].
    scores: Tensor
    #: Log-sum-exp of the scores, fp64 [G, R].
    lse: Tensor
    #: Softmax of the scores, fp64 [G, R, N].
    probabilities: Tensor

    @property
    def size(self) -> int:
        """Count the bytes of its tensors."""
        tensors = (self.query, self.rows, self.scores, self.probabilities)
        return sum(part.numel() * part.element_size() for part in tensors if part is not None)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the requests."""
        return tuple(self.problem.lengths[request] for request in self.requests)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Walk over the decoded cache rows, without their scale: which tokens, fp64 [G, n, D]."""
        if self.rows is not None:
            yield slice(None), self.rows
            return
        step = max(1, PIECE // len(self.requests))
        for start in range(0, self.slots.shape[1], step):
            part = slice(start, start + step)
            yield part, _decode(self.problem, self.slots[:, part])

    def sum_values(self, weights: Tensor) -> Tensor:
        """Sum V over tokens: fp64 weights [G, M, N] to [G, M, L], scale applied."""
        latent, scale = self.problem.latent, self.problem.cache_scale
        total = weights.new_zeros(*weights.shape[:2], latent)
        for part, rows in self.pieces():
            total.baddbmm_(weights[..., part], rows[..., :latent], alpha=scale)
        return total

    def magnitudes(self) -> Tensor:
        """Find the largest sum of magnitudes among a row's scores: max_j of factor · Σ_d |q_d k_jd|, fp64 [G, R]."""
        factor = self.problem.softmax_scale * self.problem.cache_scale
        sizes = [(self.query.abs() @ rows.abs().mT).amax(-1) for _, rows in self.pieces()]
        return torch.stack(sizes).amax(0).mul_(factor)

    def norms(self) -> Tensor:
        """Square the norm of every V: fp64 [G, N], scale applied."""
        latent, scale = self.problem.latent, self.problem.cache_scale
        return torch.cat([rows[..., :latent].square().sum(-1) for _, rows in self.pieces()], -1).mul_(scale * scale)

    def values(self, tokens: Tensor) -> Tensor:
        """Fetch V of some tokens: int64 [G, n] to fp64 [G, n, L], scale applied."""
        latent, scale = self.problem.latent, self.problem.cache_scale
        if self.rows is not None:
            return self.rows[..., :latent].gather(1, tokens[..., None].expand(-1, -1, latent)) * scale
        return _decode(self.problem, self.slots.gather(1, tokens))[..., :latent] * scale


def weigh(problem: Problem, requests: tuple[int, ...], chosen: Tensor | None = None) -> Weights:
    """Compute the scores and softmax weights of requests that have tokens; of all rows, or of those chosen, int64."""
    device, heads = problem.query.device, problem.heads
    lengths = [problem.lengths[request] for request in requests]
    spans = [[problem.starts[request], length - 1] for request, length in zip(requests, lengths, strict=True)]
    start, last = place(spans, device).T[..., None]
    tokens = torch.arange(max(lengths), device=device)
    slots = problem.slots[start + torch.minimum(tokens, last)]
    query = decode(problem.query[pick(requests, device)], FORMATS[problem.query_format]).double() * problem.query_scale
    query = query.reshape(len(requests), -1, problem.width)
    seen = (last + 1 - torch.arange(problem.query_tokens - 1, -1, -1, device=device)).clamp_(min=0)
    visible = seen.repeat_interleave(heads, 1)
    if chosen is not None:
        query, visible = query[:, chosen], visible[:, chosen]
    rows = _decode(problem, slots) if slots.numel() <= PIECE else None
    scores = query.new_empty(*query.shape[:2], slots.shape[1])
    step = slots.shape[1] if rows is not None else max(1, PIECE // len(requests))
    for begin in range(0, slots.shape[1], step):
        part = slice(begin, begin + step)
        scores[..., part] = query @ (_decode(problem, slots[:, part]) if rows is None else rows).mT
    scores *= problem.softmax_scale * problem.cache_scale
    scores.masked_fill_(tokens >= visible[..., None], -torch.inf)
    lse = scores.logsumexp(-1)
    return Weights(
        problem=problem,
        requests=requests,
        query=query,
        slots=slots,
        rows=rows,
        visible=visible,
        scores=scores,
        lse=lse,
        probabilities=(scores - lse.nan_to_num(neginf=0.0)[..., None]).exp_(),
    )


def _decode(problem: Problem, slots: Tensor) -> Tensor:
    """Decode the cache rows of slots, without their scale: int64 [G, n] to fp64 [G, n, D]."""
    codes = gather(problem, slots.reshape(-1))
    return decode(codes, FORMATS[problem.cache_format]).double().view(*slots.shape, problem.width)
