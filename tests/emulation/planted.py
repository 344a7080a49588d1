"""Kernels with one fault each, planted in the line that a PLANT comment marks.

1. ``PLANT=""`` is the sound kernel; another value changes exactly the line with that name in its comment.
2. They use what AITER's MLA kernels use: page tables, buffer and global copies to LDS, two buffers, commit and wait groups.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = 16
WIDTH = 64


@gluon.jit
def sum_rows(
    Cache,
    Table,
    Out,
    table_stride,
    row_stride,
    out_stride,
    count,
    PLANT: gl.constexpr,
    TILE: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Sum the rows that a request's table names, a tile at a time, while the next tile is on its way."""
    blocked: gl.constexpr = gl.BlockedLayout(
        size_per_thread=[1, 4], threads_per_warp=[4, 16], warps_per_cta=[4, 1], order=[1, 0]
    )
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    request = gl.program_id(0)
    rows = gl.arange(0, TILE, layout=gl.SliceLayout(1, blocked))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, blocked))
    buffers = gl.allocate_shared_memory(gl.float32, [2, TILE, WIDTH], shared)
    total = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, blocked))
    tiles = gl.cdiv(count, TILE)

    pages = gl.load(Table + request * table_stride + rows, mask=rows < count, other=0)
    if PLANT == "far":
        gl.amd.cdna4.async_copy.buffer_load_to_shared(buffers.index(0), Cache, pages[:, None] + columns[None, :])  # PLANT far
    else:
        wide = pages.to(gl.int64)[:, None] * row_stride + columns[None, :]
        gl.amd.cdna4.async_copy.global_load_to_shared(buffers.index(0), Cache + wide, mask=(rows < count)[:, None])
    gl.amd.cdna4.async_copy.commit_group()
    for tile in range(tiles):
        ahead = (tile + 1) * TILE + rows
        live = ahead < count
        if PLANT == "table":
            pages = gl.load(Table + request * table_stride + ahead)  # PLANT table
        else:
            pages = gl.load(Table + request * table_stride + ahead, mask=live, other=0)
        if PLANT == "overflow":
            offsets = pages[:, None] * row_stride + columns[None, :]  # PLANT overflow
            gl.amd.cdna4.async_copy.global_load_to_shared(buffers.index((tile + 1) % 2), Cache + offsets, mask=live[:, None])
        elif PLANT == "reuse":
            gl.amd.cdna4.async_copy.buffer_load_to_shared(
                buffers.index(tile % 2), Cache, pages[:, None] * row_stride + columns[None, :], mask=live[:, None]
            )
        else:
            wide = pages.to(gl.int64)[:, None] * row_stride + columns[None, :]
            gl.amd.cdna4.async_copy.global_load_to_shared(buffers.index((tile + 1) % 2), Cache + wide, mask=live[:, None])
        gl.amd.cdna4.async_copy.commit_group()
        if PLANT == "high wait":
            gl.amd.cdna4.async_copy.wait_group(2)
        elif PLANT != "no wait":
            gl.amd.cdna4.async_copy.wait_group(1)
        current = buffers.index(tile % 2)
        values = gl.amd.cdna4.async_copy.load_shared_relaxed(current, blocked)  # PLANT no wait, high wait, reuse
        total += gl.sum(gl.where((tile * TILE + rows < count)[:, None], values, 0.0), 0)
    if PLANT == "past output":
        gl.amd.cdna4.buffer_store(total, ptr=Out, offsets=(request + 1) * out_stride + columns)  # PLANT past output
    elif PLANT == "neighbour":
        other = gl.load(Out + (request ^ 1) * out_stride + columns)  # PLANT neighbour
        gl.store(Out + request * out_stride + columns, total + other)
    elif PLANT == "unknown":
        gl.store(Out + request * out_stride + columns, gl.erf(total))  # PLANT unknown
    elif PLANT == "promise":
        gl.assume(tiles >= 100)  # PLANT promise
    elif PLANT == "zero":
        gl.store(Out + request // (tiles - tiles) + columns, total)  # PLANT zero
    else:
        gl.amd.cdna4.buffer_store(total, ptr=Out, offsets=request * out_stride + columns)


@triton.jit
def scale(X, Out, factor, count, BLOCK: tl.constexpr):
    """Multiply by a factor: a Triton kernel that a Gluon kernel's launcher may run after it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Out + at, tl.load(X + at, mask=at < count, other=0.0) * factor, mask=at < count)


def line_of(plant: str) -> int:
    """Find the line that a plant marks."""
    with open(__file__, encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            _, mark, names = text.partition("# PLANT ")
            if mark and plant in (name.strip() for name in names.split(",")):
                return number
    raise LookupError(plant)
