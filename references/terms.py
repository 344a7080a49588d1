"""The terms of the rounding budget: what probabilities, scores and operands lose.

1. A probability is relative to its row: what it is after the division by the sum. V is scaled to magnitude 1.
2. Sums over tokens are fp32 sums of terms of one sign: some 1e-6 off, and a budget has more slack than that.

Source: the derivation in ``budget``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from references.arithmetic import Arithmetic
from references.formats import Format, find, round, ulp
from references.pieces import Change, Context, Piece, Softmax
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

    def __init__(self, arithmetic: Arithmetic, softmax: Softmax, edges: Sequence[int]) -> None:
        self._tile, self._edges, self._row = arithmetic.tile, edges, softmax.maximum
        self._moves = arithmetic.pivot == "tile"
        self._running = torch.full_like(softmax.maximum, -torch.inf)

    def find(self, piece: Piece) -> Tensor:
        """Find it for the tokens of a piece, fp64 [rows, n] or [rows, 1]; tiles are taken in order."""
        if not self._moves:
            return self._row
        inner = [edge - piece.start for edge in self._edges if piece.start < edge < piece.stop]
        found = torch.empty_like(piece.scores)
        for start, stop in pairwise([0, *inner, piece.stop - piece.start]):
            if piece.start + start in self._edges:
                self._running.fill_(-torch.inf)
            found[:, start:stop] = self._climb(piece.scores[:, start:stop])
        return found.masked_fill_(found == -torch.inf, 0.0)

    def _climb(self, scores: Tensor) -> Tensor:
        rows, count = scores.shape
        tile = min(self._tile or count, count)
        padded = torch.nn.functional.pad(scores, (0, -count % tile), value=-torch.inf)
        tops = torch.maximum(padded.view(rows, -1, tile).amax(2), self._running).cummax(1).values
        self._running = tops[:, -1:].clone()
        return tops.repeat_interleave(tile, 1)[:, :count]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbabilityErrors:
    """What rounding does to probabilities, all [rows, n]."""

    #: The probabilities, fp64.
    weights: Tensor
    #: In the spacings of their format at the place where they are rounded, fp32.
    turns: Tensor
    #: Variance of each.
    variance: Tensor
    #: Bound on each, whichever maximum is in use.
    bound: Tensor
    #: Those that become zero, as they were; zero for the others. None if there are none.
    flushed: Tensor | None


def probability_errors(arithmetic: Arithmetic, piece: Piece, softmax: Softmax, pivot: Tensor) -> ProbabilityErrors:
    """Work out what rounding does to the probabilities of a piece; ``pivot`` is the maximum in use, [rows, n] or [rows, 1]."""
    known, scale = find(arithmetic.probability), arithmetic.probability_scale
    highest = (piece.scores - softmax.maximum).exp_()
    weights = highest / softmax.total
    normalised = arithmetic.pivot == "normalised"
    given = weights if normalised else (piece.scores - pivot).exp_() if pivot is not softmax.maximum else highest
    units = given * scale
    spacing = ulp(units, known)
    flushed = units < known.smallest_subnormal / 2
    # From the units in which a probability is rounded to those of the row.
    unit = 1 / scale if normalised else (pivot - softmax.maximum).exp_() / (scale * softmax.total)
    variance = (spacing * unit).square_().mul_(UNIFORM).masked_fill_(flushed, 0.0)
    if not normalised:
        # The maximum itself is exp(0) = 1, which times a scale of the format is exact.
        variance.masked_fill_(given == 1, 0.0)
    least = known.smallest_subnormal / 2 / scale / (1.0 if normalised else softmax.total)
    bound = torch.minimum((weights * known.unit_roundoff).clamp_(min=least), weights)
    return ProbabilityErrors(
        weights=weights,
        turns=(units / spacing).to(torch.float32),
        variance=variance,
        bound=bound,
        flushed=weights * flushed if bool((flushed & (weights > 0)).any()) else None,
    )


def either(running: ProbabilityErrors, row: ProbabilityErrors, known: Format) -> ProbabilityErrors:
    """Allow for other tiles, splits and orders than declared: maxima in use lie between running ones and the row's.

    What is exact as a maximum in use is rounded where the row's is in use; subnormals are coarser there; and each of those that
    are lost there may be kept elsewhere.

    Args:
        running: errors relative to the running maximum.
        row: errors relative to the row's.
        known: the format of probabilities.
    """
    coarse = (row.turns < 2.0 ** (known.significand - 1)) | (running.variance == 0)
    variance = torch.where(coarse, torch.maximum(running.variance, row.variance), running.variance)
    if row.flushed is not None:
        variance = torch.maximum(variance, row.flushed.square())
    return replace(running, variance=variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreErrors:
    """What rounding in fp32 does to scores, natural-log units, and a bound on all that happens to them; [rows, n]."""

    #: The scores; zero where hidden.
    scores: Tensor
    #: Variance of what fp32 does to each for itself.
    variance: Tensor
    #: Bound on the relative error of the exponential, operands included.
    bound: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """How large decoded rows are, fp64 [n]."""

    #: (sum of squares)^(1/2).
    second: Tensor
    #: (sum of fourth powers)^(1/2).
    fourth: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> RowSizes:
        """Measure rows [n, D]."""
        squares = rows.square()
        return cls(second=squares.sum(1).sqrt_(), fourth=squares.norm(dim=1))

    def __add__(self, other: RowSizes) -> RowSizes:
        """Join other columns to each row."""
        return RowSizes(second=self.second.hypot(other.second), fourth=self.fourth.hypot(other.fourth))


def score_errors(
    arithmetic: Arithmetic, context: Context, piece: Piece, softmax: Softmax, updates: int, rows: RowSizes
) -> ScoreErrors:
    """Work out what rounding does to the scores of a piece, the maximum being raised ``updates`` times at most."""
    problem, query = context.problem, RowSizes.of(context.query)
    scale, terms = abs(problem.score_scale), problem.width + STEPS
    product = piece.scores.masked_fill(piece.scores == -torch.inf, 0.0)
    fall = (softmax.maximum - product).clamp_(min=0)
    exponential = (fall + 1).mul_(arithmetic.exponential)
    # What rescales a tile rescales its share of the sum too: an error there moves tiles against each other, by a random walk.
    rescaling = arithmetic.exponential + U32
    # Cauchy and Schwarz's bounds on sum |q k| and sum q^2 k^2 spare two products; only fp32 errors hang on them in full.
    squares = (scale**2 * query.fourth)[:, None] * rows.fourth
    magnitudes = (scale * query.second)[:, None] * rows.second
    # A sum of D products in random order: its partial sums are at most the product plus a random walk.
    single = product.square().add_(squares).mul_(UNIFORM * (2 * U32) ** 2 * terms)
    single.addcmul_(exponential, exponential).add_(updates * rescaling**2)
    relative = sum(find(name).unit_roundoff for name in (arithmetic.operand, arithmetic.query) if name)
    bound = magnitudes.mul_(1.01 * relative + U32 * terms).add_(exponential).add_(updates * rescaling)
    return ScoreErrors(scores=product, variance=single, bound=bound.clamp_(max=_LARGE).expm1_())


def rounded_context(arithmetic: Arithmetic, problem: Problem, request: int) -> Context | None:
    """Make a request's context with its operands rounded; None if none are."""
    if not (arithmetic.operand or arithmetic.query):
        return None
    return Context(problem, request, query=_rounding(arithmetic.query), keys=_rounding(arithmetic.operand))


def _rounding(name: str | None) -> Change | None:
    if name is None:
        return None
    known = find(name)
    # As kernels do: the product is an fp32 one.
    return lambda values, scale: round(values.to(torch.float32) * scale, known).double().div_(scale)


class Moments:
    """Weighted sums of 1, v and v^2 over tokens, for several weightings at once; streamed."""

    def __init__(self, count: int, like: Tensor) -> None:
        rows, latent = like.shape
        self._mass = like.new_zeros((count * rows, 1))
        self._mean = like.new_zeros((count * rows, latent))
        self._square = torch.zeros_like(self._mean)
        self._count = count

    def add(self, weights: Sequence[Tensor], values: Tensor, squares: Tensor) -> None:
        """Add tokens: a weighting each [rows, n], v and v^2 [n, L]."""
        stacked = torch.cat([weight.to(self._mean.dtype) for weight in weights])
        self._mass += stacked.sum(1, keepdim=True)
        self._mean.addmm_(stacked, values)
        self._square.addmm_(stacked, squares)

    def mass(self, index: int) -> Tensor:
        """Sum a weighting, fp64 [rows, 1]."""
        return self._mass.chunk(self._count)[index].double()

    def about_zero(self, index: int) -> Tensor:
        """Sum a weighting times v^2, fp64 [rows, L]."""
        return self._square.chunk(self._count)[index].double()

    def about(self, index: int, centre: Tensor) -> Tensor:
        """Sum a weighting times (v - centre)^2, fp64 [rows, L]."""
        mean = self._mean.chunk(self._count)[index]
        moved = centre * (centre * self.mass(index) - 2 * mean)
        return moved.add_(self.about_zero(index)).clamp_(min=0)

    def drift(self, index: int, centre: Tensor) -> Tensor:
        """Sum a weighting times v - centre, fp64 [rows, L]."""
        return self._mean.chunk(self._count)[index].double() - centre * self.mass(index)
