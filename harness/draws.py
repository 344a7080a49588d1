"""Numbers and signs from raw Philox words, the same bytes on every machine.

Source: sums of uniform integers for normal numbers; SplitMix64 (Steele, Lea, Flood 2014) for the signs of slots.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

#: Variance of a sum of four uniform 16-bit integers: 4 (2^32 - 1) / 12.
_SUM_VARIANCE = 4 * (2**32 - 1) / 12
#: The lower 16 bits of both halves of a word.
_LOW_HALVES = np.uint64(0x0000FFFF_0000FFFF)
#: Numbers drawn at a time: their words stay in a core's cache.
_PIECE = 1 << 15


def normal(bits: np.random.Philox, *shape: int) -> Values:
    """Draw nearly normal numbers (mean 0, variance 1, within ±3.5): sums of four uniform 16-bit integers; [*shape]."""
    values: Values = np.empty(math.prod(shape), np.float32)
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE]
        words = bits.random_raw(piece.size)
        pairs = words & _LOW_HALVES
        pairs += (words >> np.uint64(16)) & _LOW_HALVES
        pairs += pairs >> np.uint64(32)
        piece[:] = pairs.astype(np.uint32).view(np.int32) - 2 * 65535
        piece *= np.float32(1 / math.sqrt(_SUM_VARIANCE))
    return values.reshape(shape)


def signs(words: NDArray[np.uint64], count: int) -> Values:
    """Spread words over signs; [n, w] uint64 to [n, count] of ±1, count ≤ 64 w."""
    bits = np.unpackbits(words.view(np.uint8).reshape(len(words), -1), axis=1, count=count)
    return np.where(bits, np.float32(1), np.float32(-1))


def slot_signs(slots: NDArray[np.int64], latent: int) -> Values:
    """Spell out slots: a row of signs for each, as the slots family stores it in V; int64 [n] to [n, latent] of ±1.

    Source: SplitMix64 (Steele, Lea, Flood 2014), seeded by slot and word.
    """
    count = -(-latent // 64)
    with np.errstate(over="ignore"):
        word = np.arange(1, count + 1, dtype=np.uint64)
        z: NDArray[np.uint64] = slots.astype(np.uint64)[:, None] * np.uint64(count) + word
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return signs(z, latent)
