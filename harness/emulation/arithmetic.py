"""The operators of tensors.

1. An integer sum, difference or product that leaves its signed type stops the kernel; unsigned ones wrap, as defined.
2. Bounds are carried along with integers, so that an overflow is looked for only where it is possible.
3. Integer division and remainder truncate; floats are rounded to their format after every operation.

Source: ``triton.language.semantic`` of Triton 3.9; C's integer division; IEEE 754.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, FP32, FP64, INT32, INT64, Array, Kind, round_to
from harness.emulation.promotion import constant, convert, kind_of_number, promote, promote_number
from harness.emulation.tensor import NUMBERS, OuterSum, Span, Tensor

Operation = Callable[[Any, Any], Any]
_OPERANDS = frozenset({Tensor, OuterSum, bool, int, float})
_SIGNS: dict[Any, str] = {operator.add: "+", operator.sub: "-", operator.mul: "*"}


def operands(a: Any, b: Any, division: bool = False) -> tuple[Tensor, Tensor]:
    """Bring two operands to the type in which Triton combines them."""
    if isinstance(a, Tensor):
        if isinstance(b, Tensor):
            if a.kind is b.kind and not (division and a.kind.is_float):
                return a, b
            kind = promote(a.kind, b.kind, division)
            return a.cast(kind), b.cast(kind)
        if isinstance(b, NUMBERS):
            kind = a.kind
            if type(b) is int and not kind.is_float and kind.lowest <= b <= kind.highest and kind is not BOOL:
                return a, Tensor(kind, b)
            kind = promote_number(kind, kind_of_number(b), division)
            return a.cast(kind), Tensor(kind, constant(b, kind))
    elif isinstance(b, Tensor) and isinstance(a, NUMBERS):
        kind = promote_number(b.kind, kind_of_number(a), division)
        return Tensor(kind, constant(a, kind)), b.cast(kind)
    elif isinstance(a, NUMBERS) and isinstance(b, NUMBERS):
        kind = promote(kind_of_number(a), kind_of_number(b), division)
        return Tensor(kind, constant(a, kind)), Tensor(kind, constant(b, kind))
    fail("type-error", f"Triton cannot combine {a!r} and {b!r}")


def rounded(kind: Kind, value: Any, layout: object) -> Tensor:
    """Make the result of an operation in fp32 or fp64 a value of its format."""
    if kind is not FP32 and kind is not FP64:
        if kind.is_fp8():
            fail("unmodelled", f"arithmetic in {kind}")
        result = round_to(np.atleast_1d(np.asarray(value)), kind)
        value = result.reshape(np.shape(value)) if np.ndim(value) else result[0]
    return Tensor(kind, value, None, layout)


def _arithmetic(op: Operation, swapped: bool = False) -> Callable[[Tensor, Any], Any]:
    def apply(a: Tensor, b: Any) -> Any:
        kind = a.kind
        if type(a) is Tensor and type(a.value) is int:
            # Most of a kernel's arithmetic: two int32 numbers.
            other = b if type(b) is int else b.value if type(b) is Tensor and b.kind is kind else None
            if type(other) is int and kind.lowest <= other <= kind.highest:
                exact = op(other, a.value) if swapped else op(a.value, other)
                if kind.lowest <= exact <= kind.highest:
                    return Tensor(kind, exact)
        if type(b) not in _OPERANDS:
            return NotImplemented
        x, y = operands(a, b)
        if swapped:
            x, y = y, x
        kind = x.kind
        layout = a.layout if a.layout is not None else getattr(b, "layout", None)
        if kind is FP32:
            return Tensor(kind, op(x.value, y.value), None, layout)
        if kind.is_float:
            return rounded(kind, op(x.value, y.value), layout)
        if kind is BOOL:
            fail("unmodelled", f"{op.__name__} of booleans")
        if type(x) is Tensor and type(y) is Tensor and type(x.value) is int and type(y.value) is int:
            return Tensor(kind, _checked(kind, op(x.value, y.value), _SIGNS[op], x.value, y.value), None, layout)
        return _integers(kind, x, y, op, layout)

    return apply


def _checked(kind: Kind, exact: int, sign: str, x: int, y: int) -> int:
    if kind.lowest <= exact <= kind.highest:
        return exact
    if kind.family == "uint":
        return exact & kind.highest
    fail("int-overflow", f"{x} {sign} {y} leaves {kind}", exact)


def _integers(kind: Kind, x: Tensor, y: Tensor, op: Operation, layout: object) -> Tensor:
    (a, b), (c, d) = x.bounds(), y.bounds()
    if op is operator.add:
        span = (a + c, b + d)
    elif op is operator.sub:
        span = (a - d, b - c)
    else:
        products = (a * c, a * d, b * c, b * d)
        span = (min(products), max(products))
    if span[0] < kind.lowest or kind.highest < span[1]:
        return _wide(kind, x, y, op, layout)
    if op is not operator.mul and kind.register == np.int64:
        lazy = _outer(kind, x, y, op, span, layout)
        if lazy is not None:
            return lazy
    return Tensor(kind, op(x.value, y.value), span, layout)


def _outer(kind: Kind, x: Tensor, y: Tensor, op: Operation, span: Span, layout: object) -> Tensor | None:
    """Keep a sum along different axes as a sum, or return None where it is an ordinary one."""
    if type(x) is Tensor and type(y) is Tensor:
        one, two = x.value, y.value
        if type(one) is int or type(two) is int or one.ndim < 2 or one.ndim != two.ndim:
            return None
        if one.size == 1 or two.size == 1 or _share_an_axis(one, two):
            return None
        return OuterSum(kind, [one, -two if op is operator.sub else two], span, layout)
    left = list(x.terms) if isinstance(x, OuterSum) else [x.value]
    right = list(y.terms) if isinstance(y, OuterSum) else [y.value]
    if op is operator.sub:
        right = [-term for term in right]
    if not isinstance(x, OuterSum):
        left, right = right, left
    for term in right:
        if not isinstance(term, np.ndarray):
            smallest = min(range(len(left)), key=lambda index: int(left[index].size))
            left[smallest] = left[smallest] + term
            continue
        same = next((index for index, known in enumerate(left) if known.shape == term.shape), None)
        if same is not None:
            left[same] = left[same] + term
        elif any(known.ndim != term.ndim or _share_an_axis(known, term) for known in left):
            return None
        else:
            left.append(term)
    return OuterSum(kind, left, span, layout)


def _share_an_axis(one: Array, two: Array) -> bool:
    return any(a != 1 and b != 1 for a, b in zip(one.shape, two.shape, strict=True))


def _wide(kind: Kind, x: Tensor, y: Tensor, op: Operation, layout: object) -> Tensor:
    """Compute where cheap bounds do not rule out an overflow, exactly."""
    if kind.family == "uint":
        value = op(np.asarray(x.value, kind.register), np.asarray(y.value, kind.register))
        return Tensor(kind, value & kind.register.type(kind.highest), None, layout)
    exact = op(np.asarray(x.value, object), np.asarray(y.value, object))
    outside = (exact < kind.lowest) | (exact > kind.highest)
    if outside.any():
        lane = tuple(int(item) for item in np.argwhere(outside)[0])
        one = np.broadcast_to(np.asarray(x.value, object), exact.shape)[lane]
        two = np.broadcast_to(np.asarray(y.value, object), exact.shape)[lane]
        count = int(outside.sum())
        fail(
            "int-overflow",
            f"{one} {_SIGNS[op]} {two} leaves {kind} in lane {list(lane)}; {count} of {exact.size} lanes overflow",
            exact[lane],
        )
    return Tensor(kind, exact.astype(kind.register), None, layout)


def _division(swapped: bool) -> Callable[[Tensor, Any], Any]:
    def apply(a: Tensor, b: Any) -> Any:
        if type(b) not in _OPERANDS:
            return NotImplemented
        x, y = operands(a, b, division=True)
        if swapped:
            x, y = y, x
        if not x.kind.is_float:
            x, y = x.cast(FP32), y.cast(FP32)
        return Tensor(x.kind, np.divide(x.value, y.value), None, a.layout)

    return apply


def _integer_division(sign: str, swapped: bool) -> Callable[[Tensor, Any], Any]:
    def apply(a: Tensor, b: Any) -> Any:
        if type(b) not in _OPERANDS:
            return NotImplemented
        x, y = operands(a, b, division=True)
        if swapped:
            x, y = y, x
        kind, one, two = x.kind, x.value, y.value
        if type(one) is int and type(two) is int:
            if two == 0:
                fail("division-by-zero", f"{one} {sign} 0", 0)
            size = abs(one) // abs(two)
            quotient = size if (one < 0) == (two < 0) else -size
            result = quotient if sign == "//" else one - quotient * two
            return Tensor(kind, _checked(kind, result, sign, one, two))
        if kind.is_float:
            if sign == "//":
                fail("type-error", "Triton has no // of floats")
            return Tensor(kind, np.fmod(one, two), None, a.layout)
        return _truncating(kind, x, y, sign, a.layout)

    return apply


def _truncating(kind: Kind, x: Tensor, y: Tensor, sign: str, layout: object) -> Tensor:
    low, high = y.bounds()
    if low <= 0 <= high and np.any(np.asarray(y.value) == 0):
        fail("division-by-zero", f"{sign} by zero", 0)
    if x.bounds()[0] == kind.lowest and low <= -1 <= high and kind.family == "int":
        fail("unmodelled", f"{kind.lowest} {sign} -1 may occur: it leaves {kind}", kind.lowest)
    one, two = np.asarray(x.value, kind.register), np.asarray(y.value, kind.register)
    if x.bounds()[0] >= 0 and low > 0:
        return Tensor(kind, one // two if sign == "//" else one % two, None, layout)
    remainder = np.fmod(one, two)
    return Tensor(kind, (one - remainder) // two if sign == "//" else remainder, None, layout)


def _bitwise(op: Operation, swapped: bool = False) -> Callable[[Tensor, Any], Any]:
    def apply(a: Tensor, b: Any) -> Any:
        if type(b) not in _OPERANDS:
            return NotImplemented
        x, y = operands(a, b)
        if swapped:
            x, y = y, x
        kind = x.kind
        if kind.is_float:
            fail("type-error", f"{op.__name__} of {kind}")
        if op is operator.lshift or op is operator.rshift:
            return _shift(kind, x, y, op, a.layout)
        return Tensor(kind, op(x.value, y.value), None, a.layout)

    return apply


def _shift(kind: Kind, x: Tensor, y: Tensor, op: Operation, layout: object) -> Tensor:
    low, high = y.bounds()
    if low < 0 or high >= kind.bits:
        wrong = low if low < 0 else high
        fail("unmodelled", f"a shift of {kind} by {wrong}: LLVM leaves the result undefined", wrong)
    if op is operator.rshift:
        return Tensor(kind, op(x.value, y.value), None, layout)
    value = op(np.asarray(x.value, kind.register), np.asarray(y.value, kind.register))
    if kind.bits < 64:
        value = convert(value, INT64, kind)
    return Tensor(kind, value if x.shape or y.shape else int(value), None, layout)


def _comparison(op: Operation) -> Callable[[Tensor, Any], Any]:
    def apply(a: Tensor, b: Any) -> Any:
        if type(b) is int and a.kind is INT32 and INT32.lowest <= b <= INT32.highest:
            value = op(a.value, b)
        else:
            if type(b) not in _OPERANDS:
                # Nothing that is no number equals a tensor; Triton has no order for it.
                return op is operator.ne if op in (operator.eq, operator.ne) else NotImplemented
            x, y = operands(a, b)
            value = op(x.value, y.value)
        layout = a.layout if a.layout is not None else getattr(b, "layout", None)
        return Tensor(BOOL, value if isinstance(value, np.ndarray) else bool(value), None, layout)

    return apply


def _negated(a: Tensor) -> Any:
    if a.kind.is_float:
        return Tensor(a.kind, -a.value, None, a.layout)
    return _arithmetic(operator.sub, swapped=True)(a, 0)


def _inverted(a: Tensor) -> Any:
    if a.kind is BOOL:
        return Tensor(BOOL, not a.value if isinstance(a.value, bool) else ~a.value, None, a.layout)
    return _bitwise(operator.xor)(a, -1 if a.kind.family == "int" else a.kind.highest)


_OPERATORS: dict[str, Any] = {
    "__add__": _arithmetic(operator.add), "__radd__": _arithmetic(operator.add, True),
    "__sub__": _arithmetic(operator.sub), "__rsub__": _arithmetic(operator.sub, True),
    "__mul__": _arithmetic(operator.mul), "__rmul__": _arithmetic(operator.mul, True),
    "__truediv__": _division(False), "__rtruediv__": _division(True),
    "__floordiv__": _integer_division("//", False), "__rfloordiv__": _integer_division("//", True),
    "__mod__": _integer_division("%", False), "__rmod__": _integer_division("%", True),
    "__and__": _bitwise(operator.and_), "__rand__": _bitwise(operator.and_),
    "__or__": _bitwise(operator.or_), "__ror__": _bitwise(operator.or_),
    "__xor__": _bitwise(operator.xor), "__rxor__": _bitwise(operator.xor),
    "__lshift__": _bitwise(operator.lshift), "__rlshift__": _bitwise(operator.lshift, True),
    "__rshift__": _bitwise(operator.rshift), "__rrshift__": _bitwise(operator.rshift, True),
    "__lt__": _comparison(operator.lt), "__le__": _comparison(operator.le), "__gt__": _comparison(operator.gt),
    "__ge__": _comparison(operator.ge), "__eq__": _comparison(operator.eq), "__ne__": _comparison(operator.ne),
    "__neg__": _negated, "__pos__": lambda a: a, "__invert__": _inverted,
}  # fmt: skip
for _name, _function in _OPERATORS.items():
    setattr(Tensor, _name, _function)
