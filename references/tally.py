"""The second pass of the budget: a request's terms, added up over its context.

1. V is taken over its height; the scale comes in at the end. Rows are the S*H query rows of one request.
2. A tally holds sums; what they mean for an output is worked out in ``budget``.

Source: the derivation in ``budget``.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from references.arithmetic import Arithmetic
from references.formats import find
from references.partials import Partials
from references.pieces import Context, Piece, Softmax
from references.spread import Coherence, TokenSharing, probe
from references.terms import InUse, Moments, ProbabilityErrors, RowSizes, either, probability_errors, score_errors

#: Weightings of a tally's moments: variance of probabilities, of fp32 scores, bounds of scores, the scores themselves (what
#: an error of the scale does), variance by operands.
PROBABILITY, SINGLE, BOUND, SCORE, OPERAND = range(5)


class Tally:
    """The sums of one request's second pass, V over its height; rows are its S*H query rows."""

    def __init__(self, context: Context, arithmetic: Arithmetic, truth: Softmax, rounded: Context | None) -> None:
        problem = context.problem
        self.context, self.arithmetic, self.truth = context, arithmetic, truth
        self.out = truth.out / truth.height
        launch = {"heads": problem.heads, "query_tokens": problem.query_tokens, "batch": problem.batch}
        self.edges = arithmetic.splits.edges(context.length, **launch)
        self.merges = arithmetic.splits.launched(**launch) > 1
        longest = max(stop - start for start, stop in pairwise(self.edges))
        tile = min(arithmetic.tile or longest, longest)
        #: Times that a running maximum may rise, terms of a product's sum, and terms of the sum of probabilities.
        self.updates = -(-longest // tile)
        self.depth = longest + len(self.edges)
        self.sum_depth = min(self.depth, tile + self.updates + len(self.edges))
        self.in_use = InUse(arithmetic, truth, self.edges)
        self.rounded = rounded
        like = self.out.to(truth.dtype)
        self.moments = Moments(5 if rounded else 4, like)
        self.partials = Partials(find(arithmetic.partial), self.edges, problem.cache_scale * truth.height, like)
        self.sharing = TokenSharing(self.out)
        #: Coherence with tiles taken in order, and with the row's maximum in use throughout.
        self.coherences = [Coherence(context.rows, self.out) for _ in range(2)]
        zeros = torch.zeros_like(self.out)
        self.absolute, self.bound, self.flushed, self.operand = zeros, zeros.clone(), zeros.clone(), zeros.clone()
        self.bound_mass, self.flushed_mass = zeros.new_zeros((len(zeros), 1)), zeros.new_zeros((len(zeros), 1))

    def add(self, piece: Piece, rounded: Piece) -> None:
        """Add a piece, and the same one with operands rounded."""
        latent, height = self.context.problem.latent, self.truth.height
        values = piece.keys[:, :latent].to(self.truth.dtype).div_(height)
        squares = values.square()
        lengths = squares.sum(1)
        # Squares are at hand already; the rope part, which has none, is narrow.
        sizes = RowSizes(second=lengths.double().sqrt() * height, fourth=squares.norm(dim=1).double() * height**2)
        sizes = sizes + RowSizes.of(piece.keys[:, latent:])
        errors = probability_errors(self.arithmetic, piece, self.truth, self.in_use.find(piece))
        row = None
        if self.arithmetic.pivot == "tile" and (self.updates > 1 or self.merges):
            row = probability_errors(self.arithmetic, piece, self.truth, self.truth.maximum)
            errors = either(errors, row, find(self.arithmetic.probability))
        scores = score_errors(self.arithmetic, self.context, piece, self.truth, self.updates, sizes)
        weights = errors.weights
        weightings = [errors.variance, weights.square() * scores.variance, weights * scores.bound, weights * scores.scores]
        if self.rounded:
            # An error past 1 is no small one any more: then the shift is what counts.
            moved = (rounded.scores - piece.scores).nan_to_num_(nan=0.0).clamp_(-1, 1)
            weightings.append((weights * moved).square_())
            lost = (rounded.keys - piece.keys)[:, :latent] / height
            self.operand += weights.square() @ lost.square_()
        self.moments.add(weightings, values, squares)
        single = weights.to(self.truth.dtype)
        bounds = torch.cat([errors.bound.to(self.truth.dtype), single]) @ values.abs()
        self.bound += bounds[: len(single)]
        self.absolute += bounds[len(single) :]
        self.bound_mass += errors.bound.sum(1, keepdim=True)
        if self.merges:
            self.partials.add(piece, single, values)
        if errors.flushed is not None:
            self.flushed += errors.flushed @ values.double()
            self.flushed_mass += errors.flushed.sum(1, keepdim=True)
        self._share(errors, row, values, lengths, weightings[OPERAND:])

    def _share(
        self,
        errors: ProbabilityErrors,
        row: ProbabilityErrors | None,
        values: Tensor,
        lengths: Tensor,
        operand: list[Tensor],
    ) -> None:
        variance, values = errors.variance.to(torch.float32), values.to(torch.float32)
        about_zero, about_out = variance, operand[0].to(torch.float32) if operand else None
        if self.rounded_sum:
            about_zero, about_out = torch.zeros_like(variance), variance if about_out is None else variance + about_out
        self.sharing.add(values, lengths.to(torch.float32), about_zero, about_out, errors.turns)
        if find(self.arithmetic.probability).significand >= 24:
            return  # fp32 errors of scores outweigh those of its roundings
        probed = probe(values)
        self.coherences[0].add(errors.turns, variance, probed)
        if row is not None:
            self.coherences[1].add(row.turns, row.variance.to(torch.float32), probed)

    @property
    def rounded_sum(self) -> bool:
        """Whether the sum adds up rounded probabilities, so that their errors act along v - o."""
        return self.arithmetic.normaliser == "rounded"

    def coherence(self) -> Tensor:
        """Find how much larger the variance of token errors is than if they were independent, fp64 [rows, 1]."""
        centre = self.out if self.rounded_sum else None
        return torch.maximum(*(coherence.factor(centre) for coherence in self.coherences))[:, None]

    def mass_coherence(self) -> Tensor:
        """Find the same for the sum of the token errors themselves, fp64 [rows, 1]."""
        return torch.maximum(*(coherence.of_mass() for coherence in self.coherences))[:, None]
