"""How the fault model reads memory: lanes, block table, pages, rows.

1. It reads as a kernel does, by computed offsets into the allocations, so that a wrong offset reads what lies there.
2. Outside an allocation it raises, or reads zero where the fault models a bounded buffer load.
3. Dead lanes are masked: their rows are zero.

Source: paged KV caches of vLLM and SGLang.
"""

from __future__ import annotations

import torch

from harness.faults.scene import IllegalAccess, Scene, allocation
from references.formats import as_integers


def walk(scene: Scene) -> torch.Tensor:
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
    codes = as_integers(allocation(cache))
    last = codes.numel() - width
    absolute: torch.Tensor = offsets + int(cache.storage_offset())
    inside = (absolute >= 0) & (absolute <= last)
    windows = codes.as_strided((last + 1, width), (1, 1))
    if bool(inside.all()):
        return windows.index_select(0, absolute)
    if scene.outside == "raise":
        worst = int(absolute[~inside][0])
        raise IllegalAccess(f"read the row at element {worst} of a cache of {codes.numel()} elements")
    rows = windows.index_select(0, absolute.clamp(0, last))
    return rows * inside[:, None].to(rows.dtype)
