"""The engine: page allocator, block tables, copies on write, offloading; what is true of a right one.

1. A page belongs to the requests whose tables name it, and is counted. One that more than one request names is copied
   before it is written. A page that none names is free.
2. The page that was freed last is taken first, so that what lies there is young. A restored request takes those that were
   freed longest ago, so that it comes back to other page ids.
3. What the engine believes (tables, lengths) is all that a kernel is told. It never sees the truth's tokens, only rows.
4. A planted fault acts at a named point (``POINTS``) on the value there; without one the value passes as it is.

Source: vLLM's block manager and SGLang's radix cache, reduced to what one decode can tell from another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.serving.memory import PoolMemory
from harness.serving.steps import Step
from harness.serving.trace import Setup

#: Where a fault may act, and what the value is there.
POINTS: Mapping[str, str] = {
    "places": "(page, offset) of each row that a request writes",
    "shared": "whether a page that is to be written is another's too",
    "copied": "groups in which a page is copied before it is written",
    "written": "groups in which new rows are written",
    "over": "pages that a request gives up after a rejection",
    "freed": "whether a page that a request gave up is free now",
    "forked": "page ids of the new request",
    "kept": "tokens of a request after rejection",
    "saved": "pages that are copied to the host",
    "restored": "pages that the host's are copied back to",
    "loaded": "groups in which pages come back from the host",
    "rewritten": "tokens that are written anew when a request resumes",
    "entries": "page ids of a row of the batch",
    "columns": "columns of a row of the block table that are written",
    "length": "tokens of a row of the batch",
    "padding": "page ids and tokens of an empty row of the batch",
    "layout": "how a layer's rows are found",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a fault's act may look at."""

    engine: Engine
    #: The request, or "" where there is none.
    request: str = ""
    #: The group of layers, the layer, the row of the batch, and the rows of the batch; 0 where there is none.
    group: int = 0
    layer: int = 0
    row: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """An offloaded request."""

    #: Its tokens.
    length: int
    #: Its pages on the host, and those that it had on the device.
    hosts: list[int]
    pages: list[int]


#: A fault at a point: the moment and the value, and the value that is used instead.
Act = Callable[[Moment, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a kernel is told of a batch, in one group of layers."""

    #: Page ids of each row, and which columns of the block table are written.
    entries: list[list[int]]
    columns: list[list[int]]
    #: Tokens of each row.
    lengths: tuple[int, ...]


@dataclass(frozen=False, slots=True, kw_only=True)
class Engine:
    """A pool under management."""

    setup: Setup
    memory: PoolMemory
    #: Point -> what happens there; empty in a right engine.
    acts: Mapping[str, Act] = field(default_factory=dict)
    #: Page ids of each request, in the order of its tokens, and its tokens.
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    #: Requests that are offloaded.
    saved: dict[str, Saved] = field(default_factory=dict)
    #: How many requests name each page.
    counts: list[int] = field(default_factory=list)
    #: Free pages of the device and of the host; the last one was freed last.
    free: list[int] = field(default_factory=list)
    free_hosts: list[int] = field(default_factory=list)
    #: What a fault keeps from step to step.
    notes: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pages = self.setup.pages
        self.counts = [0] * (pages + 1)
        self.free = list(range(pages, 0, -1))
        self.free_hosts = list(range(pages, 0, -1))

    def at(self, point: str, value: Any, **moment: Any) -> Any:
        """Pass a value through the fault of a point."""
        act = self.acts.get(point)
        return value if act is None else act(Moment(engine=self, **moment), value)

    def write(self, request: str, rows: Mapping[tuple[int, int], Any]) -> None:
        """Append rows to a request; ``rows`` holds those of each (group, layer), all of one number."""
        count = len(next(iter(rows.values())))
        start = self.lengths.setdefault(request, 0)
        places = self._places(request, range(start, start + count))
        self.lengths[request] = start + count
        self._put(request, places, rows)

    def _put(self, request: str, places: list[tuple[int, int]], rows: Mapping[tuple[int, int], Any]) -> None:
        places = self.at("places", places, request=request)
        groups = self.at("written", range(len(self.setup.layers)), request=request)
        for (group, layer), own in rows.items():
            if group in groups:
                self.memory.write(group, layer, places, own)

    def _places(self, request: str, tokens: range) -> list[tuple[int, int]]:
        """Find room for tokens: new pages, and copies of pages that another request names too."""
        size, table = self.setup.shape.page_size, self.tables.setdefault(request, [])
        for index in sorted({token // size for token in tokens}):
            if index == len(table):
                table.append(self._take())
            elif self.at("shared", self.counts[table[index]] > 1, request=request):
                old, table[index] = table[index], self._take()
                groups = self.at("copied", range(len(self.setup.layers)), request=request)
                self.memory.copy(old, table[index], groups)
                self._give(request, [old])
        return [(table[token // size], token % size) for token in tokens]

    def _take(self, oldest: bool = False) -> int:
        page = self.free.pop(0 if oldest else -1)
        self.counts[page] += 1
        return page

    def _give(self, request: str, pages: list[int]) -> None:
        for page in pages:
            self.counts[page] -= 1
            if self.at("freed", self.counts[page] == 0, request=request):
                self.free.append(page)

    def reject(self, request: str, count: int) -> None:
        """Take the last tokens of a request back; pages past the rest are given up."""
        kept = self.at("kept", self.lengths[request] - count, request=request)
        table, needed = self.tables[request], -(-kept // self.setup.shape.page_size)
        self.lengths[request], over = kept, table[needed:]
        del table[needed:]
        self._give(request, self.at("over", over, request=request))

    def fork(self, source: str, request: str) -> None:
        """Start a request on the pages of another."""
        self.tables[request] = self.at("forked", list(self.tables[source]), request=source)
        self.lengths[request] = self.lengths[source]
        for page in self.tables[source]:
            self.counts[page] += 1

    def drop(self, request: str) -> None:
        """Give up what a request has on the device."""
        self._give(request, self.tables.pop(request, []))
        self.lengths.pop(request, None)

    def end(self, request: str) -> None:
        """End a request, wherever it is."""
        self.drop(request)
        if request in self.saved:
            self.free_hosts += self.saved.pop(request).hosts

    def resume(self, request: str, rows: Mapping[tuple[int, int], Any]) -> None:
        """Give a request pages again and write all its rows anew."""
        count = len(next(iter(rows.values())))
        places = self._places(request, range(count))
        self.lengths[request] = count
        chosen = self.at("rewritten", list(range(count)), request=request)
        self._put(request, [places[token] for token in chosen], {key: own[chosen] for key, own in rows.items()})

    def offload(self, request: str) -> None:
        """Move a request's pages to the host."""
        pages = self.tables[request]
        saved = Saved(length=self.lengths[request], hosts=[self.free_hosts.pop() for _ in pages], pages=list(pages))
        self.saved[request] = saved
        for page, host in zip(self.at("saved", pages, request=request), saved.hosts, strict=False):
            self.memory.save(page, host)
        self.drop(request)

    def restore(self, request: str) -> None:
        """Move a request's pages back to the device, to other page ids."""
        saved = self.saved[request]
        self.lengths[request] = saved.length
        table = self.tables[request] = [self._take(oldest=True) for _ in saved.hosts]
        groups = self.at("loaded", range(len(self.setup.layers)), request=request)
        for host, page in zip(saved.hosts, self.at("restored", table, request=request), strict=True):
            self.memory.load(host, page, groups)
        self.free_hosts += self.saved.pop(request).hosts

    def batch(self, step: Step, group: int) -> Batch:
        """State what the kernel is told in one group of layers."""
        entries, lengths, columns = [], [], []
        for row in range(step.rows):
            where = {"group": group, "row": row, "rows": step.rows}
            if row < len(step.requests):
                name = step.requests[row]
                pages = self.at("entries", list(self.tables[name]), request=name, **where)
                length = self.at("length", self.lengths[name], request=name, **where)
            else:
                pages, length = self.at("padding", ([], 0), **where)
            entries.append(pages)
            lengths.append(length)
            columns.append(self.at("columns", list(range(len(pages))), **where))
        return Batch(entries=entries, columns=columns, lengths=tuple(lengths))

    def view(self, group: int, layer: int) -> Any:
        """View a layer's codes, [P, T, D]."""
        layout = self.memory.layout(group, layer)
        return self.memory.view(group, self.at("layout", layout, group=group, layer=layer))
