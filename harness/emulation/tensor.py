"""Tensors of a kernel: values in registers, with Triton's types.

1. An integer sum, difference or product that leaves its signed type stops the kernel; unsigned ones wrap, as defined.
2. A sum of a row and a column of integers stays a sum until someone needs the elements: offsets of whole tiles cost what
   their edges cost. Its bounds are exact, for every combination of its terms occurs.
3. Integer division and remainder truncate; floats are rounded to their format after every operation.
4. Layouts do not change values. They are carried so that a kernel can ask for them.

Source: ``triton.language.semantic`` of Triton 3.9; C's integer division; IEEE 754.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, FP32, FP64, INT32, INT64, Array, Kind, round_to
from harness.emulation.promotion import constant, convert, kind_of_number, promote, promote_number

Span = tuple[int, int]
Shape = tuple[int, ...]
_NUMBERS = (bool, int, float)


class Type:
    """The type of a tensor as a kernel may ask for it."""

    __slots__ = ("layout", "scalar", "shape")

    def __init__(self, scalar: Any, shape: Shape, layout: object) -> None:
        self.scalar = scalar
        self.shape = list(shape)
        self.layout = layout

    @property
    def element_ty(self) -> Any:
        """The element type; of a pointer, the type that it points to."""
        return self.scalar if self.shape else getattr(self.scalar, "element_ty", self.scalar)

    def is_block(self) -> bool:
        """Whether it has dimensions."""
        return bool(self.shape)

    def is_ptr(self) -> bool:
        """Whether it is a scalar pointer."""
        return not self.shape and not isinstance(self.scalar, Kind)


class Tensor:
    """Values of one type: a Python int, bool or numpy float where it has no dimensions, else an array."""

    __slots__ = ("kind", "layout", "span", "value")

    def __init__(self, kind: Kind, value: Any, span: Span | None = None, layout: object = None) -> None:
        self.kind = kind
        self.value = value
        self.span = span
        self.layout = layout

    def __repr__(self) -> str:
        return f"{self.kind}{list(self.shape)}"

    @property
    def shape(self) -> Shape:
        """Its size in each dimension."""
        return self.value.shape if isinstance(self.value, np.ndarray) else ()

    @property
    def dtype(self) -> Kind:
        """Its element type."""
        return self.kind

    @property
    def type(self) -> Type:
        """Its type."""
        return Type(self.kind, self.shape, self.layout)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    def bounds(self) -> Span:
        """Find the least and greatest element of an integer tensor; cheap bounds may be wider than that."""
        if self.span is None:
            value = self.value
            self.span = (int(value.min()), int(value.max())) if isinstance(value, np.ndarray) else (int(value), int(value))
        return self.span

    # Arithmetic

    def __add__(self, other: Any) -> Any:
        return _arithmetic(self, other, operator.add, False)

    def __radd__(self, other: Any) -> Any:
        return _arithmetic(self, other, operator.add, True)

    def __sub__(self, other: Any) -> Any:
        return _arithmetic(self, other, operator.sub, False)

    def __rsub__(self, other: Any) -> Any:
        return _arithmetic(self, other, operator.sub, True)

    def __mul__(self, other: Any) -> Any:
        return _arithmetic(self, other, operator.mul, False)

    def __rmul__(self, other: Any) -> Any:
        return _arithmetic(self, other, operator.mul, True)

    def __truediv__(self, other: Any) -> Any:
        return _divide(self, other, False)

    def __rtruediv__(self, other: Any) -> Any:
        return _divide(self, other, True)

    def __floordiv__(self, other: Any) -> Any:
        return _integer_division(self, other, False, "//")

    def __rfloordiv__(self, other: Any) -> Any:
        return _integer_division(self, other, True, "//")

    def __mod__(self, other: Any) -> Any:
        return _integer_division(self, other, False, "%")

    def __rmod__(self, other: Any) -> Any:
        return _integer_division(self, other, True, "%")

    def __neg__(self) -> Any:
        if self.kind.is_float:
            return Tensor(self.kind, -self.value, layout=self.layout)
        return _arithmetic(self, 0, operator.sub, True)

    def __pos__(self) -> Any:
        return self

    # Bits

    def __and__(self, other: Any) -> Any:
        return _bitwise(self, other, operator.and_, False)

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        return _bitwise(self, other, operator.or_, False)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Any:
        return _bitwise(self, other, operator.xor, False)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> Any:
        return _bitwise(self, other, operator.lshift, False)

    def __rlshift__(self, other: Any) -> Any:
        return _bitwise(self, other, operator.lshift, True)

    def __rshift__(self, other: Any) -> Any:
        return _bitwise(self, other, operator.rshift, False)

    def __rrshift__(self, other: Any) -> Any:
        return _bitwise(self, other, operator.rshift, True)

    def __invert__(self) -> Any:
        if self.kind.is_float:
            fail("type-error", f"~ of {self.kind}")
        if self.kind is BOOL:
            return Tensor(BOOL, not self.value if isinstance(self.value, bool) else ~self.value, layout=self.layout)
        return _bitwise(self, -1 if self.kind.family == "int" else self.kind.highest, operator.xor, False)

    # Comparison

    def __lt__(self, other: Any) -> Any:
        return _compare(self, other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return _compare(self, other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return _compare(self, other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return _compare(self, other, operator.ge)

    def __eq__(self, other: object) -> Any:
        return _compare(self, other, operator.eq)

    def __ne__(self, other: object) -> Any:
        return _compare(self, other, operator.ne)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        if self.shape:
            fail("type-error", f"a condition needs one value; {self!r} has {self.numel}")
        return bool(self.value)

    def __index__(self) -> int:
        if self.shape or self.kind.is_float:
            fail("type-error", f"an index needs one integer, not {self!r}")
        return int(self.value)

    def __iter__(self) -> NoReturn:
        fail("type-error", f"a kernel cannot iterate over {self!r}")

    # Shape

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if any(item is not None and item != slice(None) for item in keys):
            fail("unmodelled", f"a tensor takes only : and None in brackets, not {key!r}")
        layout = getattr(self.layout, "parent", None) if None in keys else self.layout
        if not self.shape:
            return Tensor(self.kind, np.asarray(self.value, self.kind.register)[key], self.span, layout)
        return Tensor(self.kind, self.value[key], self.span, layout)

    def reshape(self, *shape: Any) -> Any:
        """Change its shape; the elements keep their order."""
        target = tuple(int(item) for item in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape))
        if int(np.prod(target, dtype=np.int64)) != self.numel:
            fail("type-error", f"{self!r} has not the elements of {list(target)}")
        return Tensor(self.kind, np.reshape(self.value, target), self.span)

    def permute(self, *order: Any) -> Any:
        """Change the order of its dimensions."""
        target = tuple(int(item) for item in (order[0] if len(order) == 1 and not isinstance(order[0], int) else order))
        if sorted(target) != list(range(len(self.shape))):
            fail("type-error", f"{list(target)} is no order of the dimensions of {self!r}")
        return Tensor(self.kind, self.value.transpose(target), self.span)

    def trans(self, *order: Any) -> Any:
        """Change the order of its dimensions; of a matrix, transpose it."""
        return self.permute(*order) if order else self.permute(tuple(reversed(range(len(self.shape)))))

    @property
    def T(self) -> Any:  # noqa: N802 - Triton's name
        """Its transpose."""
        return self.trans()

    def to(self, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Any:
        """Convert it to another type."""
        if not isinstance(dtype, Kind):
            fail("unmodelled", f"a cast of {self!r} to {dtype!r}")
        if bitcast:
            return bit_cast(self, dtype)
        if fp_downcast_rounding not in (None, "rtne"):
            fail("unmodelled", f"rounding {fp_downcast_rounding!r} in a cast; only rtne is modelled")
        return self.cast(dtype)

    def cast(self, kind: Kind) -> Tensor:
        """Convert it to another type, to nearest, ties to even."""
        if kind is self.kind:
            return self
        span = None
        if self.span is not None and not kind.is_float and kind.lowest <= self.span[0] and self.span[1] <= kind.highest:
            span = self.span
        return Tensor(kind, convert(self.value, self.kind, kind), span, self.layout)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail("unknown-operation", f"a tensor's .{name} has no meaning here")


class OuterSum(Tensor):
    """An integer tensor that is the sum of terms along different axes."""

    __slots__ = ("_whole", "terms")

    def __init__(self, kind: Kind, terms: list[Array], span: Span, layout: object = None) -> None:
        self.kind = kind
        self.terms = terms
        self.span = span
        self.layout = layout
        self._whole: Array | None = None

    @property
    def shape(self) -> Shape:
        """Its size in each dimension."""
        return np.broadcast_shapes(*(term.shape for term in self.terms))

    @property
    def value(self) -> Array:  # type: ignore[override]
        """Its elements."""
        if self._whole is None:
            whole = self.terms[0]
            for term in self.terms[1:]:
                whole = whole + term
            self._whole = whole
        return self._whole

    def cast(self, kind: Kind) -> Tensor:
        """Convert it to another type."""
        assert self.span is not None
        if kind in (INT32, INT64) and kind.lowest <= self.span[0] and self.span[1] <= kind.highest:
            return OuterSum(kind, self.terms, self.span, self.layout)
        return Tensor.cast(self, kind)


def tensor(value: Any) -> Tensor:
    """Make a constant a tensor; a tensor stays itself."""
    if isinstance(value, _NUMBERS):
        kind = kind_of_number(value)
        return Tensor(kind, constant(value, kind))
    if isinstance(value, Tensor):
        return value
    fail("type-error", f"{value!r} is no tensor and no number")


def operands(a: Any, b: Any, division: bool = False) -> tuple[Tensor, Tensor]:
    """Bring two operands to the type in which Triton combines them."""
    if isinstance(a, Tensor):
        if isinstance(b, Tensor):
            if a.kind is b.kind and not (division and a.kind.is_float):
                return a, b
            kind = promote(a.kind, b.kind, division)
            return a.cast(kind), b.cast(kind)
        if isinstance(b, _NUMBERS):
            kind = promote_number(a.kind, kind_of_number(b), division)
            return a.cast(kind), Tensor(kind, constant(b, kind))
    elif isinstance(b, Tensor) and isinstance(a, _NUMBERS):
        kind = promote_number(b.kind, kind_of_number(a), division)
        return Tensor(kind, constant(a, kind)), b.cast(kind)
    elif isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS):
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


def _arithmetic(a: Any, b: Any, op: Callable[[Any, Any], Any], swapped: bool) -> Any:
    if not isinstance(b, (Tensor, bool, int, float)):
        return NotImplemented
    x, y = operands(a, b)
    if swapped:
        x, y = y, x
    kind = x.kind
    layout = a.layout if a.layout is not None else getattr(b, "layout", None)
    if kind.is_float:
        return rounded(kind, op(x.value, y.value), layout)
    if kind is BOOL:
        fail("unmodelled", f"{op.__name__} of booleans")
    if type(x) is Tensor and type(y) is Tensor and type(x.value) is int and type(y.value) is int:
        return Tensor(kind, _checked(kind, op(x.value, y.value), op, x.value, y.value), None, layout)
    return _integers(kind, x, y, op, layout)


def _checked(kind: Kind, exact: int, op: Callable[[Any, Any], Any], x: int, y: int) -> int:
    if kind.lowest <= exact <= kind.highest:
        return exact
    if kind.family == "uint":
        return exact & kind.highest
    fail("int-overflow", f"{x} {_SIGNS[op]} {y} leaves {kind}", exact)


_SIGNS: dict[Any, str] = {operator.add: "+", operator.sub: "-", operator.mul: "*"}


def _integers(kind: Kind, x: Tensor, y: Tensor, op: Callable[[Any, Any], Any], layout: object) -> Tensor:
    (a, b), (c, d) = x.bounds(), y.bounds()
    if op is operator.add:
        span = (a + c, b + d)
    elif op is operator.sub:
        span = (a - d, b - c)
    else:
        products = (a * c, a * d, b * c, b * d)
        span = (min(products), max(products))
    if not (kind.lowest <= span[0] and span[1] <= kind.highest):
        return _wide(kind, x, y, op, layout)
    if op is not operator.mul:
        lazy = _outer(kind, x, y, op, span, layout)
        if lazy is not None:
            return lazy
    return Tensor(kind, op(x.value, y.value), span, layout)


def _outer(kind: Kind, x: Tensor, y: Tensor, op: Callable[[Any, Any], Any], span: Span, layout: object) -> Tensor | None:
    """Keep a sum along different axes as a sum, or return None where it is an ordinary one."""
    if kind.register != np.int64:
        return None
    left = x.terms if isinstance(x, OuterSum) else [x.value]
    right = y.terms if isinstance(y, OuterSum) else [y.value]
    if isinstance(x, OuterSum) or isinstance(y, OuterSum):
        if op is operator.sub:
            right = [-term for term in right]
        terms = [term for term in left if isinstance(term, np.ndarray)]
        if len(terms) < len(left):
            terms, right, left = right, left, terms
            terms = list(terms)
        for term in right:
            if not isinstance(term, np.ndarray):
                smallest = min(range(len(terms)), key=lambda index: terms[index].size)
                terms[smallest] = terms[smallest] + term
                continue
            for index, known in enumerate(terms):
                if known.shape == term.shape:
                    terms[index] = known + term
                    break
            else:
                if any(_share_an_axis(known, term) for known in terms):
                    return None
                terms.append(term)
        return OuterSum(kind, terms, span, layout)
    one, two = left[0], right[0]
    if not isinstance(one, np.ndarray) or not isinstance(two, np.ndarray) or one.ndim < 2 or one.ndim != two.ndim:
        return None
    if _share_an_axis(one, two) or one.size == 1 or two.size == 1:
        return None
    return OuterSum(kind, [one, -two if op is operator.sub else two], span, layout)


def _share_an_axis(one: Array, two: Array) -> bool:
    return any(a != 1 and b != 1 for a, b in zip(one.shape, two.shape, strict=True))


def _wide(kind: Kind, x: Tensor, y: Tensor, op: Callable[[Any, Any], Any], layout: object) -> Tensor:
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


def _divide(a: Tensor, b: Any, swapped: bool) -> Any:
    if not isinstance(b, (Tensor, *_NUMBERS)):
        return NotImplemented
    x, y = operands(a, b, division=True)
    if swapped:
        x, y = y, x
    if not x.kind.is_float:
        x, y = x.cast(FP32), y.cast(FP32)
    return Tensor(x.kind, np.divide(x.value, y.value), None, a.layout)


def _integer_division(a: Tensor, b: Any, swapped: bool, sign: str) -> Any:
    if not isinstance(b, (Tensor, *_NUMBERS)):
        return NotImplemented
    x, y = operands(a, b, division=True)
    if swapped:
        x, y = y, x
    kind, layout = x.kind, a.layout
    if kind.is_float:
        if sign == "//":
            fail("type-error", "Triton has no // of floats")
        return Tensor(kind, np.fmod(x.value, y.value), None, layout)
    if np.any(np.asarray(y.value) == 0):
        fail("division-by-zero", f"{sign} by zero", 0)
    if type(x.value) is int and type(y.value) is int:
        size = abs(x.value) // abs(y.value)
        quotient = size if (x.value < 0) == (y.value < 0) else -size
        result = quotient if sign == "//" else x.value - quotient * y.value
        return Tensor(kind, _checked(kind, result, operator.floordiv, x.value, y.value), None, layout)
    one, two = np.asarray(x.value, kind.register), np.asarray(y.value, kind.register)
    if x.bounds()[0] >= 0 and y.bounds()[0] > 0:
        return Tensor(kind, one // two if sign == "//" else one % two, None, layout)
    remainder = np.fmod(one, two)
    return Tensor(kind, (one - remainder) // two if sign == "//" else remainder, None, layout)


_SIGNS[operator.floordiv] = "//"


def _bitwise(a: Tensor, b: Any, op: Callable[[Any, Any], Any], swapped: bool) -> Any:
    if not isinstance(b, (Tensor, *_NUMBERS)):
        return NotImplemented
    x, y = operands(a, b)
    if swapped:
        x, y = y, x
    kind = x.kind
    if kind.is_float:
        fail("type-error", f"{op.__name__} of {kind}")
    if op in (operator.lshift, operator.rshift):
        low, high = y.bounds()
        if low < 0 or high >= kind.bits:
            fail("unmodelled", f"a shift of {kind} by {low if low < 0 else high}: LLVM leaves the result undefined", high)
        if op is operator.lshift:
            value = op(np.asarray(x.value, kind.register), np.asarray(y.value, kind.register))
            value = convert(value, INT64, kind) if kind.register == np.int64 and kind is not INT64 else value
            return Tensor(kind, value if x.shape or y.shape else int(value), None, a.layout)
    return Tensor(kind, op(x.value, y.value), None, a.layout)


def _compare(a: Tensor, b: Any, op: Callable[[Any, Any], Any]) -> Any:
    if b is None or isinstance(b, (str, Kind)):
        if op is operator.eq:
            return False
        if op is operator.ne:
            return True
    if not isinstance(b, (Tensor, *_NUMBERS)):
        return NotImplemented
    x, y = operands(a, b)
    value = op(x.value, y.value)
    layout = a.layout if a.layout is not None else getattr(b, "layout", None)
    return Tensor(BOOL, value if isinstance(value, np.ndarray) else bool(value), None, layout)


def bit_cast(source: Tensor, kind: Kind) -> Tensor:
    """Read the bits of a tensor as another type of the same width."""
    from harness.emulation.formats import decode, encode

    if source.kind.bits != kind.bits:
        fail("type-error", f"a bit cast of {source.kind} to {kind}: the widths differ")
    if source.kind is kind:
        return source
    codes = np.ascontiguousarray(encode(np.atleast_1d(source.value), source.kind)).view(kind.storage)
    value = decode(codes, kind)
    if source.shape:
        return Tensor(kind, value.reshape(source.shape), None, source.layout)
    first = value[0]
    return Tensor(kind, first if kind.is_float else int(first), None, source.layout)


def broadcast(value: Any, shape: Sequence[int]) -> Array:
    """Spread a register value over a shape."""
    return np.broadcast_to(np.asarray(value), tuple(shape))
