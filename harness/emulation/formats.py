"""The number formats of kernels, as numpy sees them.

1. A register holds values, not codes: integers as int64 (uint64 for itself), floats of 32 bits and fewer as the fp32
   value they stand for, which is exact.
2. Memory holds codes. ``decode`` is exact; ``encode`` takes values that the format can hold or rounds to nearest, ties to
   even.
3. These are not the reference's formats: an emulator that shared them would share their faults.

Source: IEEE 754 for fp16, fp32 and fp64; OCP 8-bit floating point (OFP8 1.0) for e4m3fn and e5m2; Graphcore, AMD and
Qualcomm (arXiv 2206.02915) for the fnuz variants. Confirmed bit for bit against ml_dtypes in ``tests/emulation``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Kind:
    """A scalar type, with Triton's name for it."""

    #: Triton's name, as in the type's ``name``.
    name: str
    #: Bits of a stored element; 1 for a boolean.
    bits: int
    #: "bool", "int", "uint" or "float".
    family: str
    #: numpy type of a stored code.
    storage: np.dtype[Any]
    #: numpy type of a value in a register.
    register: np.dtype[Any]
    #: Least and greatest value of an integer.
    lowest: int = 0
    highest: int = 0
    #: Whether it is a floating-point type.
    is_float: bool = False
    #: Floats of 8 bits: exponent bits, mantissa bits, bias, "ieee" | "fn" | "fnuz".
    small: tuple[int, int, int, str] | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def primitive_bitwidth(self) -> int:
        """Bits of a stored element, under Triton's name for it."""
        return self.bits

    @property
    def int_bitwidth(self) -> int:
        """Bits of an integer, under Triton's name for it."""
        return self.bits

    @property
    def element_ty(self) -> Kind:
        """Itself: an element type is its own."""
        return self

    @property
    def scalar(self) -> Kind:
        """Itself: an element type has no shape."""
        return self

    def is_int(self) -> bool:
        """Whether Triton calls it an integer, which includes booleans."""
        return not self.is_float

    def is_floating(self) -> bool:
        """Whether Triton calls it floating."""
        return self.is_float

    def is_fp8(self) -> bool:
        """Whether it is an 8-bit float."""
        return self.small is not None

    def is_bf16(self) -> bool:
        """Whether it is bfloat16."""
        return self.name == "bf16"

    def is_fp16(self) -> bool:
        """Whether it is IEEE half precision."""
        return self.name == "fp16"

    def is_fp32(self) -> bool:
        """Whether it is IEEE single precision."""
        return self.name == "fp32"


@cache
def table_of(kind: Kind) -> NDArray[np.float32]:
    """Compute the value of every code of an 8-bit float."""
    assert kind.small is not None
    exponent_bits, mantissa_bits, bias, variant = kind.small
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    unit = 2.0**-mantissa_bits
    values = np.where(
        exponent == 0,
        sign * mantissa * unit * 2.0 ** (1 - bias),
        sign * (1 + mantissa * unit) * 2.0 ** (exponent - bias),
    )
    top = (1 << exponent_bits) - 1
    if variant == "ieee":
        values = np.where(exponent == top, np.where(mantissa == 0, sign * np.inf, np.nan), values)
    elif variant == "fn":
        values = np.where((codes & 0x7F) == 0x7F, np.nan, values)
    else:
        values = np.where(codes == 0x80, np.nan, values)
    return values.astype(np.float32)


def largest(kind: Kind) -> float:
    """Compute the largest finite value of an 8-bit float."""
    values = table_of(kind)
    return float(values[np.isfinite(values)].max())


@cache
def _midpoints(kind: Kind) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Compute the boundaries between neighbouring finite values from 0 up, and the codes of the values."""
    codes = np.arange(128, dtype=np.uint8)
    finite = codes[np.isfinite(table_of(kind)[:128])]
    values = table_of(kind)[finite].astype(np.float64)
    return (values[:-1] + values[1:]) / 2, finite


def _integer(name: str, bits: int, signed: bool) -> Kind:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    register = np.dtype(np.uint64 if bits == 64 and not signed else np.int64)
    storage = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    family = "int" if signed else "uint"
    return Kind(name=name, bits=bits, family=family, storage=storage, register=register, lowest=low, highest=high)


def _floating(name: str, bits: int, storage: str, small: tuple[int, int, int, str] | None = None) -> Kind:
    register = np.dtype(np.float64 if bits == 64 else np.float32)
    return Kind(name=name, bits=bits, family="float", storage=np.dtype(storage), register=register, is_float=True, small=small)


BOOL = Kind(name="int1", bits=1, family="bool", storage=np.dtype(np.uint8), register=np.dtype(np.bool_), lowest=0, highest=1)
INT8, INT16, INT32, INT64 = (_integer(f"int{bits}", bits, True) for bits in (8, 16, 32, 64))
UINT8, UINT16, UINT32, UINT64 = (_integer(f"uint{bits}", bits, False) for bits in (8, 16, 32, 64))
BF16 = _floating("bf16", 16, "u2")
FP16 = _floating("fp16", 16, "f2")
FP32 = _floating("fp32", 32, "f4")
FP64 = _floating("fp64", 64, "f8")
E4M3FN = _floating("fp8e4nv", 8, "u1", (4, 3, 7, "fn"))
E4M3FNUZ = _floating("fp8e4b8", 8, "u1", (4, 3, 8, "fnuz"))
E5M2 = _floating("fp8e5", 8, "u1", (5, 2, 15, "ieee"))
E5M2FNUZ = _floating("fp8e5b16", 8, "u1", (5, 2, 16, "fnuz"))

#: All of them by Triton's name.
BY_NAME: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
        BF16, FP16, FP32, FP64, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ,
    )
}  # fmt: skip


def decode(codes: Array, kind: Kind) -> Array:
    """Turn stored codes of a format into register values, exactly."""
    if kind.small is not None:
        return table_of(kind)[codes]
    if kind is BF16:
        wide = codes.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return codes.astype(kind.register)


def decode_into(codes: Array, kind: Kind, destination: Array) -> None:
    """Turn stored codes of a format into register values, in place of ``destination``."""
    if kind is BF16:
        np.left_shift(codes, 16, out=destination.view(np.uint32), dtype=np.uint32)
    elif kind.small is not None:
        destination[...] = table_of(kind)[codes]
    else:
        destination[...] = codes


def encode(values: Array, kind: Kind) -> Array:
    """Turn register values into stored codes; a value between two codes goes to the nearest, ties to even."""
    if kind is BF16:
        values = np.asarray(values, np.float32)
        return (_bits_to_bf16(values) >> 16).astype(np.uint16)
    if kind.small is not None:
        return _encode_small(np.asarray(values, np.float32), kind)
    if kind.family in ("int", "uint"):
        return np.asarray(values).astype(kind.storage, casting="unsafe")
    return np.asarray(values).astype(kind.storage)


def round_to(values: Array, kind: Kind) -> Array:
    """Round fp32 or fp64 register values to the values of a format."""
    if kind is FP32 or kind is FP64:
        return np.asarray(values).astype(kind.register)
    if kind is BF16:
        if values.dtype == np.float64:
            values = _odd_to_fp32(values)
        return _bits_to_bf16(np.asarray(values, np.float32)).view(np.float32)
    if kind is FP16:
        return np.asarray(values).astype(np.float16).astype(np.float32)
    return table_of(kind)[encode(values, kind)]


def _odd_to_fp32(values: Array) -> Array:
    """Round fp64 to fp32 towards odd, so that a second rounding cannot err."""
    near = values.astype(np.float32)
    off = near.astype(np.float64) != values
    beyond = off & (np.abs(near.astype(np.float64)) > np.abs(values))
    bits = near.view(np.uint32).copy()
    bits[beyond] -= np.uint32(1)
    bits[off] |= np.uint32(1)
    return bits.view(np.float32)


def _bits_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Round fp32 to bf16 in the high half of its bits; the low half is zero."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded &= np.uint32(0xFFFF0000)
    unordered = np.isnan(values)
    if unordered.any():
        rounded = np.where(unordered, np.uint32(0x7FC00000) | (bits & np.uint32(0x80000000)), rounded)
    return rounded.reshape(np.shape(values))


def _encode_small(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    assert kind.small is not None
    boundaries, codes = _midpoints(kind)
    size = np.abs(values).astype(np.float64)
    below = np.searchsorted(boundaries, size, side="left")
    # A value on a boundary is a tie: it goes to the even code of its two neighbours.
    tie = (below < len(boundaries)) & (boundaries[np.minimum(below, len(boundaries) - 1)] == size)
    index = np.where(tie & (codes[np.minimum(below, len(codes) - 1)] & 1 == 1), below + 1, below)
    out = codes[index].astype(np.uint8)
    negative = np.signbit(values)
    variant = kind.small[3]
    if variant == "fnuz":
        negative &= out != 0
    out |= negative.astype(np.uint8) << np.uint8(7)
    nan = {"ieee": 0x7F, "fn": 0x7F, "fnuz": 0x80}[variant]
    return np.where(np.isnan(values), np.uint8(nan), out).astype(np.uint8)


def overflows(values: Array, kind: Kind) -> NDArray[np.bool_]:
    """Tell which values an 8-bit float cannot hold, where targets differ in what they answer (saturate, NaN, infinity)."""
    step = float(np.diff(_midpoints(kind)[0])[-1])
    return np.abs(values) >= largest(kind) + step / 2
