"""Faults of heads and query tokens: tiles of 16 heads, folding, causal tails (kinds E and F)."""

from __future__ import annotations

import torch

from harness.case import Case
from harness.faults.model import attend
from harness.faults.record import Fault
from harness.faults.scene import Scene

Tensor = torch.Tensor
Stored = tuple[Tensor, Tensor, Tensor]
Pair = tuple[Tensor, Tensor]

#: Heads that one program answers.
HEAD_TILE = 16


def partial_head_tile_unwritten(scene: Scene, stored: Stored) -> Stored:
    """Store whole tiles of heads only, if there is one."""
    out, lse, written = stored
    whole = out.shape[2] // HEAD_TILE * HEAD_TILE
    if whole:
        written[:, :, whole:] = False
    return out, lse, written


def padded_heads_stored(scene: Scene, stored: Stored) -> Stored:
    """Store the padding heads too: they land on the first heads of the next row."""
    out, lse, written = stored
    heads = out.shape[2]
    spill = min(-heads % HEAD_TILE, heads)
    rows, row_lse = out.flatten(0, 1), lse.flatten(0, 1)
    rows[1:, :spill] = 0.0
    row_lse[1:, :spill] = 0.0
    return out, lse, written


def folded_heads_take_next_cache(scene: Scene, pair: Pair) -> Pair:
    """Read the next request's cache for the second and later tiles of heads: the folded batch index used as request."""
    batch = len(scene.lengths)
    if pair[0].shape[1] <= HEAD_TILE or batch == 1:
        return pair
    out, lse = pair[0].clone(), pair[1].clone()
    scene.source = (scene.request + 1) % batch
    other, other_lse = attend(scene)
    scene.source = scene.request
    out[:, HEAD_TILE:], lse[:, HEAD_TILE:] = other[:, HEAD_TILE:], other_lse[:, HEAD_TILE:]
    return out, lse


def folded_reduce(scene: Scene, pair: Pair) -> Pair:
    """Merge every tile of heads into the first tile's place: later tiles repeat it."""
    index = torch.arange(pair[0].shape[1]) % HEAD_TILE
    return pair[0][:, index], pair[1][:, index]


def head_ratio_of_128(scene: Scene, query: Tensor) -> Tensor:
    """Find the query of request b at b x 128 heads, whatever the number of heads."""
    rows = scene.query.flatten(0, 2)
    tokens, heads = query.shape[:2]
    index = scene.request * tokens * 128 + torch.arange(tokens * heads)
    inside = index < len(rows)
    picked = rows[index.clamp(max=len(rows) - 1)] * inside[:, None]
    return picked.view(query.shape)


def first_two_swapped(scene: Scene, pair: Pair) -> Pair:
    """Exchange the answers of heads 0 and 1."""
    index = torch.arange(pair[0].shape[1])
    if len(index) > 1:
        index[:2] = torch.tensor([1, 0])
    return pair[0][:, index], pair[1][:, index]


def last_head_zero(scene: Scene, pair: Pair) -> Pair:
    """Leave zeros in the last head."""
    out = pair[0].clone()
    out[:, -1] = 0.0
    return out, pair[1]


def heads_rolled(scene: Scene, pair: Pair) -> Pair:
    """Store each head's answer one head on."""
    return pair[0].roll(1, 1), pair[1].roll(1, 1)


def heads_past_64_unwritten(scene: Scene, stored: Stored) -> Stored:
    """Give each head a thread of one block of 64."""
    stored[2][:, :, 64:] = False
    return stored


def neighbour_query(scene: Scene, query: Tensor) -> Tensor:
    """Read the query rows of the partial last tile of heads from the row's end backwards, as an overlapping tile does."""
    heads = query.shape[1]
    if heads <= HEAD_TILE or heads % HEAD_TILE == 0:
        return query
    index = torch.arange(heads)
    whole = heads // HEAD_TILE * HEAD_TILE
    index[whole:] = torch.arange(heads - HEAD_TILE, heads - HEAD_TILE + heads - whole)
    return query[:, index]


def no_causal_mask(scene: Scene, visible: Tensor) -> Tensor:
    """Let every query token see every cached token."""
    return scene.live[None, None].expand_as(visible)


def _until(scene: Scene, newest: Tensor) -> Tensor:
    return (scene.live & (scene.tokens <= newest.view(-1, 1, 1)))[:, None]


def causal_one_more(scene: Scene, visible: Tensor) -> Tensor:
    """See one token past the query token's own."""
    tokens = visible.shape[0]
    return _until(scene, scene.length - tokens + torch.arange(tokens) + 1)


def causal_one_less(scene: Scene, visible: Tensor) -> Tensor:
    """Do not see the query token's own key."""
    tokens = visible.shape[0]
    return _until(scene, scene.length - tokens + torch.arange(tokens) - 1)


def causal_from_the_left(scene: Scene, visible: Tensor) -> Tensor:
    """Align the causal mask to the first cached token."""
    return _until(scene, torch.arange(visible.shape[0]))


def causal_reversed(scene: Scene, visible: Tensor) -> Tensor:
    """Let the first query token see most and the last least."""
    return visible.flip(0)


def causal_of_padded_query(scene: Scene, visible: Tensor) -> Tensor:
    """Align the causal mask to the query padded to a power of two."""
    tokens = visible.shape[0]
    padded = 1 << (tokens - 1).bit_length()
    return _until(scene, scene.length - padded + torch.arange(tokens))


def mask_of_last_token(scene: Scene, visible: Tensor) -> Tensor:
    """Use the first query token's mask for all."""
    return visible[:1].expand_as(visible)


def answers_shared(scene: Scene, pair: Pair) -> Pair:
    """Answer every query token with the first one's output."""
    return pair[0][:1].expand_as(pair[0]), pair[1][:1].expand_as(pair[1])


def only_first_written(scene: Scene, stored: Stored) -> Stored:
    """Store the first query token of each request only."""
    stored[2][:, 1:] = False
    return stored


def tokens_past_four_repeat(scene: Scene, query: Tensor) -> Tensor:
    """Read the query of token t - 4 for tokens past the fourth."""
    return query[torch.arange(query.shape[0]) % 4]


def token_order_reversed(scene: Scene, pair: Pair) -> Pair:
    """Store query tokens in reverse order."""
    return pair[0].flip(0), pair[1].flip(0)


def _many(case: Case) -> bool:
    return case.heads > HEAD_TILE and max(case.lengths) > 0


def _tokens(case: Case) -> bool:
    return case.query_tokens > 1 and max(case.lengths) > 0


FAULTS = (
    Fault(name="partial-head-tile-unwritten", kind="E", report="ROCm/aiter #5582",
          what="heads past the last whole tile of 16 are not written", needs="more than 16 heads, no multiple of 16",
          shows=lambda case: _many(case) and case.heads % HEAD_TILE != 0, acts={"store": partial_head_tile_unwritten}),
    Fault(name="padded-heads-stored", kind="E", report="vllm-project/vllm #38615",
          what="padding heads are stored over the next row", needs="heads that are no multiple of 16, two rows",
          shows=lambda case: case.heads % HEAD_TILE != 0 and case.batch * case.query_tokens > 1 and max(case.lengths) > 0,
          acts={"store": padded_heads_stored}),
    Fault(name="fold-takes-next-cache", kind="E", report="ROCm/aiter #3310",
          what="heads past 16 read the next request's cache", needs="more than 16 heads, two requests",
          shows=lambda case: _many(case) and case.batch > 1, acts={"answer": folded_heads_take_next_cache}),
    Fault(name="fold-reduce", kind="E", report="vllm-project/vllm #46952", what="heads past 16 repeat the first 16",
          needs="more than 16 heads", shows=_many, acts={"answer": folded_reduce}),
    Fault(name="head-ratio-128", kind="E", report="flashinfer-ai/flashinfer #2750",
          what="queries are found at 128 heads a request", needs="two requests, not 128 heads",
          shows=lambda case: case.heads != 128 and case.batch > 1 and max(case.lengths) > 0,
          acts={"query": head_ratio_of_128}),
    Fault(name="heads-swapped", kind="E", report="flagos-ai/FlagGems #3759", what="two heads are exchanged",
          needs="two heads", shows=lambda case: case.heads > 1 and max(case.lengths) > 0,
          acts={"answer": first_two_swapped}),
    Fault(name="heads-rolled", kind="E", report="flagos-ai/FlagGems #3759", what="answers are stored one head on",
          needs="two heads", shows=lambda case: case.heads > 1 and max(case.lengths) > 0, acts={"answer": heads_rolled},
          twins=("heads-swapped",)),
    Fault(name="last-head-zero", kind="E", report="vllm-project/vllm #42956", what="the last head is zero",
          needs="any tokens", acts={"answer": last_head_zero}),
    Fault(name="heads-past-64-unwritten", kind="E", report="lightseekorg/tokenspeed #1185",
          what="heads past 64 are not written", needs="more than 64 heads", shows=lambda case: case.heads > 64,
          acts={"store": heads_past_64_unwritten}),
    Fault(name="head-tile-overlaps", kind="E", report="flagos-ai/FlagGems #3759",
          what="the partial tile of heads reads its neighbours' queries", needs="more than 16 heads, no multiple of 16",
          shows=lambda case: _many(case) and case.heads % HEAD_TILE != 0, acts={"query": neighbour_query}),
    Fault(name="no-causal-mask", kind="F", report="lightseekorg/tokenspeed #469",
          what="every query token sees the newest tokens", needs="two query tokens", shows=_tokens,
          acts={"visible": no_causal_mask}),
    Fault(name="causal-one-more", kind="F", report="ROCm/aiter #4872", what="query tokens see one token too many",
          needs="two query tokens", shows=_tokens, acts={"visible": causal_one_more}, twins=("no-causal-mask",)),
    Fault(name="causal-one-less", kind="F", report="ROCm/aiter #4872", what="query tokens do not see their own key",
          needs="any tokens", acts={"visible": causal_one_less}, twins=("new-tokens-not-counted",)),
    Fault(name="causal-from-the-left", kind="F", report="sgl-project/sglang #12295",
          what="the causal mask is aligned to the first cached token", needs="N that is not S",
          shows=lambda case: any(n and n != case.query_tokens for n in case.lengths),
          acts={"visible": causal_from_the_left}),
    Fault(name="causal-reversed", kind="F", report="ROCm/aiter #5679", what="the causal staircase runs the other way",
          needs="two query tokens", shows=_tokens, acts={"visible": causal_reversed}),
    Fault(name="causal-of-padded-query", kind="F", report="sgl-project/sglang #12295",
          what="the mask is aligned to the padded query", needs="query tokens that are no power of two",
          shows=lambda case: case.query_tokens & (case.query_tokens - 1) != 0 and max(case.lengths) > 0,
          acts={"visible": causal_of_padded_query}),
    Fault(name="query-tokens-share-mask", kind="F", report="vllm-project/vllm #45227",
          what="all query tokens use the first one's mask", needs="two query tokens", shows=_tokens,
          acts={"visible": mask_of_last_token}, twins=("causal-one-less",)),
    Fault(name="query-tokens-share-answer", kind="F", report="ROCm/aiter #2720",
          what="all query tokens get the first one's answer", needs="two query tokens", shows=_tokens,
          acts={"answer": answers_shared}),
    Fault(name="query-tokens-reversed", kind="F", report="ROCm/aiter #5679",
          what="query tokens are stored in reverse order", needs="two query tokens", shows=_tokens,
          acts={"answer": token_order_reversed}, twins=("query-tokens-share-answer",)),
    Fault(name="later-query-tokens-unwritten", kind="F", report="vllm-project/vllm #45227",
          what="only the first query token is written", needs="two query tokens", shows=lambda case: case.query_tokens > 1,
          acts={"store": only_first_written}),
    Fault(name="query-tokens-past-four", kind="F", report="ROCm/aiter #5679",
          what="query tokens past the fourth repeat earlier queries", needs="more than four query tokens",
          shows=lambda case: case.query_tokens > 4 and max(case.lengths) > 0, acts={"query": tokens_past_four_repeat}),
)  # fmt: skip
