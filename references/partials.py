"""What rounding the partial outputs of splits does to the budget.

1. Splits are closed as the context streams past, all of a piece at once; V is over its height.
2. Splits whose outputs are alike round alike, and where one has nearly all the weight the last rounding goes back to its grid.

Source: the derivation in ``budget``; Fourier series as in ``spread``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from references.formats import Format, ulp
from references.pieces import Layout, Piece
from references.spread import waves
from references.terms import UNIFORM

#: Columns of V that stand for all where only a factor of the row is wanted.
_COLUMNS = 32
#: Elements of the splits' outputs that are worked on at a time: bounds the temporaries to some tens of MiB.
_ELEMENTS = 1 << 20


class Partials:
    """What rounding the splits' outputs does; streamed."""

    def __init__(self, known: Format, layout: Layout, scale: Tensor, like: Tensor) -> None:
        groups, rows, latent = like.shape
        self._known, self._scale = known, scale.to(like.dtype)
        #: Splits closed at a time.
        self._together = max(1, _ELEMENTS // like.numel())
        #: Output and mass of a split that goes on in the next piece.
        self._part = self._mass = self._nothing = like.new_zeros(())
        #: Variance, bound and sum of magnitudes of what is merged, [G, R, L], in units of V over its height.
        self.variance, self.bound, self.magnitude = (torch.zeros_like(like) for _ in range(3))
        #: Sum over splits of the square of a row's variance, [G, R].
        self.squares = like.new_zeros((groups, rows))
        #: Roundings of partials by their phases: cosine and sine of two harmonics, [4, G, R, columns]; as if apart, [G, R].
        self._columns = slice(None, None, max(1, latent // _COLUMNS))
        self._waves = torch.zeros_like(like[..., self._columns]).repeat(4, 1, 1, 1)
        self._apart = torch.zeros_like(self.squares)
        #: Output of each row's heaviest split, its variance after the merge, [G, R, L], and its weight, [G, R, 1].
        self.leader, self.leader_variance = torch.zeros_like(like), torch.zeros_like(like)
        self.leader_mass = like.new_zeros((groups, rows, 1))

    def add(self, piece: Piece, weights: Tensor, values: Tensor) -> None:
        """Add tokens: weights [G, R, n] and v [G, n, L]; splits that end here are closed."""
        lanes = piece.stop - piece.start
        for first in range(0, piece.splits, self._together):
            these = slice(first, first + self._together)
            shares = piece.by_split(weights)[:, :, these].transpose(1, 2)
            mass = self._mass + shares.sum(-1, keepdim=True)
            part = self._part + shares @ values.view(len(values), -1, lanes, values.shape[-1])[:, these]
            if piece.closes:
                self._close(part, mass)
                part = mass = self._nothing
            self._part, self._mass = part, mass

    def _close(self, part: Tensor, mass: Tensor) -> None:
        """Close some splits: sums of p v, [G, splits, R, L], and their masses, [G, splits, R, 1]."""
        out, scale = part / mass.clamp(min=2.0**-126), self._scale[:, None]
        spacing = ulp(out * scale, self._known)
        error = spacing * (mass / scale.abs())
        variance = error.square() * UNIFORM
        self.variance += variance.sum(1)
        self.squares += variance.sum(-1).square().sum(1)
        self.bound.add_(error.sum(1), alpha=0.5)
        self.magnitude += part.abs().sum(1)
        turns, size = (out * scale / spacing)[..., self._columns], error[..., self._columns]
        self._waves += (size * torch.cat([waves(turns), waves(2 * turns)])).sum(2)
        self._apart += size.square().sum((1, -1))
        top, leads = mass.max(1, keepdim=True)
        led = leads.expand(-1, -1, -1, out.shape[-1])
        ahead = top[:, 0] > self.leader_mass
        self.leader = torch.where(ahead, out.gather(1, led)[:, 0], self.leader)
        self.leader_variance = torch.where(ahead, variance.gather(1, led)[:, 0], self.leader_variance)
        self.leader_mass = torch.maximum(top[:, 0], self.leader_mass)

    def coherence(self) -> Tensor:
        """Find how much larger the variance of partials is than if splits rounded apart, fp64 [G, R, 1], 1 or more.

        Splits whose outputs are alike, as where one value recurs all along the context, round alike.

        Source: as in ``spread``, two Fourier terms, the second standing for the rest too.
        """
        first, second = self._waves.square().sum(-1).view(2, 2, *self._apart.shape).sum(1)
        waves = (first + (math.pi**2 / 6 - 1) * second) * (6 / math.pi**2)
        return torch.where(self._apart > 0, waves / self._apart, 1.0).clamp_(min=1).double()[..., None]

    def second_rounding(self, out: Tensor, spacing: Tensor) -> Tensor:
        """Work out the variance of rounding the merged output to the same format, fp64 [G, R, L].

        Where one split has nearly all the weight the merge starts from a value of the format, and rounding goes back to it
        however far the others have moved it: a known error of up to half a spacing, not one of mean square 1 / 12.

        Args:
            out: merged output over its height, fp64 [G, R, L].
            spacing: the format's spacing there, in the same units.

        Source: the Fourier series of the squared distance to the next integer, damped by the variance of what the other
        splits add.
        """
        # The leader's own rounding counts as far as its weight is not one.
        rest = (self.variance - self.leader_variance * (1 - (1 - self.leader_mass).square())).double()
        square = spacing.square()
        # Cosines of the angle, of twice and of three times it; a wave of m times it is damped by the power of m^2.
        once = ((out - self.leader) / spacing).mul_(2 * math.pi).cos_()
        twice, thrice = 2 * once.square() - 1, (4 * once.square() - 3) * once
        damping = (rest / square).clamp_(min=0).mul_(-2 * math.pi**2).exp_()
        fourth = damping.square().square_()
        waves = damping * (fourth * fourth * thrice / -9 - once) + fourth * twice / 4
        uniform = UNIFORM * square
        known = uniform + waves.mul_(square / math.pi**2)
        # A kernel that scales V after the merge rounds off the grid: less than uniform is not granted to a row, nor to an
        # element less than keeps half a spacing within five standard deviations. Near the grid three terms are no better.
        floor = square * 0.01
        return torch.where(known.sum(-1, keepdim=True) > uniform.sum(-1, keepdim=True), torch.maximum(known, floor), uniform)
