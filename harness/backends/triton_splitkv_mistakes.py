"""Mistakes to make on purpose in the embedded kernel: one place of its source each.

1. Each replaces text that stands exactly once in the kernel's module; a test holds that.
2. Each is a mistake that somebody has made, or could have: the gate must catch it.
3. ``triton-splitkv!NAME`` is the backend with the mistake made.

Source: the kinds are those of the catalogue of field faults in ``docs/why.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One edit of the kernel's source."""

    #: what the edit gets wrong
    about: str
    #: source text, once in the module
    old: str
    #: what stands there instead
    new: str


MISTAKES: Mapping[str, Mistake] = MappingProxyType(
    {
        "drop-v-scale": Mistake(
            about="the cache scale reaches the scores but not the output",
            old="[:, None] * cache_scale",
            new="[:, None]",
        ),
        "drop-query-scale": Mistake(
            about="the query scale is not applied",
            old="softmax_scale * query_scale * cache_scale",
            new="softmax_scale * cache_scale",
        ),
        "mask-off-by-one": Mistake(
            about="a query token sees the token after it",
            old="position[None, :] < seen[:, None]",
            new="position[None, :] <= seen[:, None]",
        ),
        "mask-one-short": Mistake(
            about="a query token does not see itself",
            old="seen = length - tokens + token + 1",
            new="seen = length - tokens + token",
        ),
        "causal-lost": Mistake(
            about="every query token sees the whole context",
            old="seen = length - tokens + token + 1",
            new="seen = length + token * 0",
        ),
        "skip-last-page": Mistake(
            about="the last page is left out",
            old="last = tl.minimum(first + share, length)",
            new="last = tl.minimum(first + share, (length - 1) // page_size * page_size)",
        ),
        "merge-without-lse": Mistake(
            about="splits are averaged instead of weighted by their log-sum-exps",
            old='weight = tl.exp(tl.load(partial_lse + part, mask=row_live, other=float("-inf")) - level)',
            new='weight = (tl.load(partial_lse + part, mask=row_live, other=float("-inf")) > float("-inf")).to(tl.float32)',
        ),
        "read-past-the-table": Mistake(
            about="the last tile follows table entries past the request's end",
            old="live = position < last",
            new="live = position < start + TILE",
        ),
        "first-split-only": Mistake(
            about="the splits after the first are not merged",
            old="splits = tl.cdiv(length, tokens_per_split(length, STEP, SPLITS))",
            new="splits = tl.minimum(tl.cdiv(length, tokens_per_split(length, STEP, SPLITS)), 1)",
        ),
        "no-rescale": Mistake(
            about="the output is not rescaled when the running maximum moves",
            old="output = output * fade[:, None]",
            new="output = output * 1.0",
        ),
        "rope-dropped": Mistake(
            about="the rope part of the query is read from the wrong head",
            old="head.to(tl.int64) * rope_head",
            new="(head * 0).to(tl.int64) * rope_head",
        ),
        "offsets-in-int32": Mistake(
            about="the offset of a page is computed in 32 bits",
            old="mask=live, other=0).to(tl.int64)",
            new="mask=live, other=0)",
        ),
        "first-request-s-table": Mistake(
            about="every request reads the first one's padded table",
            old="entries = table + request.to(tl.int64) * table_width",
            new="entries = table + (request * 0).to(tl.int64) * table_width",
        ),
        "lse-in-base-2": Mistake(
            about="the log-sum-exp returned is in base 2",
            old="tl.store(lse + whole, tl.where(some, top + tl.log(",
            new="tl.store(lse + whole, tl.where(some, top * 1.4426950408889634 + tl.log2(",
        ),
        "unmasked-values": Mistake(
            about="dead slots are read, and multiplied by a probability of zero",
            old="mask=live[:, None] & latent_live[None, :], other=0.0)\n            value = widen",
            new="mask=latent_live[None, :], other=0.0)\n            value = widen",
        ),
    }
)
