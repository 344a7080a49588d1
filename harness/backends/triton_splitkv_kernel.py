"""Paged split-KV decode for MLA, and the reduction of its splits, in Triton.

1. A program takes ROWS of the S x H query rows of one request and one split of its tokens, TILE tokens at a time.
2. Only live table entries, live tokens and live query rows are read: the masks stand on the loads, since 0 x NaN is NaN.
3. Offsets into the pool are 64-bit.
4. Operands are exact: both codes are widened to OPERAND, which holds every value of either. Probabilities are rounded
   to OPERAND; scores, sums and partial outputs are fp32; dots of fp32 operands are IEEE, never TF32.
5. A request of n tokens has the splits that n alone gives it, never its neighbours: results do not depend on the batch.
6. A row that sees no token has output 0 and log-sum-exp -inf.

Source: the online softmax of FlashAttention (Dao et al., 2022), split along the context as in Flash-Decoding.
"""

# A kernel's parameters have Triton's types or none, and its decorator has no Python type.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def widen(codes, FORMAT: tl.constexpr, OPERAND: tl.constexpr):
    """Give the values of codes: a plain cast, or for the fp8 formats that arrive as bytes integer arithmetic."""
    if FORMAT == "cast":
        values = codes.to(OPERAND)
    else:
        MANTISSA: tl.constexpr = 2 if FORMAT == "e5m2" else 3
        BIAS: tl.constexpr = 15 if FORMAT == "e5m2" else (8 if FORMAT == "e4m3fnuz" else 7)
        bits = codes.to(tl.int32)
        size = bits & 0x7F
        field = size >> MANTISSA
        fraction = size & ((1 << MANTISSA) - 1)
        # fp32 has the same fraction further left and a larger bias; a subnormal is its fraction times the least step.
        normal = (((field + (127 - BIAS)) << 23) | (fraction << (23 - MANTISSA))).to(tl.float32, bitcast=True)
        number = tl.where(field == 0, fraction.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA)), normal)
        number = tl.where((bits & 0x80) != 0, -number, number)
        if FORMAT == "e4m3fnuz":
            number = tl.where(bits == 0x80, float("nan"), number)
        elif FORMAT == "e4m3fn":
            number = tl.where(size == 0x7F, float("nan"), number)
        else:
            number = tl.where(size == 0x7C, tl.where(bits == 0x7C, float("inf"), float("-inf")), number)
            number = tl.where(size > 0x7C, float("nan"), number)
        values = number.to(OPERAND)
    return values


@triton.jit
def decode_codes(codes, values, COUNT: tl.constexpr, FORMAT: tl.constexpr):
    """Write the values of COUNT codes, fp32: `widen` by itself."""
    at = tl.arange(0, COUNT)
    tl.store(values + at, widen(tl.load(codes + at), FORMAT, tl.float32))


@triton.jit
def tokens_per_split(length, STEP: tl.constexpr, SPLITS: tl.constexpr):
    """Give each split the same number of tokens, a multiple of STEP, so that SPLITS suffice; the last takes the rest."""
    # One of no tokens too, so that nothing is divided by zero where a request has none.
    return tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), STEP), 1) * STEP


# Triton compiles a kernel anew for each set of whole numbers that are 1 or multiples of 16. Only the strides of the pool pay
# for it, with wide loads; the others would make it compile for nearly every case.
_PLAIN_NUMBERS = (
    "tokens",
    "heads",
    "page_size",
    "nope_request",
    "nope_token",
    "nope_head",
    "rope_request",
    "rope_token",
    "rope_head",
    "table_width",
    "parts",
    "ragged",
)


@triton.jit(do_not_specialize=_PLAIN_NUMBERS)
def attend(
    nope, rope, cache, table, table_starts, lengths, partial, partial_lse, softmax_scale, query_scale, cache_scale,
    tokens, heads, page_size, nope_request, nope_token, nope_head, rope_request, rope_token, rope_head,
    page_stride, token_stride, table_width, parts, ragged,
    LATENT: tl.constexpr, LATENT_TILE: tl.constexpr, ROPE: tl.constexpr, ROPE_TILE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    QUERY: tl.constexpr, CACHE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Write one split's output and log-sum-exp of ROWS query rows.

    nope [B, S, H, L] and rope [B, S, H, R] query codes, cache [P, T, D] codes, each with unit stride in its last axis;
    table page ids, int32 [B, W], or [sum] with table_starts int32 [B + 1]; lengths int32 [B]; partial fp32
    [B, S * H, K, L], partial_lse fp32 [B, S * H, K], natural log.
    """
    request = tl.program_id(0)
    split = tl.program_id(2)
    length = tl.load(lengths + request)
    share = tokens_per_split(length, STEP, SPLITS)
    first = split * share
    last = tl.minimum(first + share, length)
    if first < last:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row_live = row < tokens * heads
        token = row // heads
        head = row % heads
        latent = tl.arange(0, LATENT_TILE)
        latent_live = latent < LATENT
        where = request.to(tl.int64) * nope_request + token.to(tl.int64) * nope_token + head.to(tl.int64) * nope_head
        query = widen(
            tl.load(
                nope + where[:, None] + latent[None, :],
                mask=row_live[:, None] & latent_live[None, :],
                other=0.0,
            ),
            QUERY,
            OPERAND,
        )
        if ROPE > 0:
            turn = tl.arange(0, ROPE_TILE)
            turn_live = turn < ROPE
            where = request.to(tl.int64) * rope_request + token.to(tl.int64) * rope_token + head.to(tl.int64) * rope_head
            query_turn = widen(
                tl.load(
                    rope + where[:, None] + turn[None, :],
                    mask=row_live[:, None] & turn_live[None, :],
                    other=0.0,
                ),
                QUERY,
                OPERAND,
            )
        # A padded table has rows of one width and ragged is 0; a ragged one's starts lie in table_starts, its width is 0.
        entries = table + request.to(tl.int64) * table_width
        entries += (tl.load(table_starts + request) * ragged).to(tl.int64)
        scale = softmax_scale * query_scale * cache_scale
        seen = length - tokens + token + 1

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        output = tl.zeros([ROWS, LATENT_TILE], tl.float32)
        for start in range(first, last, TILE):
            position = start + tl.arange(0, TILE)
            live = position < last
            page = tl.load(entries + position // page_size, mask=live, other=0).to(tl.int64)
            slot = page * page_stride + (position % page_size).to(tl.int64) * token_stride
            rows = cache + slot[:, None]
            value = tl.load(rows + latent[None, :], mask=live[:, None] & latent_live[None, :], other=0.0)
            value = widen(value, CACHE, OPERAND)
            score = tl.dot(query, tl.trans(value), input_precision="ieee")
            if ROPE > 0:
                key_turn = tl.load(rows + LATENT + turn[None, :], mask=live[:, None] & turn_live[None, :], other=0.0)
                score += tl.dot(query_turn, tl.trans(widen(key_turn, CACHE, OPERAND)), input_precision="ieee")
            visible = (position[None, :] < seen[:, None]) & live[None, :]
            score = tl.where(visible, score * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            level = tl.where(new_top == float("-inf"), 0.0, new_top)
            probability = tl.exp(score - level[:, None])
            fade = tl.exp(top - level)
            total = total * fade + tl.sum(probability, 1)
            output = output * fade[:, None]
            output += tl.dot(probability.to(OPERAND), value, input_precision="ieee")
            top = new_top

        some = total > 0
        output = output / tl.where(some, total, 1.0)[:, None] * cache_scale
        lse = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
        part = (request.to(tl.int64) * tokens * heads + row) * parts + split
        tl.store(partial_lse + part, lse, mask=row_live)
        tl.store(
            partial + (part * LATENT)[:, None] + latent[None, :],
            output,
            mask=row_live[:, None] & latent_live[None, :],
        )


@triton.jit(do_not_specialize=("tokens", "heads", "parts"))
def merge(
    partial, partial_lse, lengths, out, lse, tokens, heads, parts,
    LATENT: tl.constexpr, LATENT_TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS query rows by their log-sum-exps.

    partial fp32 [B, S * H, K, L] and partial_lse fp32 [B, S * H, K] as `attend` leaves them; out [B, S * H, L]; lse fp32
    [B, S * H], natural log.
    """
    request = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_live = row < tokens * heads
    length = tl.load(lengths + request)
    splits = tl.cdiv(length, tokens_per_split(length, STEP, SPLITS))
    latent = tl.arange(0, LATENT_TILE)
    live = row_live[:, None] & (latent < LATENT)[None, :]
    whole = request.to(tl.int64) * tokens * heads + row

    top = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(partial_lse + whole * parts + split, mask=row_live, other=float("-inf")))
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, LATENT_TILE], tl.float32)
    for split in range(splits):
        part = whole * parts + split
        weight = tl.exp(tl.load(partial_lse + part, mask=row_live, other=float("-inf")) - level)
        total += weight
        output += weight[:, None] * tl.load(partial + (part * LATENT)[:, None] + latent[None, :], mask=live, other=0.0)
    some = total > 0
    output = output / tl.where(some, total, 1.0)[:, None]
    tl.store(out + (whole * LATENT)[:, None] + latent[None, :], output.to(out.dtype.element_ty), mask=live)
    if WITH_LSE:
        tl.store(lse + whole, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=row_live)
