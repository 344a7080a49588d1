"""Triton's rules for the type of a result, and conversion of values between types.

1. A Python number in a kernel is a constant: it takes the tensor's type unless its family is the greater one (bool < int <
   float). A 0-dimensional tensor is not a constant and takes full part.
2. Division and remainder of floats below 32 bits are done in fp32; bf16 with fp16 gives fp16, bf16 with another float fp32.
3. Nothing here is borrowed from numpy or torch: their rules for scalars differ.

Source: ``triton.language.semantic`` of Triton 3.9 (``computation_type_impl``, ``integer_promote_impl``, ``cast``).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from harness.emulation.findings import fail
from harness.emulation.formats import (
    BF16,
    BOOL,
    FP16,
    FP32,
    FP64,
    INT32,
    INT64,
    UINT32,
    UINT64,
    Array,
    Kind,
    largest,
    overflows,
    round_to,
)  # fmt: skip

_RANK = {"bool": 0, "int": 1, "uint": 1, "float": 2}
_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2 - 2.0**-23) * 2.0**127


@lru_cache(maxsize=4096, typed=True)
def kind_of_number(value: bool | int | float) -> Kind:
    """Name the type that Triton gives a Python number."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        for kind in (INT32, UINT32, INT64, UINT64):
            if kind.lowest <= value <= kind.highest:
                return kind
        fail("type-error", f"no integer type of Triton holds {value}", value)
    size = abs(value)
    ordinary = size == 0 or size != size or size == float("inf") or _SMALLEST_NORMAL <= size <= _LARGEST
    return FP32 if ordinary else FP64


@cache
def promote(a: Kind, b: Kind, division: bool = False) -> Kind:
    """Name the type in which two tensors are combined."""
    if FP64 in (a, b):
        return FP64
    if division and (a.is_float or b.is_float):
        return FP32
    if FP32 in (a, b):
        return FP32
    if FP16 in (a, b):
        return FP16
    if a is BF16 and b is BF16:
        return BF16
    if BF16 in (a, b):
        return FP32
    if a.is_fp8() and b.is_fp8():
        return a if a is b else FP16
    if a.is_float or b.is_float:
        fail("type-error", f"Triton has no common type for {a} and {b}")
    signed = (a.family == "int", b.family == "int")
    if division and signed[0] != signed[1]:
        fail("type-error", f"Triton refuses /, // and % of {a} and {b}: they differ in signedness")
    if signed[0] == signed[1]:
        return a if a.bits > b.bits else b
    if not signed[0]:
        return a if a.bits >= b.bits else b
    return b if b.bits >= a.bits else a


@cache
def promote_number(tensor: Kind, number: Kind, division: bool = False) -> Kind:
    """Name the type in which a tensor and a Python number of a type are combined."""
    if _RANK[number.family] <= _RANK[tensor.family]:
        number = tensor
    return promote(tensor, number, division)


def constant(value: bool | int | float, kind: Kind) -> Any:
    """Make a constant of a type, as a register value."""
    # The zeros of both signs are equal, and would share an entry.
    return _made(value, kind) if value else _register(value, kind)


@lru_cache(maxsize=4096, typed=True)
def _made(value: bool | int | float, kind: Kind) -> Any:
    return _register(value, kind)


def _register(value: bool | int | float, kind: Kind) -> Any:
    if kind.is_float:
        if kind is FP32:
            return np.float32(value)
        if kind is FP64:
            return np.float64(value)
        return np.float32(round_to(np.array([value], np.float64), kind)[0])
    if value != int(value):
        fail("type-error", f"{value} is no {kind}", value)
    value = int(value)
    if kind is BOOL:
        return value != 0
    if not kind.lowest <= value <= kind.highest:
        fail("type-error", f"the constant {value} is out of range for {kind}", value)
    return value


def convert(value: Any, source: Kind, target: Kind) -> Any:
    """Convert register values between types, as Triton's ``cast`` does."""
    if source is target:
        return value
    scalar = not isinstance(value, np.ndarray)
    if target.is_float:
        if source.is_float and (target.bits > source.bits or target is FP32):
            # An exact widening; register values are the values themselves.
            result = value if target.register == source.register else np.asarray(value).astype(target.register)
            return result[()] if scalar else result
        wide = np.asarray(value, np.float64 if not source.is_float else None)
        if not source.is_float and source.bits == 64:
            wide = np.asarray(value, source.register)
        if target.is_fp8() and overflows(wide, target).any():
            fail(
                "unmodelled",
                f"a cast to {target} of a value beyond {largest(target)}: targets differ (saturation, NaN, infinity)",
                np.abs(wide).max(),
            )
        result = round_to(wide, target)
        return result[()] if scalar else result
    if target is BOOL:
        result = value != 0
        return bool(result) if scalar else result
    if source.is_float:
        return _float_to_int(value, target, scalar)
    if scalar:
        return _wrap(int(value), target)
    if target.lowest <= source.lowest and source.highest <= target.highest:
        return value.astype(target.register, copy=False)
    if target.bits == 64:
        return value.astype(target.register)
    wrapped = np.asarray(value).astype(np.int64).astype(target.storage)
    return wrapped.astype(target.register)


def _wrap(value: int, kind: Kind) -> int:
    value &= (1 << kind.bits) - 1
    return value - (1 << kind.bits) if value > kind.highest else value


def _float_to_int(value: Any, target: Kind, scalar: bool) -> Any:
    wide = np.trunc(np.asarray(value, np.float64))
    outside = ~((wide >= float(target.lowest)) & (wide <= float(target.highest)))
    if outside.any():
        fail(
            "unmodelled",
            f"a cast to {target} of a value outside it: LLVM leaves the result undefined",
            wide[outside].flat[0],
        )
    return int(wide) if scalar else wide.astype(target.register)


def as_array(value: Any, kind: Kind) -> Array:
    """Make a register value an array."""
    return np.asarray(value, kind.register)
