"""The fp32 reference: MLA decode as its equations, streamed over the context.

1. The arithmetic is that of the equations over the dequantised cache, in fp32: a running maximum, a running sum and a running
   output per (request, query token, head). Stored codes are decoded exactly; scales are applied in fp32.
2. Memory does not grow with N: pieces of the context are gathered, decoded, used and dropped.
3. The longest requests come first, so that those still running are always the first ones of a batch: a piece is one gather
   and two batched products whatever the lengths are.
4. On a GPU no product uses TF32 or a reduced-precision reduction.
5. A query token that sees nothing gives zeros and a log-sum-exp of minus infinity.

Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; DeepSeek-V2, 2024, section 2.1, for MLA
with the up-projections absorbed. The oracle certifies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.formats import decode, find
from references.precision import full_precision
from references.problem import Answer, Problem, gather, visible

__all__ = ["Answer", "Problem", "mla_decode"]

#: Bytes that the temporaries of a piece may take, by kind of device. A CPU wants its pieces near its caches; a GPU wants
#: products large enough to fill it.
_PIECE_BYTES = {"cpu": 24 << 20, "cuda": 640 << 20}
#: Fewest tokens of a request in a piece: below this the products are too thin to be worth a launch.
_FEWEST_TOKENS = 64


def mla_decode(problem: Problem, *, piece_bytes: int | None = None) -> Answer:
    """Compute a decode problem in fp32, on the device its tensors are on.

    Args:
        problem: the problem; scores must stay within fp32's range.
        piece_bytes: bytes that temporaries may take; by default what suits the device.

    Source: s = scale * q.k over the tokens a query token sees, p = softmax(s), out = p @ v, v the latent part of k.
    Error: about 1e-6 of sum(p * |v|); every step is one fp32 rounding, and sums over a piece are products' sums.
    """
    limit = piece_bytes or _PIECE_BYTES.get(problem.query.device.type, _PIECE_BYTES["cpu"])
    rows = problem.query_tokens * problem.heads
    device = problem.query.device
    out = torch.zeros((problem.batch, rows, problem.latent), dtype=torch.float32, device=device)
    lse = torch.full((problem.batch, rows), -torch.inf, dtype=torch.float32, device=device)
    order = sorted((b for b, length in enumerate(problem.lengths) if length), key=lambda b: -problem.lengths[b])
    # A group's decoded queries are temporaries too, and each of its requests must get its fewest tokens into a piece.
    group = max(1, limit // max(_FEWEST_TOKENS * _bytes_per_token(problem), 4 * rows * problem.width))
    with full_precision():
        for first in range(0, len(order), group):
            requests = order[first : first + group]
            index = torch.tensor(requests, device=device)
            out[index], lse[index] = _stream(problem, requests, limit)
    shape = (problem.batch, problem.query_tokens, problem.heads)
    return Answer(out=out.view(*shape, problem.latent), lse=lse.view(shape))


def _bytes_per_token(problem: Problem) -> int:
    """Count the temporary bytes that a token of a piece needs: its code, its fp32 row, and its scores with a mask."""
    rows = problem.query_tokens * problem.heads
    return problem.width * (problem.cache.element_size() + 4 + 4) + 5 * rows


def _stream(problem: Problem, requests: list[int], limit: int) -> tuple[Tensor, Tensor]:
    """Stream some requests, the longest first: output [G, S*H, L] and log-sum-exp [G, S*H]."""
    device = problem.query.device
    lengths = [problem.lengths[request] for request in requests]
    starts = torch.tensor([problem.starts[request] for request in requests], device=device)
    last = torch.tensor(lengths, device=device) - 1
    seen = torch.tensor([visible(length, problem.query_tokens) for length in lengths], device=device)
    rows, latent = problem.query_tokens * problem.heads, problem.latent
    query = decode(problem.query[requests], find(problem.query_format)).reshape(len(requests), rows, problem.width)
    maximum = torch.full((len(requests), rows, 1), -torch.inf, device=device)
    total = torch.zeros_like(maximum)
    out = torch.zeros((len(requests), rows, latent), device=device)
    start = 0
    while start < lengths[0]:
        active = sum(length > start for length in lengths)
        tokens = max(_FEWEST_TOKENS, limit // (active * _bytes_per_token(problem)))
        position = torch.arange(start, min(start + tokens, lengths[0]), device=device)
        # Past its end a request repeats its last row, hidden below: rows that nobody owns are never read.
        slots = starts[:active, None] + torch.minimum(position, last[:active, None])
        cache = decode(gather(problem, problem.slots[slots.view(-1)]), find(problem.cache_format))
        cache = cache.view(active, len(position), problem.width)
        scores = torch.baddbmm(cache.new_empty(()), query[:active], cache.transpose(1, 2), beta=0, alpha=problem.score_scale)
        if start + len(position) > max(0, lengths[active - 1] - problem.query_tokens + 1):
            hidden = position >= seen[:active, :, None]
            by_token = scores.view(active, problem.query_tokens, problem.heads, len(position))
            by_token.masked_fill_(hidden[:, :, None], -torch.inf)
        running = _Running(maximum[:active], total[:active], out[:active])
        running.add(scores, cache[..., :latent])
        start += len(position)
    out = out.div_(total).mul_(problem.cache_scale)
    lse = (maximum + total.log()).squeeze(-1)
    return torch.where(total > 0, out, 0.0), lse


class _Running:
    """A softmax-weighted sum in progress; it updates the tensors it is given."""

    def __init__(self, maximum: Tensor, total: Tensor, out: Tensor) -> None:
        self.maximum, self.total, self.out = maximum, total, out

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a piece: scores [G, rows, n], overwritten, and values [G, n, L]."""
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))
        # Where nothing has been seen yet the maximum is minus infinity, and a difference of two of those is NaN.
        pivot = torch.where(maximum == -torch.inf, 0.0, maximum)
        weights = scores.sub_(pivot).exp_()
        shrink = (self.maximum - pivot).exp_()
        self.total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        self.out.mul_(shrink).baddbmm_(weights, values)
        self.maximum.copy_(maximum)
