"""Reads and writes of global memory, lane by lane or row by row.

1. A lane that is not masked and lies outside its allocation stops the kernel; a masked lane touches nothing.
2. Rows of a tile are moved as rows. That is only a matter of speed: both ways find the same elements.
3. A buffer operation adds a 32-bit byte offset to its base, so an offset outside ``BUFFER_BYTES`` is a finding even where
   the allocation is larger: hardware would read zero and drop the write, in silence.

Source: AMD CDNA4 ISA, buffer addressing; the record count is the one in Triton's gfx950 code (README, "How it was
confirmed").
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, Array, decode, encode
from harness.emulation.memory import Allocation
from harness.emulation.tensor import OuterSum, Shape, Tensor

#: Bytes that a buffer operation of Triton's AMD backend can address from its base: the descriptor's record count.
BUFFER_BYTES = 2**31 - 2


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


def locate(memory: Allocation, offset: Tensor, mask: Tensor | None, act: str, base: int | None = None) -> Place:
    """Find and check the elements of an access; of a buffer operation, with the element that its base points to.

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
            _check_scalar(memory, element, act, base)
            place.index = element
        else:
            place.active = np.zeros((), np.bool_)
        return place
    if (
        isinstance(offset, OuterSum)
        and len(offset.terms) == 2
        and len(shape) == 2
        and _locate_rows(place, offset, mask, act, base)
    ):
        return place
    index = offset.value
    if mask is not None and mask.value is not True:
        active = np.broadcast_to(np.asarray(mask.value), shape)
        place.active = active
        index = index[active]
    place.index = index
    if index.size:
        low, high = offset.bounds() if place.active is None else (int(index.min()), int(index.max()))
        first, end = _reach(memory, base)
        if low < first or high >= end:
            _check_lanes(memory, offset.value, place.active, act, base)
    return place


def _reach(memory: Allocation, base: int | None) -> tuple[int, int]:
    """Bound the elements that may be reached: by size, and for a buffer operation by its unsigned 31-bit offsets."""
    if base is None:
        return 0, memory.size
    return max(base, 0), min(memory.size, base + BUFFER_BYTES // memory.codes.itemsize)


def _locate_rows(place: Place, offset: OuterSum, mask: Tensor | None, act: str, base: int | None) -> bool:
    """Find the rows of a tile, or return False where it has none."""
    down, across = offset.terms if offset.terms[0].shape[1] == 1 else offset.terms[::-1]
    axis, rows, step = 0, down, across.ravel()
    if not _consecutive(step):
        axis, rows, step = 1, across, down.ravel()
        if not _consecutive(step):
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
        first, end = _reach(place.memory, base)
        if low < first or high >= end:
            active = None
            if place.active is not None:
                active = np.broadcast_to(place.active[:, None] if axis == 0 else place.active[None, :], place.shape)
            _check_lanes(place.memory, offset.value, active, act, base)
    return True


def _consecutive(step: Array) -> bool:
    return bool(step[-1] - step[0] == step.size - 1 and (step[1:] - step[:-1] == 1).all())


def _check_scalar(memory: Allocation, element: int, act: str, base: int | None) -> None:
    first, end = _reach(memory, base)
    if not first <= element < end:
        _report(memory, element, "", act, base)


def _check_lanes(memory: Allocation, elements: Array, active: Array | None, act: str, base: int | None) -> None:
    first, end = _reach(memory, base)
    outside = (elements < first) | (elements >= end)
    if active is not None:
        outside &= active
    lanes = np.argwhere(outside)
    if len(lanes):
        lane = tuple(int(item) for item in lanes[0])
        _report(memory, int(elements[lane]), f" in lane {list(lane)}, and {len(lanes) - 1} more", act, base)


def _report(memory: Allocation, element: int, lane: str, act: str, base: int | None) -> NoReturn:
    if base is not None and 0 <= element < memory.size:
        fail(
            "buffer-range",
            f"{act} {memory.name} at element {element}{lane}: byte {(element - base) * memory.codes.itemsize} from the base "
            f"is not among the {BUFFER_BYTES} bytes that a buffer operation reaches",
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
    codes: Array = _window(memory, place.width)[place.index] if place.axis is not None else memory.codes[place.index]
    return codes


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
        memory.before_write(_elements(place))
    if memory.watch is not None:
        memory.watch(memory, _elements(place), True)
    if not place.shape:
        if place.active is None:
            memory.codes[place.index] = encode(np.asarray(values)[None], memory.kind)[0]
        return
    if place.index.size == 0:
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
