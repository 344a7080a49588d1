"""What the rounding errors of a row have in common: the spread of its statistic.

A row is the L output elements of a (request, query token, head). The error of one probability, or of one score, reaches all
elements of its row; equal values round alike. The mean of ρ² = ‖e‖² / ‖√V‖² is 1 whatever errors share; its variance is not:

    e = Σ_s ε_s b_s          sources s: independent errors ε_s of variance 1 with directions b_s in R^L
    C = Σ_s b_s b_sᵀ         E‖e‖² = tr C = Σ_i V_i
    Var ‖e‖² = 2 tr C² - 0.91 Σ_s ‖b_s‖⁴        0.91 = 3 - 2.09 for roundings (E ε⁴ = 2.09), 0 for sums of many

1. tr C² is the squares of V plus what the sources share off the diagonal. The matrices are never formed: of the tokens'
   directions, the part along their mean is taken exactly and the rest as uncorrelated (``_square_trace``).
2. Tokens with the same codes have the same probability, which rounds the same way: they are one source.
3. Scores closer together than a rounding step round alike too, in a way the running maximum decides. The share that does
   is the order parameter r = |Σ p_j e^{2πi x_j}|, x_j the probability in units of its last place: a source along o.
4. Below half the smallest subnormal a probability is lost: all of these together are one source, which may or may not
   act, since a split or tile with a lower maximum keeps them.
5. Output elements of one significand round alike: they are one source.

Source: docs/numerics.md; the moments are those of δ/(√c·u), δ uniform within ±1/2 unit in the last place over a log-uniform
significand: E δ⁴/(c·u²)² = (1 - 2^-4)/(4·5·ln 2)/c² = 2.09.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.weights import Weights
from references.budget import Arithmetic
from references.formats import FORMATS, Format

#: Mean square of a rounding error in units of u², over a log-uniform significand: (1 - 1/4) / (2 ln 2) / 3.
MEAN_SQUARE = (1 - 1 / 4) / (2 * math.log(2)) / 3
#: 3 less the fourth moment of such an error in units of its variance squared.
FOURTH = 3 - (1 - 2**-4) / (20 * math.log(2)) / MEAN_SQUARE**2
#: Significands of this many bits and more round below what fp32 sums leave uncertain: nothing is shared there.
_FINE = 20
#: Relative gap between significands that are the same value but for fp32 sums.
_SAME = 2.0**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Coherence:
    """Corrections to the budget of the rows of one request."""

    #: Variance that equal and lost probabilities add to the budget's, fp64 [R, L].
    extra: Tensor
    #: Off-diagonal part of tr C², fp64 [R].
    shared: Tensor
    #: Σ_s ‖b_s‖⁴ of the roundings of probabilities, fp64 [R].
    fourth: Tensor


def cohere(weights: Weights, arithmetic: Arithmetic, out: Tensor) -> Coherence:
    """Find what the errors of a request's rows share.

    Args:
        weights: its softmax weights.
        arithmetic: what the kernel rounds.
        out: the truth, [R, L].

    Source: the module.
    Error: the square trace is within a factor of two on the content families (a test holds it); its root enters z.
    """
    known, out = FORMATS[arithmetic.probability], out.double()
    p, extra = weights.probabilities, torch.zeros_like(out)
    variance = (MEAN_SQUARE * known.unit_roundoff**2) * p.square()
    shared = torch.zeros_like(weights.lse)
    lost, coarse = _subnormal(weights, known, arithmetic.probability_scale)
    if coarse is not None:
        extra += _sum_squares(weights, (coarse - variance).clamp_(min=0))
        variance = torch.maximum(variance, coarse)
    if lost is not None:
        direction = weights.sum_values(lost)
        extra += direction.square()
        shared += _off_diagonal(direction)
    merged, values = _merge_ties(weights, variance)
    if values is not None:
        extra += merged @ values.square() - _sum_squares(weights, variance)
    if known.significand < _FINE:
        order = MEAN_SQUARE * known.unit_roundoff**2 * _order(weights, known)
        extra += order[:, None] * out.square()
        shared += _off_diagonal(order.sqrt()[:, None] * out)
    trace, diagonal = _square_trace(weights, merged, values)
    norms = weights.norms() if values is None else values.square().sum(-1)
    fourth = merged.square() @ norms.square()
    return Coherence(extra=extra, shared=shared + (trace - diagonal).clamp_(min=0), fourth=fourth)


def kin(variance: Tensor, out: Tensor, known: Format) -> Tensor:
    """Add up what output elements of one significand share: variance and truth [R, L] to fp64 [R], off the diagonal."""
    if known.significand >= _FINE:
        return torch.zeros_like(out[:, 0], dtype=torch.float64)
    significands, order = torch.frexp(out.abs())[0].sort(dim=-1)
    fresh = significands.diff(dim=-1) > _SAME
    if bool(fresh.all()):
        return torch.zeros_like(out[:, 0], dtype=torch.float64)
    group = torch.nn.functional.pad(fresh.long().cumsum(dim=-1), (1, 0))
    sums = torch.zeros_like(variance).scatter_add_(1, group, variance.gather(1, order))
    return (sums.square().sum(-1) - variance.square().sum(-1)).double()


def _off_diagonal(direction: Tensor) -> Tensor:
    """Take tr (b bᵀ)² less its diagonal: [R, L] to [R]."""
    squares = direction.square()
    return squares.sum(-1).square() - squares.square().sum(-1)


def _sum_squares(weights: Weights, of: Tensor) -> Tensor:
    """Sum the squares of V over tokens: [M, N] to [M, L]."""
    latent, scale = weights.problem.latent, weights.problem.cache_scale
    total = of.new_zeros(of.shape[0], latent)
    for start, stop, rows in weights.pieces():
        total.addmm_(of[:, start:stop], rows[:, :latent].square(), alpha=scale * scale)
    return total


def _subnormal(weights: Weights, known: Format, scale: float) -> tuple[Tensor | None, Tensor | None]:
    """Find probabilities that the format loses, and the variance of those it holds as subnormals; [R, N] each."""
    p = weights.probabilities
    top = p.amax(-1, keepdim=True)
    step = top * (known.smallest_subnormal / scale)
    small = (p < top * (known.smallest_normal / scale)) & (p > 0)
    if not bool(small.any()):
        return None, None
    gone = small & (p < step / 2)
    coarse = torch.where(small & ~gone, step.square() / 12, 0.0)
    return torch.where(gone, p, 0.0) if bool(gone.any()) else None, coarse


def _merge_ties(weights: Weights, variance: Tensor) -> tuple[Tensor, Tensor | None]:
    """Merge tokens of the same codes into one source; gives its variance [R, U] and V [U, L], or the tokens as they are."""
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(weights.problem.width, generator=generator, dtype=torch.float64).to(variance.device)
    marks = torch.cat([(rows * key).sum(-1) for _, _, rows in weights.pieces()])
    unique, group = torch.unique(marks, return_inverse=True)
    if len(unique) == weights.length:
        return variance, None
    deviation = variance.new_zeros(variance.shape[0], len(unique))
    deviation.index_add_(1, group, variance.sqrt())
    first = torch.zeros(len(unique), dtype=torch.int64, device=variance.device)
    first[group] = torch.arange(weights.length, device=variance.device)
    return deviation.square_(), weights.values(first)


def _order(weights: Weights, known: Format) -> Tensor:
    """Square the order parameter of a row's probabilities, [R]."""
    relative = torch.exp(weights.scores - weights.scores.amax(-1, keepdim=True).nan_to_num_(neginf=0.0))
    phase = torch.frexp(relative)[0] * (2 * math.pi * 2.0**known.significand)
    p = weights.probabilities
    return (p * phase.cos()).sum(-1).square() + (p * phase.sin()).sum(-1).square()


def _square_trace(weights: Weights, variance: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Estimate tr M² and its diagonal part for M = Σ_j w_j v_j v_jᵀ, w the variance [R, N]; [R] each.

    M is split by the mean direction m of Σ w_j v_j: λ = mᵀ M m exactly; across it the v_j count as uncorrelated.
    """
    if values is None:
        mean, squares, norms = weights.sum_values(variance), _sum_squares(weights, variance), weights.norms()
    else:
        mean, squares, norms = variance @ values, variance @ values.square(), values.square().sum(-1)
    mean = torch.nn.functional.normalize(mean, dim=-1, eps=torch.finfo(mean.dtype).tiny)
    along = weights.along(mean) if values is None else mean @ values.T
    along = along.square_()
    largest = (variance * along).sum(-1)
    across = (squares - largest[:, None] * mean.square()).clamp_(min=0)
    rest = (variance.square() * (norms - along).clamp_(min=0).square()).sum(-1)
    return largest.square() + across.square().sum(-1) + rest, squares.square().sum(-1)
