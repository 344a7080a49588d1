"""The second pass of the budget: the terms of some requests, added up over their contexts.

1. V is taken over its height; the scale comes in at the end. Shapes are those of ``pieces``.
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
from references.problem import place
from references.spread import Coherence, TokenSharing, probe
from references.terms import InUse, Moments, ProbabilityErrors, RowSizes, either, probability_errors, score_errors

#: Weightings of a tally's moments: variance of probabilities, of fp32 scores, bounds of scores, the scores themselves (what
#: an error of the scale does), variance by operands.
PROBABILITY, SINGLE, BOUND, SCORE, OPERAND = range(5)
#: A probability that is lost below this is nothing, however many are.
_NOTHING = 2.0**-60


class Tally:
    """The sums of the second pass over some requests, V over its height."""

    def __init__(self, context: Context, arithmetic: Arithmetic, truth: Softmax, rounded: Context | None) -> None:
        self.context, self.arithmetic, self.truth = context, arithmetic, truth
        layout = context.layout
        self.out, self.merges = truth.out / truth.height, layout.merges
        known = find(arithmetic.probability)
        # Of each request: times that a running maximum may rise; terms of a product's sum, and of the sum of probabilities;
        # edges; whether its tokens may have other maxima in use than the row's.
        counts = []
        for edges in layout.edges:
            longest = max(stop - start for start, stop in pairwise(edges))
            tile = min(arithmetic.tile or longest, longest)
            updates, depth = -(-longest // tile), longest + len(edges)
            varies = self.merges or (arithmetic.pivot == "tile" and updates > 1)
            counts.append([updates, depth, min(depth, tile + updates + len(edges)), len(edges), varies])
        stacked = place(counts, self.out.device, torch.float64)
        self.updates, self.depth, self.sum_depth, self.edges, self._varies = stacked[..., None, None].unbind(1)
        self.in_use = InUse(arithmetic, truth, varies=any(count[-1] for count in counts))
        self.rounded = rounded
        like = self.out.to(truth.dtype)
        self.moments = Moments(5 if rounded else 4, like)
        self.partials = Partials(find(arithmetic.partial), layout, context.problem.cache_scale * truth.height, like)
        self.sharing = TokenSharing(self.out)
        #: Coherence relative to each of the maxima in use; None for fp32, whose errors of scores outweigh those of rounding.
        self._coherence = None if known.significand >= 24 else Coherence(like)
        self.loses = known.smallest_subnormal / arithmetic.probability_scale >= _NOTHING
        #: Sums of p |v|, and of the bounds on p's roundings times |v|.
        self.absolute, self.bound = (torch.zeros_like(self.out) for _ in range(2))
        self.bound_mass = torch.zeros_like(truth.total)
        #: Sum of p v over what is lost relative to each of the maxima in use, [P, G, R, L], and of p.
        self.flushed, self.flushed_mass = torch.zeros_like(self.out)[None], torch.zeros_like(truth.total)[None]
        #: Sum of p^2 |v|^2, [G, R, 1].
        self.scattered = torch.zeros_like(truth.total)
        #: Sum of p^2 times the squared rounding of v.
        self.operand = torch.zeros_like(self.out)

    def add(self, piece: Piece, rounded: Piece) -> None:
        """Add a piece, and the same one with operands rounded."""
        latent, height, dtype = self.context.problem.latent, self.truth.height, self.truth.dtype
        values = piece.keys[..., :latent].to(dtype).div_(height.to(dtype))
        squares = values.square()
        lengths = squares.sum(-1)
        # Squares are at hand already; the rope part, which has none, is narrow.
        sizes = RowSizes(second=lengths.double().sqrt() * height[..., 0], fourth=squares.norm(dim=-1) * height[..., 0] ** 2)
        sizes = sizes + RowSizes.of(piece.keys[..., latent:])
        errors = probability_errors(self.arithmetic, piece, self.truth, self.in_use.find(piece))
        variance = errors.variance[0]
        if len(errors.variance) > 1:
            variance = either(errors, find(self.arithmetic.probability), self._varies)
        scores = score_errors(self.arithmetic, self.context, piece, self.truth, self.updates, sizes)
        weights, sharing = errors.weights, errors.weights.square()
        self.scattered += sharing @ lengths.double()[..., None]
        weightings = [variance, sharing * scores.variance, weights * scores.bound, weights * scores.scores]
        if self.rounded:
            # An error past 1 is no small one any more: then the shift is what counts.
            moved = (rounded.scores - piece.scores).nan_to_num_(nan=0.0).clamp_(-1, 1)
            weightings.append((weights * moved).square_())
            lost = (rounded.keys - piece.keys)[..., :latent] / height
            self.operand += sharing @ lost.square_()
        self.moments.add(weightings, values, squares)
        single = weights.to(dtype)
        bounds = torch.cat([errors.bound.to(dtype), single], 1) @ values.abs()
        bound, absolute = bounds.chunk(2, 1)
        self.bound += bound
        self.absolute += absolute
        self.bound_mass += errors.bound.sum(-1, keepdim=True)
        if self.merges:
            self.partials.add(piece, single, values)
        if self.loses:
            self.flushed = self.flushed + errors.flushed.to(dtype) @ values
            self.flushed_mass = self.flushed_mass + errors.flushed.sum(-1, keepdim=True)
        self._share(errors, variance.to(torch.float32), values.to(torch.float32), lengths, weightings[OPERAND:])

    def _share(
        self, errors: ProbabilityErrors, variance: Tensor, values: Tensor, lengths: Tensor, operand: list[Tensor]
    ) -> None:
        about_zero, about_out = variance, operand[0].to(torch.float32) if operand else None
        if self.rounded_sum:
            about_zero, about_out = torch.zeros_like(variance), variance if about_out is None else variance + about_out
        self.sharing.add(values, lengths.to(torch.float32), about_zero, about_out, errors.turns[0])
        if self._coherence is not None:
            sizes = variance[None]
            if len(errors.variance) > 1:
                sizes = torch.stack([variance, errors.variance[-1].to(torch.float32)])
            self._coherence.add(errors.turns, sizes, probe(values))

    @property
    def rounded_sum(self) -> bool:
        """Whether the sum adds up rounded probabilities, so that their errors act along v - o."""
        return self.arithmetic.normaliser == "rounded"

    def coherence(self) -> Tensor:
        """Find how much larger the variance of token errors is than if they were independent, fp64 [G, R, 1]."""
        if self._coherence is None:
            return torch.ones_like(self.truth.total)
        return self._coherence.factor(self.out if self.rounded_sum else None)

    def mass_coherence(self) -> Tensor:
        """Find the same for the sum of the token errors themselves, fp64 [G, R, 1]."""
        return torch.ones_like(self.truth.total) if self._coherence is None else self._coherence.of_mass()
