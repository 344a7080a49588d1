"""What the names of Gluon and Triton mean that exist on every target.

1. A function here has the signature of the one it stands for. What changes speed only is accepted and ignored (cache
   modifiers, eviction, hints); what would change values and is not modelled stops the kernel by name.
2. Elementary functions are computed in fp64 and rounded once: hardware's last bit is not modelled, see the README.
3. maximum, minimum, max and min return the other operand where one is NaN, as Triton's do unless told otherwise.

Source: ``triton.language.core``, ``math`` and ``standard`` of Triton 3.9 and their Gluon counterparts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness.emulation.findings import fail
from harness.emulation.formats import BF16, BOOL, FP16, FP32, FP64, INT32, INT64, UINT32, Array, Kind
from harness.emulation.memory import Pointer, locate, read, write
from harness.emulation.program import now
from harness.emulation.promotion import constant, convert
from harness.emulation.shared import SharedMemory
from harness.emulation.tensor import OuterSum, Tensor, bit_cast, broadcast, operands, rounded, tensor

_NUMBERS = (bool, int, float)


# Programs


def program_id(axis: Any) -> Tensor:
    """This program's number along a grid axis."""
    return Tensor(INT32, now.ids[int(axis)])


def num_programs(axis: Any) -> Tensor:
    """How many programs the grid has along an axis."""
    return Tensor(INT32, now.grid[int(axis)])


def num_warps() -> int:
    """How many warps the launch asked for."""
    return now.warps


# Making tensors

_RANGES: dict[tuple[int, int], Array] = {}


def arange(start: Any, end: Any, layout: object = None) -> Tensor:
    """Count from start to end, exclusive; the size must be a power of two."""
    first, last = int(start), int(end)
    size = last - first
    if size <= 0 or size & (size - 1):
        fail("type-error", f"arange({first}, {last}): the size must be a power of two", size)
    values = _RANGES.get((first, last))
    if values is None:
        values = _RANGES[first, last] = np.arange(first, last, dtype=np.int64)
        values.flags.writeable = False
    return Tensor(INT32, values, (first, last - 1), layout)


def full(shape: Any, value: Any, dtype: Kind, layout: object = None) -> Tensor:
    """Make a tensor of one value."""
    size = tuple(int(item) for item in shape)
    if isinstance(value, Tensor):
        if value.numel != 1:
            fail("type-error", f"full takes one value, not {value!r}")
        fill = value.cast(dtype).value
    else:
        fill = constant(value, dtype)
    if not size:
        return Tensor(dtype, fill if not isinstance(fill, np.ndarray) else fill.reshape(-1)[0], None, layout)
    return Tensor(dtype, np.full(size, fill, dtype.register), None, layout)


def zeros(shape: Any, dtype: Kind, layout: object = None) -> Tensor:
    """Make a tensor of zeros."""
    return Tensor(dtype, np.zeros(tuple(int(item) for item in shape), dtype.register), None, layout) if shape else full((), 0, dtype)


def full_like(input: Tensor, value: Any, shape: Any = None, dtype: Any = None, layout: object = None) -> Tensor:
    """Make a tensor of one value, like another."""
    return full(input.shape if shape is None else shape, value, dtype or input.kind, layout or input.layout)


def zeros_like(input: Tensor, shape: Any = None, dtype: Any = None, layout: object = None) -> Tensor:
    """Make a tensor of zeros, like another."""
    return full_like(input, 0, shape, dtype, layout)


def to_tensor(value: Any) -> Tensor:
    """Make a constant a tensor."""
    return tensor(value)


# Elements


def where(condition: Any, x: Any, y: Any) -> Any:
    """Choose element by element."""
    flag = tensor(condition)
    chosen = flag.cast(BOOL) if flag.kind is not BOOL else flag
    if isinstance(x, Pointer) or isinstance(y, Pointer):
        if not (isinstance(x, Pointer) and isinstance(y, Pointer) and x.memory is y.memory):
            fail("unmodelled", "a choice between pointers into different allocations")
        return Pointer(x.memory, where(chosen, x.offset, y.offset), x.layout)
    a, b = operands(x, y)
    layout = chosen.layout or a.layout or b.layout
    if not (chosen.shape or a.shape or b.shape):
        return Tensor(a.kind, a.value if chosen.value else b.value, None, layout)
    span = None
    if not a.kind.is_float and a.kind is not BOOL:
        (low, high), (lower, higher) = a.bounds(), b.bounds()
        span = (min(low, lower), max(high, higher))
    one, two = (np.asarray(item.value, a.kind.register) for item in (a, b))
    return Tensor(a.kind, np.where(chosen.value, one, two), span, layout)


def _extreme(x: Any, y: Any, propagate_nan: Any, float_pair: tuple[Any, Any], integer: Any, pick: Any) -> Tensor:
    a, b = operands(x, y)
    layout = a.layout or b.layout
    if a.kind.is_float:
        choose = float_pair[1] if "ALL" in str(propagate_nan) else float_pair[0]
        return Tensor(a.kind, choose(a.value, b.value), None, layout)
    if not a.shape and not b.shape:
        return Tensor(a.kind, pick(a.value, b.value), None, layout)
    (low, high), (lower, higher) = a.bounds(), b.bounds()
    return Tensor(a.kind, integer(a.value, b.value), (pick(low, lower), pick(high, higher)), layout)


def maximum(x: Any, y: Any, propagate_nan: Any = None) -> Tensor:
    """Take the greater, element by element."""
    return _extreme(x, y, propagate_nan, (np.fmax, np.maximum), np.maximum, max)


def minimum(x: Any, y: Any, propagate_nan: Any = None) -> Tensor:
    """Take the lesser, element by element."""
    return _extreme(x, y, propagate_nan, (np.fmin, np.minimum), np.minimum, min)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = None) -> Tensor:
    """Limit to a range; a NaN becomes the lower limit unless it is to be propagated."""
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def cast(input: Any, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Any:
    """Convert to another type."""
    return (input if isinstance(input, Pointer) else tensor(input)).to(dtype, fp_downcast_rounding, bitcast)


def cdiv(x: Any, div: Any) -> Any:
    """Divide, rounding up, as Triton's own function does."""
    return (x + (div - 1)) // div


def _elementary(function: Callable[[Array], Array], name: str, narrow: bool = False) -> Callable[..., Tensor]:
    def apply(x: Any, *_: Any, **__: Any) -> Tensor:
        source = tensor(x)
        kind = source.kind
        if kind not in (FP32, FP64) and not (narrow and kind in (BF16, FP16)):
            fail("type-error", f"{name} of {kind}: Triton takes fp32 and fp64")
        value = function(np.asarray(source.value, np.float64))
        if kind is FP64:
            return Tensor(kind, value if source.shape else np.float64(value), None, source.layout)
        return rounded(kind, value.astype(np.float32) if source.shape else np.float32(value), source.layout)

    apply.__name__ = name
    return apply


exp2 = _elementary(np.exp2, "exp2")
exp = _elementary(np.exp, "exp")
log2 = _elementary(np.log2, "log2")
log = _elementary(np.log, "log")
sqrt = _elementary(np.sqrt, "sqrt")
sqrt_rn = _elementary(np.sqrt, "sqrt_rn")
rsqrt = _elementary(lambda x: 1 / np.sqrt(x), "rsqrt")
sin = _elementary(np.sin, "sin")
cos = _elementary(np.cos, "cos")
floor = _elementary(np.floor, "floor", narrow=True)
ceil = _elementary(np.ceil, "ceil", narrow=True)
sigmoid = _elementary(lambda x: 1 / (1 + np.exp(-x)), "sigmoid")


def absolute(x: Any) -> Tensor:
    """Take the size of each element."""
    source = tensor(x)
    if not source.kind.is_float and source.bounds()[0] == source.kind.lowest and source.kind.family == "int":
        fail("int-overflow", f"the absolute value of {source.kind.lowest} leaves {source.kind}", source.kind.lowest)
    value = abs(source.value) if not source.shape else np.abs(source.value)
    return Tensor(source.kind, value, None, source.layout)


def fma(x: Any, y: Any, z: Any) -> Tensor:
    """Multiply and add with one rounding."""
    a, b = operands(x, y)
    a, c = operands(a, z)
    b = b.cast(a.kind)
    if a.kind is not FP32:
        fail("unmodelled", f"fma of {a.kind}")
    wide = (np.asarray(item.value, np.longdouble) for item in (a, b, c))
    one, two, three = wide
    value = (one * two + three).astype(np.float32)
    return Tensor(FP32, value if value.ndim else value[()], None, a.layout)


def fdiv(x: Any, y: Any, *_: Any, **__: Any) -> Any:
    """Divide floats."""
    return tensor(x) / y


def umulhi(x: Any, y: Any) -> Tensor:
    """Take the high half of an unsigned product of 32-bit integers."""
    a, b = operands(x, y)
    if a.kind not in (INT32, UINT32):
        fail("unmodelled", f"umulhi of {a.kind}")
    one, two = (np.asarray(convert(item.value, a.kind, UINT32), np.uint64) for item in (a, b))
    high = ((one * two) >> np.uint64(32)).astype(np.int64)
    return Tensor(a.kind, convert(high if high.ndim else int(high), UINT32, a.kind), None, a.layout)


# Shapes


def expand_dims(input: Tensor, axis: Any) -> Any:
    """Add dimensions of size one."""
    for place in sorted(int(item) for item in (axis if isinstance(axis, Sequence) else (axis,))):
        rank = len(input.shape)
        at = place if place >= 0 else place + rank + 1
        input = input[tuple([slice(None)] * at + [None] + [slice(None)] * (rank - at))]
    return input


def reshape(input: Tensor, *shape: Any, can_reorder: bool = False) -> Any:
    """Change the shape; the elements keep their order."""
    if can_reorder:
        fail("unmodelled", "a reshape that may reorder elements")
    return input.reshape(*shape)


def permute(input: Tensor, *dims: Any) -> Any:
    """Change the order of the dimensions."""
    return input.permute(*dims)


def trans(input: Tensor, *dims: Any) -> Any:
    """Change the order of the dimensions; of a matrix, transpose it."""
    return input.trans(*dims)


def ravel(x: Tensor, can_reorder: bool = False) -> Any:
    """Make it one-dimensional."""
    return reshape(x, (x.numel,), can_reorder=can_reorder)


def broadcast_to(input: Any, *shape: Any) -> Any:
    """Spread over a shape."""
    target = tuple(int(item) for item in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape))
    source = tensor(input)
    return Tensor(source.kind, broadcast(source.value, target), source.span, source.layout)


def broadcast_pair(input: Tensor, other: Tensor) -> Any:
    """Spread the first over the shape of both."""
    return broadcast_to(input, np.broadcast_shapes(input.shape, other.shape))


def join(a: Any, b: Any) -> Tensor:
    """Put two tensors side by side in a new last dimension."""
    x, y = operands(a, b)
    pair = np.broadcast_arrays(np.asarray(x.value), np.asarray(y.value))
    return Tensor(x.kind, np.stack(pair, axis=-1))


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """Take the two halves of a last dimension of size two."""
    if not a.shape or a.shape[-1] != 2:
        fail("type-error", f"split needs a last dimension of 2, not {a!r}")
    halves = (a.value[..., 0], a.value[..., 1])
    one, two = (item if item.ndim else item[()] for item in halves)
    return Tensor(a.kind, one), Tensor(a.kind, two)


def gather(src: Tensor, index: Tensor, axis: Any) -> Tensor:
    """Pick elements along an axis."""
    low, high = int(index.value.min()), int(index.value.max())
    if low < 0 or high >= src.shape[int(axis)]:
        fail("out-of-bounds", f"gather takes element {low if low < 0 else high} of {src!r}", low if low < 0 else high)
    return Tensor(src.kind, np.take_along_axis(src.value, index.value, int(axis)), None, index.layout)


def convert_layout(value: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
    """Carry another layout; values do not change."""
    if isinstance(value, OuterSum):
        return OuterSum(value.kind, value.terms, value.bounds(), layout)
    return Tensor(value.kind, value.value, value.span, layout)


def same(input: Any, *_: Any, **__: Any) -> Any:
    """Return the value: a hint about it changes nothing."""
    return input


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing: an instruction to the compiler or a barrier within a program that runs as one."""


# Reductions


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
    return _most(
        input, axis, keep_dims, return_indices, return_indices_tie_break_left, np.fmax, np.maximum, np.argmax
    )


def reduce_min(
    input: Any,
    axis: Any = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    """Take the least along an axis; NaN is passed over."""
    return _most(
        input, axis, keep_dims, return_indices, return_indices_tie_break_left, np.fmin, np.minimum, np.argmin
    )


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
    return _reduced(source, np.bitwise_xor.reduce(source.value, axis=_axis(source, axis)), _axis(source, axis), keep_dims, source.kind)


def reduce_or(input: Any, axis: Any = None, keep_dims: bool = False) -> Tensor:
    """Combine bits by or along an axis."""
    source = tensor(input)
    return _reduced(source, np.bitwise_or.reduce(source.value, axis=_axis(source, axis)), _axis(source, axis), keep_dims, source.kind)


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


# Matrix products


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
        return Tensor(kind, product, None, accumulator.layout) + accumulator
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


# Global memory


def _pointer(value: Any, name: str) -> Pointer:
    if not isinstance(value, Pointer):
        fail("type-error", f"{name} needs a pointer, not {value!r}")
    return value


def mask_of(mask: Any) -> Tensor | None:
    """Make a mask a tensor; None stays None."""
    return None if mask is None else tensor(mask)


def other_of(other: Any, kind: Kind) -> Any:
    """Find the register value of masked lanes: what was given, else zero."""
    return 0 if other is None else tensor(other).cast(kind).value


def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Tensor:
    """Read global memory; masked lanes give ``other``, or zero where none is given."""
    source = _pointer(pointer, "load")
    _check_hints(hints, "load")
    kind = source.memory.kind
    place = locate(source.memory, source.offset, mask_of(mask), "reads")
    return Tensor(kind, read(place, other_of(other, kind)), None, source.layout)


def store(pointer: Any, value: Any, mask: Any = None, **hints: Any) -> None:
    """Write global memory where it is not masked."""
    target = _pointer(pointer, "store")
    _check_hints(hints, "store")
    place = locate(target.memory, target.offset, mask_of(mask), "writes")
    write(place, tensor(value).cast(target.memory.kind).value)


_HINTS = {"cache_modifier", "eviction_policy", "volatile", "cache_policy", "boundary_check", "padding_option"}


def _check_hints(hints: dict[str, Any], name: str) -> None:
    for hint, value in hints.items():
        if hint not in _HINTS or (hint in ("boundary_check", "padding_option") and value not in ((), "", None)):
            fail("unmodelled", f"{name} with {hint}={value!r}")


def _atomic(name: str, combine: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    def apply(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
        target = _pointer(pointer, name)
        kind = target.memory.kind
        place = locate(target.memory, target.offset, mask_of(mask), "updates")
        if place.shape and np.unique(np.asarray(place.index)).size != np.asarray(place.index).size:
            fail("unmodelled", f"{name} of which two lanes meet in one element")
        old = Tensor(kind, read(place, 0))
        update = tensor(val).cast(kind)
        new = combine(old, update)
        write(place, broadcast(new.cast(kind).value, place.shape) if place.shape else new.cast(kind).value)
        return old

    apply.__name__ = name
    return apply


atomic_add = _atomic("atomic_add", operator.add)
atomic_max = _atomic("atomic_max", maximum)
atomic_min = _atomic("atomic_min", minimum)
atomic_xchg = _atomic("atomic_xchg", lambda old, new: new)


# Shared memory


def allocate_shared_memory(element_ty: Kind, shape: Any, layout: object, value: Any = None) -> SharedMemory:
    """Allocate LDS for the program; it begins poisoned."""
    size = tuple(int(item) for item in shape)
    memory = SharedMemory(now.copies, element_ty, now.lds.allocate(element_ty, size, fastest_axis(layout, len(size))), layout, size)
    if value is not None:
        memory.store(value)
    return memory


def fastest_axis(layout: object, rank: int) -> int:
    """Find the axis along which a shared layout is contiguous; only speed depends on it."""
    bases = getattr(layout, "offset_bases", None)
    if bases:
        inner = max(range(len(bases[0])), key=lambda axis: bases[0][axis])
        return inner + rank - len(bases[0])
    order = getattr(layout, "order", None)
    return int(order[0]) + rank - len(order) if order else rank - 1


# Checks


def static_assert(cond: Any, msg: Any = "") -> None:
    """Require a condition when the kernel is compiled."""
    if isinstance(cond, Tensor) or not cond:
        fail("assertion", f"static_assert does not hold{': ' + str(msg) if msg else ''}")


def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    """Require a condition of every lane that is not masked."""
    flags = tensor(cond).cast(BOOL)
    if mask is not None:
        flags = flags | ~tensor(mask)
    if not np.all(flags.value):
        fail("assertion", f"device_assert does not hold{': ' + str(msg) if msg else ''}")


def assume(cond: Any) -> None:
    """Require what the kernel promises: the compiler builds on it, so a broken promise is undefined behaviour."""
    if not np.all(tensor(cond).value):
        fail("assumption", "the kernel promises the compiler a condition that does not hold")


def device_print(*values: Any, **_: Any) -> None:
    """Keep what a kernel prints."""
    now.printed.append(" ".join(repr(item.value) if isinstance(item, Tensor) else str(item) for item in values))


def bit_cast_to(input: Any, dtype: Kind) -> Tensor:
    """Read the bits as another type."""
    return bit_cast(tensor(input), dtype)
