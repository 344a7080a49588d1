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
#: Parts of spacings that are sorted into places of their own, rather than by size: bf16's of one binade.
_FEW = 2049


@lru_cache(maxsize=16)
def _signs(latent: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(latent)
    signs = torch.randint(0, 2, (latent, _PROBES), generator=generator, dtype=torch.float32) * 2 - 1
    return signs.to(device)


def effective_elements(written: Tensor, variance: Tensor, known: Format) -> Tensor:
    """Count the elements of each row that round independently, [...]: outputs of one significand count as one.

    Args:
        written: outputs as they are written, fp64 [..., L].
        variance: variance of each element's own roundings, fp64 [..., L].
        known: the format they are written in.
    """
    turns = (written / ulp(written, known)).abs_()
    parts, count = (turns * _PARTS).round_(), (_PARTS << known.significand) + 1
    if count > _FEW:
        parts, count = _ranks(parts), variance.shape[-1]
    groups = variance.new_zeros((*variance.shape[:-1], count)).scatter_add_(-1, parts.long(), variance)
    total = variance.sum(-1)
    alike = (variance * waves(turns)).sum(-1).square().sum(0)
    squares = torch.maximum(groups.square().sum(-1), alike)
    return torch.where(squares > 0, total.square() / squares, variance.shape[-1])


def _ranks(values: Tensor) -> Tensor:
    """Number the different values of each row, [..., L], from 0 on."""
    ordered, index = values.sort(dim=-1)
    rises = torch.zeros_like(index)
    rises[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return torch.zeros_like(index).scatter_(-1, index, rises.cumsum(-1))


def waves(turns: Tensor) -> Tensor:
    """Take cosine and sine of turns, fp32 [2, ...]."""
    angle = turns.frac().to(torch.float32).mul_(2 * math.pi)
    return torch.stack([angle.cos(), angle.sin()])


def effective_number(parts: Tensor) -> Tensor:
    """Count how many equal parts would be as uneven as these, [...]; parts are 0 or more, [..., n]."""
    squares = parts.square().sum(-1)
    return torch.where(squares > 0, parts.sum(-1).square() / squares, parts.shape[-1])


class TokenSharing:
    """How the errors of a row's tokens are spread over tokens and directions; streamed."""

    def __init__(self, out: Tensor) -> None:
        self._out = out.to(torch.float32)
        self._norm = self._out.norm(dim=-1, keepdim=True)
        self._direction = torch.where(self._norm > 0, self._out / self._norm, 0.0)
        #: Sums over tokens of their mean squares and of the squares of those, of their parts along the output and of the
        #: squares of those, and of the squares of their parts across it, fp64 [5, G, R].
        self._sums = out.new_zeros((5, *out.shape[:2]))
        #: Sums of mean squares by their phases, cosine and sine, fp64 [2, G, R].
        self._phases = out.new_zeros((2, *out.shape[:2]))

    def add(self, values: Tensor, lengths: Tensor, about_zero: Tensor, about_out: Tensor | None, turns: Tensor) -> None:
        """Add tokens.

        Args:
            values: v, fp32 [G, n, L].
            turns: their probabilities in spacings, fp32 [G, R, n].
            lengths: their squared norms, fp32 [G, n].
            about_zero: mean squares of errors that act along v, fp32 [G, R, n].
            about_out: mean squares of errors that act along v - o, fp32 [G, R, n]; None if there are none.
        """
        along, lengths = self._direction @ values.mT, lengths[:, None]
        tokens, part = about_zero * lengths, about_zero * along.square()
        if about_out is not None:
            apart = (lengths - 2 * self._norm * along + self._norm.square()).clamp_(min=0)
            tokens = tokens + about_out * apart
            part = part + about_out * (along - self._norm).square()
        part = torch.minimum(part, tokens)
        self._phases += (tokens * waves(turns)).sum(-1)
        self._sums += torch.stack([tokens, tokens.square(), part, part.square(), (tokens - part).square_()]).sum(-1)

    def effective_tokens(self, factor: Tensor, directions: Tensor) -> Tensor:
        """Count the tokens that share a row's error, [G, R].

        Args:
            factor: the coherence of their errors, [G, R].
            directions: directions that errors may take across the output, [G, R].
        """
        total, total_squares, along, along_squares, across_squares = self._sums
        across = (total - along).square() - across_squares
        pairs = (along.square() - along_squares).clamp(min=0) + across.clamp(min=0) / directions
        alike = torch.maximum(total_squares, self._phases.square().sum(0))
        inverse = (alike + NORMAL_EXCESS / EXCESS * pairs) / total.square()
        inverse = torch.where(total > 0, inverse, 1.0) * factor
        return 1 / inverse.clamp(max=NORMAL_EXCESS / EXCESS)


class Coherence:
    """How much larger the variance of a row's token errors is than if they were independent; streamed.

    Errors act along v, or along v - o where a centre is given. Several ways to round, P, are looked at side by side; the
    largest factor counts.
    """

    def __init__(self, like: Tensor) -> None:
        nothing = torch.zeros((), dtype=torch.float32, device=like.device)
        #: Sums over tokens of cosines and sines of each harmonic, of v and of 1, [G, 2 H, P, R, probes or 1].
        self._waves = self._wave_mass = nothing
        #: Sums of mean squares, of v^2 and v, [G, P, R, 2 probes], and of 1, [G, P, R, 1].
        self._plain = self._mass = nothing

    def add(self, turns: Tensor, variance: Tensor, probed: Tensor) -> None:
        """Add tokens.

        Args:
            turns: probabilities in spacings, fp32 [P, G, R, n].
            variance: mean squares of their errors, fp32 [P, G, R, n].
            probed: v as ``probe`` sees it, fp32 [G, n, probes].
        """
        harmonics = torch.arange(1, len(_HARMONICS) + 1, device=turns.device).view(-1, 1, 1, 1) * (2 * math.pi)
        angles = turns.frac().transpose(0, 1)[:, None] * harmonics
        variance = variance.transpose(0, 1).contiguous()
        waves = torch.cat([angles.cos(), angles.sin()], 1).mul_(variance.sqrt()[:, None])
        self._waves = self._waves + (waves.flatten(1, 3) @ probed).view(*waves.shape[:-1], -1)
        self._wave_mass = self._wave_mass + waves.sum(-1, keepdim=True)
        looked = torch.cat([probed.square(), probed], -1)
        self._plain = self._plain + (variance.flatten(1, 2) @ looked).view(*variance.shape[:-1], -1)
        self._mass = self._mass + variance.sum(-1, keepdim=True)

    def of_mass(self) -> Tensor:
        """Give the factor of the errors' own sum, fp64 [G, R, 1], 1 or more."""
        return _quotient(self._wave_mass, self._mass)

    def factor(self, centre: Tensor | None) -> Tensor:
        """Give the factor, fp64 [G, R, 1], 1 or more; ``centre`` is o, fp64 [G, R, L], where errors act along v - o."""
        squares, means = self._plain.chunk(2, -1)
        if centre is None:
            return _quotient(self._waves, squares)
        middle = probe(centre.to(torch.float32))[:, None]
        plain = squares - 2 * middle * means + middle.square() * self._mass
        return _quotient(self._waves - self._wave_mass * middle[:, None], plain)


def _quotient(waves: Tensor, plain: Tensor) -> Tensor:
    """Divide coherent by incoherent mean squares, [G, 2 H, P, R, m] by [G, P, R, m], the larger of P; fp64 [G, R, 1]."""
    # Cosines first, then sines.
    powers = waves.square().sum(-1).view(len(waves), 2, len(_HARMONICS), *plain.shape[1:-1]).sum(1).unbind(1)
    coherent, incoherent = sum(map(torch.mul, powers, _HARMONICS)), plain.sum(-1)
    factors = torch.where(incoherent > 0, coherent / incoherent, 1.0)
    return factors.clamp_(min=1).amax(1)[..., None].double()


def probe(values: Tensor) -> Tensor:
    """Look at v along the fixed random signs; fp32 [..., L] to [..., probes]."""
    return values @ _signs(values.shape[-1], values.device)
