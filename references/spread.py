"""How independent the roundings of a row are: what the spread of its statistic depends on.

1. Equal values round alike. Tokens of (nearly) equal probability have one error between them, and elements of equal magnitude
   too; a row with many of either has a wider statistic and, for tokens, a larger variance.
2. Everything is worked out from the data, per row, with sketches that are the same on every run and device.

Derivation. The relative error of rounding to nearest is d / x with d uniform in +-u and the significand x in [1, 2). With x
log-uniform, its mean square is c u^2, c = (1 - 1/4) / (6 ln 2), and its mean fourth power u^4 (1 - 1/16) / (20 ln 2); the variance
of its square over (c u^2)^2 is then EXCESS. A sum of squares of n such errors, t_j their mean squares, has the relative variance
EXCESS sum t_j^2 / (sum t_j)^2, which defines the effective number: 1 / n_eff = sum t_j^2 / (sum t_j)^2. Errors of tokens act
along their v_j, and two that are not orthogonal add 2 t_j t_k cos^2(v_j, v_k) to that sum.

The error of two values at a distance of d spacings is correlated as 1 - 6 d (1 - d), d's fractional part, whose Fourier series
is 6 / pi^2 sum_m cos(2 pi m d) / m^2. So the variance of a sum of such errors is c u^2 6 / pi^2 sum_m |sum_j p_j v_j e^(i m phi_j)|^2
/ m^2, with phi_j the phase of p_j between its neighbours: the coherence is that over c u^2 sum_j p_j^2 v_j^2. Three terms are
kept, the third standing for the rest, and v is looked at along fixed random signs.

Source: the Fourier series of the second Bernoulli polynomial (DLMF 24.8.1); sketches by W. Johnson, J. Lindenstrauss, 1984.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from references.formats import Format

#: c: mean square of a relative rounding error over u^2, the significand log-uniform.
MEAN_SQUARE = (1 - 1 / 4) / (2 * math.log(2)) / 3
#: Variance of its square over (c u^2)^2.
EXCESS = (1 - 1 / 16) / (4 * math.log(2)) / 5 / MEAN_SQUARE**2 - 1
#: Shares of the first two Fourier terms, and of all others.
_HARMONICS = (6 / math.pi**2, 1.5 / math.pi**2, 1 - 7.5 / math.pi**2)
#: Random directions in which V is looked at: the coherence of independent roundings then comes out as 1 +- 0.1.
_PROBES = 64


#: Noise in spacings below which three harmonics no longer describe a rounding, and none is needed: it is known.
_QUIET = 0.12


@lru_cache(maxsize=16)
def _signs(latent: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(latent)
    signs = torch.randint(0, 2, (latent, _PROBES), generator=generator, dtype=torch.float64) * 2 - 1
    return signs.to(device)


def known_rounding(value: Tensor, variance: Tensor, known: Format) -> Tensor:
    """Work out what rounding adds to the mean square error of values that are known but for some noise.

    Where the noise is small against the spacing, a value far from those of the format is rounded by a known amount, and
    values that are alike by the same amount: their average over significands says nothing about them.

    Args:
        value: the values, fp64, any shape.
        variance: variance of the noise before rounding, same shape.
        known: what they are rounded to.

    Source: the Fourier series of x - round(x) and of its square, each harmonic damped by the noise's characteristic function.
    """
    exponent = torch.frexp(value).exponent.clamp(min=known.exponent_min + 1) - known.significand
    turns = torch.ldexp(value, -exponent)
    noise = torch.ldexp(torch.ldexp(variance, -exponent), -exponent)
    exact = (turns - turns.round()).square()
    noisy = torch.full_like(value, 1 / 12)
    angle = 2 * math.pi * turns.frac()
    for harmonic in (1, 2, 3):
        wave = torch.cos(harmonic * angle) * torch.exp(-2 * (math.pi * harmonic) ** 2 * noise)
        noisy += (-1) ** harmonic * wave * (1 / (math.pi * harmonic) ** 2 + 4 * noise)
    added = torch.where(noise < _QUIET**2, exact, noisy.clamp_(min=0))
    return torch.ldexp(torch.ldexp(added, exponent), exponent)


def effective_elements(out: Tensor, variance: Tensor) -> Tensor:
    """Count the elements of each row that round independently, [rows]: outputs of one significand count as one.

    Args:
        out: outputs, fp64 [rows, L].
        variance: variance of each element's own roundings, fp64 [rows, L].
    """
    significand = torch.frexp(out.abs().to(torch.float32)).mantissa
    ordered, index = significand.sort(dim=1)
    first = torch.zeros_like(index)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    groups = torch.zeros_like(variance).scatter_add_(1, first.cumsum(1), variance.gather(1, index))
    squares = groups.square().sum(1)
    return torch.where(squares > 0, variance.sum(1).square() / squares, out.shape[1])


@dataclass(slots=True)
class Sharing:
    """Sums over the tokens of a row that say how many of them share its error; streamed."""

    #: Variance by token: sum, and sum of squares, [rows].
    total: Tensor
    squares: Tensor
    #: The part of it along the output: sum, and sum of squares, [rows].
    along: Tensor
    along_squares: Tensor
    #: Sum of squares of the part across the output, [rows].
    across_squares: Tensor
    #: Variance of a sum of probability errors along the probes as if independent, [rows].
    plain: Tensor
    #: Their amplitudes with phases: cosine and sine by harmonic, [6, rows, probes].
    amplitudes: Tensor

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> Sharing:
        """Start with no tokens."""
        sums = [like.new_zeros(rows) for _ in range(6)]
        return cls(*sums, like.new_zeros((2 * len(_HARMONICS), rows, _PROBES)))

    def add(self, values: Tensor, variance: Tensor, score: Tensor, out: Tensor) -> None:
        """Add tokens: v [n, L], mean square weights of v (``variance``) and of v - o (``score``) [rows, n], o [rows, L]."""
        norm = out.norm(dim=1, keepdim=True)
        lengths = values.square().sum(1)
        along = torch.where(norm > 0, out / norm, 0.0) @ values.T
        apart = (lengths - 2 * norm * along + norm.square()).clamp_(min=0)
        tokens = variance * lengths + score * apart
        part = torch.minimum(variance * along.square() + score * (along - norm).square(), tokens)
        self.total += tokens.sum(1)
        self.squares += tokens.square().sum(1)
        self.along += part.sum(1)
        self.along_squares += part.square().sum(1)
        self.across_squares += (tokens - part).square_().sum(1)

    def add_phases(self, values: Tensor, given: Tensor, variance: Tensor, known: Format) -> None:
        """Add the phases of tokens: v [n, L], probabilities in the units they are rounded in and their mean squares [rows, n]."""
        probed = values @ _signs(values.shape[1], values.device)
        fraction, exponent = torch.frexp(given.to(torch.float32))
        below = (exponent - 1 < known.exponent_min).logical_and_(given > 0)
        turns = torch.where(below, given / known.smallest_subnormal, fraction * 2.0**known.significand)
        angle = (turns.frac() * (2 * math.pi)).to(torch.float32)
        wave = torch.polar(variance.sqrt().to(torch.float32), angle)
        turn = torch.polar(torch.ones_like(angle), angle)
        for harmonic in range(len(_HARMONICS)):
            parts = torch.view_as_real(wave).unbind(-1)
            for side, part in enumerate(parts):
                self.amplitudes[2 * harmonic + side] += part.to(torch.float64) @ probed
            wave = wave * turn
        self.plain += (variance @ probed.square()).sum(1)

    def factor(self) -> Tensor:
        """Say how much larger the variance of the token errors is than if they were independent, [rows, 1], 1 or more."""
        shares = self.amplitudes.new_tensor(_HARMONICS).repeat_interleave(2)[:, None]
        wave = (self.amplitudes.square().sum(-1) * shares).sum(0)
        return torch.where(self.plain > 0, wave / self.plain, 1.0).clamp_(min=1)[:, None]

    def effective_tokens(self, elements: Tensor) -> Tensor:
        """Count the tokens that share a row's error, [rows]; ``elements`` is how many directions there are to be apart in."""
        across = (self.total - self.along).square() - self.across_squares
        pairs = self.along.square() - self.along_squares + across.clamp(min=0) / elements
        inverse = (self.squares + 2 / EXCESS * pairs) / self.total.square()
        inverse = torch.where(self.total.square() > 0, inverse, 1.0) * self.factor()[:, 0]
        # One error along one direction, normal at worst: the relative variance of its square is 2.
        return 1 / inverse.clamp(max=2 / EXCESS)
