"""Shared memory (LDS) of a program, and asynchronous copies into it.

1. It begins poisoned: NaN in floats, an absurd number in integers.
2. A copy has two legal extremes. Early: the data lands when it is issued. Late: it lands in the wait that retires its
   group, and is read from global memory then. Everything a GPU may do lies between.
3. ``wait_group(n)`` retires the oldest groups until n are left; with n = 0 also what was never committed.
4. A masked lane of a buffer copy becomes zero when the copy lands; of a global copy it stays as it was. Where ``other`` is
   given, it is stored at once, beside the copy.
5. A load that overlaps a copy in flight is noted: where the extremes differ, that is where the race is.
6. A register owns its values: a later write to LDS does not change what was loaded.

Source: ``triton.experimental.gluon.language.amd.cdna4.async_copy`` (Triton 3.9) and the gfx950 code that Triton makes of it;
CDNA4 ISA, s_waitcnt vmcnt in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np

from harness.emulation.findings import fail, site
from harness.emulation.formats import BOOL, Array, Kind, decode, decode_into
from harness.emulation.lanes import Place, read, read_codes
from harness.emulation.tensor import Shape, Tensor, Type

#: Poison of integers: as a page number or an offset it lies outside everything.
INTEGER_POISON = -0x5A5A5A5B


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """An asynchronous copy that has been issued and has not landed."""

    #: The LDS region it will fill.
    region: Array
    #: What it reads.
    place: Place
    #: What masked lanes become: None leaves them as they are.
    fill: float | None
    #: Kernel line of the copy.
    line: int


class Copies:
    """The asynchronous copies of one program."""

    def __init__(self, late: bool) -> None:
        #: Whether data lands as late as allowed.
        self.late = late
        #: Committed groups, oldest first.
        self.groups: list[list[Copy]] = []
        #: Issued and not committed.
        self.open: list[Copy] = []
        #: (file, line of a load, line of a copy in flight into what it loads), over all programs.
        self.overlaps: set[tuple[str, int, int]] = set()

    def issue(self, region: Array, place: Place, fill: float | None, other: Any = None) -> None:
        """Issue a copy.

        Args:
            region: where in LDS it goes.
            place: what it reads.
            fill: what the copy itself writes for masked lanes; None if nothing.
            other: what is stored for masked lanes beside the copy, at once; None if nothing.
        """
        if other is not None and place.active is not None:
            _fill(region, place, other)
            fill = None
        if not self.late:
            land(region, place, fill)
        else:
            self.open.append(Copy(region=region, place=place, fill=fill, line=site()[1]))

    def commit(self) -> None:
        """Close a group."""
        self.groups.append(self.open)
        self.open = []

    def wait(self, outstanding: int) -> None:
        """Retire groups, oldest first, until so many are left."""
        retired = self.groups[: max(len(self.groups) - outstanding, 0)]
        self.groups = self.groups[len(retired) :]
        if outstanding == 0:
            retired.append(self.open)
            self.open = []
        for group in retired:
            for copy in group:
                land(copy.region, copy.place, copy.fill)

    def note_load(self, region: Array) -> None:
        """Note copies in flight into a region that is being loaded."""
        for group in (*self.groups, self.open):
            for copy in group:
                if np.shares_memory(copy.region, region):
                    file, line = site()
                    self.overlaps.add((file, line, copy.line))

    def clear(self) -> None:
        """Forget a program's copies when it ends."""
        self.groups.clear()
        self.open.clear()


def land(region: Array, place: Place, fill: float | None) -> None:
    """Put the data of a copy into LDS."""
    kind, active = place.memory.kind, place.active
    rows = region.T if place.axis == 1 else region
    if active is None:
        if place.axis is not None:
            decode_into(read_codes(place), kind, rows)
        else:
            region[...] = read(place, 0)
        return
    if active.any():
        rows[active] = decode(read_codes(place), kind)
    if fill is not None:
        rows[~active] = fill


def _fill(region: Array, place: Place, other: Any) -> None:
    """Store what masked lanes become."""
    assert place.active is not None
    rows = region.T if place.axis == 1 else region
    values = np.broadcast_to(np.asarray(other), place.shape)
    rows[~place.active] = (values.T if place.axis == 1 else values)[~place.active]


class Lds:
    """The shared memory of the programs of a launch; arrays are used again by the next program."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Array]] = {}
        self._used: list[tuple[tuple[Any, ...], Array]] = []

    def allocate(self, kind: Kind, shape: Shape, fastest: int) -> Array:
        """Take poisoned memory whose fastest axis is the one named; values, not codes."""
        key = (kind, shape, fastest)
        stock = self._free.get(key)
        if stock:
            array = stock.pop()
        else:
            order = [axis for axis in range(len(shape)) if axis != fastest] + [fastest]
            array = np.empty([shape[axis] for axis in order], kind.register).transpose(np.argsort(order))
        array.fill(_poison(kind))
        self._used.append((key, array))
        return array

    def clear(self) -> None:
        """Take back what a program has used."""
        for key, array in self._used:
            self._free.setdefault(key, []).append(array)
        self._used.clear()


def _poison(kind: Kind) -> Any:
    if kind.is_float:
        return np.nan
    if kind is BOOL:
        return True
    return max(INTEGER_POISON, kind.lowest) if kind.family == "int" else kind.highest - 0x5A


class SharedMemory:
    """A descriptor of shared memory, or a view of one."""

    __slots__ = ("_copies", "alloc_shape", "array", "kind", "layout")

    def __init__(self, copies: Copies, kind: Kind, array: Array, layout: object, alloc_shape: Shape) -> None:
        self._copies = copies
        self.kind = kind
        self.array = array
        self.layout = layout
        self.alloc_shape = alloc_shape

    def __repr__(self) -> str:
        return f"shared_memory_descriptor<{self.kind}, {list(self.shape)}>"

    @property
    def shape(self) -> Shape:
        """Its size in each dimension."""
        return self.array.shape

    @property
    def rank(self) -> int:
        """Its number of dimensions."""
        return self.array.ndim

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.array.shape)

    @property
    def dtype(self) -> Kind:
        """Its element type."""
        return self.kind

    @property
    def type(self) -> Type:
        """Its type."""
        return Type(self.kind, self.shape, self.layout)

    def load(self, layout: object = None) -> Tensor:
        """Load a tensor."""
        copies = self._copies
        if copies.late and (copies.groups or copies.open):
            copies.note_load(self.array)
        return Tensor(self.kind, self.array.copy(order="K"), None, layout)

    def store(self, value: Any) -> None:
        """Store a tensor of the same shape and type."""
        if not isinstance(value, Tensor) or value.kind is not self.kind or value.shape != self.shape:
            fail("type-error", f"a store of {value!r} to {self!r}: shape and type must be the same")
        copies = self._copies
        if copies.late and (copies.groups or copies.open):
            copies.note_load(self.array)
        self.array[...] = value.value

    def index(self, index: Any) -> SharedMemory:
        """View one entry of the first dimension."""
        entry = int(index)
        if not 0 <= entry < self.array.shape[0]:
            fail("out-of-bounds", f"index {entry} of {self!r}", entry)
        return self._view(self.array[entry])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> SharedMemory:
        """View a range of one dimension."""
        first, size, axis = int(start), int(length), int(dim)
        if first < 0 or size <= 0 or first + size > self.array.shape[axis]:
            fail("out-of-bounds", f"slice {first}:{first + size} of dimension {axis} of {self!r}", first)
        key = [slice(None)] * self.array.ndim
        key[axis] = slice(first, first + size)
        return self._view(self.array[tuple(key)])

    def permute(self, order: Any) -> SharedMemory:
        """View it with its dimensions in another order."""
        return self._view(self.array.transpose([int(axis) for axis in order]))

    def reshape(self, shape: Any) -> SharedMemory:
        """View it with another shape; the elements keep their order."""
        target = tuple(int(size) for size in shape)
        if prod(target) != self.array.size:
            fail("type-error", f"{self!r} has not the elements of {list(target)}")
        view = self.array.reshape(target)
        if not np.shares_memory(view, self.array):
            fail("unmodelled", f"a reshape of {self!r} to {list(target)} that numpy cannot view")
        return self._view(view)

    def _keep_alive(self) -> None:
        """Do nothing: memory lives as long as its program."""

    def _view(self, array: Array) -> SharedMemory:
        return SharedMemory(self._copies, self.kind, array, self.layout, self.alloc_shape)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail("unknown-operation", f"a shared memory descriptor's .{name} has no meaning here")
