"""The fp32 reference: MLA decode as its equations, streamed over the context.

1. The arithmetic is that of the equations over the dequantised cache, in fp32: a running maximum, a running sum and a running
   output per (request, query token, head). Stored codes are decoded exactly; scales are applied in fp32.
2. Memory does not grow with N: pieces of the context are gathered, decoded, used and dropped.
3. The longest requests come first, so that those still running are always the first ones of a batch: a piece is one gather
   and two batched products whatever the lengths are.
4. On a GPU no product uses TF32 or a reduced-precision reduction. On a CPU, scores of bf16 values may be made by bf16 dot
   products: exact products, fp32 sums.
5. On a GPU a piece is gathered and decoded on a stream of its own while the one before is multiplied: decoding waits for
   memory and fp32 products do not.
6. A query token that sees nothing gives zeros and a log-sum-exp of minus infinity.

Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; DeepSeek-V2, 2024, section 2.1, for MLA
with the up-projections absorbed. The oracle certifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.formats import decode, find
from references.precision import full_precision, onednn_products, prefers_onednn
from references.problem import Answer, Problem, gather, pick, place, visible

__all__ = ["Answer", "Problem", "mla_decode"]

#: Bytes that the temporaries of a piece may take, by kind of device. A CPU wants its pieces near its caches; a GPU wants
#: products large enough to fill it.
_PIECE_BYTES = {"cpu": 24 << 20, "cuda": 640 << 20}
#: Multiples that the tokens of a GPU's piece are cut down to, largest first: products of odd sizes leave it idle at the end.
_EVEN_TOKENS = (1024, 256)
#: Type that products and sums are made in, by kind of device.
_WORKING = {"cpu": torch.float32, "cuda": torch.float32}
#: Fewest tokens of a request in a piece: below this the products are too thin to be worth a launch.
_FEWEST_TOKENS = 64
#: Largest query value that may meet a subnormal cache value taken for zero: 2^64 times 2^-126 is nothing to a score.
_LARGE_QUERY = 2.0**64


def mla_decode(problem: Problem, *, piece_bytes: int | None = None, working: torch.dtype | None = None) -> Answer:
    """Compute a decode problem in fp32, on the device its tensors are on.

    Args:
        problem: the problem; scores must stay within fp32's range.
        piece_bytes: bytes that temporaries may take; by default what suits the device.
        working: fp32, or fp64 where its products are as fast; by default what suits the device.

    Source: s = scale * q.k over the tokens a query token sees, p = softmax(s), out = p @ v, v the latent part of k.
    Error: about 1e-6 of sum(p * |v|); every step is one fp32 rounding, and sums over a piece are products' sums.
    """
    device = problem.query.device
    limit = piece_bytes or _PIECE_BYTES.get(device.type, _PIECE_BYTES["cpu"])
    dtype = working or _WORKING.get(device.type, torch.float32)
    rows = problem.query_tokens * problem.heads
    out = torch.zeros((problem.batch, rows, problem.latent), dtype=torch.float32, device=device)
    lse = torch.full((problem.batch, rows), -torch.inf, dtype=torch.float32, device=device)
    order = sorted((b for b, length in enumerate(problem.lengths) if length), key=lambda b: -problem.lengths[b])
    # A group's decoded queries are temporaries too, and each of its requests must get its fewest tokens into a piece.
    group = max(1, limit // max(_FEWEST_TOKENS * _bytes_per_token(problem, dtype), dtype.itemsize * rows * problem.width))
    with full_precision():
        for first in range(0, len(order), group):
            requests = order[first : first + group]
            index = pick(requests, device)
            part_out, part_lse = _stream(problem, requests, limit, dtype)
            out[index], lse[index] = part_out.to(torch.float32), part_lse.to(torch.float32)
    shape = (problem.batch, problem.query_tokens, problem.heads)
    return Answer(out=out.view(*shape, problem.latent), lse=lse.view(shape))


def _bytes_per_token(problem: Problem, dtype: torch.dtype) -> int:
    """Count the temporary bytes that a token of a piece needs: its code, its row, and its scores with a mask."""
    rows = problem.query_tokens * problem.heads
    return problem.width * (problem.cache.element_size() + 4 + dtype.itemsize) + (1 + dtype.itemsize) * rows


def _decode(codes: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) if codes.is_cuda else decode(codes, find(name)).to(dtype)


def _narrow(problem: Problem, query: Tensor) -> bool:
    """Tell whether the scores' operands are bf16 values whose subnormals do not matter."""
    if query.is_cuda or any(find(name).significand > 8 for name in (problem.query_format, problem.cache_format)):
        return False
    size = query.abs()
    return bool(((size == 0) | ((size >= 2.0**-126) & (size <= _LARGE_QUERY))).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Tokens start … stop - 1 of the first requests."""

    start: int
    stop: int
    #: Requests that have tokens there.
    active: int


def _cut(lengths: list[int], rows: int, *, even: bool) -> list[_Piece]:
    """Cut contexts, the longest first, into pieces of about ``rows`` cache rows."""
    pieces: list[_Piece] = []
    start = 0
    while start < lengths[0]:
        active = sum(length > start for length in lengths)
        tokens = max(_FEWEST_TOKENS, rows // active)
        unit = next((unit for unit in _EVEN_TOKENS if unit <= tokens), 1) if even else 1
        stop = min(start + tokens // unit * unit, lengths[0])
        pieces.append(_Piece(start=start, stop=stop, active=active))
        start = stop
    return pieces


def _decoded(
    pieces: list[_Piece], fetch: Callable[[_Piece], Tensor], problem: Problem, dtype: torch.dtype
) -> Iterator[tuple[_Piece, Tensor]]:
    """Yield the decoded rows of each piece, [active * tokens, D]; they hold until the next ones are asked for."""
    device = problem.query.device
    if device.type != "cuda" or len(pieces) == 1:
        for piece in pieces:
            yield piece, _decode(fetch(piece), problem.cache_format, dtype)
        return
    # Two buffers by turns: the one is filled while the other is multiplied, and memory is bounded however far the host is
    # ahead of the device. Each side waits for what the other did last with the buffer.
    most = max((piece.stop - piece.start) * piece.active for piece in pieces)
    buffers = [torch.empty((most, problem.width), dtype=dtype, device=device) for _ in pieces[:2]]
    ours, ahead = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead.wait_stream(ours)
    used: list[torch.cuda.Event] = []

    def begin(turn: int) -> torch.cuda.Event:
        piece, buffer = pieces[turn], buffers[turn % 2]
        with torch.cuda.stream(ahead):
            codes = fetch(piece)
            if turn >= 2:
                ahead.wait_event(used[turn - 2])
            buffer[: len(codes)].copy_(codes)
            filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            filled.record(ahead)
            return filled

    ready = [begin(0)]
    for turn, piece in enumerate(pieces):
        if turn + 1 < len(pieces):
            ready.append(begin(turn + 1))
        ours.wait_event(ready[turn])
        yield piece, buffers[turn % 2][: (piece.stop - piece.start) * piece.active]
        used.append(ours.record_event())


def _stream(problem: Problem, requests: list[int], limit: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stream some requests, the longest first: output [G, S*H, L] and log-sum-exp [G, S*H]."""
    device = problem.query.device
    lengths = [problem.lengths[request] for request in requests]
    starts = place([problem.starts[request] for request in requests], device)
    last = place(lengths, device) - 1
    seen = place([visible(length, problem.query_tokens) for length in lengths], device)
    rows, latent = problem.query_tokens * problem.heads, problem.latent
    query = _decode(problem.query[pick(requests, device)], problem.query_format, dtype).reshape(
        len(requests), rows, problem.width
    )
    on_cpu = not query.is_cuda and dtype == torch.float32
    score = _Products(onednn=on_cpu and prefers_onednn(narrow=_narrow(problem, query)))
    weigh = _Products(onednn=on_cpu and prefers_onednn(narrow=False))
    maximum = query.new_full((len(requests), rows, 1), -torch.inf)
    running = Running(maximum=maximum, total=torch.zeros_like(maximum), out=query.new_zeros((len(requests), rows, latent)))

    def fetch(piece: _Piece) -> Tensor:
        """Gather the codes of a piece, [active * tokens, D]."""
        position = torch.arange(piece.start, piece.stop, device=device)
        # Past its end a request repeats its last row, hidden below: rows that nobody owns are never read.
        slots = starts[: piece.active, None] + torch.minimum(position, last[: piece.active, None])
        return gather(problem, problem.slots[slots.view(-1)])

    pieces = _cut(lengths, limit // _bytes_per_token(problem, dtype), even=device.type == "cuda")
    for piece, cache in _decoded(pieces, fetch, problem, dtype):
        active, tokens = piece.active, piece.stop - piece.start
        cache = cache.view(active, tokens, problem.width)
        scores = score.scores(query[:active], cache, problem.score_scale)
        if piece.stop > max(0, lengths[active - 1] - problem.query_tokens + 1):
            hidden = torch.arange(piece.start, piece.stop, device=device) >= seen[:active, :, None]
            by_token = scores.view(active, problem.query_tokens, problem.heads, tokens)
            by_token.masked_fill_(hidden[:, :, None], -torch.inf)
        running.first(active).add(scores, cache[..., :latent], weigh)
    out = running.out.div_(running.total).mul_(problem.cache_scale)
    lse = (running.maximum + running.total.log()).squeeze(-1)
    return torch.where(running.total > 0, out, 0.0), lse


@dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """Batched products, made by one library or another."""

    #: Whether oneDNN makes them.
    onednn: bool

    def scores(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Multiply queries [G, rows, D] and cache rows [G, n, D] to scores [G, rows, n]."""
        if not self.onednn:
            return torch.baddbmm(cache.new_empty(()), query, cache.transpose(1, 2), beta=0, alpha=scale)
        with onednn_products():  # the scaling that comes with it takes a scale of zero for none
            return torch.bmm(query, cache.transpose(1, 2)).mul_(scale)

    def add(self, out: Tensor, weights: Tensor, values: Tensor) -> None:
        """Add weights [G, rows, n] times V [G, n, L] to an output [G, rows, L]."""
        if self.onednn:
            with onednn_products():
                out.baddbmm_(weights, values)
        else:
            out.baddbmm_(weights, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A softmax-weighted sum in progress."""

    #: Largest score so far, [G, rows, 1].
    maximum: Tensor
    #: Sum of exponentials relative to it, [G, rows, 1].
    total: Tensor
    #: Sum of V weighted by them, [G, rows, L].
    out: Tensor

    def first(self, count: int) -> Running:
        """Look at the first requests; what is added there is added here."""
        return Running(maximum=self.maximum[:count], total=self.total[:count], out=self.out[:count])

    def add(self, scores: Tensor, values: Tensor, products: _Products) -> None:
        """Add a piece: scores [G, rows, n], overwritten, and values [G, n, L]."""
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))
        # Where nothing has been seen yet the maximum is minus infinity, and a difference of two of those is NaN.
        pivot = torch.where(maximum == -torch.inf, 0.0, maximum)
        weights = scores.sub_(pivot).exp_()
        shrink = (self.maximum - pivot).exp_()
        self.total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        products.add(self.out.mul_(shrink), weights, values)
        self.maximum.copy_(maximum)
