"""The terms of the rounding budget: what probabilities, scores and operands lose.

1. A probability is relative to its row: what it is after the division by the sum. V is scaled to magnitude 1.
2. Sums over tokens are fp32 sums of terms of one sign: some 1e-6 off, and a budget has more slack than that.
3. Shapes are those of ``pieces``: G requests, R rows of each, n lanes.

Source: the derivation in ``budget``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from references.arithmetic import Arithmetic
from references.formats import Format, find, round, ulp
from references.pieces import Change, Context, Layout, Piece, Softmax
from references.problem import Problem

#: Mean square of an error that is uniform within half a spacing, over the square of the spacing.
UNIFORM = 1 / 12
#: fp32's unit roundoff.
U32 = 2.0**-24
#: fp32 roundings on the way of one value besides sums and exponentials: scales multiplied together, applied to the score and
#: to V, weights of the merge, the division by the sum. More than any kernel here needs.
STEPS = 16
#: A score error whose exponential says nothing any more, but whose square is still an fp32 value: e^40 = 2e17.
_LARGE = 40.0


class InUse:
    """The maximum that each token's probability is relative to when it is rounded; streamed."""

    def __init__(self, arithmetic: Arithmetic, softmax: Softmax, *, varies: bool) -> None:
        self._tile, self._softmax = arithmetic.tile if arithmetic.pivot == "tile" else 0, softmax
        #: Whether tokens of a row may have several.
        self._varies = varies and arithmetic.pivot != "normalised"
        self._running: Tensor | None = None

    def find(self, piece: Piece) -> Tensor:
        """Find those of a piece, fp64 [P, G, R, n or 1]: where tokens have several, by tiles or splits; last, the row's."""
        row = self._softmax.maximum
        if not self._varies:
            return row[None]
        shape = piece.scores.shape
        found = self._climb(piece) if self._tile else self._softmax.tops[..., piece.first : piece.first + piece.splits, None]
        found = found.expand(*shape[:-1], piece.splits, piece.stop - piece.start).reshape(shape)
        return torch.stack([found.masked_fill(found == -torch.inf, 0.0), row.expand(shape)])

    def _climb(self, piece: Piece) -> Tensor:
        """Find the running maximum of each tile and give it to its lanes, [G, R, splits, lanes]; tiles are taken in order."""
        scores = piece.by_split(piece.scores)
        lanes = scores.shape[-1]
        padded = torch.nn.functional.pad(scores, (0, -lanes % self._tile), value=-torch.inf)
        tops = padded.view(*padded.shape[:-1], -1, self._tile).amax(-1)
        if piece.start and self._running is not None:
            tops = torch.maximum(tops, self._running)
        tops, _ = tops.cummax(-1)
        self._running = tops[..., -1:]
        return tops.repeat_interleave(self._tile, -1)[..., :lanes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbabilityErrors:
    """What rounding does to probabilities, relative to each of the maxima in use [P, ...]; the last is the row's."""

    #: The probabilities, fp64 [G, R, n].
    weights: Tensor
    #: In the spacings of their format at the place where they are rounded, fp32 [P, G, R, n].
    turns: Tensor
    #: Variance of each, [P, G, R, n].
    variance: Tensor
    #: Bound on each, whichever maximum is in use, [G, R, n].
    bound: Tensor
    #: Those that become zero, as they were; zero for the others, [P, G, R, n].
    flushed: Tensor


def probability_errors(arithmetic: Arithmetic, piece: Piece, softmax: Softmax, pivots: Tensor) -> ProbabilityErrors:
    """Work out what rounding does to the probabilities of a piece; ``pivots`` are the maxima in use, [P, G, R, n or 1]."""
    known, scale = find(arithmetic.probability), arithmetic.probability_scale
    given = (piece.scores - pivots).exp_()
    weights = given[-1] / softmax.total
    normalised = arithmetic.pivot == "normalised"
    if normalised:
        given = weights[None]
    units = given * scale
    spacing = ulp(units, known)
    lost = units < known.smallest_subnormal / 2
    # From the units in which a probability is rounded to those of the row.
    unit = 1 / scale if normalised else (pivots - softmax.maximum).exp_() / (scale * softmax.total)
    variance = (spacing * unit).square_().mul_(UNIFORM).masked_fill_(lost, 0.0)
    if not normalised:
        # The maximum itself is exp(0) = 1, which times a scale of the format is exact.
        variance.masked_fill_(given == 1, 0.0)
    least = known.smallest_subnormal / 2 / scale / (1.0 if normalised else softmax.total)
    return ProbabilityErrors(
        weights=weights,
        turns=(units / spacing).to(torch.float32),
        variance=variance,
        bound=torch.minimum((weights * known.unit_roundoff).clamp_(min=least), weights),
        flushed=weights * lost,
    )


def either(errors: ProbabilityErrors, known: Format, varies: Tensor) -> Tensor:
    """Allow for other tiles, splits and orders than declared: maxima in use lie between those and the row's; [G, R, n].

    What is exact as a maximum in use is rounded where the row's is in use; subnormals are coarser there; and each of those that
    are lost there may be kept elsewhere.

    Args:
        errors: errors relative to the maximum in use, and to the row's.
        known: the format of probabilities.
        varies: 1 where a request has several maxima in use, else 0, [G, 1, 1].
    """
    running, row = errors.variance[0], errors.variance[-1]
    coarse = (errors.turns[-1] < 2.0 ** (known.significand - 1)) | (running == 0)
    return torch.maximum(torch.where(coarse, torch.maximum(running, row), running), (errors.flushed[-1] * varies).square())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreErrors:
    """What rounding in fp32 does to scores, natural-log units, and a bound on all that happens to them; [G, R, n]."""

    #: The scores; zero where hidden.
    scores: Tensor
    #: Variance of what fp32 does to each for itself.
    variance: Tensor
    #: Bound on the relative error of the exponential, operands included.
    bound: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """How large decoded rows are, fp64 [G, rows]."""

    #: (sum of squares)^(1/2).
    second: Tensor
    #: (sum of fourth powers)^(1/2).
    fourth: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> RowSizes:
        """Measure rows [G, rows, D]."""
        squares = rows.square()
        return cls(second=squares.sum(-1).sqrt_(), fourth=squares.norm(dim=-1))

    def __add__(self, other: RowSizes) -> RowSizes:
        """Join other columns to each row."""
        return RowSizes(second=self.second.hypot(other.second), fourth=self.fourth.hypot(other.fourth))


def score_errors(
    arithmetic: Arithmetic, context: Context, piece: Piece, softmax: Softmax, updates: Tensor, rows: RowSizes
) -> ScoreErrors:
    """Work out what rounding does to the scores of a piece, the maximum being raised ``updates`` [G, 1, 1] times at most."""
    problem, query = context.problem, RowSizes.of(context.query)
    scale, terms = abs(problem.score_scale), problem.width + STEPS
    product = piece.scores.masked_fill(piece.scores == -torch.inf, 0.0)
    fall = (softmax.maximum - product).clamp_(min=0)
    exponential = (fall + 1).mul_(arithmetic.exponential)
    # What rescales a tile rescales its share of the sum too: an error there moves tiles against each other, by a random walk.
    rescaling = arithmetic.exponential + U32
    # Cauchy and Schwarz's bounds on sum |q k| and sum q^2 k^2 spare two products; only fp32 errors hang on them in full.
    squares = (scale**2 * query.fourth)[..., None] * rows.fourth[:, None]
    magnitudes = (scale * query.second)[..., None] * rows.second[:, None]
    # A sum of D products in random order: its partial sums are at most the product plus a random walk.
    single = product.square().add_(squares).mul_(UNIFORM * (2 * U32) ** 2 * terms)
    single.addcmul_(exponential, exponential).add_(updates * rescaling**2)
    relative = sum(find(name).unit_roundoff for name in (arithmetic.operand, arithmetic.query) if name)
    bound = magnitudes.mul_(1.01 * relative + U32 * terms).add_(exponential).add_(updates * rescaling)
    return ScoreErrors(scores=product, variance=single, bound=bound.clamp_(max=_LARGE).expm1_())


def rounded_context(arithmetic: Arithmetic, problem: Problem, layout: Layout) -> Context | None:
    """Make contexts with their operands rounded; None if none are."""
    if not (arithmetic.operand or arithmetic.query):
        return None
    return Context(problem, layout, query=_rounding(arithmetic.query), keys=_rounding(arithmetic.operand))


def _rounding(name: str | None) -> Change | None:
    if name is None:
        return None
    known = find(name)
    # As kernels do: the product is an fp32 one.
    return lambda values, scale: round(values.to(torch.float32) * scale, known).double().div_(scale)


class Moments:
    """Weighted sums of 1, v and v^2 over tokens, for several weightings at once; streamed."""

    def __init__(self, count: int, like: Tensor) -> None:
        groups, rows, latent = like.shape
        self._mass = like.new_zeros((groups, count * rows, 1))
        self._mean = like.new_zeros((groups, count * rows, latent))
        self._square = torch.zeros_like(self._mean)
        self._count = count

    def add(self, weights: Sequence[Tensor], values: Tensor, squares: Tensor) -> None:
        """Add tokens: a weighting each [G, R, n], v and v^2 [G, n, L]."""
        stacked = torch.cat([weight.to(self._mean.dtype) for weight in weights], 1)
        self._mass += stacked.sum(-1, keepdim=True)
        self._mean.baddbmm_(stacked, values)
        self._square.baddbmm_(stacked, squares)

    def mass(self, index: int) -> Tensor:
        """Sum a weighting, fp64 [G, R, 1]."""
        return self._mass.chunk(self._count, 1)[index].double()

    def about_zero(self, index: int) -> Tensor:
        """Sum a weighting times v^2, fp64 [G, R, L]."""
        return self._square.chunk(self._count, 1)[index].double()

    def about(self, index: int, centre: Tensor) -> Tensor:
        """Sum a weighting times (v - centre)^2, fp64 [G, R, L]."""
        mean = self._mean.chunk(self._count, 1)[index]
        moved = centre * (centre * self.mass(index) - 2 * mean)
        return moved.add_(self.about_zero(index)).clamp_(min=0)

    def drift(self, index: int, centre: Tensor) -> Tensor:
        """Sum a weighting times v - centre, fp64 [G, R, L]."""
        return self._mean.chunk(self._count, 1)[index].double() - centre * self.mass(index)
