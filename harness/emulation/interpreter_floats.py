"""Number formats of Triton's CPU interpreter, which keeps a bf16 or fp8 tensor as raw unsigned codes.

1. A code means what ml_dtypes says it means, subnormals, infinities and NaN included.
2. A narrowing conversion rounds once, to nearest with ties to even, or toward zero where the kernel asks for it.
3. Past the largest finite value an fp8 conversion saturates, infinities included, and a wider one gives infinity.
4. Not a number stays not a number.

Formats go by Triton's own names. Nothing here imports Triton.

Source: the OCP 8-bit floating point specification (fp8e4nv, fp8e5), the FNUZ formats of CDNA3 (fp8e4b8, fp8e5b16);
rule 3 is `cvt.rn.satfinite` of the PTX instruction set, which Triton uses for fp8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One format's bit layout."""

    #: stored mantissa bits
    mantissa: int
    #: exponent bits
    exponent: int
    #: exponent bias
    bias: int
    #: "ieee" (infinities, many NaN), "fn" (one NaN a sign, no infinity) or "fnuz" (one NaN, no negative zero)
    specials: str
    #: numpy type that holds the codes
    storage: type[np.generic]

    @property
    def bits(self) -> int:
        """Return the width of a code in bits."""
        return 1 + self.exponent + self.mantissa

    @property
    def saturates(self) -> bool:
        """Return whether a conversion past the largest finite value gives that value."""
        return self.bits == 8


#: formats whose codes numpy holds as integers
CODED = {
    "bf16": Layout(mantissa=7, exponent=8, bias=127, specials="ieee", storage=np.uint16),
    "fp8e5": Layout(mantissa=2, exponent=5, bias=15, specials="ieee", storage=np.uint8),
    "fp8e5b16": Layout(mantissa=2, exponent=5, bias=16, specials="fnuz", storage=np.uint8),
    "fp8e4nv": Layout(mantissa=3, exponent=4, bias=7, specials="fn", storage=np.uint8),
    "fp8e4b8": Layout(mantissa=3, exponent=4, bias=8, specials="fnuz", storage=np.uint8),
}
#: formats that numpy knows itself
NATIVE: dict[str, type[np.generic]] = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
_HALF = Layout(mantissa=10, exponent=5, bias=15, specials="ieee", storage=np.uint16)


def known(name: str) -> bool:
    """Return whether `name` is a floating-point format with a meaning here."""
    return name in CODED or name in NATIVE


@cache
def _values(name: str) -> NDArray[np.float32]:
    """Decode every code of a format of 8 or 16 bits; the largest fit fp32 exactly."""
    layout = _HALF if name == "fp16" else CODED[name]
    codes = np.arange(1 << layout.bits, dtype=np.int64)
    mantissa = codes & ((1 << layout.mantissa) - 1)
    exponent = (codes >> layout.mantissa) & ((1 << layout.exponent) - 1)
    normal = exponent > 0
    significand = np.where(normal, mantissa + (1 << layout.mantissa), mantissa).astype(np.float64)
    values = np.ldexp(significand, np.where(normal, exponent, 1) - layout.bias - layout.mantissa)
    top = exponent == (1 << layout.exponent) - 1
    sign = codes >> (layout.bits - 1)
    if layout.specials == "ieee":
        values[top & (mantissa == 0)] = np.inf
        values[top & (mantissa != 0)] = np.nan
    elif layout.specials == "fn":
        values[top & (mantissa == (1 << layout.mantissa) - 1)] = np.nan
    values = np.where(sign == 1, -values, values)
    if layout.specials == "fnuz":
        values[1 << (layout.bits - 1)] = np.nan
    return np.asarray(values, np.float32)


@cache
def _magnitudes(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the finite values from zero up, and the points half way to the next one (the last one past the end)."""
    layout = _HALF if name == "fp16" else CODED[name]
    positive = _values(name)[: 1 << (layout.bits - 1)].astype(np.float64)
    finite = positive[np.isfinite(positive)]
    return finite, finite + np.diff(finite, append=2 * finite[-1] - finite[-2]) / 2


def decode(codes: Codes, name: str) -> NDArray[np.floating]:
    """Return the exact values of codes of the format `name`: fp32, or fp64 for "fp64"."""
    if name == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name in CODED:
        return _values(name)[codes]
    if name == "fp16":
        return codes.astype(np.float32)
    if name in NATIVE:
        return np.asarray(codes)
    raise NotImplementedError(
        f"the interpreter was asked for values of {name}, which has no meaning here; known are {', '.join([*NATIVE, *CODED])}"
    )


def encode(values: NDArray[np.floating], name: str, *, toward_zero: bool = False) -> Codes:
    """Return fp32 or fp64 values as codes of the format `name`, rounded once.

    Error: half a unit in the last place of the target (one unit where `toward_zero`).
    """
    if name == "bf16" and values.dtype == np.float32 and not toward_zero:
        return _single_to_bf16(values)
    if name == "fp64" or (name == "fp32" and values.dtype == np.float32):
        return values.astype(NATIVE[name], copy=False)
    if name in NATIVE and not toward_zero:
        return values.astype(NATIVE[name])
    if name == "fp32":
        nearest = values.astype(np.float32)
        return np.where(np.abs(nearest) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest)
    if name not in CODED and name != "fp16":
        raise NotImplementedError(
            f"the interpreter was asked to convert to {name}, which has no meaning here; "
            f"known are {', '.join([*NATIVE, *CODED])}"
        )
    return _by_table(values, name, toward_zero)


def _single_to_bf16(values: NDArray[np.floating]) -> Codes:
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    lost = np.isnan(values)
    if lost.any():  # the carry of rounding may turn a NaN into an infinity or a zero
        rounded = np.where(lost, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def _by_table(values: NDArray[np.floating], name: str, toward_zero: bool) -> Codes:
    # Positive codes ascend with their values, so the place in the list of finite magnitudes is the code,
    # and the parity of the place is the parity of the mantissa.
    layout = _HALF if name == "fp16" else CODED[name]
    finite, halves = _magnitudes(name)
    magnitude = np.abs(values).astype(np.float64)
    if toward_zero:
        place = np.searchsorted(finite, magnitude, side="right") - 1
    else:
        place = np.searchsorted(halves, magnitude, side="left")
        tied = halves[np.minimum(place, halves.size - 1)] == magnitude
        place = place + (tied & (place % 2 == 1))
    if layout.saturates:
        place = np.minimum(place, finite.size - 1)
    elif toward_zero:
        place = np.where(np.isinf(magnitude), finite.size, np.minimum(place, finite.size - 1))
    negative = np.signbit(values)
    if layout.specials == "fnuz":
        negative = negative & (place > 0)
    codes = np.where(negative, place | (1 << (layout.bits - 1)), place)
    nan = {"ieee": (1 << (layout.bits - 1)) - 1, "fn": (1 << (layout.bits - 1)) - 1, "fnuz": 1 << (layout.bits - 1)}
    codes = np.where(np.isnan(values), nan[layout.specials], codes).astype(layout.storage)
    return codes.view(np.float16) if name == "fp16" else codes


def convert(codes: Codes, source: str, target: str, *, toward_zero: bool = False) -> Codes:
    """Return codes of the format `source` as codes of `target`, rounded once."""
    return encode(decode(codes, source), target, toward_zero=toward_zero)


def round_to_tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return fp32 values rounded to the ten mantissa bits that a TF32 matrix product keeps."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)
