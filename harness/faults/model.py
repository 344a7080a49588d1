"""A correct split-KV model of MLA decode with named points at which a fault may act.

1. Without acts it is right: paging, tiles, online softmax, splits, merge, scales, formats and the causal tail are those
   of a real kernel, and it rounds where its variant says, nowhere else.
2. It reads memory as a kernel does: table entries, pages and rows by computed offsets into the allocations, so that a
   wrong offset reads what lies there. Outside an allocation it raises, or reads zero where the fault models a bounded
   buffer load.
3. An act is a function (scene, value) -> value at one point; acts of several faults may be put together.
4. It uses only what a kernel is given, never the slots that the truth is computed from.

Source: the equations of ``references.decode``; the structure of split-KV decode kernels (FlashDecoding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.faults.variant import Variant
from harness.inputs import Inputs
from references.formats import FORMATS

#: The points, in the order a call passes them, and what the value is there.
POINTS: Mapping[str, str] = {
    "arguments": "the scene itself: scales, lengths, strides, page size, as the kernel believes them",
    "plan": "splits of a request, list of (start, stop)",
    "lanes": "token index and liveness of every lane, two tensors [K, M]",
    "columns": "index of each token's entry in the request's row of the block table",
    "pages": "page ids read from the table",
    "within": "offset of each token in its page, tokens",
    "offsets": "element offset of each row from the cache pointer",
    "codes": "raw codes of the rows [n, D], storage type",
    "rows": "decoded rows [K, M, D], without the cache scale; dead lanes are zero",
    "query": "decoded query [S, H, D], without the query scale",
    "scores": "scaled scores [S, H, K, M], natural-log units",
    "visible": "which lanes a query token may see, bool [S, 1, K, M]",
    "running": "running maximum of each tile [S, H, K, G]",
    "rescale": "factor that brings a tile to its split's last maximum [S, H, K, G]",
    "probabilities": "numerators before rounding [S, H, K, M], relative to the running maximum",
    "rounded": "numerators after rounding [S, H, K, M]",
    "sums": "softmax denominators of splits [S, H, K]",
    "values": "decoded V [K, M, L], without the cache scale",
    "partials": "outputs [S, H, K, L] and lse [S, H, K] that the splits write",
    "weights": "weights of the splits in the merge [S, H, K]",
    "merged": "output [S, H, L] and lse [S, H] of a request",
    "answer": "the same, as the request's answer",
    "store": "outputs [B, S, H, L], lse [B, S, H] and which rows are written, bool [B, S, H]",
    "end": "the scene, after the outputs are stored",
}

Act = Callable[["Scene", Any], Any]
Acts = Mapping[str, Sequence[Act]]

#: Integer types of a code's bytes, by its size.
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class IllegalAccess(RuntimeError):
    """A read outside every allocation; on a GPU, a memory fault."""


class Hang(RuntimeError):
    """A loop that would not end."""

    #: What a run that ends in it is taken for.
    verdict_fault = "hang"


@dataclass(slots=True)
class Scene:
    """What a call of the model knows; acts at ``arguments`` may change what it believes."""

    inputs: Inputs
    variant: Variant
    acts: Acts
    #: Kept from call to call by the backend.
    memory: dict[Any, Any]
    lengths: list[int] = field(default_factory=list)
    query_scale: float = 1.0
    #: Cache scale as it acts on K.
    key_scale: float = 1.0
    #: Cache scale as it acts on V.
    value_scale: float = 1.0
    softmax_scale: float = 1.0
    page_size: int = 1
    #: Elements from page to page, and from row to row.
    page_stride: int = 0
    token_stride: int = 0
    #: Type that cache codes are read as.
    cache_dtype: torch.dtype = torch.bfloat16
    #: What a read outside the cache does: "raise", or "zero" for a bounded buffer load.
    outside: str = "raise"
    #: Where each request's table row starts in ``entries``.
    table_starts: list[int] = field(default_factory=list)
    #: The whole table allocation, int64.
    entries: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    #: Query codes as values [B, S, H, D].
    query: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: Request whose query is answered, and request whose cache is read.
    request: int = 0
    source: int = 0
    #: Lanes of the request at hand.
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    live: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    plan: list[tuple[int, int]] = field(default_factory=list)

    def at(self, point: str, value: Any) -> Any:
        """Pass a value through the acts of a point."""
        for act in self.acts.get(point, ()):
            value = act(self, value)
        return value

    @property
    def length(self) -> int:
        """N of the request whose cache is read, as the kernel believes it."""
        return self.lengths[self.source]

    @property
    def itemsize(self) -> int:
        """Bytes of a cache code."""
        return self.inputs.cache.element_size()


def open_scene(inputs: Inputs, variant: Variant, acts: Acts, memory: dict[Any, Any]) -> Scene:
    """Lay out what a kernel is given in this call."""
    case = inputs.case
    scene = Scene(inputs=inputs, variant=variant, acts=acts, memory=memory)
    scene.lengths = inputs.lengths.tolist()
    scene.query_scale, scene.softmax_scale = case.query_scale, case.softmax_scale
    scene.key_scale = scene.value_scale = case.cache_scale
    scene.page_size = case.page_size
    scene.page_stride, scene.token_stride = inputs.cache.stride(0), inputs.cache.stride(1)
    scene.cache_dtype = inputs.cache.dtype
    if inputs.block_table is not None:
        table = inputs.block_table
        scene.entries = _allocation(table).long()
        scene.table_starts = [table.storage_offset() + b * table.stride(0) for b in range(case.batch)]
    else:
        assert inputs.kv_indices is not None and inputs.kv_indptr is not None
        scene.entries = _allocation(inputs.kv_indices).long()
        base = inputs.kv_indices.storage_offset()
        scene.table_starts = [base + start for start in inputs.kv_indptr.tolist()[:-1]]
    scene.query = torch.cat([inputs.query_nope.float(), inputs.query_rope.float()], dim=-1)
    scene.at("arguments", scene)
    return scene


def _allocation(tensor: torch.Tensor) -> torch.Tensor:
    """View the whole allocation that a tensor lies in as one row of its elements."""
    whole = torch.empty(0, dtype=tensor.dtype)
    return whole.set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def run(inputs: Inputs, variant: Variant, acts: Acts, memory: dict[Any, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Answer one decode problem and store it into the outputs of ``inputs``.

    Raises:
        IllegalAccess: if an act made it read outside the allocations.
    """
    with torch.inference_mode():
        scene = open_scene(inputs, variant, acts, memory)
        case = inputs.case
        out = torch.zeros(case.batch, case.query_tokens, case.heads, case.latent)
        lse = torch.full((case.batch, case.query_tokens, case.heads), -math.inf)
        for request in range(case.batch):
            out[request], lse[request] = answer(scene, request)
        written = torch.ones(lse.shape, dtype=torch.bool)
        out, lse, written = scene.at("store", (out, lse, written))
        for target, values in ((inputs.out, out), (inputs.lse, lse)):
            if target is not None:
                target[written] = _stored(values, target.dtype)[written]
        scene.at("end", scene)
    return inputs.out, inputs.lse


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to the output's type; a NaN becomes the quiet one, never the pattern that outputs begin with."""
    stored = values.to(dtype)
    nan = torch.isnan(values)
    if bool(nan.any()):
        # torch's vectorised conversion writes a NaN as all bits set.
        quiet = torch.tensor([math.nan], dtype=torch.float32).view(torch.int32) >> (32 - 8 * dtype.itemsize)
        stored.view(_BYTES[dtype.itemsize])[nan] = 0x7E00 if dtype == torch.float16 else int(quiet)
    return stored


def answer(scene: Scene, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer one request: output [S, H, L] and lse [S, H]."""
    scene.request = scene.source = request
    return scene.at("answer", attend(scene))  # type: ignore[no-any-return]


def attend(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the query of ``scene.request`` to the cache of ``scene.source``."""
    case, arithmetic = scene.inputs.case, scene.variant.arithmetic
    cut = scene.variant.plan(scene.length, heads=case.heads, query_tokens=case.query_tokens, batch=case.batch)
    scene.plan = scene.at("plan", cut)
    rows = _walk(scene)
    query = scene.at("query", scene.query[scene.request])
    keys = rows
    scale = scene.softmax_scale * scene.query_scale * scene.key_scale
    if arithmetic.operand is not None:
        keys = rounded_to(rows * scene.key_scale, arithmetic.operand)
        scale = scene.softmax_scale * scene.query_scale
        values = rounded_to(rows[..., : case.latent] * scene.value_scale, arithmetic.operand)
    else:
        values = rows[..., : case.latent]
    splits, lanes = scene.tokens.shape
    flat = query.reshape(-1, query.shape[-1]) @ keys.reshape(-1, keys.shape[-1]).T
    scores = flat.view(*query.shape[:2], splits, lanes) * scale
    scores = scene.at("scores", scores)
    newest = scene.length - case.query_tokens + torch.arange(case.query_tokens)
    visible = scene.live & (scene.tokens <= newest.view(-1, 1, 1))
    visible = scene.at("visible", visible[:, None])
    scores = scores.masked_fill(~visible, -math.inf)
    partials = _softmax(scene, scores, scene.at("values", values))
    return scene.at("merged", _merge(scene, *scene.at("partials", partials)))  # type: ignore[no-any-return]


def _walk(scene: Scene) -> torch.Tensor:
    """Read the rows of every lane [K, M, D]."""
    plan = scene.plan
    starts = torch.tensor([start for start, _ in plan])[:, None]
    stops = torch.tensor([stop for _, stop in plan])[:, None]
    widest = max(1, max(stop - start for start, stop in plan))
    tile = scene.variant.tile or widest
    tokens = starts + torch.arange(-(-widest // tile) * tile)
    scene.tokens, scene.live = scene.at("lanes", (tokens, tokens < stops))
    live = scene.live.flatten()
    if bool(live.all()):
        rows = read(scene, scene.tokens.flatten())
    else:
        rows = torch.zeros(live.numel(), scene.inputs.case.width)
        rows[live] = read(scene, scene.tokens.flatten()[live])
    return scene.at("rows", rows.view(*scene.tokens.shape, -1))  # type: ignore[no-any-return]


def read(scene: Scene, tokens: torch.Tensor) -> torch.Tensor:
    """Read the rows of tokens [n] of ``scene.source`` through its block table: fp32 [n, D], without the scale.

    Raises:
        IllegalAccess: if an entry or a row lies outside its allocation and ``scene.outside`` is "raise".
    """
    columns = scene.at("columns", torch.div(tokens, scene.page_size, rounding_mode="floor"))
    where = scene.table_starts[scene.source] + columns
    if where.numel() and (int(where.min()) < 0 or int(where.max()) >= scene.entries.numel()):
        raise IllegalAccess(f"read entry {int(where.max())} of a block table of {scene.entries.numel()} entries")
    pages = scene.at("pages", scene.entries[where])
    within = scene.at("within", tokens % scene.page_size)
    offsets = scene.at("offsets", pages * scene.page_stride + within * scene.token_stride)
    codes = scene.at("codes", fetch(scene, offsets))
    return codes.view(scene.cache_dtype).float()  # type: ignore[no-any-return]


def fetch(scene: Scene, offsets: torch.Tensor) -> torch.Tensor:
    """Read rows of codes [n, D] at element offsets from the cache pointer, as integers of the code's size."""
    cache, width = scene.inputs.cache, scene.inputs.case.width
    codes = _allocation(cache).view(_BYTES[cache.element_size()])
    last = codes.numel() - width
    absolute = offsets + cache.storage_offset()
    inside = (absolute >= 0) & (absolute <= last)
    windows = codes.as_strided((last + 1, width), (1, 1))
    if bool(inside.all()):
        return windows.index_select(0, absolute)
    if scene.outside == "raise":
        worst = int(absolute[~inside][0])
        raise IllegalAccess(f"read the row at element {worst} of a cache of {codes.numel()} elements")
    rows = windows.index_select(0, absolute.clamp(0, last))
    return rows * inside[:, None].to(rows.dtype)


def rounded_to(values: torch.Tensor, name: str) -> torch.Tensor:
    """Round values to a format as conversion instructions do: to nearest even, fp8 saturating."""
    fmt = FORMATS[name]
    if fmt.storage == torch.float32:
        return values
    if fmt.storage.itemsize == 1:
        values = values.clamp(-fmt.maximum, fmt.maximum)
    return values.to(fmt.storage).float()


def _softmax(scene: Scene, scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the partial output [S, H, K, L] and lse [S, H, K] of every split, tile by tile."""
    arithmetic = scene.variant.arithmetic
    tokens, heads, splits, lanes = scores.shape
    numerators, rescale, last = _numerators(scene, scores)
    lift = arithmetic.probability_scale
    if arithmetic.pivot == "normalised":
        lift = lift / numerators.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = scene.at("rounded", rounded_to(numerators * lift, arithmetic.probability))
    summed = rounded / lift if arithmetic.normaliser == "rounded" else numerators
    sums = scene.at("sums", (summed * rescale).sum(-1))
    weighted = (rounded / lift * rescale).permute(2, 0, 1, 3).reshape(splits, tokens * heads, lanes)
    accumulated = torch.bmm(weighted, values).view(splits, tokens, heads, -1).permute(1, 2, 0, 3)
    empty = sums == 0
    safe = sums.masked_fill(empty, 1.0)
    out = accumulated / safe[..., None]
    if arithmetic.operand is None:
        out = out * scene.value_scale
    if len(scene.plan) > 1:
        out = rounded_to(out, arithmetic.partial)
    return out, (last + safe.log()).masked_fill(empty, -math.inf)


def _numerators(scene: Scene, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the exponentials relative to the running maxima; with them the factors to the last one, a lane each."""
    variant = scene.variant
    tiled = scores.view(*scores.shape[:3], -1, variant.tile or scores.shape[-1])
    peaks = tiled.amax(-1)
    if variant.backward:
        running = peaks.flip(-1).cummax(-1).values.flip(-1)
        last = running[..., 0]
    else:
        running = peaks.cummax(-1).values
        last = running[..., -1]
    if variant.arithmetic.pivot != "tile":
        running = last[..., None].expand_as(running)
    running = scene.at("running", running)
    relative, shrink = tiled - _finite(running)[..., None], running - _finite(last)[..., None]
    if variant.binary:
        factor = 1 / math.log(2)
        numerators, rescale = (relative * factor).exp2(), (shrink * factor).exp2()
    else:
        numerators, rescale = relative.exp(), shrink.exp()
    rescale = scene.at("rescale", rescale)
    lanes = rescale[..., None].expand_as(tiled).reshape(scores.shape)
    return scene.at("probabilities", numerators.view(scores.shape)), lanes, last


def _merge(scene: Scene, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the splits of a request by their lse; a split that saw nothing has no weight."""
    top = _finite(lse.amax(-1, keepdim=True))
    weights = scene.at("weights", (lse - top).exp())
    total = weights.sum(-1)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    merged = (weights[..., None] * out).sum(-2) / safe[..., None]
    return merged, (top[..., 0] + safe.log()).masked_fill(empty, -math.inf)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Replace minus infinity, the maximum of nothing, by zero."""
    return values.masked_fill(values == -math.inf, 0.0)
