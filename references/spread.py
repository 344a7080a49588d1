"""How independent the roundings of a row are: what the spread of its statistic depends on.

1. Equal values round alike. Tokens of (nearly) equal probability have one error between them, and elements of equal magnitude
   too; a row with many of either has a wider statistic and, for tokens, a larger variance.
2. Everything is worked out from the data, per row, with sketches that are the same on every run.

Derivation. An error uniform within half a spacing has a square whose variance is EXCESS = 9/5 - 1 times its squared mean. The
squared length of a sum of such errors along vectors, t_j their mean squares, has the relative variance
EXCESS sum t_j^2 / (sum t_j)^2 and, for each two vectors at an angle, 2 t_j t_k cos^2 / (sum t_j)^2 more. That defines the
effective number n_eff as the number of equal and orthogonal ones with the same relative variance EXCESS / n_eff. Angles are
worked out along the output, where V rows have a direction in common, and taken as random otherwise.

The errors of two values d spacings apart are correlated as 1 - 6 d (1 - d), d taken modulo 1, whose Fourier series is
6 / pi^2 sum_m cos(2 pi m d) / m^2. So the mean square of sum_j a_j e_j v_j, over common shifts of the grid, is that of one
error times 6 / pi^2 sum_m |sum_j a_j v_j e^(2 pi i m x_j)|^2 / m^2, x_j the value in spacings. Its quotient by
sum_j a_j^2 v_j^2 is the coherence: 1 for scattered values, the size of the group for equal ones. Three terms are kept, the
third standing for the rest, and v is looked at along fixed random signs.

Source: the Fourier series of the second Bernoulli polynomial (DLMF 24.8.1); for sketches, W. Johnson and J. Lindenstrauss,
1984.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from references.formats import Format, ulp

#: Variance of the square of a uniform error over its squared mean: E x^4 / (E x^2)^2 - 1.
EXCESS = 9 / 5 - 1
#: The same for a normal error, which is what a sum of many is.
NORMAL_EXCESS = 2.0
#: Shares of the first two Fourier terms, and of all others.
_HARMONICS = (6 / math.pi**2, 1.5 / math.pi**2, 1 - 7.5 / math.pi**2)
#: Random directions in which V is looked at: the coherence of independent roundings then comes out as 1 +- 0.1.
_PROBES = 32
#: Parts of a spacing that two outputs may be apart to count as equal: finer than noise moves them when it matters.
_PARTS = 8


@lru_cache(maxsize=16)
def _signs(latent: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(latent)
    signs = torch.randint(0, 2, (latent, _PROBES), generator=generator, dtype=torch.float32) * 2 - 1
    return signs.to(device)


def effective_elements(written: Tensor, variance: Tensor, known: Format) -> Tensor:
    """Count the elements of each row that round independently, [rows]: outputs of one significand count as one.

    Args:
        written: outputs as they are written, fp64 [rows, L].
        variance: variance of each element's own roundings, fp64 [rows, L].
        known: the format they are written in.
    """
    turns = written / ulp(written, known)
    ordered, index = (turns * _PARTS).round_().abs_().sort(dim=1)
    first = torch.zeros_like(index)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    groups = torch.zeros_like(variance).scatter_add_(1, first.cumsum(1), variance.gather(1, index))
    total = variance.sum(1)
    alike = torch.polar(variance, turns.abs().frac() * (2 * math.pi)).sum(1).abs().square()
    squares = torch.maximum(groups.square().sum(1), alike)
    return torch.where(squares > 0, total.square() / squares, variance.shape[1])


def effective_number(parts: Tensor) -> Tensor:
    """Count how many equal parts would be as uneven as these, [rows]; parts are 0 or more, [rows, n]."""
    squares = parts.square().sum(1)
    return torch.where(squares > 0, parts.sum(1).square() / squares, parts.shape[1])


class TokenSharing:
    """How the errors of a row's tokens are spread over tokens and directions; streamed."""

    def __init__(self, out: Tensor) -> None:
        self._out = out.to(torch.float32)
        self._norm = self._out.norm(dim=1, keepdim=True)
        self._direction = torch.where(self._norm > 0, self._out / self._norm, 0.0)
        self._total, self._squares, self._along, self._along_squares, self._across_squares = (
            out.new_zeros(len(out)) for _ in range(5)
        )
        self._phases = torch.zeros(len(out), dtype=torch.complex128, device=out.device)

    def add(self, values: Tensor, lengths: Tensor, about_zero: Tensor, about_out: Tensor | None, turns: Tensor) -> None:
        """Add tokens.

        Args:
            values: v, fp32 [n, L].
            turns: their probabilities in spacings, fp32 [rows, n].
            lengths: their squared norms, fp32 [n].
            about_zero: mean squares of errors that act along v, fp32 [rows, n].
            about_out: mean squares of errors that act along v - o, fp32 [rows, n]; None if there are none.
        """
        along = self._direction @ values.T
        tokens, part = about_zero * lengths, about_zero * along.square()
        if about_out is not None:
            apart = (lengths - 2 * self._norm * along + self._norm.square()).clamp_(min=0)
            tokens = tokens + about_out * apart
            part = part + about_out * (along - self._norm).square()
        part = torch.minimum(part, tokens)
        self._phases += torch.polar(tokens, turns.frac() * (2 * math.pi)).sum(1)
        for total, terms in (
            (self._total, tokens),
            (self._squares, tokens.square()),
            (self._along, part),
            (self._along_squares, part.square()),
            (self._across_squares, (tokens - part).square_()),
        ):
            total += terms.sum(1)

    def effective_tokens(self, factor: Tensor, directions: Tensor) -> Tensor:
        """Count the tokens that share a row's error, [rows].

        Args:
            factor: the coherence of their errors, [rows].
            directions: directions that errors may take across the output, [rows].
        """
        across = (self._total - self._along).square() - self._across_squares
        pairs = (self._along.square() - self._along_squares).clamp(min=0) + across.clamp(min=0) / directions
        alike = torch.maximum(self._squares, self._phases.abs().square())
        inverse = (alike + NORMAL_EXCESS / EXCESS * pairs) / self._total.square()
        inverse = torch.where(self._total > 0, inverse, 1.0) * factor
        return 1 / inverse.clamp(max=NORMAL_EXCESS / EXCESS)


class Coherence:
    """How much larger the variance of a row's token errors is than if they were independent; streamed.

    Errors act along v, or along v - o where a centre is given.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        new = torch.zeros((rows, 1), dtype=torch.float32, device=like.device).new_zeros
        self._waves, self._wave_mass = new((2 * len(_HARMONICS), rows, _PROBES)), new((2 * len(_HARMONICS), rows, 1))
        self._squares, self._means, self._mass = new((rows, _PROBES)), new((rows, _PROBES)), new((rows, 1))

    def add(self, turns: Tensor, variance: Tensor, probed: Tensor) -> None:
        """Add tokens.

        Args:
            turns: probabilities in spacings, fp32 [rows, n].
            variance: mean squares of their errors, fp32 [rows, n].
            probed: v as ``probe`` sees it, fp32 [n, probes].
        """
        angle = turns.frac().mul_(2 * math.pi)
        cosine, sine, size = angle.cos(), angle.sin(), variance.sqrt()
        waves = [size * cosine, size * sine]
        for _ in _HARMONICS[1:]:
            real, imaginary = waves[-2:]
            waves += [real * cosine - imaginary * sine, real * sine + imaginary * cosine]
        stacked = torch.stack(waves)
        self._waves += stacked @ probed
        self._wave_mass += stacked.sum(2, keepdim=True)
        self._squares += variance @ probed.square()
        self._means += variance @ probed
        self._mass += variance.sum(1, keepdim=True)

    def of_mass(self) -> Tensor:
        """Give the factor of the errors' own sum, fp64 [rows], 1 or more."""
        return self._quotient(self._wave_mass, self._mass)

    def _quotient(self, waves: Tensor, plain: Tensor) -> Tensor:
        shares = waves.new_tensor(_HARMONICS).repeat_interleave(2)[:, None]
        coherent, incoherent = (waves.square().sum(2) * shares).sum(0), plain.sum(1)
        return torch.where(incoherent > 0, coherent / incoherent, 1.0).clamp_(min=1).double()

    def factor(self, centre: Tensor | None) -> Tensor:
        """Give the factor, fp64 [rows], 1 or more; ``centre`` is o, fp64 [rows, L], where errors act along v - o."""
        waves, plain = self._waves, self._squares
        if centre is not None:
            middle = probe(centre.to(torch.float32))
            waves = waves - self._wave_mass * middle
            plain = plain - 2 * middle * self._means + middle.square() * self._mass
        return self._quotient(waves, plain)


def probe(values: Tensor) -> Tensor:
    """Look at v along the fixed random signs; fp32 [n, L] to [n, probes]."""
    return values @ _signs(values.shape[1], values.device)
