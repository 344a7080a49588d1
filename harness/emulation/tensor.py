"""Tensors of a kernel: values in registers, with Triton's types.

1. What has no dimensions is a Python int, bool or numpy float: most of a kernel's arithmetic is on such, and it is fast.
2. A sum of a row and a column of integers stays a sum until someone needs the elements: offsets of whole tiles cost what
   their edges cost. Its bounds are exact, for every combination of its terms occurs.
3. Layouts do not change values. They are carried so that a kernel can ask for them.

Source: ``triton.language.core.tensor`` of Triton 3.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from harness.emulation.findings import fail
from harness.emulation.formats import INT32, INT64, Array, Kind, decode, encode
from harness.emulation.promotion import constant, convert, kind_of_number

Span = tuple[int, int]
Shape = tuple[int, ...]
#: Python's numbers that a kernel may hold: constants.
NUMBERS = (bool, int, float)


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

    if TYPE_CHECKING:  # The operators are in ``arithmetic``, which puts them here.

        def __add__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __and__(self, other: Any) -> Any: ...
        def __or__(self, other: Any) -> Any: ...
        def __invert__(self) -> Any: ...

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
    def T(self) -> Any:
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
    def value(self) -> Array:
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
    if isinstance(value, NUMBERS):
        kind = kind_of_number(value)
        return Tensor(kind, constant(value, kind))
    if isinstance(value, Tensor):
        return value
    fail("type-error", f"{value!r} is no tensor and no number")


def bit_cast(source: Tensor, kind: Kind) -> Tensor:
    """Read the bits of a tensor as another type of the same width."""
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
