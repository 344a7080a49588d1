"""The rounding budget: how far a correct kernel of a declared arithmetic may be from the truth, element by element.

1. It follows from the problem and the arithmetic alone; no actual output, and no reference's, goes in.
2. ``hard`` assumes no independence: more than that cannot be rounding. ``variance`` takes roundings of different values as
   independent, and roundings of equal values as equal.
3. It is streamed over the context in two passes: the first finds the softmax and the output, the second adds up the terms.
   Memory grows neither with N nor with the number of requests.

Derivation, o = sum_j p_j v_j with p the softmax of the scores s:

- Rounding moves x by at most u |x|, by at most h among subnormals (u the unit roundoff, h half the smallest subnormal), and
  by at most |x|. The error is uniform within half a spacing, so its mean square is spacing^2 / 12. What lies below h becomes
  zero, all of it with the same sign: that is a shift sum_j p_j v_j over the flushed tokens, not a variance.
- A score error d_j moves o by sum_j p_j (v_j - o) (e^d_j - 1) / (1 + sum p (e^d - 1)), the quotient because the sum moves too.
  Its weighted mean deviation obeys Cauchy and Schwarz: sum_j a_j |v_j - o| <= sqrt(sum_j a_j  sum_j a_j (v_j - o)^2). fp32
  errors of scores and exponentials may be the same for all tokens, so this bound with their root mean squares for a_j / p_j
  stands in for their variance; it is far below the other terms where probabilities have fewer bits.
- Operands rounded after their scale are known values: their shift is worked out, and the larger of its square and of what
  independent errors of the same size would do is the variance.
- A sum of n fp32 terms is off by at most n u32 sum |terms|, in whatever order they are added.
- The partial outputs o_k of splits, of weight w_k, are rounded one by one: w_k times half a spacing at o_k each.

Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sections 2.2, 3.1 and 4.2, for the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from references.arithmetic import Arithmetic, Splits
from references.formats import find, ulp
from references.pieces import Context, Piece, Softmax, softmax
from references.precision import full_precision
from references.problem import Problem
from references.spread import (
    EXCESS,
    NORMAL_EXCESS,
    Coherence,
    TokenSharing,
    effective_elements,
    effective_number,
    probe,
)
from references.terms import (
    STEPS,
    U32,
    UNIFORM,
    InUse,
    Moments,
    Partials,
    ProbabilityErrors,
    probability_errors,
    rounded_context,
    score_errors,
)

__all__ = ["Arithmetic", "Budget", "Splits", "budget"]

#: Weightings of ``Moments``: variance of probabilities, fp32 score errors, bounds of scores, variance by operands.
_PROBABILITY, _SINGLE, _BOUND, _OPERAND = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What rounding may do to each element. Query tokens that see nothing have a budget of zero."""

    #: Variance of each element's error, fp64 [B, S, H, L]; infinite where the output format may overflow.
    variance: Tensor
    #: Bound on each element's error, fp64 [B, S, H, L]; infinite where the output format may overflow.
    hard: Tensor
    #: Bound on the error of the log-sum-exp, fp64 [B, S, H].
    lse_hard: Tensor
    #: Tokens that share the row's error as if independent, fp64 [B, S, H].
    effective_tokens: Tensor
    #: Share of the row's variance that comes token by token (probabilities and scores), fp64 [B, S, H], 0 to 1.
    probability_share: Tensor
    #: Elements that round independently, fp64 [B, S, H], up to L.
    effective_elements: Tensor
    #: Standard deviation of the squared row ratio |e|^2 / sum of variance of a correct kernel, fp64 [B, S, H].
    spread: Tensor


def budget(problem: Problem, arithmetic: Arithmetic) -> Budget:
    """Work out the rounding budget of a problem for kernels of an arithmetic, on the device the problem is on.

    Source: the module's derivation.
    Error: ``hard`` is a bound of first order in each rounding; products of roundings are kept where they matter.
    """
    shape = (problem.batch, problem.query_tokens, problem.heads)
    empty = torch.zeros((*shape, problem.latent), dtype=torch.float64, device=problem.query.device)
    found = Budget(
        variance=empty,
        hard=empty.clone(),
        lse_hard=empty.new_zeros(shape),
        effective_tokens=empty.new_ones(shape),
        probability_share=empty.new_zeros(shape),
        effective_elements=empty.new_full(shape, problem.latent),
        spread=empty.new_zeros(shape),
    )
    with full_precision():
        for request, length in enumerate(problem.lengths):
            if length:
                context = Context(problem, request)
                rounded = rounded_context(arithmetic, problem, request)
                terms = _Terms(context, arithmetic, softmax(context), rounded)
                for piece, other in zip(context.pieces(), (rounded or context).pieces(), strict=True):
                    terms.add(piece, other)
                terms.finish(found)
    return found


class _Terms:
    """The sums of one request's second pass, V over its height; rows are its S*H query rows."""

    def __init__(self, context: Context, arithmetic: Arithmetic, truth: Softmax, rounded: Context | None) -> None:
        problem = context.problem
        self.context, self.arithmetic, self.truth = context, arithmetic, truth
        self.out = truth.out / truth.height
        launch = {"heads": problem.heads, "query_tokens": problem.query_tokens, "batch": problem.batch}
        self.edges = arithmetic.splits.edges(context.length, **launch)
        self.merges = arithmetic.splits.launched(**launch) > 1
        longest = max(stop - start for start, stop in zip(self.edges, self.edges[1:], strict=False))
        tile = min(arithmetic.tile or longest, longest)
        #: Times that a running maximum may rise, terms of a product's sum, and terms of the sum of probabilities.
        self.updates = -(-longest // tile)
        self.depth = longest + len(self.edges)
        self.sum_depth = min(self.depth, tile + self.updates + len(self.edges))
        self.in_use = InUse(arithmetic, truth, self.edges)
        self.rounded = rounded
        self.moments = Moments(4 if rounded else 3, self.out)
        self.partials = Partials(find(arithmetic.partial), self.edges, problem.cache_scale * truth.height, self.out)
        self.sharing = TokenSharing(self.out)
        #: Coherence with tiles taken in order, and with the row's maximum in use throughout.
        self.coherences = [Coherence(context.rows, self.out) for _ in range(2)]
        zeros = torch.zeros_like(self.out)
        self.absolute, self.bound, self.flushed, self.operand = zeros, zeros.clone(), zeros.clone(), zeros.clone()
        self.bound_mass, self.flushed_mass = zeros.new_zeros((len(zeros), 1)), zeros.new_zeros((len(zeros), 1))

    def add(self, piece: Piece, rounded: Piece) -> None:
        """Add a piece, and the same one with operands rounded."""
        values = (piece.keys[:, : self.context.problem.latent] / self.truth.height).to(torch.float32)
        squares = values.square()
        errors = probability_errors(self.arithmetic, piece, self.truth, self.in_use.find(piece))
        scores = score_errors(self.arithmetic, self.context, piece, self.truth, self.updates)
        weights = errors.weights
        weightings = [errors.variance, weights * scores.single, weights * scores.bound]
        if self.rounded:
            moved = (
                (rounded.scores - piece.scores).nan_to_num_(nan=0.0).clamp_(-1, 1)
            )  # beyond 1 the shift is what counts
            weightings.append((weights * moved).square_())
            lost = (rounded.keys - piece.keys)[:, : self.context.problem.latent] / self.truth.height
            self.operand += weights.square() @ lost.square_()
        self.moments.add(weightings, values, squares)
        single = weights.to(torch.float32)
        bounds = torch.cat([errors.bound.to(torch.float32), single]) @ values.abs()
        self.bound += bounds[: len(single)]
        self.absolute += bounds[len(single) :]
        self.bound_mass += errors.bound.sum(1, keepdim=True)
        if self.merges:
            self.partials.add(piece, single, values)
        if errors.flushed is not None:
            self.flushed += errors.flushed @ values.double()
            self.flushed_mass += errors.flushed.sum(1, keepdim=True)
        self._share(piece, errors, values, squares, weightings[_OPERAND:])

    def _share(
        self, piece: Piece, errors: ProbabilityErrors, values: Tensor, squares: Tensor, operand: list[Tensor]
    ) -> None:
        variance = errors.variance.to(torch.float32)
        about_zero, about_out = variance, operand[0].to(torch.float32) if operand else None
        if self.arithmetic.normaliser == "rounded":
            about_zero, about_out = torch.zeros_like(variance), variance if about_out is None else variance + about_out
        self.sharing.add(values, squares.sum(1), about_zero, about_out, errors.turns)
        if find(self.arithmetic.probability).significand >= 24:
            return  # fp32 errors of scores outweigh those of its roundings
        probed = probe(values)
        self.coherences[0].add(errors.turns, variance, probed)
        if self.arithmetic.pivot == "tile" and self.updates > 1:
            row = probability_errors(self.arithmetic, piece, self.truth, self.truth.maximum)
            self.coherences[1].add(row.turns, row.variance.to(torch.float32), probed)

    def finish(self, found: Budget) -> None:
        """Put the terms together and store them."""
        centre = self.out if self.arithmetic.normaliser == "rounded" else None
        coherent = torch.maximum(*(coherence.factor(centre) for coherence in self.coherences))[:, None]
        tokens = coherent * self._probabilities()
        if self.rounded:
            shift = softmax(self.rounded).out / self.truth.height - self.out
            tokens = tokens + torch.maximum(shift.square(), self.operand + self.moments.about(_OPERAND, self.out))
        flushed = self._flushed().square()
        common = self._common()
        scale = abs(self.context.problem.cache_scale) * self.truth.height
        written = find(self.arithmetic.output)
        out = self.out * scale
        last = self._last_rounding(scale)
        sums, parts = self._elements()
        single = flushed + sums + parts + last
        hard = self._hard(scale)
        variance = tokens + common + single
        row = variance.sum(1)
        number = self.sharing.effective_tokens(coherent[:, 0], effective_number(tokens))
        token_share, common_share = tokens.sum(1) / row, common.sum(1) / row
        share = token_share + common_share
        inverse = token_share.square() / number + common_share.square() * (NORMAL_EXCESS / EXCESS)
        elements = effective_elements(out, single, written)
        if self.merges:
            led = self.partials.leader.double() * scale
            elements = torch.minimum(elements, effective_elements(led, single, find(self.arithmetic.partial)))
        # An element's error is a sum of a few uniform ones: the more it has, the closer to a normal one.
        few = (
            last.sum(1).square() + sums.sum(1).square() + (self.partials.squares if self.merges else 0.0)
        ) / single.sum(1).square()
        excess = NORMAL_EXCESS - (NORMAL_EXCESS - EXCESS) * few.clamp(max=1)
        spread = EXCESS * inverse + (1 - share) * (excess * (1 - share) + 4 * share) / elements
        over = out.abs() + hard >= written.maximum
        self._store(
            (found.variance, (variance * scale**2).masked_fill(over, torch.inf)),
            (found.hard, hard.masked_fill(over, torch.inf)),
            (found.lse_hard, self._lse()),
            (found.effective_tokens, torch.where(share > 0, share.square() / inverse, 1.0)),
            (found.probability_share, share),
            (found.effective_elements, elements),
            (found.spread, spread.sqrt()),
        )

    def _probabilities(self) -> Tensor:
        if self.arithmetic.normaliser == "rounded":
            return self.moments.about(_PROBABILITY, self.out)
        return self.moments.about_zero(_PROBABILITY)

    def _flushed(self) -> Tensor:
        """Work out how far the output moves when what becomes zero is left out."""
        if self.arithmetic.normaliser == "exact":
            return self.flushed
        return (self.flushed - self.flushed_mass * self.out) / (1 - self.flushed_mass).clamp(min=U32)

    def _common(self) -> Tensor:
        """Estimate what all tokens or all elements have in common: fp32 errors of scores, of scales and of the sum."""
        scores = self.moments.mass(_SINGLE) * self.moments.about(_SINGLE, self.out)
        return scores + UNIFORM * (2 * U32) ** 2 * (STEPS + self.sum_depth) * self.out.square()

    def _elements(self) -> tuple[Tensor, Tensor]:
        """Estimate what each element has for itself before its last rounding: sums in fp32, and partial outputs."""
        squares = self.moments.about_zero(_PROBABILITY) / (
            UNIFORM * (2 * find(self.arithmetic.probability).unit_roundoff) ** 2
        )
        sums = UNIFORM * (2 * U32) ** 2 * self.depth * (self.out.square() + squares)
        return sums, self.partials.variance.double() if self.merges else torch.zeros_like(sums)

    def _last_rounding(self, scale: float) -> Tensor:
        written = find(self.arithmetic.output)
        spacing = ulp(self.out * scale * (1 + written.unit_roundoff), written) / scale
        if self.merges and self.arithmetic.partial == self.arithmetic.output:
            return self.partials.second_rounding(self.out, spacing)
        return spacing.square() * UNIFORM

    def _hard(self, scale: float) -> Tensor:
        arithmetic, out = self.arithmetic, self.out.abs()
        hard = self.bound + (find(arithmetic.operand).unit_roundoff * self.absolute if arithmetic.operand else 0.0)
        if arithmetic.normaliser == "rounded":
            hard = (hard + self.bound_mass * out) / (1 - self.bound_mass).clamp(min=0)
        mass = self.moments.mass(_BOUND)
        hard = hard + (mass * self.moments.about(_BOUND, self.out)).sqrt() / (1 - mass).clamp(min=0)
        hard += U32 * (self.depth + 2 * self.updates + STEPS) * (self.absolute + out)
        if self.merges:
            part = find(arithmetic.partial)
            magnitude = self.partials.magnitude.double() + hard
            # Rounding moves what was already moved, and may do so in the next binade.
            hard = hard + self.partials.bound + 2 * part.unit_roundoff * hard
            hard += 2 * (arithmetic.exponential + U32 * (len(self.edges) + 4 + 2 * self._height())) * magnitude
        # Weights that are positive and sum to one give nothing beyond the largest value; rounding each once adds little.
        hard = hard.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(max=2.5) * scale
        return hard + ulp(out * scale + hard, find(arithmetic.output)) / 2

    def _height(self) -> Tensor:
        """Measure how large the logarithms are that are added, [rows, 1]."""
        return self.truth.maximum.abs() + self.truth.total.log() + 1

    def _lse(self) -> Tensor:
        """Bound the error of the log-sum-exp, [rows, 1]: of the scores, of the sum, of the logarithm and its addition."""
        arithmetic = self.arithmetic
        moved = self.moments.mass(_BOUND) + U32 * (self.sum_depth + STEPS) + arithmetic.exponential
        if arithmetic.normaliser == "rounded":
            moved = moved + self.bound_mass
        # Base-two kernels multiply the maximum by log2(e) and the result by ln 2; each is a rounding of the whole.
        return moved / (1 - moved).clamp(min=0) + (arithmetic.exponential + 8 * U32) * self._height()

    def _store(self, *parts: tuple[Tensor, Tensor]) -> None:
        problem, empty = self.context.problem, self.context.seen == 0
        for record, values in parts:
            values = values.view(len(empty), -1).masked_fill(empty, 0.0)
            record[self.context.request] = values.view(problem.query_tokens, problem.heads, *record.shape[3:])
