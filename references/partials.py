"""What rounding the partial outputs of splits does to the budget.

1. Splits are closed one by one as the context streams past; V is over its height.
2. Splits whose outputs are alike round alike, and where one has nearly all the weight the last rounding goes back to its grid.

Source: the derivation in ``budget``; Fourier series as in ``spread``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from references.formats import Format, ulp
from references.pieces import Piece
from references.terms import UNIFORM

#: Columns of V that stand for all where only a factor of the row is wanted.
_COLUMNS = 32


class Partials:
    """What rounding the splits' outputs does; streamed."""

    def __init__(self, known: Format, edges: Sequence[int], scale: float, like: Tensor) -> None:
        self._known, self._edges, self._scale = known, edges, scale
        self._mass = like.new_zeros((len(like), 1))
        self._part = torch.zeros_like(like)
        #: Variance, bound and sum of magnitudes of what is merged, [rows, L], in units of V over its height.
        self.variance, self.bound, self.magnitude = (torch.zeros_like(self._part) for _ in range(3))
        #: Sum over splits of the square of a row's variance, [rows].
        self.squares = self._mass.new_zeros(len(like))
        #: Roundings of partials by their phases: cosine and sine of two harmonics, [4, rows, columns], and as if apart, [rows].
        self._columns = slice(None, None, max(1, like.shape[1] // _COLUMNS))
        self._waves = torch.zeros_like(self._part[:, self._columns]).repeat(4, 1, 1)
        self._apart = self._mass.new_zeros(len(like))
        #: Output of each row's heaviest split, its variance after the merge, [rows, L], and its weight, [rows, 1].
        self.leader, self.leader_variance = torch.zeros_like(self._part), torch.zeros_like(self._part)
        self.leader_mass = torch.zeros_like(self._mass)

    def add(self, piece: Piece, weights: Tensor, values: Tensor) -> None:
        """Add tokens: weights [rows, n] and v [n, L]; splits that end here are closed."""
        inner = [edge - piece.start for edge in self._edges if piece.start < edge < piece.stop]
        for start, stop in pairwise([0, *inner, piece.stop - piece.start]):
            self._part.addmm_(weights[:, start:stop], values[start:stop])
            self._mass += weights[:, start:stop].sum(1, keepdim=True)
            if piece.start + stop in self._edges:
                self._close()

    def _close(self) -> None:
        out = self._part / self._mass.clamp(min=2.0**-126)
        error = ulp(out * self._scale, self._known).mul_(self._mass / abs(self._scale))
        variance = error.square() * UNIFORM
        self.variance += variance
        self.squares += variance.sum(1).square()
        self.bound.add_(error, alpha=0.5)
        self.magnitude += self._part.abs()
        turns, size = (out * self._scale / ulp(out * self._scale, self._known))[:, self._columns], error[:, self._columns]
        turn = torch.polar(torch.ones_like(turns), turns.frac() * (2 * math.pi))
        for harmonic, wave in enumerate((turn, turn * turn)):
            self._waves[2 * harmonic] += size * wave.real
            self._waves[2 * harmonic + 1] += size * wave.imag
        self._apart += size.square().sum(1)
        leads = self._mass > self.leader_mass
        self.leader = torch.where(leads, out, self.leader)
        self.leader_variance = torch.where(leads, variance, self.leader_variance)
        self.leader_mass = torch.where(leads, self._mass, self.leader_mass)
        self._part.zero_()
        self._mass.zero_()

    def coherence(self) -> Tensor:
        """Find how much larger the variance of partials is than if splits rounded apart, fp64 [rows, 1], 1 or more.

        Splits whose outputs are alike, as where one value recurs all along the context, round alike.

        Source: as in ``spread``, two Fourier terms, the second standing for the rest too.
        """
        first, second = self._waves.square().sum(2).view(2, 2, -1).sum(1)
        waves = (first + (math.pi**2 / 6 - 1) * second) * (6 / math.pi**2)
        return torch.where(self._apart > 0, waves / self._apart, 1.0).clamp_(min=1).double()[:, None]

    def second_rounding(self, out: Tensor, spacing: Tensor) -> Tensor:
        """Work out the variance of rounding the merged output to the same format, fp64 [rows, L].

        Where one split has nearly all the weight the merge starts from a value of the format, and rounding goes back to it
        however far the others have moved it: a known error of up to half a spacing, not one of mean square 1 / 12.

        Args:
            out: merged output over its height, fp64 [rows, L].
            spacing: the format's spacing there, in the same units.

        Source: the Fourier series of the squared distance to the next integer, damped by the variance of what the other
        splits add.
        """
        # The leader's own rounding counts as far as its weight is not one.
        rest = (self.variance - self.leader_variance * (1 - (1 - self.leader_mass).square())).double()
        turns = ((out - self.leader) / spacing).mul_(2 * math.pi)
        damping = (rest / spacing.square()).clamp_(min=0).mul_(-2 * math.pi**2).exp_()
        waves = -damping * turns.cos() + damping.pow(4) * (2 * turns).cos() / 4 - damping.pow(9) * (3 * turns).cos() / 9
        uniform = UNIFORM * spacing.square()
        known = uniform + waves.mul_(spacing.square() / math.pi**2)
        # A kernel that scales V after the merge rounds off the grid: less than uniform is not granted to a row, nor to an
        # element less than keeps half a spacing within five standard deviations. Near the grid three terms are no better.
        floor = spacing.square() * 0.01
        return torch.where(known.sum(1, keepdim=True) > uniform.sum(1, keepdim=True), torch.maximum(known, floor), uniform)
