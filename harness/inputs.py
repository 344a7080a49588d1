"""The tensors of a case, in hostile memory.

1. The same case gives the same bytes on every machine and device: they are made on the host and copied.
2. A kernel owns its outputs and nothing else. Around every buffer lie guard bands; dead slots, page tails, paddings, page 0
   and whatever a fused tensor holds beside the query are poison; outputs begin as NaN.
3. A pool above 64 MiB on the host is mapped lazily: poison then lies on the live pages, their neighbours and page 0 only.
   On a GPU all of it is poison. Either way only those pages are compared afterwards.
4. Codes are written and copied as integers: floating-point copies may not keep every NaN.
5. ``slots`` is the truth's own map of the pool. A backend reads the tables.

Source: the layouts are vLLM's and SGLang's: nope as a bmm leaves it, rope as a slice of the un-absorbed query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.cache import Placement, block_table, place, pool_pages, ragged_table
from harness.case import Case
from harness.content import FAMILIES, PIECE, Aim, Request
from harness.memory import GUARD_BYTE, LAZY_BYTES, Arena, NotEnoughMemory, Violation, free_bytes
from references.decode import Problem
from references.formats import FORMATS, as_integers, decode, encode

#: On a GPU: what is left to a backend, as much again as the case takes, up to this; torch-sdpa takes 1.1 GiB and some copies.
BACKEND_BYTES = 2 << 30
#: Elements of the un-absorbed query that lie before the rope part in the transposed layout (DeepSeek's nope width).
UNABSORBED = 128
#: A NaN code of each format whose NaN is not all bits set.
_NAN_BYTES = {"e4m3fnuz": 0x80}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a backend is given, and what the truth is computed from."""

    case: Case
    device: torch.device
    #: Latent part of the query codes, [B, S, H, L], strides by ``case.query_layout``.
    query_nope: Tensor
    #: Rope part of the query codes, [B, S, H, R], strides by ``case.query_layout``.
    query_rope: Tensor
    #: The pool of cache codes, [P, T, D], unit stride in D.
    cache: Tensor
    #: Page ids, int32 [B, W]; entries past a request's pages are absurd. None for a ragged table.
    block_table: Tensor | None
    #: Ends of each request's pages in ``kv_indices``, int32 [B + 1]. None for a padded table.
    kv_indptr: Tensor | None
    #: Page ids of all requests, int32 [sum]. None for a padded table.
    kv_indices: Tensor | None
    #: N of each request, int32 [B].
    lengths: Tensor
    #: The query scale, fp32 [1].
    query_scale: Tensor
    #: The cache scale, fp32 [1].
    cache_scale: Tensor
    #: Where the output goes, [B, S, H, L]; NaN.
    out: Tensor
    #: Where the log-sum-exp goes, fp32 [B, S, H]; NaN. None if the case asks for none.
    lse: Tensor | None
    #: Token slots of all requests one after another, int64 [sum N]; the truth's, not the backend's.
    slots: Tensor
    #: The memory behind all of them.
    arena: Arena

    @property
    def query(self) -> Tensor:
        """The joint query codes, [B, S, H, D]: a view where the layout is fused, else a new tensor."""
        if self.case.query_layout == "fused":
            latent, rope = self.case.latent, self.case.rope
            return self.query_nope.as_strided((*self.query_nope.shape[:3], latent + rope), self.query_nope.stride())
        joint = torch.cat([as_integers(self.query_nope), as_integers(self.query_rope)], dim=-1)
        return joint.view(self.query_nope.dtype)

    def problem(self) -> Problem:
        """State the problem for the reference and the oracle."""
        case = self.case
        return Problem(
            query=self.query,
            query_format=case.query_format,
            query_scale=case.query_scale,
            cache=self.cache,
            cache_format=case.cache_format,
            cache_scale=case.cache_scale,
            slots=self.slots,
            lengths=case.lengths,
            softmax_scale=case.softmax_scale,
            latent=case.latent,
        )

    def violations(self) -> list[Violation]:
        """Find what a run touched and does not own."""
        return self.arena.violations()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How a case's values are arranged into tensors otherwise than plainly; relations between runs are made of these."""

    #: Requests of the case, by index, in the order of the batch; None for all in their order.
    requests: tuple[int, ...] | None = None
    #: Heads in their order; None for the plain one.
    heads: tuple[int, ...] | None = None
    #: Power of two moved from the query codes into the query scale.
    query_shift: int = 0
    #: Power of two moved from the cache codes into the cache scale.
    cache_shift: int = 0

    def arrange(self, case: Case) -> Case:
        """Make the case that the arranged tensors are a problem of."""
        lengths = case.lengths if self.requests is None else tuple(case.lengths[index] for index in self.requests)
        return case.replace(
            lengths=lengths,
            query_scale=case.query_scale * 2.0**self.query_shift,
            cache_scale=case.cache_scale * 2.0**self.cache_shift,
        )


class Inexact(ValueError):
    """A power of two cannot move out of codes that have no room for it."""


PLAIN = Arrangement()


def make_inputs(
    case: Case, *, device: torch.device | str = "cpu", output_format: str = "bf16", arrangement: Arrangement = PLAIN
) -> Inputs:
    """Make the tensors of a case.

    Args:
        case: the problem.
        device: where they go.
        output_format: number format of the output buffer.
        arrangement: how the values of ``case`` are arranged; ``Inputs.case`` is then the arranged one.

    Raises:
        NotEnoughMemory: if the device has too little free; nothing was run.
        Inexact: if the arrangement would change a value.
    """
    device = torch.device(device)
    source, case = case, arrangement.arrange(case)
    _check_memory(case, device)
    placement = place(case)
    arena = Arena(device)
    requests = _requests(source, placement, arrangement.requests or tuple(range(source.batch)))
    queries = np.stack([FAMILIES[case.content][0](request) for request in requests])
    heads = slice(None) if arrangement.heads is None else list(arrangement.heads)
    nope, rope = _lay_query(case, arena, _codes(queries, case.query_format, arrangement.query_shift)[:, :, heads])
    cache = _fill_pool(case, arena, placement, requests, queries, arrangement.cache_shift)
    tables: dict[str, Tensor | None] = dict.fromkeys(("block_table", "kv_indptr", "kv_indices"))
    if case.table == "padded":
        tables["block_table"] = _give(arena, "block_table", block_table(placement, case.table_padding))
    else:
        indptr, indices = ragged_table(placement)
        tables |= {"kv_indptr": _give(arena, "kv_indptr", indptr), "kv_indices": _give(arena, "kv_indices", indices)}
    shape = (case.batch, case.query_tokens, case.heads)
    out = arena.allocate("out", int(np.prod(shape)) * case.latent, FORMATS[output_format].storage, output=True)
    lse = arena.allocate("lse", int(np.prod(shape)), torch.float32, output=True) if case.lse else None
    inputs = Inputs(
        case=case,
        device=device,
        query_nope=nope,
        query_rope=rope,
        cache=cache,
        **tables,
        lengths=_give(arena, "lengths", np.array(case.lengths, np.int32)),
        query_scale=_give(arena, "query_scale", np.array([case.query_scale], np.float32)),
        cache_scale=_give(arena, "cache_scale", np.array([case.cache_scale], np.float32)),
        out=out.view(*shape, case.latent),
        lse=None if lse is None else lse.view(shape),
        slots=torch.from_numpy(placement.slots).to(device),
        arena=arena,
    )
    arena.seal()
    return inputs


def _requests(source: Case, placement: Placement, indices: tuple[int, ...]) -> list[Request]:
    """See each request of the batch as the source's request of that index, at its own place in the pool."""
    aim, ends = Aim.at(source), np.cumsum([0, *(source.lengths[index] for index in indices)])
    return [
        Request(case=source, index=index, slots=placement.slots[ends[row] : ends[row + 1]], aim=aim)
        for row, index in enumerate(indices)
    ]


def needed_bytes(case: Case, device: torch.device) -> int:
    """Estimate the memory that a case, its truth and the backend take on a device, bytes."""
    row = (case.width + case.token_padding) * FORMATS[case.cache_format].storage.itemsize
    tokens = sum(case.lengths)
    pool = row * case.page_size * pool_pages(case)
    if pool <= LAZY_BYTES:
        pool *= 3  # its copy, and another while they are compared
    else:  # the copies are of the live pages and their neighbours
        live = 3 * row * (tokens + case.batch * case.page_size)
        pool = 2 * live + min(pool, live if device.type == "cpu" else pool)
    # Slots and their copies; the truth works on streamed pieces, with partial results in fp64.
    own = pool + 32 * tokens + 32 * case.batch * case.query_tokens * case.heads * case.latent
    return own if device.type == "cpu" else own + min(own, BACKEND_BYTES)


def _check_memory(case: Case, device: torch.device) -> None:
    needed, free = needed_bytes(case, device), free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(f"not run: needs {needed / 2**30:.1f} GiB on {device}, {free / 2**30:.1f} GiB are free")


def _give(arena: Arena, name: str, values: NDArray[np.int32] | NDArray[np.float32]) -> Tensor:
    buffer = arena.allocate(name, values.size, torch.from_numpy(values).dtype).view(values.shape)
    return buffer.copy_(torch.from_numpy(values))


def _codes(values: NDArray[np.float32], name: str, shift: int = 0) -> Tensor:
    known = FORMATS[name]
    codes = encode(torch.from_numpy(np.ascontiguousarray(values)), known, saturate=True)
    if shift:
        shifted = torch.ldexp(decode(codes, known), torch.tensor(-shift))
        codes = encode(shifted, known)
        if not torch.equal(decode(codes, known), shifted):
            raise Inexact(f"2^{shift} cannot move out of these {name} codes")
    return as_integers(codes)


def poison_code(case: Case, name: str) -> int:
    """Find the integer that poisons one element of a format."""
    known = FORMATS[name]
    if case.poison == "large":
        return int(as_integers(encode(torch.tensor([known.maximum]), known)).item())
    return _NAN_BYTES.get(name, -1 if known.storage.itemsize > 1 else GUARD_BYTE)


def _lay_query(case: Case, arena: Arena, codes: Tensor) -> tuple[Tensor, Tensor]:
    known, latent, rope = FORMATS[case.query_format], case.latent, case.rope
    batch, tokens, heads = case.batch, case.query_tokens, case.heads
    rows = batch * tokens * heads
    if case.query_layout == "fused":
        joint = arena.allocate("query", rows * case.width, known.storage).view(batch, tokens, heads, case.width)
        nope, pe = joint[..., :latent], joint[..., latent:]
    elif case.query_layout == "transposed":
        nope = arena.allocate("query_nope", rows * latent, known.storage).view(heads, batch, tokens, latent).permute(1, 2, 0, 3)
        whole = arena.allocate("query_rope", rows * (UNABSORBED + rope), known.storage)
        as_integers(whole).fill_(poison_code(case, case.query_format))
        pe = whole.view(batch, tokens, heads, UNABSORBED + rope)[..., UNABSORBED:]
    else:
        nope = arena.allocate("query_nope", rows * latent, known.storage).view(batch, tokens, heads, latent)
        pe = arena.allocate("query_rope", rows * rope, known.storage).view(batch, tokens, heads, rope)
    as_integers(nope).copy_(codes[..., :latent])
    as_integers(pe).copy_(codes[..., latent:])
    return nope, pe


def _fill_pool(
    case: Case,
    arena: Arena,
    placement: Placement,
    requests: list[Request],
    queries: NDArray[np.float32],
    shift: int,
) -> Tensor:
    known, size = FORMATS[case.cache_format], case.page_size
    row = case.width + case.token_padding
    page = size * row + case.page_padding
    pool = arena.allocate("cache", placement.pages * page, known.storage)
    bits, poison = as_integers(pool), poison_code(case, case.cache_format)
    if pool.numel() * pool.element_size() > LAZY_BYTES:
        live = placement.live_pages
        around = np.unique(np.concatenate([[0], live - 1, live, live + 1]))
        near = torch.from_numpy(around[(around >= 0) & (around < placement.pages)])
        if arena.device.type == "cpu":
            bits.view(placement.pages, page).index_fill_(0, near, poison)
        else:
            bits.fill_(poison)
        arena.watch_rows("cache", page * pool.element_size(), near)
    else:
        bits.fill_(poison)
    cells = bits.as_strided((placement.pages, size, case.width), (page, row, 1))
    # The first request last: it owns the pages that others share with it.
    for row_of_batch, request in reversed(list(enumerate(requests))):
        for start in range(0, request.length, PIECE):
            stop = min(start + PIECE, request.length)
            values = FAMILIES[case.content][1](request, queries[row_of_batch], start, stop)
            slots = torch.from_numpy(request.slots[start:stop]).to(arena.device)
            cells[slots // size, slots % size] = _codes(values, case.cache_format, shift).to(arena.device)
    return pool.as_strided((placement.pages, size, case.width), (page, row, 1))
