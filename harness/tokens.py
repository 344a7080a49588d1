"""Which tokens an output really read, from content in which V spells out its slot.

1. With slot-coded V an output row is a known mixture of known vectors: solving for the mixture tells the weight that the
   kernel gave to each token of the request, and the rest tells which slots of other requests, or of none, came in.
2. A weight is compared with the one that the truth gives: near nothing is missing, near twice is doubled.
3. Tokens are named with their pages and splits where these are whole.

Source: least squares over the rows of a request, the ratio of each token shared by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from harness.draws import slot_signs
from harness.inputs import Inputs
from references.arithmetic import Arithmetic
from references.budget import budget
from references.formats import FORMATS, decode
from references.problem import gather

Tensor = torch.Tensor

#: Most tokens of a request that are solved for: the normal equations are a square of this size.
MOST = 1536
#: Times that tokens' ratios and rows' factors are solved for by turns: a lost token raises the others of each row differently.
FACTOR_STEPS = 4
#: Largest ρ of a row that a correct kernel reaches: 1/√0.18, a row led by one probability that rounds by half an ulp.
LED_BY_ONE = 0.18**-0.5
#: Deviation of a ratio, and share of it that the ridge may take, up to which it is known: half is two of them from one.
SURE = 1 / 4
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What happened to some tokens of a request."""

    request: int
    #: "missing", "doubled", "read though beyond the length", "foreign".
    what: str
    #: Token indices; for foreign ones (request, token) pairs lie in ``of``.
    tokens: tuple[int, ...]
    #: Pages and splits that they fill, in words.
    place: str

    def __str__(self) -> str:
        return f"request {self.request}: tokens {_runs(self.tokens)} {self.what}{self.place}"


def sight(inputs: Inputs, out: Tensor, arithmetic: Arithmetic) -> tuple[Sighting, ...]:
    """Tell which tokens were missing, doubled or foreign in an output of slot-coded content [B, S, H, L]."""
    found: list[Sighting] = []
    for request, rows in _requests(inputs, out, arithmetic):
        found += _request(inputs, request, rows, arithmetic)
    return tuple(found)


def arrived(inputs: Inputs, out: Tensor, arithmetic: Arithmetic) -> dict[int, Tensor]:
    """Tell how much of its weight each token gave to an output of slot-coded content [B, S, H, L], 1 being right.

    Returns, for each request whose tokens explain its output, the shares [N]; NaN where a token's share cannot be told.
    """
    found = {}
    for request, rows in _requests(inputs, out, arithmetic):
        worst = rows.worst()
        ratios, known, rest = _solve(worst)
        if _explained(worst, rest) and bool((known & (ratios > 0)).any()):
            found[request] = _shares(ratios, known).masked_fill(~known, torch.nan)
    return found


def _requests(inputs: Inputs, out: Tensor, arithmetic: Arithmetic) -> Iterator[tuple[int, _Rows]]:
    """Lay out the rows of each request that can be solved for."""
    problem, case = inputs.problem(), inputs.case
    variance = budget(problem, arithmetic).variance.sum(-1).flatten(1)
    starts = np.cumsum([0, *case.lengths])
    for request, length in enumerate(case.lengths):
        if not 0 < length <= MOST:
            continue
        rows = out[request].double().flatten(0, 1)
        keys = decode(
            gather(problem, problem.slots[starts[request] : starts[request + 1]]), FORMATS[case.cache_format]
        ).double()
        query = decode(inputs.query[request], FORMATS[case.query_format]).double().flatten(0, 1)
        scores = query @ keys.T * (case.softmax_scale * case.query_scale * case.cache_scale)
        newest = (torch.arange(case.query_tokens) + length - case.query_tokens).repeat_interleave(case.heads)
        scores = scores.masked_fill(torch.arange(length) > newest[:, None], -torch.inf)
        keep = (newest >= 0) & torch.isfinite(rows).all(-1)
        if not bool(keep.any()):
            continue
        p = scores[keep].softmax(-1)
        values = keys[:, : case.latent] * case.cache_scale
        yield request, _Rows(p=p, values=values, actual=rows[keep], variance=variance[request][keep])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of a request: true weights [R, N], V [N, L], actual rows [R, L], variance of their rounding [R]."""

    p: Tensor
    values: Tensor
    actual: Tensor
    variance: Tensor

    def worst(self) -> _Rows:
        """Keep the rows at least half as far off as the worst one."""
        error = (self.actual - self.p @ self.values).norm(dim=-1)
        kept = 2 * error >= error.max()
        return _Rows(p=self.p[kept], values=self.values, actual=self.actual[kept], variance=self.variance[kept])


def _request(inputs: Inputs, request: int, rows: _Rows, arithmetic: Arithmetic) -> list[Sighting]:
    """Tell it of one request, from the rows that are furthest off."""
    rows = rows.worst()
    ratios, known, rest = _solve(rows)
    # Said only where what is left is no more than rounding leaves.
    if _explained(rows, rest):
        return _judge(inputs, request, ratios, known, arithmetic)
    return _foreign(inputs, request, rows.actual - rows.p @ rows.values)


def _explained(rows: _Rows, rest: Tensor) -> bool:
    return bool(rest.square().sum() <= LED_BY_ONE**2 * rows.variance.sum())


def _solve(rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Find the ratio of actual to true weight of each token, shared by the rows up to a factor.

    Returns the ratios [N]; whether each is known, bool [N]: of a token that no row sees, or whose whole weight is less
    than the rows round, nothing is; and what the ratios leave of the rows [R, L].
    """
    target = rows.actual
    factors = torch.ones(len(target), 1, dtype=torch.float64)
    for _ in range(FACTOR_STEPS):
        p = rows.p * factors
        normal = (p.T @ p) * (rows.values @ rows.values.T)
        right = (p * (target @ rows.values.T)).sum(0)
        ridge = normal.diagonal().mean() * torch.finfo(torch.float32).eps
        inverse = torch.linalg.inv(normal + ridge * torch.eye(len(normal), dtype=normal.dtype))
        ratios = inverse @ right
        fit = (rows.p * ratios) @ rows.values
        factors = (fit * target).sum(-1, keepdim=True) / fit.square().sum(-1, keepdim=True).clamp_min(TINY)
    # Of one element: where one token outweighs the rest, all elements of a row round alike, and nothing averages out.
    noise = rows.variance.mean()
    # The ridge pulls a ratio towards zero, and rounding takes it anywhere.
    known = (ridge * inverse.diagonal() < SURE) & (noise * inverse.diagonal() < SURE**2)
    return ratios, known, target - factors * fit


def _judge(inputs: Inputs, request: int, ratios: Tensor, known: Tensor, arithmetic: Arithmetic) -> list[Sighting]:
    """Sort the tokens by how much of their weight arrived, relative to the usual: below a half, above one and a half."""
    if not bool((known & (ratios > 0)).any()):
        return []
    share = _shares(ratios, known)
    found = []
    for what, hit in (("missing", known & (share < 0.5)), ("doubled", known & (share > 1.5))):
        tokens = torch.nonzero(hit).flatten().tolist()
        if tokens:
            found.append(
                Sighting(request=request, what=what, tokens=tuple(tokens), place=_place(inputs, request, tokens, arithmetic))
            )
    return found


def _shares(ratios: Tensor, known: Tensor) -> Tensor:
    """Relate ratios to the usual one: where tokens are lost, the others take their weight, and those did arrive."""
    sure = ratios[known]
    return ratios / sure[4 * sure > sure.max()].median()


def _foreign(inputs: Inputs, request: int, rest: Tensor) -> list[Sighting]:
    """Find slots of other requests in the error of some rows: [R, L]."""
    case = inputs.case
    slots, starts = inputs.slots.cpu().numpy(), np.cumsum([0, *case.lengths])
    own = set(slots[starts[request] : starts[request + 1]].tolist())
    found = []
    for other, length in enumerate(case.lengths):
        theirs = slots[starts[other] : starts[other + 1]]
        if other == request or not 0 < length <= MOST:
            continue
        signs = torch.from_numpy(slot_signs(theirs, case.latent)).double() * case.cache_scale
        weight = (rest @ signs.T).mean(0) / (case.latent * case.cache_scale**2)
        hit = [index for index in torch.nonzero(weight > weight.max() / 2).flatten().tolist() if int(theirs[index]) not in own]
        left = rest - weight.clamp_min(0) @ signs
        if hit and bool(2 * left.square().sum() < rest.square().sum()):
            found.append(Sighting(request=request, what=f"of request {other} were read", tokens=tuple(hit), place=""))
    return found


def _place(inputs: Inputs, request: int, tokens: list[int], arithmetic: Arithmetic) -> str:
    """Say which pages and splits some tokens fill wholly."""
    case, wanted = inputs.case, set(tokens)
    length, size = case.lengths[request], case.page_size
    pages = [k for k in range(-(-length // size)) if set(range(k * size, min((k + 1) * size, length))) <= wanted]
    edges = arithmetic.splits.edges(length, heads=case.heads, query_tokens=case.query_tokens, batch=case.batch)
    splits = [k for k, (a, b) in enumerate(pairwise(edges)) if set(range(a, b)) <= wanted]
    parts = []
    if size > 1 and pages:
        parts.append(f"page {_runs(tuple(pages))}")
    if len(edges) > 2 and splits:
        parts.append(f"split {_runs(tuple(splits))} of {len(edges) - 1}")
    return f" (all of {', '.join(parts)})" if parts else ""


def _runs(numbers: tuple[int, ...]) -> str:
    """Write numbers as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:8]) + (", …" if len(runs) > 8 else "")
