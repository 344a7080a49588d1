"""The CDNA4 Gluon kernel of `gluon-splitkv`, and the Triton kernel that merges its splits.

1. A program holds 16 heads of one query token and walks one split of one request, a tile of 64 tokens at a time, while the
   next tile is on its way into the other LDS buffer.
2. Cache addresses are 64 bits wide: pools above 2 GiB need no path of their own.
3. A program without tokens writes zeros and -inf, so that the merge may read every split.
4. Operands are bf16 (fp8 widens exactly), sums fp32, probabilities bf16, partial outputs and their log-sum-exp fp32.

Source: the streamed softmax of FlashAttention (arXiv 2205.14135, 2307.08691); the split-KV form of Flash-Decoding.
"""

# A kernel's parameters have Triton's types or none, its decorator has no Python type, and a constant may be set in either
# branch of another.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-redef"

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

#: tokens a program holds at a time
TILE = 64
#: heads of a program: the M of the matrix instruction
BLOCK = 16


@gluon.jit
def locate(Table, first, token, live, page_size, page_stride, token_stride):
    """Find where the rows of tokens begin in the pool; 64 bits wide."""
    page = gl.load(Table + first + token // page_size, mask=live, other=0)
    return page.to(gl.int64) * page_stride + (token % page_size).to(gl.int64) * token_stride


@gluon.jit
def attend(
    QueryNope,
    QueryRope,
    Cache,
    Table,
    Starts,
    Lengths,
    Partial,
    PartialLse,
    score_scale,
    value_scale,
    nope_batch,
    nope_token,
    nope_head,
    rope_batch,
    rope_token,
    rope_head,
    table_stride,
    page_size,
    page_stride,
    token_stride,
    heads,
    query_tokens,
    splits,
    RAGGED: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK: gl.constexpr,
    EIGHT_BITS: gl.constexpr,
):
    """Attend to one split."""
    LOG2E: gl.constexpr = 1.4426950408889634
    query_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 64], [4, 1], [1, 0])
    mfma: gl.constexpr = gl.amd.AMDMFMALayout(version=4, instr_shape=[16, 16, 32], transposed=True, warps_per_cta=[1, 4])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mfma, k_width=8)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mfma, k_width=8)
    # A lane copies 16 bytes and a wave 1024 in a row: the padding comes between waves.
    if EIGHT_BITS:
        latent_layout: gl.constexpr = gl.BlockedLayout([1, 16], [2, 32], [4, 1], [1, 0])
        rope_layout: gl.constexpr = gl.BlockedLayout([1, 16], [16, 4], [4, 1], [1, 0])
        padding: gl.constexpr = [[1024, 16]]
    else:
        latent_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 64], [4, 1], [1, 0])
        rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 8], [4, 1], [1, 0])
        padding: gl.constexpr = [[512, 16]]
    latent_shared: gl.constexpr = gl.PaddedSharedLayout.with_identity_for(padding, [TILE, LATENT], [1, 0])
    rope_shared: gl.constexpr = gl.PaddedSharedLayout.with_identity_for(padding, [TILE, ROPE], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, mfma)

    request = gl.program_id(0)
    split = gl.program_id(1)
    blocks = gl.cdiv(heads, BLOCK)
    block = gl.program_id(2) % blocks
    query_token = gl.program_id(2) // blocks

    length = gl.load(Lengths + request)
    if RAGGED:
        first = gl.load(Starts + request)
    else:
        first = request * table_stride
    span = gl.cdiv(gl.cdiv(length, splits), TILE) * TILE
    start = split * span
    end = gl.minimum(start + span, length)
    visible = gl.minimum(end, length - query_tokens + query_token + 1)

    head_out = block * BLOCK + gl.arange(0, BLOCK, rows)
    row_out = ((request * query_tokens + query_token) * heads + head_out) * splits + split
    column_out = gl.arange(0, LATENT, gl.SliceLayout(0, mfma))
    lse_offset = row_out
    out_offset = row_out.to(gl.int64)[:, None] * LATENT + column_out[None, :]
    if start >= visible:
        nothing = gl.zeros([BLOCK, LATENT], gl.float32, mfma)
        gl.store(Partial + out_offset, nothing, mask=(head_out < heads)[:, None])
        gl.store(PartialLse + lse_offset, gl.full([BLOCK], float("-inf"), gl.float32, rows), mask=head_out < heads)
        return

    head = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, query_layout))
    nope_column = gl.arange(0, LATENT, gl.SliceLayout(0, query_layout))
    rope_column = gl.arange(0, ROPE, gl.SliceLayout(0, query_layout))
    nope_row = request * nope_batch + query_token * nope_token + head * nope_head
    rope_row = request * rope_batch + query_token * rope_token + head * rope_head
    live_head = (head < heads)[:, None]
    query = gl.load(QueryNope + nope_row[:, None] + nope_column[None, :], mask=live_head, other=0.0)
    query = gl.convert_layout(query, left)
    query_rope = gl.load(QueryRope + rope_row[:, None] + rope_column[None, :], mask=live_head, other=0.0)
    query_rope = gl.convert_layout(query_rope, left)

    latents = gl.allocate_shared_memory(Cache.dtype.element_ty, [2, TILE, LATENT], latent_shared)
    ropes = gl.allocate_shared_memory(Cache.dtype.element_ty, [2, TILE, ROPE], rope_shared)
    latent_token = gl.arange(0, TILE, gl.SliceLayout(1, latent_layout))
    rope_token_at = gl.arange(0, TILE, gl.SliceLayout(1, rope_layout))
    latent_column = gl.arange(0, LATENT, gl.SliceLayout(0, latent_layout))
    cache_rope_column = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, rope_layout))

    token = start + latent_token
    row = locate(Table, first, token, token < end, page_size, page_stride, token_stride)
    gl.amd.cdna4.async_copy.global_load_to_shared(
        latents.index(0), Cache + row[:, None] + latent_column[None, :], mask=(token < end)[:, None], other=0.0
    )
    token = start + rope_token_at
    row = locate(Table, first, token, token < end, page_size, page_stride, token_stride)
    gl.amd.cdna4.async_copy.global_load_to_shared(
        ropes.index(0), Cache + row[:, None] + cache_rope_column[None, :], mask=(token < end)[:, None], other=0.0
    )
    gl.amd.cdna4.async_copy.commit_group()

    greatest = gl.full([BLOCK], float("-inf"), gl.float32, rows)
    total = gl.zeros([BLOCK], gl.float32, rows)
    out = gl.zeros([BLOCK, LATENT], gl.float32, mfma)
    tiles = gl.cdiv(visible - start, TILE)
    for tile in range(tiles):
        ahead = start + (tile + 1) * TILE
        token = ahead + latent_token
        row = locate(Table, first, token, token < end, page_size, page_stride, token_stride)
        gl.amd.cdna4.async_copy.global_load_to_shared(
            latents.index((tile + 1) % 2), Cache + row[:, None] + latent_column[None, :], mask=(token < end)[:, None], other=0.0
        )
        token = ahead + rope_token_at
        row = locate(Table, first, token, token < end, page_size, page_stride, token_stride)
        gl.amd.cdna4.async_copy.global_load_to_shared(
            ropes.index((tile + 1) % 2),
            Cache + row[:, None] + cache_rope_column[None, :],
            mask=(token < end)[:, None],
            other=0.0,
        )
        gl.amd.cdna4.async_copy.commit_group()
        gl.amd.cdna4.async_copy.wait_group(1)

        keys = latents.index(tile % 2).permute([1, 0]).load(right).to(gl.bfloat16)
        scores = gl.amd.cdna4.mfma(query, keys, gl.zeros([BLOCK, TILE], gl.float32, mfma))
        rope_keys = ropes.index(tile % 2).permute([1, 0]).load(right).to(gl.bfloat16)
        scores = gl.amd.cdna4.mfma(query_rope, rope_keys, scores)
        position = start + tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, mfma))
        scores = gl.where((position < visible)[None, :], scores * score_scale, float("-inf"))
        # The first token of a tile that is walked is visible, so the maximum is finite.
        higher = gl.maximum(greatest, gl.max(scores, 1))
        fade = gl.exp2((greatest - higher) * LOG2E)
        weights = gl.exp2((scores - higher[:, None]) * LOG2E)
        total = total * fade + gl.sum(weights, 1)
        greatest = higher
        values = latents.index(tile % 2).load(right).to(gl.bfloat16)
        out = gl.amd.cdna4.mfma(gl.convert_layout(weights.to(gl.bfloat16), left), values, out * fade[:, None])
    gl.amd.cdna4.async_copy.wait_group(0)

    out = out * value_scale / total[:, None]
    gl.store(Partial + out_offset, out, mask=(head_out < heads)[:, None])
    gl.store(PartialLse + lse_offset, greatest + gl.log(total), mask=head_out < heads)


@triton.jit
def merge(
    Partial,
    PartialLse,
    Out,
    Lse,
    splits,
    HAS_LSE: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the splits of one row: a query token of a request, and a head."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, LATENT)
    lse = tl.load(PartialLse + row * splits + split, mask=split < splits, other=-float("inf"))
    greatest = tl.max(lse, 0)
    if greatest == -float("inf"):
        tl.store(Out + row * LATENT + column, tl.zeros([LATENT], tl.bfloat16))
        if HAS_LSE:
            tl.store(Lse + row, -float("inf"))
    else:
        weight = tl.exp(lse - greatest)
        total = tl.sum(weight, 0)
        at = (row * splits + split)[:, None] * LATENT + column[None, :]
        partial = tl.load(Partial + at, mask=(split < splits)[:, None], other=0.0)
        out = tl.sum(partial * weight[:, None], 0) / total
        tl.store(Out + row * LATENT + column, out.to(tl.bfloat16))
        if HAS_LSE:
            tl.store(Lse + row, greatest + tl.log(total))
