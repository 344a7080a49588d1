"""What replaces each faulty operation of Triton's CPU interpreter.

1. An operation on bf16 or fp8 works on values: decode, compute in fp32, round once. The shipped one works on codes.
2. A comparison, minimum or maximum of bf16 or fp8 compares values.
3. A dot decodes both operands exactly and accumulates in its accumulator's type; fp32 operands keep ten mantissa bits
   where the kernel asks for TF32.
4. Loads, stores and atomics go through the launch's memory.
5. Signed integer results are checked against their type.
6. A reduction ignores NaN as the shipped one does, and does not warn.

Source: `InterpreterBuilder` and `ReduceOps` of `triton/runtime/interpreter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.emulation import interpreter_floats as floats
from harness.emulation.interpreter_memory import IntegerFault, kernel_line

Method = Callable[..., Any]

_BINARY = ("fadd", "fmul", "fdiv", "frem", "fsub", "precise_divf", "approx_divf", "minimumf", "minnumf", "maximumf", "maxnumf")
_COMPARE = (
    "fcmpOLT",
    "fcmpOGT",
    "fcmpOLE",
    "fcmpOGE",
    "fcmpOEQ",
    "fcmpONE",
    "fcmpULT",
    "fcmpUGT",
    "fcmpULE",
    "fcmpUGE",
    "fcmpUEQ",
    "fcmpUNE",
)
_UNARY = ("fneg", "cos", "exp", "exp2", "floor", "ceil", "log", "log2", "precise_sqrt", "sqrt", "sin", "erf", "rsqrt")
_CHECKED = {"create_add": np.add, "create_sub": np.subtract, "create_mul": np.multiply}
_CASTS = (
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "create_fp_ext",
    "create_fp_trunc",
    "cast_impl",
)


def builder_mends(source: Any, launch: Any, *, poison: bool) -> dict[str, Method]:
    """Return methods of the interpreter's builder by name."""
    builder = source.InterpreterBuilder
    mends: dict[str, Method] = {}
    for name in _BINARY + _UNARY:
        mends[f"create_{name}"] = _on_values(source, getattr(builder, f"create_{name}"), coded_result=True)
    for name in _COMPARE:
        mends[f"create_{name}"] = _on_values(source, getattr(builder, f"create_{name}"), coded_result=False)
    for name in ("fcmpUEQ", "fcmpULT", "fcmpULE", "fcmpUGT", "fcmpUGE"):
        mends[f"create_{name}"] = _unordered(source, mends[f"create_{name}"])
    mends["create_fcmpONE"] = _ordered(source, mends["create_fcmpONE"])
    for name in ("create_clampf", "create_fma"):
        mends[name] = _on_values(source, getattr(builder, name), coded_result=True, wide=name == "create_fma")
    for name in _CHECKED:
        mends[name] = _checked(getattr(builder, name), _CHECKED[name])
    for name in _CASTS:
        mends[name] = _cast(source)
    mends["create_int_cast"] = lambda self, value, target, is_signed: _cast_integer(source, value, target)
    mends["create_fp_to_fp"] = lambda self, value, target, mode: _cast_float(source, value, target, mode)
    mends["create_dot"] = _dot(source)
    mends["create_masked_load"] = _load(source, launch, poison)
    mends["create_masked_store"] = lambda self, pointers, value, mask, policy: launch.memory.store(
        pointers.data, value.data, mask.data
    )
    mends["create_atomic_cas"] = _atomic(source, launch, builder.create_atomic_cas, 0)
    mends["create_atomic_rmw"] = _atomic(source, launch, builder.create_atomic_rmw, 1)
    return mends


def module_mends(source: Any, launch: Any) -> dict[str, Method]:
    """Return functions of the interpreter's module by name."""

    def convert(codes: Any, kind: Any, target: Any, mode: Any) -> Any:
        found = floats.convert(
            codes.view(source._get_np_dtype(kind)), kind.name, target.name, toward_zero=mode == source._ir.ROUNDING_MODE.RTZ
        )
        return found.view(f"u{found.itemsize}")

    return {"_convert_float": convert, "_implicit_cvt": lambda value: launch.argument(value, "an argument")}


def reduction_mends(source: Any) -> dict[str, Method]:
    """Return methods of the interpreter's reductions by name."""
    shipped = source.ReduceOps.apply_impl

    def extreme(self: Any, values: Any, pick: Any, place: Any = None) -> Any:
        tensor = values[0] if isinstance(values, tuple) else values
        data = tensor.handle.data
        name = tensor.dtype.scalar.name
        numbers = floats.decode(data, name) if name in floats.CODED else data
        found = pick.reduce(numbers, axis=self.axis, keepdims=self.keep_dims)
        if name in floats.CODED:
            found = floats.encode(np.asarray(found), name)
        result = self.to_tensor(found, tensor.dtype)
        if place is None:
            return result
        if numbers.dtype.kind == "f":  # NaN loses to everything
            numbers = np.where(np.isnan(numbers), -np.inf if pick is np.fmax else np.inf, numbers)
        return result, self.to_tensor(place(numbers, axis=self.axis, keepdims=self.keep_dims), source.tl.int32)

    def apply_impl(self: Any, values: Any) -> Any:
        standard = source.tl.standard
        if self.combine_fn in (standard._argmin_combine_tie_break_left, standard._argmin_combine_tie_break_fast):
            return extreme(self, values[0], np.fmin, np.argmin)
        if self.combine_fn in (standard._argmax_combine_tie_break_left, standard._argmax_combine_tie_break_fast):
            return extreme(self, values[0], np.fmax, np.argmax)
        if self.combine_fn is standard._elementwise_max:
            return extreme(self, values[0], np.fmax)
        if self.combine_fn is standard._elementwise_min:
            return extreme(self, values[0], np.fmin)
        name = values[0].dtype.scalar.name
        if self.combine_fn is standard._sum_combine and name in floats.CODED:
            total = np.sum(floats.decode(values[0].handle.data, name), axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(floats.encode(np.asarray(total, np.float32), name), values[0].dtype)
        return shipped(self, values)

    return {"apply_impl": apply_impl}


def _on_values(source: Any, shipped: Method, *, coded_result: bool, wide: bool = False) -> Method:
    """Carry an operation on coded floats out on their values, and round its result once."""

    def method(self: Any, *operands: Any) -> Any:
        name = operands[0].dtype.scalar.name
        if name not in floats.CODED:
            return shipped(self, *operands)
        kind, number = (source.tl.float64, np.float64) if wide else (source.tl.float32, np.float32)
        values = [
            source.TensorHandle(floats.decode(item.data, name).astype(number, copy=False), kind)
            if isinstance(item, source.TensorHandle)
            else item
            for item in operands
        ]
        found = shipped(self, *values)
        if not coded_result:
            return source.TensorHandle(found.data, source.tl.int1)
        return source.TensorHandle(floats.encode(found.data, name), operands[0].dtype.scalar)

    return method


def _unordered(source: Any, ordered: Method) -> Method:
    def method(self: Any, left: Any, right: Any) -> Any:
        found = ordered(self, left, right)
        return source.TensorHandle(found.data | _either_nan(left, right), found.dtype)

    return method


def _ordered(source: Any, unordered: Method) -> Method:
    def method(self: Any, left: Any, right: Any) -> Any:
        found = unordered(self, left, right)
        return source.TensorHandle(found.data & ~_either_nan(left, right), found.dtype)

    return method


def _either_nan(left: Any, right: Any) -> Any:
    name = left.dtype.scalar.name
    return np.isnan(floats.decode(left.data, name)) | np.isnan(floats.decode(right.data, name))


def _checked(shipped: Method, operation: Any) -> Method:
    """Report a signed result that left its type; unsigned arithmetic wraps by right."""

    def method(self: Any, left: Any, right: Any) -> Any:
        result = shipped(self, left, right)
        a, b, c = left.data, right.data, result.data
        if c.dtype.kind != "i":
            return result
        if operation is np.multiply:
            if c.dtype.itemsize < 8:
                lost = operation(a, b, dtype=np.int64) != c
            else:
                lost = (a != 0) & ((c // np.where(a == 0, 1, a) != b) | ((a == -1) & (b == np.iinfo(b.dtype).min)))
        elif operation is np.add:
            lost = ((a ^ c) & (b ^ c)) < 0
        else:
            lost = ((a ^ b) & (a ^ c)) < 0
        if lost.any():
            lane = tuple(int(i) for i in np.argwhere(lost)[0])
            x, y = (int(np.broadcast_to(side, c.shape)[lane]) for side in (a, b))
            sign = {np.add: "+", np.subtract: "-", np.multiply: "x"}[operation]
            raise IntegerFault(f"{x} {sign} {y} leaves {c.dtype} and wraps to {int(c[lane])} (lane {lane}); {kernel_line()}")
        return result

    return method


def _cast(source: Any) -> Method:
    def method(self: Any, value: Any, target: Any) -> Any:
        kind, wanted = value.dtype.scalar, target.scalar
        if value.data.dtype.kind == "b":  # a comparison, which keeps its operands' type as a label
            kind = source.tl.int1
        if kind.is_floating() and wanted.is_floating():
            return _cast_float(source, value, target, None)
        if kind.is_floating():
            numbers = floats.decode(value.data, kind.name)
            return source.TensorHandle(numbers.astype(source._get_np_dtype(target)), wanted)
        if wanted.is_floating():
            # fp64 holds every integer of up to 53 bits, so that what follows is the one rounding.
            numbers = value.data if wanted.name in floats.NATIVE else value.data.astype(np.float64)
            data = (
                numbers.astype(source._get_np_dtype(target))
                if wanted.name in floats.NATIVE
                else floats.encode(numbers, wanted.name)
            )
            return source.TensorHandle(data, wanted)
        return _cast_integer(source, value, target)

    return method


def _cast_integer(source: Any, value: Any, target: Any) -> Any:
    return source.TensorHandle(value.data.astype(source._get_np_dtype(target)), target.scalar)


def _cast_float(source: Any, value: Any, target: Any, mode: Any) -> Any:
    toward_zero = mode is not None and mode == source._ir.ROUNDING_MODE.RTZ
    data = floats.convert(value.data, value.dtype.scalar.name, target.scalar.name, toward_zero=toward_zero)
    return source.TensorHandle(data, target.scalar)


def _dot(source: Any) -> Method:
    def method(self: Any, left: Any, right: Any, sum_: Any, precision: Any, imprecise: Any) -> Any:
        kinds = [side.dtype.scalar for side in (left, right)]
        if not kinds[0].is_floating():
            product = np.matmul(left.data, right.data, dtype=sum_.data.dtype)
            return source.TensorHandle(product + sum_.data, sum_.dtype.scalar)
        a, b = (floats.decode(side.data, kind.name) for side, kind in zip((left, right), kinds, strict=True))
        if kinds[0].is_fp32() and precision == source._ir.INPUT_PRECISION.TF32:
            a, b = floats.round_to_tf32(a), floats.round_to_tf32(b)
        total = np.matmul(a, b)
        if sum_.data.any():
            total = total + floats.decode(sum_.data, sum_.dtype.scalar.name)
        return source.TensorHandle(total.astype(sum_.data.dtype, copy=False), sum_.dtype.scalar)

    return method


def _load(source: Any, launch: Any, poison: bool) -> Method:
    def method(self: Any, pointers: Any, mask: Any, other: Any, policy: Any, is_volatile: Any) -> Any:
        kind = pointers.get_element_ty()
        dtype = source._get_np_dtype(kind)
        fill = None if other is None else other.data
        if fill is None and poison:
            fill = np.full(1, 0xFF, np.uint8).repeat(dtype.itemsize).view(dtype)
        return source.TensorHandle(launch.memory.load(pointers.data, mask.data, fill, dtype), kind)

    return method


def _atomic(source: Any, launch: Any, shipped: Method, position: int) -> Method:
    def method(self: Any, *operands: Any) -> Any:
        pointer, value = operands[position], operands[position + 1]
        kind = pointer.get_element_ty()
        if kind.name in floats.CODED:
            raise NotImplementedError(f"the interpreter has no atomic operation on {kind}; use fp32")
        mask = operands[3].data if position else np.ones(pointer.data.shape, bool)
        mask = np.broadcast_to(mask, pointer.data.shape)
        if not mask.any():
            return source.TensorHandle(np.zeros(value.data.shape, value.data.dtype), value.dtype.scalar)
        host = launch.memory.host(pointer.data, mask, source._get_np_dtype(kind).itemsize)
        moved = source.TensorHandle(host, pointer.dtype)
        return shipped(self, *operands[:position], moved, *operands[position + 1 :])

    return method
