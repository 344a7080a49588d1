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
    operand_errors,
    probability_errors,
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
    #: Variance of the error of the log-sum-exp, fp64 [B, S, H].
    lse_variance: Tensor
    #: Tokens that share the row's error as if independent, fp64 [B, S, H].
    effective_tokens: Tensor
    #: Share of the row's variance that comes token by token (probabilities and scores), fp64 [B, S, H], 0 to 1.
    probability_share: Tensor
    #: Elements that round independently, fp64 [B, S, H], 1 to L.
    effective_elements: Tensor

    @property
    def spread(self) -> Tensor:
        """Estimate the standard deviation of the squared row ratio |e|^2 / sum V of a correct kernel, fp64 [B, S, H].

        Source: the token errors and the element errors of a row are two independent sums of squares, and each has the
        relative variance EXCESS over its effective number.
        """
        tokens = self.probability_share.square() / self.effective_tokens
        return (EXCESS * (tokens + (1 - self.probability_share).square() / self.effective_elements)).sqrt()


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
        lse_variance=empty.new_zeros(shape),
        effective_tokens=empty.new_ones(shape),
        probability_share=empty.new_zeros(shape),
        effective_elements=empty.new_full(shape, problem.latent),
    )
    with full_precision():
        for request, length in enumerate(problem.lengths):
            if length:
                context = Context(problem, request)
                terms = _Terms(context, arithmetic, softmax(context))
                for piece in context.pieces():
                    terms.add(piece)
                terms.finish(found)
    return found


class _Terms:
    """The sums of one request's second pass, V over its height; rows are its S*H query rows."""

    def __init__(self, context: Context, arithmetic: Arithmetic, truth: Softmax) -> None:
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
        self.rounds_operands = bool(arithmetic.operand or arithmetic.query)
        self.moments = Moments(4 if self.rounds_operands else 3, self.out)
        self.partials = Partials(find(arithmetic.partial), self.edges, problem.cache_scale * truth.height, self.out)
        self.sharing = TokenSharing(self.out)
        #: Coherence with tiles taken in order, and with the row's maximum in use throughout.
        self.coherences = [Coherence(context.rows, self.out) for _ in range(2)]
        zeros = torch.zeros_like(self.out)
        self.absolute, self.bound, self.shift, self.operand = zeros, zeros.clone(), zeros.clone(), zeros.clone()
        self.bound_mass, self.shift_mass = zeros.new_zeros((len(zeros), 1)), zeros.new_zeros((len(zeros), 1))

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        values = (piece.keys[:, : self.context.problem.latent] / self.truth.height).to(torch.float32)
        squares = values.square()
        errors = probability_errors(self.arithmetic, piece, self.truth, self.in_use.find(piece))
        scores = score_errors(self.arithmetic, self.context, piece, self.truth, self.updates)
        weights = errors.weights
        weightings = [errors.variance, weights * scores.single, weights * scores.bound]
        operands = operand_errors(self.arithmetic, self.context, piece, self.truth.height)
        if operands:
            weightings.append((weights * operands.scores).square_())
            moved = weights * operands.scores
            self.shift += weights @ operands.values.double() + moved @ values.double()
            self.shift_mass += moved.sum(1, keepdim=True)
            self.operand += weights.square() @ operands.values.square().double()
        self.moments.add(weightings, values, squares)
        single = weights.to(torch.float32)
        bounds = torch.cat([errors.bound.to(torch.float32), single]) @ values.abs()
        self.bound += bounds[: len(single)]
        self.absolute += bounds[len(single) :]
        self.bound_mass += errors.bound.sum(1, keepdim=True)
        if self.merges:
            self.partials.add(piece, single, values)
        if errors.flushed is not None:
            self.shift -= errors.flushed @ values.double()
            if self.arithmetic.normaliser == "rounded":
                self.shift_mass -= errors.flushed.sum(1, keepdim=True)
        self._share(piece, errors, values, squares, weightings[_OPERAND:])

    def _share(
        self, piece: Piece, errors: ProbabilityErrors, values: Tensor, squares: Tensor, operand: list[Tensor]
    ) -> None:
        variance = errors.variance.to(torch.float32)
        about_zero, about_out = variance, operand[0].to(torch.float32) if operand else None
        if self.arithmetic.normaliser == "rounded":
            about_zero, about_out = torch.zeros_like(variance), variance if about_out is None else variance + about_out
        self.sharing.add(values, squares.sum(1), about_zero, about_out)
        if find(self.arithmetic.probability).significand >= 24:
            return  # fp32 errors of scores outweigh those of its roundings
        probed = probe(values)
        self.coherences[0].add(errors.turns, variance, probed)
        if self.arithmetic.pivot == "tile" and self.updates > 1:
            row = probability_errors(self.arithmetic, piece, self.truth, self.truth.maximum)
            self.coherences[1].add(row.turns, row.variance.to(torch.float32), probed)

    def finish(self, found: Budget) -> None:
        """Put the terms together and store them."""
        coherent = torch.maximum(*(coherence.factor() for coherence in self.coherences))[:, None]
        tokens = coherent * self._probabilities()
        if self.rounds_operands:
            known = (self.shift - self.shift_mass * self.out).square()
            tokens = tokens + torch.maximum(known, self.operand + self.moments.about(_OPERAND, self.out))
            flushed = torch.zeros_like(known)
        else:
            flushed = (self.shift - self.shift_mass * self.out).square()
        common = self._common()
        scale = abs(self.context.problem.cache_scale) * self.truth.height
        written = find(self.arithmetic.output)
        out = self.out * scale
        single = (
            flushed * scale**2 + self._elements(scale) + ulp(out * (1 + written.unit_roundoff), written) ** 2 * UNIFORM
        )
        tokens, common, hard = tokens * scale**2, common * scale**2, self._hard(scale)
        variance = tokens + common + single
        shares = [part.sum(1) / variance.sum(1) for part in (tokens, common)]
        share = shares[0] + shares[1]
        number = self.sharing.effective_tokens(coherent[:, 0], effective_number(tokens))
        inverse = shares[0].square() / number + shares[1].square() * (NORMAL_EXCESS / EXCESS)
        number = torch.where(share > 0, share.square() / inverse, 1.0)
        elements = effective_elements(out, single, written)
        over = out.abs() + hard >= written.maximum
        self._store(
            (found.variance, variance.masked_fill(over, torch.inf)),
            (found.hard, hard.masked_fill(over, torch.inf)),
            (found.lse_hard, self._lse()),
            (found.lse_variance, self._lse_variance(coherent)),
            (found.effective_tokens, number),
            (found.probability_share, share),
            (found.effective_elements, elements),
        )

    def _probabilities(self) -> Tensor:
        if self.arithmetic.normaliser == "rounded":
            return self.moments.about(_PROBABILITY, self.out)
        return self.moments.about_zero(_PROBABILITY)

    def _common(self) -> Tensor:
        """Estimate what all tokens or all elements have in common: fp32 errors of scores, of scales and of the sum."""
        scores = self.moments.mass(_SINGLE) * self.moments.about(_SINGLE, self.out)
        return scores + UNIFORM * (2 * U32) ** 2 * (STEPS + self.sum_depth) * self.out.square()

    def _elements(self, scale: float) -> Tensor:
        """Estimate what each element has for itself besides its last rounding: sums in fp32, and partial outputs."""
        squares = self.moments.about_zero(_PROBABILITY) / (
            UNIFORM * find(self.arithmetic.probability).unit_roundoff ** 2
        )
        variance = UNIFORM * (2 * U32) ** 2 * self.depth * (self.out.square() + squares) * scale**2
        return variance + self.partials.variance.double() * scale**2 if self.merges else variance

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
        written = find(arithmetic.output)
        hard = hard * scale
        return hard + ulp(out * scale + hard, written) / 2

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

    def _lse_variance(self, coherent: Tensor) -> Tensor:
        """Estimate the variance of the log-sum-exp's error, [rows, 1]: the terms of its bound, those of fp32 in common."""
        height = (self.arithmetic.exponential + 8 * U32) * self._height()
        variance = self.moments.mass(_SINGLE).square() + UNIFORM * (2 * U32) ** 2 * self.sum_depth + height.square()
        if self.arithmetic.normaliser == "rounded":
            variance = variance + coherent * self.moments.mass(_PROBABILITY)
        return variance + self.shift_mass.square()

    def _store(self, *parts: tuple[Tensor, Tensor]) -> None:
        problem, empty = self.context.problem, self.context.seen == 0
        for record, values in parts:
            values = values.view(len(empty), -1).masked_fill(empty, 0.0)
            record[self.context.request] = values.view(problem.query_tokens, problem.heads, *record.shape[3:])
