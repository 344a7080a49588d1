"""Global memory of a launch: allocations, pointers into them, reads and writes.

1. A pointer belongs to one allocation: the elements of the tensor that was passed, from its first to its last. A lane that
   is not masked and lies outside stops the kernel; a masked lane touches nothing.
2. Nothing is copied or scanned whole: a pool of which three pages are touched costs three pages.
3. Rows of a tile are moved as rows. That is only a matter of speed: both ways find the same elements.
4. A buffer operation adds a 32-bit byte offset to its base, so an offset outside ``BUFFER_BYTES`` is a finding even where
   the allocation is larger.

Source: AMD CDNA4 ISA, buffer addressing; the record count is the one in Triton's gfx950 code (see README, Confirmed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, BY_NAME, INT64, Array, Kind, decode, encode
from harness.emulation.tensor import OuterSum, Shape, Tensor, Type

#: Bytes that a buffer operation of Triton's AMD backend can address from its base: the descriptor's record count.
BUFFER_BYTES = 2**31 - 2
#: torch's types, by Triton's names.
_TORCH_KINDS = {
    torch.bool: "int1", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.uint8: "uint8", torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64",
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2: "fp8e5",
    torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class PointerKind:
    """The type of a pointer."""

    element_ty: Kind

    @property
    def scalar(self) -> PointerKind:
        """Itself."""
        return self

    def is_ptr(self) -> bool:
        """Whether it is a pointer."""
        return True


class Allocation:
    """The elements that one tensor argument gives a kernel access to."""

    __slots__ = ("address", "before_write", "codes", "kind", "name", "size", "tensor", "watch")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _TORCH_KINDS:
            fail("launch-error", f"argument {name} has the type {tensor.dtype}, which Triton does not know")
        if tensor.device.type != "cpu":
            fail("launch-error", f"argument {name} lies on {tensor.device}; emulation needs tensors on the CPU")
        self.name = name
        self.tensor = tensor
        self.kind = BY_NAME[_TORCH_KINDS[tensor.dtype]]
        self.size = 0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.detach().as_strided((self.size,), (1,))
        self.codes: Array = flat.view(_CARRIERS[tensor.element_size()]).numpy().view(self.kind.storage)
        self.address = tensor.data_ptr()
        #: Called before the first write.
        self.before_write: Callable[[Allocation], None] | None = None
        #: Called with (allocation, elements, whether it is a write) for each access; tracing only.
        self.watch: Callable[[Allocation, Array, bool], None] | None = None


class Pointer:
    """One pointer, or a tensor of pointers, into an allocation: element offsets in int64."""

    __slots__ = ("layout", "memory", "offset")

    def __init__(self, memory: Allocation, offset: Tensor, layout: object = None) -> None:
        self.memory = memory
        self.offset = offset
        self.layout = layout

    def __repr__(self) -> str:
        return f"pointer<{self.memory.kind}>{list(self.shape)} into {self.memory.name}"

    @property
    def shape(self) -> Shape:
        """Its size in each dimension."""
        return self.offset.shape

    @property
    def dtype(self) -> PointerKind:
        """The pointer type."""
        return PointerKind(self.memory.kind)

    @property
    def type(self) -> Type:
        """Its type."""
        return Type(PointerKind(self.memory.kind), self.shape, self.layout)

    def __add__(self, other: Any) -> Pointer:
        return self._moved(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self._moved(other, -1)

    def _moved(self, other: Any, sign: int) -> Pointer:
        if isinstance(other, Tensor):
            if other.kind.is_float or other.kind is BOOL:
                fail("type-error", f"a pointer plus {other!r}")
            step: Any = other.cast(INT64)
        elif isinstance(other, int):
            step = other
        else:
            fail("type-error", f"a pointer plus {other!r}")
        layout = self.layout if self.layout is not None else getattr(other, "layout", None)
        return Pointer(self.memory, self.offset + step if sign > 0 else self.offset - step, layout)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offset[key], getattr(self.layout, "parent", None))

    def to(self, kind: Any, bitcast: bool = False) -> Pointer:
        """Refuse a cast, unless to what it is."""
        if getattr(kind, "element_ty", None) is self.memory.kind:
            return self
        fail("unmodelled", f"a cast of {self!r} to {kind!r}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail("unknown-operation", f"a pointer's .{name} has no meaning here")


class Place:
    """The elements that the lanes of one access touch, checked."""

    __slots__ = ("active", "axis", "index", "memory", "shape", "start", "width")

    def __init__(self, memory: Allocation, shape: Shape) -> None:
        self.memory = memory
        self.shape = shape
        #: Axis along which whole rows lie, or None where each element is found by itself.
        self.axis: int | None = None
        #: Elements: where rows begin, or the element of every active lane.
        self.index: Any = None
        self.width = 1
        #: Active rows or lanes; None for all.
        self.active: Array | None = None


def locate(memory: Allocation, offset: Tensor, mask: Tensor | None, act: str, buffer: bool = False) -> Place:
    """Find and check the elements of an access.

    Raises:
        EmulationFault: out-of-bounds or buffer-range, for the first such lane that is not masked.
    """
    shape = offset.shape
    if mask is not None and mask.kind is not BOOL:
        fail("type-error", f"a mask must be boolean, not {mask!r}")
    place = Place(memory, shape)
    if not shape:
        if mask is None or mask.value:
            element = int(offset.value)
            _check_scalar(memory, element, act, buffer)
            place.index = element
        else:
            place.active = np.zeros((), np.bool_)
        return place
    if isinstance(offset, OuterSum) and len(offset.terms) == 2 and len(shape) == 2 and _locate_rows(place, offset, mask, act, buffer):
        return place
    index = offset.value
    if mask is not None and mask.value is not True:
        active = np.broadcast_to(np.asarray(mask.value), shape)
        place.active = active
        index = index[active]
    place.index = index
    if index.size:
        low, high = (offset.bounds() if place.active is None else (int(index.min()), int(index.max())))
        limit = _limit(memory, buffer)
        if low < 0 or high >= limit:
            _check_lanes(memory, offset.value, place.active, act, buffer)
    return place


def _limit(memory: Allocation, buffer: bool) -> int:
    """Elements that may be reached: by size, and for a buffer operation by bytes."""
    return min(memory.size, BUFFER_BYTES // memory.codes.itemsize) if buffer else memory.size


def _locate_rows(place: Place, offset: OuterSum, mask: Tensor | None, act: str, buffer: bool) -> bool:
    """Find the rows of a tile, or return False where it has none."""
    down, across = offset.terms if offset.terms[0].shape[1] == 1 else offset.terms[::-1]
    for axis, rows, columns in ((0, down, across), (1, across, down)):
        step = columns.ravel()
        if step[-1] - step[0] == step.size - 1 and (step[1:] - step[:-1] == 1).all():
            break
    else:
        return False
    starts = rows.ravel() + step[0]
    if mask is not None and mask.value is not True:
        flags = np.asarray(mask.value)
        if flags.ndim != 2 or flags.shape[1 - axis] != 1:
            return False
        if flags.shape[axis] != starts.size:
            flags = np.broadcast_to(flags, tuple(starts.size if a == axis else 1 for a in (0, 1)))
        flags = flags.ravel()
        if not flags.all():
            place.active = flags
            starts = starts[flags]
    place.axis, place.index, place.width = axis, starts, step.size
    if starts.size:
        low, high = int(starts.min()), int(starts.max()) + step.size - 1
        if low < 0 or high >= _limit(place.memory, buffer):
            active = None
            if place.active is not None:
                active = np.broadcast_to(place.active[:, None] if axis == 0 else place.active[None, :], place.shape)
            _check_lanes(place.memory, offset.value, active, act, buffer)
    return True


def _check_scalar(memory: Allocation, element: int, act: str, buffer: bool) -> None:
    if not 0 <= element < _limit(memory, buffer):
        _report(memory, element, "", act, buffer)


def _check_lanes(memory: Allocation, elements: Array, active: Array | None, act: str, buffer: bool) -> None:
    outside = (elements < 0) | (elements >= _limit(memory, buffer))
    if active is not None:
        outside &= active
    lanes = np.argwhere(outside)
    if len(lanes):
        lane = tuple(int(item) for item in lanes[0])
        _report(memory, int(elements[lane]), f" in lane {list(lane)}, and {len(lanes) - 1} more", act, buffer)


def _report(memory: Allocation, element: int, lane: str, act: str, buffer: bool) -> NoReturn:
    if buffer and 0 <= element < memory.size:
        fail(
            "buffer-range",
            f"{act} {memory.name} at element {element}{lane}: byte {element * memory.codes.itemsize} is past the "
            f"{BUFFER_BYTES} bytes that a buffer operation reaches",
            element,
        )
    side = f"{-element} before its first" if element < 0 else f"{element - memory.size + 1} past its last"
    fail("out-of-bounds", f"{act} {memory.name} at element {element}{lane}: {side}; it has {memory.size} elements", element)


def _window(memory: Allocation, width: int) -> Array:
    """View the allocation as all its runs of ``width`` elements."""
    codes = memory.codes
    return np.ndarray((memory.size - width + 1, width), codes.dtype, codes, 0, (codes.itemsize, codes.itemsize))


def read_codes(place: Place) -> Array:
    """Read the stored codes of the active lanes: rows, or one after another."""
    memory = place.memory
    if memory.watch is not None:
        memory.watch(memory, _elements(place), False)
    return _window(memory, place.width)[place.index] if place.axis is not None else memory.codes[place.index]


def read(place: Place, other: Any) -> Any:
    """Read a place into register values.

    Args:
        place: what ``locate`` found.
        other: register value for masked lanes: a number, or an array of the place's shape.
    """
    memory, kind = place.memory, place.memory.kind
    if not place.shape:
        if place.active is not None:
            return other
        value = decode(read_codes(place)[None] if place.index is not None else memory.codes[:1], kind)[0]
        return value if kind.is_float else (bool(value) if kind is BOOL else int(value))
    if place.index.size == 0:
        return np.broadcast_to(np.asarray(other, kind.register), place.shape)
    values = decode(read_codes(place), kind)
    if place.active is None:
        return values.T if place.axis == 1 else values
    if place.axis is None:
        whole = np.array(np.broadcast_to(np.asarray(other, kind.register), place.shape))
        whole[place.active] = values
        return whole
    if np.ndim(other):
        whole = np.array(np.broadcast_to(np.asarray(other, kind.register), place.shape))
        (whole if place.axis == 0 else whole.T)[place.active] = values
        return whole
    whole = np.full((place.active.size, place.width), other, kind.register)
    whole[place.active] = values
    return whole.T if place.axis == 1 else whole


def write(place: Place, values: Any) -> None:
    """Write register values, of the memory's type and the place's shape, to a place."""
    memory = place.memory
    if memory.before_write is not None:
        memory.before_write(memory)
    if memory.watch is not None:
        memory.watch(memory, _elements(place), True)
    if not place.shape:
        if place.active is None:
            memory.codes[place.index] = encode(np.asarray(values)[None], memory.kind)[0]
        return
    codes = encode(values, memory.kind)
    if codes.shape != place.shape:
        codes = np.broadcast_to(codes, place.shape)
    if place.axis is None:
        memory.codes[place.index] = codes if place.active is None else codes[place.active]
        return
    rows = codes if place.axis == 0 else codes.T
    _window(memory, place.width)[place.index] = rows if place.active is None else rows[place.active]


def _elements(place: Place) -> Array:
    """List every element that a place touches."""
    if place.index is None:
        return np.empty(0, np.int64)
    if place.axis is None:
        return np.atleast_1d(np.asarray(place.index)).ravel()
    return (np.asarray(place.index)[:, None] + np.arange(place.width)).ravel()
