"""Number formats, and the verbs decode, encode, round and ulp.

1. A format is a record. One integer rule serves all of them: a magnitude code is ``(e - exponent_min) * 2**(p - 1) + k`` for
   the value ``k * 2**(e - p + 1)``; subnormals and the carry into the next binade need no case of their own.
2. Encoding rounds once, to nearest with ties to even, straight from fp64 or fp32.
3. A value past the largest finite one becomes infinity where the format has it, else NaN; ``saturate`` makes it the largest.
   NaN stays NaN always. fnuz formats have no negative zero: what rounds to it becomes zero.
4. Decoding is exact and gives fp32.

Source: IEEE 754-2019 (fp16, fp32); OCP 8-bit floating point 1.0 (e4m3fn, e5m2); the fnuz variant of LLVM's APFloat; bf16 is
the upper half of fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

#: Integer type that holds the codes of a format, by their bytes.
_INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32})
#: Elements quantised at a time: bounds the fp64 and int64 temporaries to some tens of MiB.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point format."""

    #: Name used in cases and regimes.
    name: str
    #: torch's type of the codes.
    storage: torch.dtype
    #: Significand bits, the hidden one counted.
    significand: int
    #: Exponent of the smallest normal value.
    exponent_min: int
    #: Largest finite value.
    maximum: float
    #: Code of positive infinity, or None.
    infinity: int | None
    #: Code of a quiet NaN.
    nan: int
    #: Whether negative zero exists.
    signed_zero: bool = True

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.storage.itemsize

    @property
    def has_infinity(self) -> bool:
        """Whether infinities exist."""
        return self.infinity is not None

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest in the normal range."""
        return 2.0**-self.significand

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return 2.0**self.exponent_min

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value; the spacing of the subnormals."""
        return 2.0 ** (self.exponent_min - self.significand + 1)

    def __str__(self) -> str:
        return self.name


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        known.name: known
        for known in (
            Format(
                name="fp32", storage=torch.float32, significand=24, exponent_min=-126,
                maximum=(2 - 2.0**-23) * 2.0**127, infinity=0x7F800000, nan=0x7FC00000,
            ),
            Format(
                name="bf16", storage=torch.bfloat16, significand=8, exponent_min=-126,
                maximum=(2 - 2.0**-7) * 2.0**127, infinity=0x7F80, nan=0x7FC0,
            ),
            Format(
                name="fp16", storage=torch.float16, significand=11, exponent_min=-14,
                maximum=65504.0, infinity=0x7C00, nan=0x7E00,
            ),
            Format(
                name="e4m3fn", storage=torch.float8_e4m3fn, significand=4, exponent_min=-6,
                maximum=448.0, infinity=None, nan=0x7F,
            ),
            Format(
                name="e4m3fnuz", storage=torch.float8_e4m3fnuz, significand=4, exponent_min=-7,
                maximum=240.0, infinity=None, nan=0x80, signed_zero=False,
            ),
            Format(
                name="e5m2", storage=torch.float8_e5m2, significand=3, exponent_min=-14,
                maximum=57344.0, infinity=0x7C, nan=0x7E,
            ),
        )
    }
)  # fmt: skip


def find(name: str) -> Format:
    """Find a format by name.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in FORMATS:
        raise ValueError(f"number format {name!r} is not known; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def as_integers(codes: Tensor) -> Tensor:
    """View codes as integers, bit for bit: uint8, int16 or int32 of the same shape."""
    return codes.view(_INTEGERS[codes.element_size()])


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Decode codes of ``fmt``, any shape, to fp32.

    Raises:
        TypeError: if the codes are not of the format's storage type.

    Error: none; every value of every format is an fp32 value.
    """
    if codes.dtype != fmt.storage:
        raise TypeError(f"codes of {fmt} are {fmt.storage}, these are {codes.dtype}; view them as that type")
    if fmt.bits > 8 or codes.is_cuda:
        return codes.to(torch.float32)
    # torch's own 8-bit casts run an element at a time on a CPU: a table is several times as fast, and one of pairs more so.
    flat = codes.contiguous().view(torch.uint8).view(-1)
    if flat.numel() % 2 or flat.storage_offset() % 2:
        return _table(fmt).index_select(0, flat.to(torch.int32)).view(codes.shape)
    pairs = flat.view(torch.int16).to(torch.int32).add_(1 << 15)
    return _pair_table(fmt).index_select(0, pairs).view(torch.float32).view(codes.shape)


@lru_cache(maxsize=8)
def _table(fmt: Format) -> Tensor:
    """Work out the value of every code of an 8-bit format, by the rule that encoding follows; fp32 [256]."""
    codes = torch.arange(256)
    magnitude = codes & 0x7F
    step = torch.clamp((magnitude >> (fmt.significand - 1)) - 1, min=0)
    count = magnitude - step * 2 ** (fmt.significand - 1)
    values = torch.ldexp(count.to(torch.float64), step + fmt.exponent_min - fmt.significand + 1)
    values = torch.where(magnitude > _largest_code(fmt), torch.nan, values)
    if fmt.infinity is not None:
        values[magnitude == fmt.infinity] = torch.inf
    values = torch.where(codes >= 0x80, -values, values)
    if not fmt.signed_zero:
        values[fmt.nan] = torch.nan
    return values.to(torch.float32)


@lru_cache(maxsize=8)
def _pair_table(fmt: Format) -> Tensor:
    """Lay out the values of every two codes that an int16 holds, from -2^15 on; two fp32 in an int64 [65536]."""
    pairs = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.uint8).to(torch.int64)
    return _table(fmt)[pairs].view(torch.int64)


def encode(values: Tensor, fmt: Format, *, saturate: bool = False) -> Tensor:
    """Encode fp32 or fp64 values, any shape, to codes of ``fmt``: one rounding to nearest, ties to even.

    Args:
        values: what to encode.
        fmt: the format of the codes.
        saturate: give the largest finite value, not infinity or NaN, for anything larger, infinity too.

    Raises:
        TypeError: if the values are neither fp32 nor fp64.

    Error: half an ulp of the format; none where the value is one of the format's.
    """
    _require_wide(values)
    if values.dtype == torch.float32 and fmt.bits >= 16:
        # torch rounds fp32 to nearest even; tested on every code and midpoint
        return (values.clamp(-fmt.maximum, fmt.maximum) if saturate else values).to(fmt.storage)
    if values.dtype == torch.float32:
        return _encode_by_table(values, fmt, saturate)
    codes = torch.empty(values.shape, dtype=_INTEGERS[fmt.storage.itemsize], device=values.device)
    flat, out = values.reshape(-1), codes.view(-1)
    for start in range(0, flat.numel(), _PIECE):
        part = _encode_piece(flat[start : start + _PIECE].to(torch.float64), fmt, saturate)
        # Above the sign bit of a signed code type the integer wraps to the same bits.
        if fmt.bits > 8:
            part = part - ((part >> (fmt.bits - 1)) << fmt.bits)
        out[start : start + _PIECE] = part.to(codes.dtype)
    return codes.view(fmt.storage)


def round(values: Tensor, fmt: Format, *, saturate: bool = False) -> Tensor:
    """Round fp32 or fp64 values, any shape, to those of ``fmt``, in their own type.

    Raises:
        TypeError: if the values are neither fp32 nor fp64.

    Error: as for ``encode``.
    """
    return decode(encode(values, fmt, saturate=saturate), fmt).to(values.dtype)


def ulp(values: Tensor, fmt: Format) -> Tensor:
    """Measure the spacing of ``fmt`` at fp32 or fp64 values, any shape, in their own type.

    It is that of the binade a value lies in, as if the format had no largest value; NaN and infinity give NaN.

    Raises:
        TypeError: if the values are neither fp32 nor fp64.
    """
    _require_wide(values)
    spacing = _binade(values).clamp_(min=fmt.smallest_normal).mul_(2.0 ** (1 - fmt.significand))
    return spacing.add_(values - values)  # nothing, or NaN


def _require_wide(values: Tensor) -> None:
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"values to round are fp32 or fp64, these are {values.dtype}; decode codes first")


def _binade(values: Tensor) -> Tensor:
    """Find the power of two at or below the magnitude of values; 0 for subnormal ones, infinity for NaN."""
    if values.dtype == torch.float32:
        return (values.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (values.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)


def _encode_by_table(values: Tensor, fmt: Format, saturate: bool) -> Tensor:
    """Encode fp32 values to an 8-bit format through their upper half, rounded to odd.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd"
    (2008): what is rounded to odd with two bits more than the format has is then rounded as if it never had been.
    """
    bits = values.contiguous().view(torch.int32)
    odd = (bits >> 16) | ((bits & 0xFFFF) != 0)  # 8 significand bits; the formats have 4 at most
    codes = _codes_of_halves(fmt, saturate, values.device).index_select(0, odd.view(-1).add_(1 << 15))
    return codes.view(values.shape).view(fmt.storage)


@lru_cache(maxsize=16)
def _codes_of_halves(fmt: Format, saturate: bool, device: torch.device) -> Tensor:
    """Work out the code of every upper half of an fp32 number, from -2^15 on; uint8 [65536]."""
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    values = (halves << 16).view(torch.float32)
    return _encode_piece(values.to(torch.float64), fmt, saturate).to(torch.uint8).to(device)


def _encode_piece(wide: Tensor, fmt: Format, saturate: bool) -> Tensor:
    """Encode fp64 values to int64 codes with the sign in the format's top bit."""
    magnitudes = torch.where(wide.isfinite(), wide.abs(), 0.0)
    binade = _binade(magnitudes).clamp_(min=fmt.smallest_normal)
    # A power of two scales exactly here: the quotient lies below 2**p, and what underflows rounds to zero anyway.
    count = magnitudes.div_(binade).mul_(2.0 ** (fmt.significand - 1)).round_().long()
    step = (binade.view(torch.int64) >> 52) - (1023 + fmt.exponent_min)
    magnitude = step * 2 ** (fmt.significand - 1) + count
    largest = _largest_code(fmt)
    overflow = fmt.nan if fmt.infinity is None else fmt.infinity
    beyond = (magnitude > largest) | wide.isinf()
    magnitude = torch.where(beyond, largest if saturate else overflow, magnitude)
    negative = wide.signbit()
    if not fmt.signed_zero:
        negative &= (magnitude != 0) & (magnitude != fmt.nan)
    codes = magnitude | (negative.long() << (fmt.bits - 1))
    return codes.masked_fill_(wide.isnan(), fmt.nan)


def _largest_code(fmt: Format) -> int:
    """Find the magnitude code of the largest finite value: the one before infinity, or the last that is no NaN."""
    if fmt.infinity is not None:
        return fmt.infinity - 1
    return fmt.nan - 1 if fmt.signed_zero else 0x7F
