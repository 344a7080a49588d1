"""The memory of a pool: one allocation a group of layers, and the host's.

1. A group's allocation is [P, layers, T, D + padding]: a page holds a block of each layer, so that for one layer the stride
   from page to page is larger than its block. Page 0 is nobody's and stays poison.
2. Everything begins as NaN. What a request leaves behind stays as it is, as in an engine: the next one must not read it.
3. Rows are moved as integers: floating-point copies may not keep every NaN.
4. ``changes`` says which rows of which pages are not what they were, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.inputs import poison_code
from harness.memory import Arena
from harness.serving.trace import Setup
from references.formats import FORMATS, as_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Where a row lies."""

    group: int
    layer: int
    page: int
    #: Token slot within the page.
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a layer's rows are found in its group's allocation, elements."""

    #: From the allocation's start to the layer's first row.
    start: int
    #: From page to page, and from row to row.
    page_stride: int
    token_stride: int


class PoolMemory:
    """The pool's bytes."""

    def __init__(self, setup: Setup, arena: Arena) -> None:
        """Allocate the groups in an arena, and the host's memory beside it; all NaN."""
        shape = setup.shape
        self.setup = setup
        self._storage = FORMATS[shape.cache_format].storage
        row = shape.width + shape.token_padding
        self._pools: list[Tensor] = []
        self._groups: list[Tensor] = []
        self._hosts: list[Tensor] = []
        poison = poison_code(shape, shape.cache_format)
        for group, layers in enumerate(setup.layers):
            count = (setup.pages + 1) * layers * setup.block
            pool = arena.allocate(f"cache of group {group}", count, self._storage)
            bits = as_integers(pool).fill_(poison)
            self._pools.append(pool)
            self._groups.append(bits.view(setup.pages + 1, layers, shape.page_size, row))
            self._hosts.append(torch.full_like(self._groups[-1], poison, device="cpu"))

    def layout(self, group: int, layer: int) -> Layout:
        """Say where a layer's rows lie."""
        block, row = self.setup.block, self.setup.shape.width + self.setup.shape.token_padding
        return Layout(start=layer * block, page_stride=self.setup.layers[group] * block, token_stride=row)

    def view(self, group: int, layout: Layout) -> Tensor:
        """View a layer's codes by a layout, [P, T, D]."""
        shape = (self.setup.pages + 1, self.setup.shape.page_size, self.setup.shape.width)
        pool = self._pools[group]
        return pool.as_strided(shape, (layout.page_stride, layout.token_stride, 1), pool.storage_offset() + layout.start)

    def write(self, group: int, layer: int, places: Sequence[tuple[int, int]], rows: Tensor) -> None:
        """Write rows [n, D] to places, (page, offset) each."""
        if places:
            pages, offsets = (torch.tensor(part) for part in zip(*places, strict=True))
            memory = self._groups[group]
            memory[pages, layer, offsets, : self.setup.shape.width] = rows.to(memory.device)

    def copy(self, source: int, target: int, groups: Iterable[int]) -> None:
        """Copy a page in some groups, all layers of each."""
        for group in groups:
            self._groups[group][target] = self._groups[group][source]

    def save(self, page: int, host_page: int) -> None:
        """Copy a page to the host."""
        for memory, host in zip(self._groups, self._hosts, strict=True):
            host[host_page] = memory[page].cpu()

    def load(self, host_page: int, page: int, groups: Iterable[int]) -> None:
        """Copy a page back from the host, in some groups."""
        for group in groups:
            self._groups[group][page] = self._hosts[group][host_page].to(self._groups[group].device)

    def copies(self) -> list[Tensor]:
        """Copy all groups, to compare with later."""
        return [memory.clone() for memory in self._groups]

    def changes(self, before: Sequence[Tensor]) -> list[Row]:
        """List the rows that are not what they were."""
        found = []
        for group, (memory, copy) in enumerate(zip(self._groups, before, strict=True)):
            if not torch.equal(memory, copy):
                places = torch.nonzero((memory != copy).any(-1)).tolist()
                found += [Row(group=group, layer=layer, page=page, offset=at) for page, layer, at in places]
        return found
