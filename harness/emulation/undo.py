"""What stood where a run wrote, so that it can be put back and compared.

1. A small allocation is copied whole before the first write to it.
2. Of a large one only the blocks that are written are copied: a pool of many GiB must not need its memory.

Source: the two runs of ``extremes`` begin with the same memory.
"""

from __future__ import annotations

import numpy as np

from harness.emulation.formats import Array
from harness.emulation.memory import Allocation

#: Allocations of more bytes are kept by blocks.
WHOLE_BYTES = 1 << 26
#: Elements of a block.
BLOCK = 1 << 16


class Written:
    """One allocation that a run writes to."""

    def __init__(self, memory: Allocation, keep: bool) -> None:
        self.memory = memory
        self._keep = keep
        self._whole = memory.codes.nbytes <= WHOLE_BYTES
        #: First element of each block, and what it held before; None where that is not kept.
        self.blocks: dict[int, Array | None] = {}
        if self._whole:
            self.blocks[0] = memory.codes.copy() if keep else None

    def before(self, elements: Array) -> None:
        """Keep what stands where elements are about to be written."""
        for start in (np.unique(elements // BLOCK) * BLOCK).tolist():
            if start not in self.blocks:
                self.blocks[start] = self.memory.codes[start : start + BLOCK].copy() if self._keep else None

    @property
    def complete(self) -> bool:
        """Whether nothing more needs to be kept."""
        return self._whole

    def undo(self) -> None:
        """Put back what stood there."""
        for start, codes in self.blocks.items():
            if codes is not None:
                self.memory.codes[start : start + codes.size] = codes

    def now(self) -> dict[int, Array]:
        """Copy what stands there now, by first element."""
        size = self.memory.codes.size if self._whole else BLOCK
        return {start: self.memory.codes[start : start + size].copy() for start in self.blocks}
