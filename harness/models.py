"""Wrong answers that are cheap to compute: what a pass would have let through.

1. A null model is gross: it reads no cache, or mixes up requests, heads or scales. A case that one of them passes proves
   nothing, unless that model is right there (the mean of V is, for a single token).
2. A sensitivity is fine: one token, one page, one per cent. No case shows them all; those that it shows are counted.
3. Each is a closed form over the softmax weights of some requests, G of them, and costs a few sums, never another run.
4. A model that does not apply (one head, no scale) gives None; one that applies to some of the requests says to which.

Source: docs/numerics.md, section "When a pass means nothing"; the sums follow from o = Σ p v with p renormalised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.case import Case
from harness.weights import Weights
from references.problem import pick, place

#: How far the scale sensitivities are off.
PER_CENT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Some requests and their truth, as the models see them."""

    case: Case
    weights: Weights
    #: The truth of all requests in fp64, so that a wrong answer that equals it is known to, [B, R, L].
    out: Tensor
    #: The truth of these requests and rows, fp64 [G, R, L].
    truth: Tensor
    #: Which rows of a request are looked at, int64; None for all.
    rows: Tensor | None = None
    #: Of each request the tokens at which splits begin, the first (0) left out.
    split_edges: list[list[int]]
    #: Tokens of a tile; 0 if the kernel has none.
    tile: int

    @property
    def by_head(self) -> Tensor:
        """The truth of these requests and all rows, fp64 [G, S, H, L]."""
        truth = self.out[pick(self.weights.requests, self.out.device)]
        return truth.view(-1, self.case.query_tokens, self.case.heads, self.case.latent)

    def looked_at(self, answer: Tensor) -> Tensor:
        """Take the rows that are looked at from an answer of all, [G, R, L] or [G, S, H, L]."""
        answer = answer.flatten(1, -2)
        return answer if self.rows is None else answer[:, self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A wrong answer of some requests."""

    #: fp64 [G, R, L].
    out: Tensor
    #: fp64 [G, R]; None if the model says nothing of it.
    lse: Tensor | None = None
    #: Which requests the model applies to; None for all.
    applies: list[bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A way to be wrong."""

    #: What it does.
    about: str
    #: Computes it, or gives None where it does not apply.
    answer: Callable[[View], Wrong | None]


def _zeros(view: View) -> Wrong:
    return Wrong(out=torch.zeros_like(view.truth))


def _query_only(view: View) -> Wrong:
    """Answer the multiple of the query's latent part that fits best: nothing of the cache but one number."""
    query = view.weights.query[..., : view.case.latent]
    size = query.square().sum((1, 2), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    factor = (query * view.truth).sum((1, 2), keepdim=True) / size
    return Wrong(out=factor * query)


def _mean(view: View) -> Wrong:
    seen = (view.weights.scores > -torch.inf).double()
    return Wrong(out=view.weights.sum_values(seen / seen.sum(-1, keepdim=True).clamp_min(1)))


def _other_request(view: View) -> Wrong | None:
    if view.case.batch == 1:
        return None
    following = pick([(request + 1) % view.case.batch for request in view.weights.requests], view.out.device)
    return Wrong(out=view.looked_at(view.out[following]))


def _other_head(view: View) -> Wrong | None:
    if view.case.heads == 1:
        return None
    return Wrong(out=view.looked_at(view.by_head.roll(1, dims=2)))


def _other_token(view: View) -> Wrong | None:
    if view.case.query_tokens == 1:
        return None
    return Wrong(out=view.looked_at(view.by_head.roll(1, dims=1)))


def _value_scale_dropped(view: View) -> Wrong | None:
    scale = view.case.cache_scale
    return None if scale == 1 else Wrong(out=view.truth / scale)


def _key_scale_dropped(view: View) -> Wrong | None:
    scale = view.case.cache_scale
    return None if scale == 1 else _rescored(view, 1 / scale)


def _query_scale_dropped(view: View) -> Wrong | None:
    scale = view.case.query_scale
    return None if scale == 1 else _rescored(view, 1 / scale)


def _rescored(view: View, factor: float) -> Wrong:
    """Answer with all scores multiplied by a factor."""
    scores = view.weights.scores * factor
    lse = scores.logsumexp(-1)
    return Wrong(out=view.weights.sum_values((scores - lse.nan_to_num(neginf=0.0)[..., None]).exp_()), lse=lse)


def _newest_dropped(view: View) -> Wrong:
    return _dropped(view, (view.weights.visible - 1).clamp(min=0))


def _dropped(view: View, tokens: Tensor, applies: list[bool] | None = None) -> Wrong:
    """Answer without one token a row: int64 [G, R]."""
    weights, truth = view.weights, view.truth
    p = weights.probabilities.gather(-1, tokens[..., None])
    rest = 1 - p
    # A row that saw only this token is left with nothing.
    out = torch.where(rest > torch.finfo(torch.float64).eps, (truth - p * weights.values(tokens)) / rest, 0.0)
    return Wrong(out=out, lse=weights.lse + torch.log(rest[..., 0]), applies=applies)


def _edge(view: View, edges: list[list[int]]) -> Wrong | None:
    """Drop the token before the middle edge of each request, or the one after it in every other request."""
    if not any(edges):
        return None
    turns = zip(edges, view.weights.requests, strict=True)
    middles = [one[len(one) // 2] - 1 + request % 2 if one else 0 for one, request in turns]
    visible = view.weights.visible
    tokens = place(middles, visible.device)[:, None].expand_as(visible)
    return _dropped(view, tokens, [bool(one) for one in edges])


def _every(view: View, step: int) -> list[list[int]]:
    """List the edges of pieces of a size in each request."""
    return [list(range(step, length, step)) for length in view.weights.lengths]


def _page_edge(view: View) -> Wrong | None:
    size = view.case.page_size
    return None if size == 1 else _edge(view, _every(view, size))


def _tile_edge(view: View) -> Wrong | None:
    return _edge(view, _every(view, view.tile)) if view.tile > 1 else None


def _split_edge(view: View) -> Wrong | None:
    ends = zip(view.split_edges, view.weights.lengths, strict=True)
    return _edge(view, [[edge for edge in edges if 0 < edge < length] for edges, length in ends])


def _foreign_page(view: View) -> Wrong | None:
    """Read one page in another's place: the middle page is read twice, its neighbour never."""
    size, weights = view.case.page_size, view.weights
    pages = [length // size for length in weights.lengths]
    if max(pages) < 2:
        return None
    # A request of less than two pages reads whatever is there, and is not asked.
    middle = place([[size * (whole // 2) if whole > 1 else size] for whole in pages], weights.visible.device)
    lost = middle + torch.arange(size, device=middle.device)
    tokens = torch.cat([lost - size, lost], -1)
    index = tokens[:, None].expand(-1, weights.visible.shape[1], -1)
    p, seen = weights.probabilities.gather(-1, index), weights.scores.gather(-1, index[..., size:]) > -torch.inf
    change = torch.cat([torch.where(seen, p[..., :size], 0.0), -p[..., size:]], -1)
    total = (1 + change.sum(-1, keepdim=True)).clamp_min(torch.finfo(torch.float64).eps)
    out = (view.truth + change @ weights.values(tokens)) / total
    return Wrong(out=out, lse=weights.lse + total.log()[..., 0], applies=[whole > 1 for whole in pages])


def _value_scale_off(view: View) -> Wrong:
    return Wrong(out=view.truth * (1 + PER_CENT), lse=view.weights.lse)


def _softmax_scale_off(view: View) -> Wrong:
    return _rescored(view, 1 + PER_CENT)


#: Gross mistakes: a case that passes one is UNTRUSTED.
NULLS: Mapping[str, Model] = {
    "zeros": Model(about="zeros everywhere", answer=_zeros),
    "query-only": Model(about="the best multiple of the query's latent part: the cache is not read", answer=_query_only),
    "mean": Model(about="the mean of V: the scores are not used", answer=_mean),
    "other-request": Model(about="the next request's output", answer=_other_request),
    "other-head": Model(about="the neighbouring head's output", answer=_other_head),
    "other-token": Model(about="the neighbouring query token's output", answer=_other_token),
    "value-scale-dropped": Model(about="V without the cache scale", answer=_value_scale_dropped),
    "key-scale-dropped": Model(about="K without the cache scale", answer=_key_scale_dropped),
    "query-scale-dropped": Model(about="the query without its scale", answer=_query_scale_dropped),
}

#: Fine mistakes: counted, a regime must have seen each.
SENSITIVITIES: Mapping[str, Model] = {
    "newest-dropped": Model(about="the newest token a query token sees is dropped", answer=_newest_dropped),
    "page-edge-dropped": Model(about="one token beside a page edge is dropped", answer=_page_edge),
    "tile-edge-dropped": Model(about="one token beside a tile edge is dropped", answer=_tile_edge),
    "split-edge-dropped": Model(about="one token beside a split edge is dropped", answer=_split_edge),
    "foreign-page": Model(about="one page is read in another's place", answer=_foreign_page),
    "value-scale-off": Model(about="V is 1 % too large", answer=_value_scale_off),
    "softmax-scale-off": Model(about="the softmax scale is 1 % too large", answer=_softmax_scale_off),
}

#: All of them.
MODELS: Mapping[str, Model] = {**NULLS, **SENSITIVITIES}
