"""The rounding budget: how far a correct kernel of a declared arithmetic may be from the truth, element by element.

1. It follows from the problem and the arithmetic alone; no actual output, and no reference's, goes in.
2. ``hard`` assumes no independence: more than that cannot be rounding. ``variance`` takes roundings of different values as
   independent, and roundings of equal values as equal.
3. It is streamed over the contexts in two passes: the first finds the softmax and the output, the second adds up the terms.
   Requests of about a length go together; memory grows neither with N nor with the number of requests.

Derivation, o = sum_j p_j v_j with p the softmax of the scores s:

- Rounding moves x by at most u |x|, by at most h among subnormals (u the unit roundoff, h half the smallest subnormal), and
  by at most |x|. The error is uniform within half a spacing, so its mean square is spacing^2 / 12. What lies below h becomes
  zero, all of it with the same sign: that is a shift sum_j p_j v_j over the flushed tokens, not a variance.
- A probability is rounded relative to a maximum in use: its tile's running one, its split's or its row's. What is declared is
  one extreme, the row's is the other, and other tiles, splits and orders lie between: see ``terms.either``.
- A score error d_j moves o by sum_j p_j (v_j - o) (e^d_j - 1) / (1 + sum p (e^d - 1)), the quotient because the sum moves too.
  Its weighted mean deviation obeys Cauchy and Schwarz, sum_j a_j |v_j - o| <= sqrt(sum_j a_j  sum_j a_j (v_j - o)^2): the
  bound. For the variance, what fp32 does to a score's sum and exponential is the token's own; an error of the scale is common
  to all, d_j = e s_j, and moves o by e sum_j p_j s_j (v_j - o). What is the same for all tokens cancels.
- Operands rounded after their scale are known values: their shift is worked out, and the larger of its square and of what
  independent errors of the same size would do is the variance.
- A sum of n fp32 terms is off by at most n u32 sum |terms|, in whatever order they are added.
- The partial outputs o_k of splits, of weight w_k, are rounded one by one: w_k times half a spacing at o_k each.

Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sections 2.2, 3.1 and 4.2, for the bounds.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from references.arithmetic import Arithmetic, Splits
from references.formats import find, ulp
from references.pieces import Context, Layout, lay_out, softmax
from references.precision import full_precision, onednn_products, prefers_onednn
from references.problem import Problem
from references.spread import EXCESS, NORMAL_EXCESS, effective_elements, effective_number
from references.tally import BOUND, OPERAND, PROBABILITY, SCORE, SINGLE, Tally
from references.terms import STEPS, U32, UNIFORM, rounded_context

__all__ = ["Arithmetic", "Budget", "Splits", "budget"]

#: Smallest deviation told apart from none, of V's height: fp32 sums of squares hold no less.
_FAINT = 2.0**-60
#: fp32's smallest normal value: exponentials below it may be zero.
_LOST = 2.0**-126

#: Largest error over the height of V: weights are positive and sum to one, each rounded, so that no output lies beyond 1.5
#: times the largest value, and the truth does not lie beyond it.
_FARTHEST = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What rounding may do to each element. Query tokens that see nothing have a budget of zero."""

    #: Variance of each element's error, fp64 [B, S, H, L]; infinite where the output format may overflow.
    variance: Tensor
    #: Bound on each element's error, fp64 [B, S, H, L]; infinite where the output format may overflow.
    hard: Tensor
    #: The output in fp64 that all this is about, [B, S, H, L].
    exact: Tensor
    #: Bound on the error of the log-sum-exp, fp64 [B, S, H].
    lse_hard: Tensor
    #: Variance of the error of the log-sum-exp, fp64 [B, S, H].
    lse_variance: Tensor
    #: Tokens that share the row's error as if independent, fp64 [B, S, H].
    effective_tokens: Tensor
    #: Share of the row's variance that comes token by token (probabilities and scores), fp64 [B, S, H], 0 to 1.
    probability_share: Tensor
    #: Elements that round independently, fp64 [B, S, H], up to L.
    effective_elements: Tensor
    #: Standard deviation of the squared row ratio |e|^2 / sum of variance of a correct kernel, fp64 [B, S, H].
    spread: Tensor
    #: Largest magnitude of a score, fp64 [B, S, H].
    largest_score: Tensor
    #: Norm of an output of such weights and values in random directions, (sum p^2 |v|^2)^(1/2), fp64 [B, S, H].
    scattered: Tensor


def budget(problem: Problem, arithmetic: Arithmetic) -> Budget:
    """Work out the rounding budget of a problem for kernels of an arithmetic, on the device the problem is on.

    Source: the module's derivation.
    Error: ``hard`` is a bound of first order in each rounding; products of roundings are kept where they matter.
    """
    shape = (problem.batch, problem.query_tokens * problem.heads)
    elements = torch.zeros((3, *shape, problem.latent), dtype=torch.float64, device=problem.query.device)
    rows = elements.new_zeros((len(_OF_ROWS), *shape))
    # What rows that see nothing have: nothing, of independent tokens and elements.
    rows[_OF_ROWS.index("effective_tokens")] = 1
    rows[_OF_ROWS.index("effective_elements")] = problem.latent
    quick = problem.query.device.type == "cpu" and prefers_onednn(narrow=False)
    with full_precision(), onednn_products() if quick else nullcontext():
        for layout in lay_out(problem, arithmetic):
            tally = _count(problem, arithmetic, layout)
            empty = tally.context.seen == 0
            for found, values in zip((elements, rows), _settle(tally), strict=True):
                hidden = empty if found is elements else empty[..., 0]
                found[:, tally.context.at] = torch.stack(values).masked_fill_(hidden, 0.0)
    variance, hard, exact = elements.view(3, *problem.query.shape[:3], problem.latent)
    return Budget(
        variance=variance, hard=hard, exact=exact, **dict(zip(_OF_ROWS, rows.view(-1, *problem.query.shape[:3]), strict=True))
    )


#: What a budget says of rows, in the order in which it is worked out.
_OF_ROWS = (
    "lse_hard",
    "lse_variance",
    "effective_tokens",
    "probability_share",
    "effective_elements",
    "spread",
    "largest_score",
    "scattered",
)


def _count(problem: Problem, arithmetic: Arithmetic, layout: Layout) -> Tally:
    context, rounded = Context(problem, layout), rounded_context(arithmetic, problem, layout)
    tally = Tally(context, arithmetic, softmax(context), rounded)
    for piece, other in zip(context.pieces(), (rounded or context).pieces(), strict=True):
        tally.add(piece, other)
    return tally


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Variance of each element by its origin, fp64 [G, R, L], V over its height."""

    #: Token by token: probabilities and operands.
    tokens: Tensor
    #: The same for all tokens or all elements: fp32 errors of scores, of scales and of the sum.
    common: Tensor
    #: Sums in fp32 and what is flushed, element by element.
    sums: Tensor
    #: Partial outputs.
    partials: Tensor
    #: The last rounding.
    last: Tensor

    @property
    def single(self) -> Tensor:
        """What each element has for itself."""
        return self.sums + self.partials + self.last


def _settle(tally: Tally) -> tuple[list[Tensor], list[Tensor]]:
    """Work out the part of a budget that some requests have: of elements, [G, R, L] each, and of rows, [G, R] each."""
    problem, arithmetic, truth = tally.context.problem, tally.arithmetic, tally.truth
    scale = abs(problem.cache_scale) * truth.height
    rounded = softmax(tally.rounded) if tally.rounded else None
    coherence = tally.coherence()
    shift = rounded.out / truth.height - tally.out if rounded else None
    parts = _variances(tally, scale, coherence, shift)
    hard = _hard(tally, scale)
    variance = (parts.tokens + parts.common + parts.single).clamp_(min=_FAINT**2) * scale**2
    over = tally.out.abs() * scale + hard >= find(arithmetic.output).maximum
    moved = rounded.lse - truth.lse if rounded else None
    lse = [values[..., 0] for values in (_lse_hard(tally), _lse_variance(tally, moved))]
    return (
        [variance.masked_fill_(over, torch.inf), hard.masked_fill_(over, torch.inf), truth.out * problem.cache_scale],
        [*lse, *_shares(tally, parts, scale, coherence), truth.largest[..., 0], (tally.scattered.sqrt() * scale)[..., 0]],
    )


def _variances(tally: Tally, scale: Tensor, coherence: Tensor, shift: Tensor | None) -> _Parts:
    arithmetic, moments, out = tally.arithmetic, tally.moments, tally.out
    squares = moments.about_zero(PROBABILITY)
    tokens = coherence * (moments.about(PROBABILITY, out) if tally.rounded_sum else squares)
    if shift is not None:
        tokens = tokens + torch.maximum(shift.square(), tally.operand + moments.about(OPERAND, out))
    flushed = tally.flushed
    if tally.rounded_sum:  # the sum is smaller by what is missing from it
        flushed = (flushed - tally.flushed_mass * out) / (1 - tally.flushed_mass).clamp(min=U32)
    known, written = find(arithmetic.probability), find(arithmetic.output)
    # sum p^2 v^2, as far as it can be had from the variance of the roundings of p.
    squares = squares / (UNIFORM * (2 * known.unit_roundoff) ** 2)
    spacing = ulp(out * scale * (1 + written.unit_roundoff), written) / scale
    twice = tally.merges and arithmetic.partial == arithmetic.output
    return _Parts(
        tokens=tokens,
        common=moments.about(SINGLE, out)
        + UNIFORM * (2 * U32) ** 2 * STEPS * moments.drift(SCORE, out).square()
        + UNIFORM * (2 * U32) ** 2 * (STEPS + tally.sum_depth) * out.square(),
        sums=flushed.square().amax(0) + UNIFORM * (2 * U32) ** 2 * tally.depth * (out.square() + squares),
        partials=tally.partials.coherence() * tally.partials.variance.double() if tally.merges else torch.zeros_like(out),
        last=tally.partials.second_rounding(out, spacing) if twice else spacing.square() * UNIFORM,
    )


def _shares(tally: Tally, parts: _Parts, scale: Tensor, coherence: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Work out effective tokens, their share, effective elements and the spread, each [G, R]."""
    arithmetic, single = tally.arithmetic, parts.single
    written, part = find(arithmetic.output), find(arithmetic.partial)
    elements = effective_elements(tally.out * scale, single, written)
    squares = parts.last.sum(-1).square() + parts.sums.sum(-1).square()
    if tally.merges:
        squares = squares + tally.partials.squares
        if part.significand <= written.significand:
            leader = tally.partials.leader.double() * scale
            elements = torch.minimum(elements, effective_elements(leader, single, part))
    row = (parts.tokens + parts.common + single).sum(-1)
    tokens, common = parts.tokens.sum(-1) / row, parts.common.sum(-1) / row
    number = tally.sharing.effective_tokens(coherence[..., 0], effective_number(parts.tokens))
    inverse = tokens.square() / number + common.square() * (NORMAL_EXCESS / EXCESS)
    share = tokens + common
    # An element's error is a sum of a few uniform ones: the more it has, the closer to a normal one. The last term is the
    # product of the two kinds of error, which a square has as well.
    few = (squares / single.sum(-1).square()).clamp(max=1)
    excess = NORMAL_EXCESS - (NORMAL_EXCESS - EXCESS) * few
    spread = EXCESS * inverse + (1 - share) * (excess * (1 - share) + 4 * share) / elements
    return torch.where(share > 0, share.square() / inverse, 1.0), share, elements, spread.sqrt()


def _hard(tally: Tally, scale: Tensor) -> Tensor:
    arithmetic, out, mass = tally.arithmetic, tally.out.abs(), tally.moments.mass(BOUND)
    hard = tally.bound + (find(arithmetic.operand).unit_roundoff * tally.absolute if arithmetic.operand else 0.0)
    if tally.rounded_sum:
        hard = (hard + tally.bound_mass * out) / (1 - tally.bound_mass).clamp(min=0)
    hard = hard + (mass * tally.moments.about(BOUND, tally.out)).sqrt() / (1 - mass).clamp(min=0)
    hard += U32 * (tally.depth + 2 * tally.updates + STEPS) * (tally.absolute + out)
    hard += tally.depth * _LOST
    if tally.merges:
        magnitude = tally.partials.magnitude.double() + hard
        # Rounding moves what was already moved, and may do so in the next binade.
        hard = hard + tally.partials.bound + 2 * find(arithmetic.partial).unit_roundoff * hard
        hard += 2 * (arithmetic.exponential + U32 * (tally.edges + 4 + 2 * _height(tally))) * magnitude
    hard = hard.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(max=_FARTHEST) * scale
    return hard + ulp(out * scale + hard, find(arithmetic.output)) / 2


def _height(tally: Tally) -> Tensor:
    """Measure how large the logarithms are that are added, [G, R, 1]."""
    return tally.truth.maximum.abs() + tally.truth.total.log() + 1


def _logarithm(tally: Tally) -> Tensor:
    """Bound the error of taking the logarithm and adding the maximum, [G, R, 1].

    Base-two kernels multiply the maximum by log2(e) and the result by ln 2; each is a rounding of the whole.
    """
    return (tally.arithmetic.exponential + 8 * U32) * _height(tally)


def _lse_hard(tally: Tally) -> Tensor:
    """Bound the error of the log-sum-exp, [G, R, 1]: that of the scores, of the sum and of the logarithm."""
    moved = tally.moments.mass(BOUND) + U32 * (tally.sum_depth + STEPS) + tally.arithmetic.exponential
    if tally.rounded_sum:
        moved = moved + tally.bound_mass
    # A sum that may be anything between nothing and twice itself has a logarithm without a bound.
    return torch.where(moved < 1, moved / (1 - moved), torch.inf) + _logarithm(tally)


def _lse_variance(tally: Tally, moved: Tensor | None) -> Tensor:
    """Estimate the variance of the log-sum-exp's error, [G, R, 1]: the terms of its bound, those of fp32 in common."""
    moments = tally.moments
    variance = moments.mass(SINGLE) + UNIFORM * (2 * U32) ** 2 * tally.sum_depth + _logarithm(tally).square()
    if tally.rounded_sum:
        lost = tally.flushed_mass.amax(0).clamp(max=1 - U32)
        variance = variance + tally.mass_coherence() * moments.mass(PROBABILITY) + (1 - lost).log().square()
    if moved is not None:
        variance = variance + torch.maximum(moved.square(), moments.mass(OPERAND))
    return variance
