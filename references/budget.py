"""The rounding budget: how far a correct kernel of a declared arithmetic may be from the truth, element by element.

1. It follows from the problem and the arithmetic alone; no actual output, and no reference's, goes in.
2. ``hard`` assumes no independence: more than that cannot be rounding. ``variance`` takes roundings of different values as
   independent, and roundings of equal values as equal.
3. Everything is fp64, streamed over the context in two passes: the first finds the softmax and the output, the second adds up
   the terms. Memory grows neither with N nor with the number of requests.

Derivation, o = sum_j p_j v_j with p the softmax of the scores s, u and c as in ``spread``:

- A rounding to a format of unit roundoff u moves x by at most max(u |x|, h) in the normal and subnormal range, h half the
  smallest subnormal, and by at most |x|. Its mean square is c u^2 x^2 in the normal range, h^2 / 3 below it; what lies below h
  becomes zero, all of it with the same sign, so that goes in as a shift and not as a variance.
- A score error d_j moves o by sum_j p_j (v_j - o) (e^d_j - 1) / (1 + sum p (e^d - 1)), the quotient because the sum moves too.
  Its weighted mean deviation obeys Cauchy and Schwarz, sum_j a_j |v_j - o| <= sqrt(sum_j a_j  sum_j a_j (v_j - o)^2), where the
  right side is made of sums of a, a v and a v^2.
- Errors of sums of n fp32 terms are at most n u32 sum |terms|, in whatever order they are added.
- The partial outputs o_k of splits, of weight w_k, are rounded one by one: u_part |w_k o_k| each.

Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sections 2.2, 3.1 and 4.2, for the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from references.arithmetic import Arithmetic, Splits
from references.formats import Format, decode, find
from references.precision import full_precision
from references.problem import Problem, gather, visible
from references.spread import EXCESS, MEAN_SQUARE, Sharing, effective_elements, known_rounding

__all__ = ["Arithmetic", "Budget", "Splits", "budget"]

#: Bytes that the temporaries of a piece may take.
_PIECE_BYTES = 160 << 20
_U32 = 2.0**-24
#: A score that may be off by more than this says nothing; e^60 is finite, and so are sums and products of it.
_FAR = 60.0
_TINY = torch.finfo(torch.float64).tiny
#: fp32 roundings on the way of one value besides sums and exponentials: scales multiplied together, applied to the score and
#: to V, weights of the merge, the division by the sum. More than any kernel here needs.
_STEPS = 16


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

        Source: the token errors and the element errors of a row are two independent sums of squares.
        """
        tokens = self.probability_share.square() / self.effective_tokens
        return (EXCESS * (tokens + (1 - self.probability_share).square() / self.effective_elements)).sqrt()


def budget(problem: Problem, arithmetic: Arithmetic) -> Budget:
    """Work out the rounding budget of a problem for kernels of an arithmetic, on the device the problem is on.

    Source: the module's derivation.
    Error: ``hard`` is a bound of first order in each rounding; products of roundings are kept where they matter.
    """
    shape = (problem.batch, problem.query_tokens, problem.heads)
    device = problem.query.device

    def zeros(*tail: int) -> Tensor:
        return torch.zeros((*shape, *tail), dtype=torch.float64, device=device)

    found = Budget(
        variance=zeros(problem.latent),
        hard=zeros(problem.latent),
        lse_hard=zeros(),
        lse_variance=zeros(),
        effective_tokens=zeros() + 1,
        probability_share=zeros(),
        effective_elements=zeros() + problem.latent,
    )
    with full_precision():
        for request, length in enumerate(problem.lengths):
            if length:
                _Request(problem, arithmetic, request).fill(found)
    return found


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the context: tokens start … stop - 1."""

    start: int
    stop: int
    #: Decoded rows, fp64 [n, D].
    keys: Tensor
    #: Scores, fp64 [S*H, n]; minus infinity where a query token does not see a token.
    scores: Tensor


class _Request:
    """The budget of one request in the making; rows are its S*H query rows."""

    def __init__(self, problem: Problem, arithmetic: Arithmetic, request: int) -> None:
        self.problem, self.arithmetic, self.request = problem, arithmetic, request
        self.length = problem.lengths[request]
        self.rows = problem.query_tokens * problem.heads
        self.query = decode(problem.query[request], find(problem.query_format)).double().view(self.rows, problem.width)
        device = self.query.device
        seen = torch.tensor(visible(self.length, problem.query_tokens), device=device)
        self.seen = seen.repeat_interleave(problem.heads)[:, None]
        # Some fourteen fp64 arrays of [rows, n] live at once, and four of [n, D].
        per_token = 8 * (14 * self.rows + 4 * problem.width)
        self.tokens = max(16, min(self.length, _PIECE_BYTES // per_token))
        self.kept: _Piece | None = None

    def pieces(self) -> Iterator[_Piece]:
        """Yield the context piece by piece; a single piece is kept for the next pass."""
        if self.kept:
            yield self.kept
            return
        for start in range(0, self.length, self.tokens):
            stop = min(start + self.tokens, self.length)
            offset = self.problem.starts[self.request]
            codes = gather(self.problem, self.problem.slots[offset + start : offset + stop])
            keys = decode(codes, find(self.problem.cache_format)).double()
            scores = (self.query @ keys.T).mul_(self.problem.score_scale)
            if stop > self.length - self.problem.query_tokens + 1:
                hidden = torch.arange(start, stop, device=keys.device) >= self.seen
                scores.masked_fill_(hidden, -torch.inf)
            piece = _Piece(start, stop, keys, scores)
            if start == 0 and stop == self.length:
                self.kept = piece
            yield piece

    def fill(self, found: Budget) -> None:
        """Fill in the request's part of a budget."""
        softmax = _softmax(self)
        terms = _Terms(self, softmax)
        for piece in self.pieces():
            terms.add(piece)
        terms.finish(found)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """The first pass: maximum and sum [rows, 1], and the output in code units [rows, L]; zeros for rows that see nothing."""

    maximum: Tensor
    total: Tensor
    out: Tensor


def _softmax(request: _Request) -> _Softmax:
    latent = request.problem.latent
    maximum = request.query.new_full((request.rows, 1), -torch.inf)
    total, out = torch.zeros_like(maximum), request.query.new_zeros((request.rows, latent))
    for piece in request.pieces():
        new = torch.maximum(maximum, piece.scores.amax(1, keepdim=True))
        pivot = new.masked_fill(new == -torch.inf, 0.0)
        weights = (piece.scores - pivot).exp_()
        shrink = (maximum - pivot).exp_()
        total = total * shrink + weights.sum(1, keepdim=True)
        out = out * shrink + weights @ piece.keys[:, :latent]
        maximum = new
    empty = total == 0
    return _Softmax(maximum.masked_fill(empty, 0.0), total, (out / total).masked_fill(empty, 0.0))


class _Terms:
    """The sums of the second pass, in code units of V (the cache scale is applied at the end)."""

    def __init__(self, request: _Request, softmax: _Softmax) -> None:
        self.request, self.softmax, self.arithmetic = request, softmax, request.arithmetic
        problem, arithmetic = request.problem, request.arithmetic
        self.probability = find(arithmetic.probability)
        self.operand = _relative(arithmetic.operand)
        self.query_operand = _relative(arithmetic.query)
        self.scale = abs(problem.score_scale)
        rows, latent = request.rows, problem.latent
        new = softmax.out.new_zeros
        #: Sums over tokens of a weight times v^2, v and |v|.
        self.independent, self.shared, self.drift = new((rows, latent)), new((rows, latent)), new((rows, latent))
        self.score, self.score_mean, self.score_mass = new((rows, latent)), new((rows, latent)), new((rows, 1))
        self.delta, self.delta_mean, self.delta_mass = new((rows, latent)), new((rows, latent)), new((rows, 1))
        self.absolute, self.bound = new((rows, latent)), new((rows, latent))
        self.split, self.split_square, self.split_absolute, self.split_known = (new((rows, latent)) for _ in range(4))
        self.split_mass = new((rows, 1))
        self.mass_error = new((rows, 1))
        self.sharing = Sharing.empty(rows, like=softmax.out)
        launch = {"heads": problem.heads, "query_tokens": problem.query_tokens, "batch": problem.batch}
        self.edges = arithmetic.splits.edges(request.length, **launch)
        self.launched = arithmetic.splits.launched(**launch)
        longest = max(stop - start for start, stop in zip(self.edges, self.edges[1:], strict=False))
        #: Terms that one fp32 accumulator adds up, and times that it may be rescaled.
        self.depth = longest + len(self.edges)
        self.updates = -(-longest // (arithmetic.tile or longest))
        self.sum_depth = min(self.depth, (arithmetic.tile or longest) + self.updates + len(self.edges))

    def add(self, piece: _Piece) -> None:
        """Add a piece."""
        latent = self.request.problem.latent
        values = piece.keys[:, :latent]
        fall = (self.softmax.maximum - piece.scores).clamp_(min=0)  # infinite where hidden
        relative = fall.neg().exp_()
        weights = relative / self.softmax.total.clamp(min=1)
        variance, bound, flushed = self._probability_errors(relative, weights)
        deviation, worst = self._score_errors(piece, fall)
        if self.probability.significand < 24:
            normalised = self.arithmetic.pivot == "normalised"
            given = (weights if normalised else relative) * self.arithmetic.probability_scale
            self.sharing.add_phases(values, given, variance, self.probability)
        score = weights.square().mul_(deviation)
        delta = weights * worst
        rounded = self.arithmetic.normaliser == "rounded"
        if rounded:  # the sum moves along, and the error of a probability acts through v - o as a score's does
            score, variance, delta, bound = (
                score + variance,
                torch.zeros_like(variance),
                delta + bound,
                torch.zeros_like(bound),
            )
        self.mass_error += (flushed if rounded else 0 * flushed).sum(1, keepdim=True)
        self._add_squares(values, weights, variance, score, delta)
        self._add_absolute(values, weights, bound, flushed)
        self._add_splits(piece, values, weights)
        self.sharing.add(values, variance, score, self.softmax.out)

    def _probability_errors(self, relative: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Work out what rounding does to each probability: variance, bound and what is flushed, all [rows, n]."""
        known, arithmetic = self.probability, self.arithmetic
        given = weights if arithmetic.pivot == "normalised" else relative
        # From the units in which a probability is rounded to those of the softmax.
        unit = 1.0 if arithmetic.pivot == "normalised" else 1 / self.softmax.total.clamp(min=1)
        smallest, half = _floor(known, arithmetic.probability_scale)
        spacing = known.unit_roundoff * given
        bound = torch.minimum(torch.maximum(spacing, spacing.new_tensor(half)), given) * unit
        variance = spacing.square().mul_(MEAN_SQUARE)
        if half > _U32 * _U32:
            variance = torch.where(given < smallest, half * half / 3, variance)
        below = given < half
        variance.masked_fill_(below | (given == 0), 0.0)
        if arithmetic.pivot != "normalised":
            # The maximum itself is exp(0) = 1, which times a scale of the format is exact.
            variance.masked_fill_(relative == 1, 0.0)
        flushed = torch.where(below, weights, 0.0)
        return variance * (unit * unit), bound, flushed

    def _score_errors(self, piece: _Piece, fall: Tensor) -> tuple[Tensor, Tensor]:
        """Work out the variance and the bound of each score's error, in natural-log units, [rows, n]."""
        query, keys, width = self.request.query, piece.keys, self.request.problem.width
        relative = self.operand + self.query_operand
        # Not by norms: elements that a zero of the query hides may be larger than all others together.
        squares = query.square() @ keys.square().T
        magnitudes = query.abs() @ keys.abs().T
        squares, magnitudes = squares * self.scale**2, magnitudes * self.scale
        product = piece.scores.nan_to_num(neginf=0.0).square()
        visible_fall = fall.nan_to_num(posinf=0.0)
        exponential = self.arithmetic.exponential * (1 + visible_fall)
        # A sum of D products in random order: its partial sums are at most the product plus a random walk.
        variance = MEAN_SQUARE * (self.operand**2 + self.query_operand**2) * squares
        variance += MEAN_SQUARE * _U32**2 * (width + _STEPS) * (squares + product)
        variance += exponential.square() + self.updates * (self.arithmetic.exponential**2 + _U32**2)
        bound = (relative + self.operand * self.query_operand + _U32 * (width + _STEPS)) * magnitudes
        bound += exponential + self.updates * (self.arithmetic.exponential + _U32)
        return variance, bound.clamp_(max=_FAR).expm1_()

    def _add_squares(self, values: Tensor, weights: Tensor, variance: Tensor, score: Tensor, delta: Tensor) -> None:
        rows = self.request.rows
        operand = MEAN_SQUARE * self.operand**2 * weights.square()
        squares = torch.cat([variance, operand, score, delta] if self.operand else [variance, score, delta])
        squares = squares @ values.square()
        means = torch.cat([score, delta]) @ values
        self.shared += squares[:rows]
        if self.operand:
            self.independent += squares[rows : 2 * rows]
        self.score += squares[-2 * rows : -rows]
        self.delta += squares[-rows:]
        self.score_mean += means[:rows]
        self.delta_mean += means[rows:]
        self.score_mass += score.sum(1, keepdim=True)
        self.delta_mass += delta.sum(1, keepdim=True)

    def _add_absolute(self, values: Tensor, weights: Tensor, bound: Tensor, flushed: Tensor) -> None:
        rows = self.request.rows
        sums = torch.cat([bound, weights]) @ values.abs()
        self.bound += sums[:rows]
        self.absolute += sums[rows:]
        if flushed.any():
            self.drift += flushed @ values

    def _add_splits(self, piece: _Piece, values: Tensor, weights: Tensor) -> None:
        """Add up w_k o_k of the split under way; close those that end in this piece."""
        if self.launched == 1:
            return
        inner = [edge - piece.start for edge in self.edges[1:] if piece.start < edge <= piece.stop]
        start = 0
        for edge in inner:
            self.split += weights[:, start:edge] @ values[start:edge]
            self.split_mass += weights[:, start:edge].sum(1, keepdim=True)
            self._close_split()
            start = edge
        if start < len(values):
            self.split += weights[:, start:] @ values[start:]
            self.split_mass += weights[:, start:].sum(1, keepdim=True)

    def _close_split(self) -> None:
        scale = abs(self.request.problem.cache_scale)
        part = find(self.arithmetic.partial)
        square = self.split.square()
        self.split_square += square
        self.split_absolute += self.split.abs()
        plain = MEAN_SQUARE * part.unit_roundoff**2 * square
        if part.significand < 24:
            mass = self.split_mass.clamp(min=_TINY)
            known = known_rounding(self.split / mass * scale, torch.zeros_like(square), part)
            plain = torch.maximum(plain, known * (mass / scale) ** 2)
        self.split_known += plain
        self.split.zero_()
        self.split_mass.zero_()

    def finish(self, found: Budget) -> None:
        """Put the terms together and store them."""
        out, arithmetic = self.softmax.out, self.arithmetic
        problem = self.request.problem
        scale = abs(problem.cache_scale)
        coherent = self.sharing.factor()
        score = (self.score - 2 * out * self.score_mean + out.square() * self.score_mass).clamp_(min=0)
        drift = self.drift - self.mass_error * out
        shared = coherent * (self.shared + score)
        single = coherent * self.independent + drift.square()
        single += MEAN_SQUARE * _U32**2 * self.depth * (out.square() + self.shared / MEAN_SQUARE)
        written = find(arithmetic.output)
        spread = (self.delta - 2 * out * self.delta_mean + out.square() * self.delta_mass).clamp_(min=0)
        hard = self.bound + self.operand * self.absolute
        moved = (self.delta_mass * spread).sqrt()
        hard += torch.where(moved > 0, moved / (1 - self.delta_mass).clamp(min=0), 0.0)
        hard += _U32 * (self.depth + 2 * self.updates + _STEPS) * (self.absolute + out.abs())
        if self.launched > 1:
            part = find(arithmetic.partial)
            plain = MEAN_SQUARE * part.unit_roundoff**2 * self.split_square
            # Noise below a tenth of the spacing at the output leaves the roundings of partials what they are.
            quiet = shared + single < (part.unit_roundoff / 10 * out).square()
            single += torch.where(quiet, self.split_known, plain) + _tail(part, scale)
            merge = 2 * (arithmetic.exponential + _U32 * (len(self.edges) + 4 + 2 * self._height()))
            hard += part.unit_roundoff * (self.split_absolute + hard) + part.smallest_subnormal / 2 / scale
            hard += merge * (self.split_absolute + hard)
        plain = MEAN_SQUARE * written.unit_roundoff**2 * out.square() + _tail(written, scale)
        last = known_rounding(out * scale, (shared + single) * scale**2, written)
        single += torch.maximum(plain, last / scale**2)
        hard += written.unit_roundoff * (out.abs() + hard) + written.smallest_subnormal / 2 / scale
        self._store(found, shared * scale**2, single * scale**2, hard * scale)

    def _height(self) -> Tensor:
        """Measure how large the logarithms are that splits hand to the merge, [rows, 1]."""
        return self.softmax.maximum.abs() + self.softmax.total.clamp(min=1).log() + 1

    def _lse(self) -> Tensor:
        """Bound the error of the log-sum-exp, [rows, 1]: of the scores, of the sum, of the logarithm and its addition."""
        arithmetic = self.arithmetic
        moved = self.delta_mass + _U32 * (self.sum_depth + _STEPS) + arithmetic.exponential
        # Base-two kernels multiply the maximum by log2(e) and the result by ln 2; each is a rounding of the whole.
        return moved.log1p() + (arithmetic.exponential + 8 * _U32) * self._height()

    def _lse_variance(self) -> Tensor:
        """Work out the variance of the log-sum-exp's error, [rows, 1]: the terms of its bound, those of tokens independent."""
        arithmetic = self.arithmetic
        sums = MEAN_SQUARE * _U32**2 * self.sum_depth
        return self.score_mass + sums + ((arithmetic.exponential + 8 * _U32) * self._height()).square()

    def _store(self, found: Budget, shared: Tensor, single: Tensor, hard: Tensor) -> None:
        problem = self.request.problem
        written = find(self.arithmetic.output)
        out = self.softmax.out * problem.cache_scale
        over = out.abs() + hard >= written.maximum
        empty = (self.request.seen == 0).expand(-1, 1)
        total = shared.sum(1) + single.sum(1)
        share = torch.where(total > 0, shared.sum(1) / total, 0.0)
        elements = effective_elements(out, single)
        tokens = self.sharing.effective_tokens(elements)
        shape = (problem.query_tokens, problem.heads)
        target = self.request.request
        for record, values in (
            (found.variance, (shared + single).masked_fill(over, torch.inf).masked_fill(empty, 0.0)),
            (found.hard, hard.masked_fill(over, torch.inf).masked_fill(empty, 0.0)),
            (found.lse_hard, self._lse().masked_fill(empty, 0.0)),
            (found.lse_variance, self._lse_variance().masked_fill(empty, 0.0)),
            (found.effective_tokens, tokens),
            (found.probability_share, share),
            (found.effective_elements, elements),
        ):
            record[target] = values.view(*shape, *record.shape[3:])


def _relative(name: str | None) -> float:
    return find(name).unit_roundoff if name else 0.0


def _floor(known: Format, scale: float) -> tuple[float, float]:
    """Find the smallest normal value and half the smallest subnormal of a format whose values are multiplied by a scale."""
    return known.smallest_normal / scale, known.smallest_subnormal / 2 / scale


def _tail(known: Format, scale: float) -> float:
    """Work out the variance of rounding among a format's subnormals, in units of ``scale``."""
    return (known.smallest_subnormal / 2 / scale) ** 2 / 3
