"""A plain model of a split-KV kernel: what a declared arithmetic does, and a few mistakes.

1. Every rounding of an arithmetic is done where it says, by tiles with a running maximum, in fp32.
2. It shares the formats with the truth and nothing of the budget.

Source: the shape that flash-decoding kernels have.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from references import formats
from references.arithmetic import Arithmetic
from references.formats import as_integers, decode, find
from references.oracle import oracle
from references.problem import Answer, Problem, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """What a wrong kernel does."""

    #: Factor on V.
    values: float = 1.0
    #: Factor on scores.
    scores: float = 1.0
    #: Newest tokens left out.
    dropped: int = 0
    #: Whether results are cut off rather than rounded when stored.
    truncated: bool = False


RIGHT = Mistake()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One split's output, [rows, L], and log-sum-exp, [rows, 1]."""

    out: Tensor
    lse: Tensor


def simulate(problem: Problem, arithmetic: Arithmetic, mistake: Mistake = RIGHT) -> Answer:
    """Decode as a kernel of an arithmetic does: fp32 values that the output format holds, and an fp32 log-sum-exp."""
    shape = (problem.batch, problem.query_tokens, problem.heads)
    out, lse = torch.zeros((*shape, problem.latent)), torch.full(shape, -torch.inf)
    launch = {"heads": problem.heads, "query_tokens": problem.query_tokens, "batch": problem.batch}
    merges = arithmetic.splits.launched(**launch) > 1
    for request, length in enumerate(problem.lengths):
        if not length:
            continue
        query, cache = operands(problem, arithmetic, request)
        seen = torch.tensor(visible(length, problem.query_tokens)).repeat_interleave(problem.heads)[:, None] - mistake.dropped
        edges = arithmetic.splits.edges(length, **launch)
        parts = [
            attend(problem, arithmetic, query, cache[start:stop], seen - start, mistake) for start, stop in pairwise(edges)
        ]
        whole = merge(parts, arithmetic, mistake) if merges else parts[0]
        out[request] = store(whole.out, arithmetic.output, mistake).view(*shape[1:], -1)
        lse[request] = whole.lse.view(shape[1:])
    return Answer(out=out, lse=lse)


def operands(problem: Problem, arithmetic: Arithmetic, request: int) -> tuple[Tensor, Tensor]:
    """Decode a request's query [rows, D] and cache [N, D] as they are multiplied, scales taken out again where applied."""
    start, size = problem.starts[request], problem.cache.shape[1]
    slots = problem.slots[start : start + problem.lengths[request]]
    codes = as_integers(problem.cache)[slots // size, slots % size].view(problem.cache.dtype)
    cache = decode(codes, find(problem.cache_format)) * problem.cache_scale
    query = decode(problem.query[request], find(problem.query_format)).view(-1, problem.width) * problem.query_scale
    if arithmetic.operand:
        cache = formats.round(cache, find(arithmetic.operand))
    if arithmetic.query:
        query = formats.round(query, find(arithmetic.query))
    return query, cache


def attend(problem: Problem, arithmetic: Arithmetic, query: Tensor, cache: Tensor, seen: Tensor, mistake: Mistake) -> Part:
    """Attend to one split, tile by tile."""
    rows, latent = len(query), problem.latent
    known, scale = find(arithmetic.probability), arithmetic.probability_scale
    maximum, total, out = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, latent)
    tile = arithmetic.tile or len(cache)
    for start in range(0, len(cache), tile):
        keys = cache[start : start + tile]
        scores = query @ keys.T * (problem.softmax_scale * mistake.scores)
        scores.masked_fill_(torch.arange(start, start + len(keys)) >= seen, -torch.inf)
        raised = torch.maximum(maximum, scores.amax(1, keepdim=True))
        pivot = raised.masked_fill(raised == -torch.inf, 0.0)
        weights, shrink = (scores - pivot).exp(), (maximum - pivot).exp()
        rounded = formats.round(weights * scale, known) / scale
        total = total * shrink + (rounded if arithmetic.normaliser == "rounded" else weights).sum(1, keepdim=True)
        out = out * shrink + rounded @ keys[:, :latent]
        maximum = raised
    live = total > 0
    return Part(
        out=torch.where(live, out / total * mistake.values, 0.0), lse=torch.where(live, maximum + total.log(), -torch.inf)
    )


def merge(parts: list[Part], arithmetic: Arithmetic, mistake: Mistake) -> Part:
    """Merge splits, their outputs stored in between."""
    lse = torch.stack([part.lse for part in parts])
    top = lse.amax(0)
    weights = (lse - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(0)
    stored = torch.stack([store(part.out, arithmetic.partial, mistake) for part in parts])
    return Part(out=torch.where(total > 0, (weights * stored).sum(0) / total, 0.0), lse=top + total.log())


def store(values: Tensor, name: str, mistake: Mistake) -> Tensor:
    """Round values to a format, or cut them off."""
    known = find(name)
    rounded = formats.round(values, known)
    if not mistake.truncated:
        return rounded
    away = rounded.abs() > values.abs()
    return torch.where(away, rounded - rounded.sign() * formats.ulp(values, known), rounded)


def errors(problem: Problem, arithmetic: Arithmetic, mistake: Mistake = RIGHT) -> Answer:
    """Simulate a kernel and subtract the truth, fp64; zeros where a query token sees nothing."""
    truth, actual = oracle(problem), simulate(problem, arithmetic, mistake)
    lse = torch.where(truth.lse == -torch.inf, 0.0, actual.lse.double() - truth.lse)
    return dataclasses.replace(truth, out=actual.out.double() - truth.out, lse=lse)
