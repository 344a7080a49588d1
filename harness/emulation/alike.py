"""Launches that the second of two runs need not repeat.

1. Only a Triton kernel is spared: it has no LDS and no asynchronous copies of its own making, so that the extremes of copies
   are one and the same for it.
2. Its programs shared nothing in the first run: no allocation that one of them wrote was read by any, and no element was
   written by two accesses. Their order then changes nothing.
3. In the second run its arguments and every bit of what it read are the same. It would write the same bits, and these are
   put there. Whatever differs is run.

Source: rule 1 of ``extremes``: what two runs may differ in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.emulation.formats import Array
from harness.emulation.memory import Allocation, Pointer
from harness.emulation.tensor import Tensor

#: Bytes of an argument beyond which a launch is repeated: what is compared is copied.
MOST_BYTES = 1 << 26


class _Launch:
    """One launch: what it was given, and what it touched once it has run."""

    def __init__(self, kernel: Any, values: Sequence[Any], grid: tuple[int, int, int]) -> None:
        self.memories = [value.memory for value in values if isinstance(value, Pointer)]
        self.asked = (kernel, grid, [_number(value) for value in values], [(one.kind, one.size) for one in self.memories])
        #: Whether its programs share nothing, as far as it has run.
        self.sole = False
        self._before: list[Array] = []
        self._read: set[int] = set()
        #: Argument -> which of its elements were written; and what they hold at the end.
        self._written: dict[int, Array] = {}
        self._after: dict[int, Array] = {}

    def watch(self) -> None:
        """Begin to watch what it touches."""
        self.sole = True
        self._before = [one.codes.copy() for one in self.memories]
        for place, memory in enumerate(self.memories):
            memory.watch = lambda memory, elements, writes, place=place: self._touched(place, memory, elements, writes)

    def _touched(self, place: int, memory: Allocation, elements: Array, writes: bool) -> None:
        if not writes:
            self._read.add(place)
            self.sole = self.sole and place not in self._written
            return
        if place not in self._written:
            self._written[place] = np.zeros(memory.size, np.bool_)
        seen = self._written[place]
        self.sole = self.sole and place not in self._read and not seen[elements].any()
        seen[elements] = True

    def end(self) -> None:
        """Keep what a later run is compared with, and what it would write."""
        self._before = [codes if place in self._read else codes[:0] for place, codes in enumerate(self._before)]
        self._after = {place: self.memories[place].codes[seen] for place, seen in self._written.items()} if self.sole else {}

    def gives(self, later: _Launch) -> bool:
        """Tell whether a later launch would write what this one wrote."""
        return (
            self.sole
            and self.asked == later.asked
            and all(_same(self._before[place], later.memories[place].codes) for place in self._read)
        )

    def give(self, later: _Launch) -> None:
        """Write for a later launch."""
        for place, seen in self._written.items():
            memory = later.memories[place]
            if memory.before_write is not None:
                memory.before_write(np.flatnonzero(seen))
            memory.codes[seen] = self._after[place]


class Launches:
    """The launches of a run, in order, and those of an earlier one to compare them with."""

    def __init__(self, earlier: Launches | None) -> None:
        self._earlier = earlier
        self._known: list[_Launch | None] = []
        #: How many launches were not repeated.
        self.spared = 0

    def spares(self, jit: Any, values: Sequence[Any], grid: tuple[int, int, int]) -> bool:
        """Begin a launch; where the earlier run tells what it would write, write that and tell so."""
        launch = None if _why_not(jit, values) else _Launch(jit, values, grid)
        self._known.append(launch)
        if launch is None:
            return False
        if self._earlier is None:
            launch.watch()
            return False
        place = len(self._known) - 1
        before = self._earlier._known[place] if place < len(self._earlier._known) else None
        if before is None or not before.gives(launch):
            return False
        before.give(launch)
        self.spared += 1
        return True

    def end(self) -> None:
        """End a launch that ran."""
        launch = self._known[-1]
        if launch is not None and launch.sole:
            launch.end()


def _why_not(jit: Any, values: Sequence[Any]) -> bool:
    """Tell whether a launch is always repeated."""
    memories = [value.memory for value in values if isinstance(value, Pointer)]
    storages = {memory.tensor.untyped_storage().data_ptr() for memory in memories}
    return (
        jit.is_gluon()
        or any(isinstance(value, tuple) for value in values)
        or len(storages) < len(memories)
        or any(memory.codes.nbytes > MOST_BYTES for memory in memories)
    )


def _number(value: Any) -> Any:
    """Name an argument that is no pointer, so that equal names mean equal arguments."""
    if isinstance(value, Pointer):
        return None
    return (value.kind, repr(value.value)) if isinstance(value, Tensor) else (type(value), repr(value))


def _same(one: Array, two: Array) -> bool:
    return bool(np.array_equal(one.view(f"i{one.itemsize}"), two.view(f"i{two.itemsize}")))
