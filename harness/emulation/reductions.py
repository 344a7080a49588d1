"""Reductions, scans and matrix products.

1. Extremes widen what has fewer than 32 bits and pass over NaN; sums of small integers are int32, as in Triton.
2. The order of fp32 additions is numpy's: no target promises one. Budgets allow for that.
3. A matrix product takes its operands exactly and accumulates in fp32, int8 in int32.

Source: ``triton.language.standard`` and ``semantic.dot`` of Triton 3.9.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.emulation.arithmetic import rounded
from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, FP16, FP32, FP64, INT32, INT64, UINT32, Kind
from harness.emulation.tensor import Tensor, tensor


def _reduced(source: Tensor, value: Any, axis: int | None, keep_dims: bool, kind: Kind) -> Tensor:
    if keep_dims:
        shape = tuple(1 if axis is None or at == axis else size for at, size in enumerate(source.shape))
        return Tensor(kind, np.reshape(value, shape))
    layout = getattr(source.layout, "parent", None) if source.layout is None else _slice_of(source.layout, axis)
    if np.ndim(value):
        return Tensor(kind, value, None, layout)
    return Tensor(kind, kind.register.type(value) if kind.is_float else (bool(value) if kind is BOOL else int(value)))


def _slice_of(layout: object, axis: int | None) -> object:
    return None if axis is None else Sliced(axis, layout)


class Sliced:
    """The layout of a tensor of which a dimension was reduced."""

    __slots__ = ("dim", "parent")

    def __init__(self, dim: int, parent: object) -> None:
        self.dim = dim
        self.parent = parent


def _axis(source: Tensor, axis: Any) -> int | None:
    if axis is None:
        return None
    at = int(axis)
    rank = len(source.shape)
    if not -rank <= at < rank:
        fail("type-error", f"{source!r} has no axis {at}")
    return at % rank


def _widened(source: Tensor) -> Tensor:
    """Widen as Triton does before it takes an extreme."""
    if source.kind.bits >= 32:
        return source
    return source.cast(FP32 if source.kind.is_float else INT32)


def _most(input: Any, axis: Any, keep_dims: bool, indices: bool, left: bool, floats: Any, integers: Any, best: Any) -> Any:
    source = tensor(input)
    at = _axis(source, axis)
    wide = _widened(source)
    if not indices:
        reduce = floats if wide.kind.is_float else integers
        return _reduced(source, reduce.reduce(wide.value, axis=at), at, keep_dims, wide.kind)
    if wide.kind.is_float and np.isnan(wide.value).any():
        fail("unmodelled", "an extreme with its index of values that hold NaN")
    if not left:
        fail("unmodelled", "an extreme with its index where ties may go either way")
    where_best = best(wide.value, axis=at)
    value = (np.max if best is np.argmax else np.min)(wide.value, axis=at)
    return _reduced(source, value, at, keep_dims, wide.kind), _reduced(source, where_best, at, keep_dims, INT32)


def reduce_max(
    input: Any,
    axis: Any = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    """Take the greatest along an axis; NaN is passed over."""
    return _most(input, axis, keep_dims, return_indices, return_indices_tie_break_left, np.fmax, np.maximum, np.argmax)


def reduce_min(
    input: Any,
    axis: Any = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    """Take the least along an axis; NaN is passed over."""
    return _most(input, axis, keep_dims, return_indices, return_indices_tie_break_left, np.fmin, np.minimum, np.argmin)


def argmax(input: Any, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Any:
    """Find the greatest along an axis."""
    return reduce_max(input, axis, True, tie_break_left, keep_dims)[1]


def argmin(input: Any, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Any:
    """Find the least along an axis."""
    return reduce_min(input, axis, True, tie_break_left, keep_dims)[1]


def reduce_sum(input: Any, axis: Any = None, keep_dims: bool = False, dtype: Any = None) -> Tensor:
    """Add up along an axis; the order of fp32 additions is numpy's, which no target promises."""
    source = tensor(input)
    kind = dtype or source.kind
    if dtype is None and not kind.is_float and kind.bits < 32:
        kind = UINT32 if kind.family == "uint" else INT32
    wide = source.cast(kind)
    at = _axis(source, axis)
    if kind.is_float:
        total = np.add.reduce(wide.value, axis=at)
        result = rounded(kind, total, None)
        return _reduced(source, result.value, at, keep_dims, kind)
    exact = np.add.reduce(np.asarray(wide.value, object), axis=at)
    if kind.family == "uint":
        exact = exact & kind.highest
    elif np.any(exact < kind.lowest) or np.any(exact > kind.highest):
        fail("int-overflow", f"a sum of {source!r} leaves {kind}", np.max(np.abs(exact)))
    return _reduced(source, np.asarray(exact, kind.register)[()], at, keep_dims, kind)


def xor_sum(input: Any, axis: Any = None, keep_dims: bool = False) -> Tensor:
    """Combine bits by exclusive or along an axis."""
    source = tensor(input)
    return _reduced(
        source, np.bitwise_xor.reduce(source.value, axis=_axis(source, axis)), _axis(source, axis), keep_dims, source.kind
    )


def reduce_or(input: Any, axis: Any = None, keep_dims: bool = False) -> Tensor:
    """Combine bits by or along an axis."""
    source = tensor(input)
    return _reduced(
        source, np.bitwise_or.reduce(source.value, axis=_axis(source, axis)), _axis(source, axis), keep_dims, source.kind
    )


def cumsum(input: Any, axis: Any = 0, reverse: bool = False, dtype: Any = None) -> Tensor:
    """Add up along an axis, keeping every partial sum."""
    source = tensor(input)
    kind = dtype or source.kind
    if kind not in (FP32, FP64, INT32, INT64):
        fail("unmodelled", f"cumsum of {kind}")
    values = source.cast(kind).value
    at = int(axis)
    ordered = np.flip(values, at) if reverse else values
    sums = np.cumsum(ordered, axis=at, dtype=kind.register)
    if kind is INT32 and (sums.min() < kind.lowest or sums.max() > kind.highest):
        fail("int-overflow", f"a running sum of {source!r} leaves {kind}", int(np.abs(sums).max()))
    return Tensor(kind, np.flip(sums, at) if reverse else sums, None, source.layout)


def matmul(a: Tensor, b: Tensor, accumulator: Any, name: str, out: Kind | None = None) -> Tensor:
    """Multiply matrices of exact operands, accumulating in fp32 (int32 for int8)."""
    for operand in (a, b):
        if not isinstance(operand, Tensor) or len(operand.shape) not in (2, 3):
            fail("type-error", f"{name} needs matrices, not {operand!r}")
    same_kind = a.kind is b.kind or (a.kind.is_fp8() and b.kind.is_fp8())
    if not same_kind or a.shape[-1] != b.shape[-2]:
        fail("type-error", f"{name} of {a!r} and {b!r}: types and inner sizes must agree")
    if a.kind.is_float:
        kind = FP64 if a.kind is FP64 else out or FP32
        if kind is FP16:
            fail("unmodelled", f"{name} accumulating in fp16")
        product = np.matmul(a.value, b.value)
    elif a.kind.bits == 8:
        kind = INT32
        product = np.matmul(a.value.astype(np.float64), b.value.astype(np.float64)).astype(np.int64)
    else:
        fail("type-error", f"{name} of {a.kind}")
    if accumulator is None:
        return Tensor(kind, product)
    if not isinstance(accumulator, Tensor) or accumulator.shape != product.shape or accumulator.kind is not kind:
        fail("type-error", f"{name} into {accumulator!r}: it needs {kind}{list(product.shape)}")
    if kind is INT32:
        total: Tensor = Tensor(kind, product, None, accumulator.layout) + accumulator
        return total
    product += accumulator.value
    return Tensor(kind, product, None, accumulator.layout)


def dot(
    input: Tensor,
    other: Tensor,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = None,
) -> Tensor:
    """Multiply matrices; fp32 operands only where their precision is asked for by name."""
    if input.kind is FP32 and input_precision not in ("ieee", None):
        fail("unmodelled", f"dot with input_precision={input_precision!r}")
    return matmul(input, other, acc, "dot", out_dtype)


def dot_fma(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """Multiply matrices on the vector units."""
    return matmul(a, b, acc, "dot_fma", acc.kind)
