"""The catalogue of pool faults: engines that are wrong in one place.

1. A fault is a few lines at named points of the right engine, so that a wrong answer is wrong in one way only.
2. ``why`` is the public report that the fault models, or why it stands here. ``needs`` says what a trace must have to show it.

Source: the reports of stale tables, padded rows, block strides and offloading in vLLM, SGLang and their kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.serving.engine import POINTS, Act, Moment
from harness.serving.memory import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFault:
    """One wrong engine."""

    #: Words and hyphens.
    name: str
    #: What the engine does wrong, one clause.
    what: str
    #: Public report that it models, or the reason for which it stands here.
    why: str
    #: What a trace needs to show it, in words.
    needs: str
    #: Point -> what happens there.
    acts: Mapping[str, Act]

    def __post_init__(self) -> None:
        unknown = set(self.acts) - set(POINTS)
        if unknown or not self.acts:
            raise ValueError(f"fault {self.name}: acts at {sorted(unknown) or 'no point'}; points are {', '.join(POINTS)}")


Places = list[tuple[int, int]]


def _only_new_columns(moment: Moment, columns: list[int]) -> list[int]:
    """Write only the columns that the row of the batch had not before."""
    key = "columns", moment.rows, moment.row
    had: int = moment.engine.notes.get(key, 0)
    moment.engine.notes[key] = max(had, len(columns))
    return columns[had:]


def _one_slot_late(moment: Moment, places: Places) -> Places:
    """Put the last row one slot further in its page."""
    *first, (page, offset) = places
    return [*first, (page, (offset + 1) % moment.engine.setup.shape.page_size)]


def _page_of_the_token_before(moment: Moment, places: Places) -> Places:
    """Look the page of the first new row up by the token before it."""
    engine = moment.engine
    start = engine.lengths[moment.request] - len(places)
    if not places or not start:
        return places
    page = engine.tables[moment.request][(start - 1) // engine.setup.shape.page_size]
    return [(page, places[0][1]), *places[1:]]


def _remember_longest(moment: Moment, kept: int) -> int:
    """Note how long a request was before its drafted tokens were rejected."""
    moment.engine.notes["longest", moment.request] = moment.engine.lengths[moment.request]
    return kept


def _longest(moment: Moment, length: int) -> int:
    """Count the rejected tokens in, as far as the request's pages reach."""
    room = len(moment.engine.tables[moment.request]) * moment.engine.setup.shape.page_size
    longest: int = moment.engine.notes.get(("longest", moment.request), 0)
    return min(max(length, longest), room)


def _forget_partial(moment: Moment, pages: list[int]) -> list[int]:
    """Round the kept tokens down to pages, and give up the page that the rest of them lies in."""
    engine = moment.engine
    rest = engine.lengths[moment.request] % engine.setup.shape.page_size
    return [*pages, engine.tables[moment.request][-1]] if rest else pages


def _old_pages(moment: Moment, pages: list[int]) -> list[int]:
    return list(moment.engine.saved[moment.request].pages)


def _save_nothing_yet(moment: Moment, pages: list[int]) -> list[int]:
    return []


def _save_now(moment: Moment, groups: Any) -> Any:
    """Copy what lies by now in the pages that the request had."""
    saved = moment.engine.saved[moment.request]
    for page, host in zip(saved.pages, saved.hosts, strict=True):
        moment.engine.memory.save(page, host)
    return groups


def _table_at_first(moment: Moment, pages: list[int]) -> list[int]:
    """Keep the second group's page ids as they were when they were first seen; new pages are added."""
    known: list[int] = moment.engine.notes.setdefault(("table", moment.request), [])
    known += pages[len(known) :]
    return known[: len(pages)] if moment.group else pages


def _neighbour(moment: Moment, pages: list[int]) -> list[int]:
    """Give the second group the page ids of another request of as many pages."""
    tables = moment.engine.tables
    others = [table for name, table in tables.items() if name != moment.request and len(table) >= len(pages)]
    return list(others[0][: len(pages)]) if moment.group and others else pages


def _row_zero(moment: Moment, padding: tuple[list[int], int]) -> tuple[list[int], int]:
    """Let an empty row be the first row again."""
    engine = moment.engine
    first = engine.notes.get("first row")
    return padding if first not in engine.tables else (list(engine.tables[first]), engine.lengths[first])


def _note_first(moment: Moment, pages: list[int]) -> list[int]:
    if moment.row == 0:
        moment.engine.notes["first row"] = moment.request
    moment.engine.notes["row", moment.row] = (list(pages), moment.engine.lengths[moment.request])
    return pages


def _row_before(moment: Moment, padding: tuple[list[int], int]) -> tuple[list[int], int]:
    """Leave in an empty row what an earlier batch had there."""
    found: tuple[list[int], int] = moment.engine.notes.get(("row", moment.row), padding)
    return found


def _tight(moment: Moment, layout: Layout) -> Layout:
    return dataclasses.replace(layout, page_stride=moment.engine.setup.block)


def _first_layer(moment: Moment, layout: Layout) -> Layout:
    return dataclasses.replace(layout, start=0)


def _first_group(moment: Moment, groups: Any) -> Any:
    return list(groups)[:1]


def _same_table(moment: Moment, pages: list[int]) -> list[int]:
    return moment.engine.tables[moment.request]


#: All pool faults, gross ones first.
FAULTS: Mapping[str, PoolFault] = {
    fault.name: fault
    for fault in (
        PoolFault(name="table-stale-after-reuse", what="a row of the block table keeps the columns of the request before",
                  why="lightseekorg/tokenspeed #955", needs="two requests, one after the other in a row of the batch",
                  acts={"columns": _only_new_columns}),
        PoolFault(name="page-freed-early", what="a page is free as soon as one of the requests that share it ends",
                  why="reference counts of shared prefixes", needs="a fork, an end and a request after it",
                  acts={"freed": lambda moment, free: True}),
        PoolFault(name="shared-page-written", what="a page that two requests share is written without a copy",
                  why="copy on write of the last page of a shared prefix", needs="a fork within a page",
                  acts={"shared": lambda moment, shared: False}),
        PoolFault(name="copy-leaves-a-group-out", what="a copy on write copies the first group's layers only",
                  why="draft layers that joined the target's group (vllm-project/vllm #50563, its second thread)",
                  needs="two groups and a fork within a page", acts={"copied": _first_group}),
        PoolFault(name="fork-shares-the-table", what="a fork and its source have one table between them",
                  why="a list that is taken over and not copied", needs="a fork, and a new page in one of the two",
                  acts={"forked": _same_table}),
        PoolFault(name="restored-to-old-pages", what="offloaded pages come back to the page ids that they had",
                  why="page ids saved with the rows", needs="offload and restore", acts={"restored": _old_pages}),
        PoolFault(name="restored-in-reverse", what="offloaded pages come back in the other order",
                  why="a stack used as a queue", needs="offload and restore of two pages",
                  acts={"restored": lambda moment, pages: pages[::-1]}),
        PoolFault(name="saved-after-reuse", what="pages are saved to the host only when they have been given away",
                  why="offload and speculation together fault (vllm-project/vllm #50563, its second thread)",
                  needs="offload, another request in the pages, restore",
                  acts={"saved": _save_nothing_yet, "loaded": _save_now}),
        PoolFault(name="restore-leaves-a-group-out", what="the second group's layers do not come back from the host",
                  why="layers left out of the store while they stay in the group (vllm-project/vllm #50563)",
                  needs="two groups, offload and restore", acts={"loaded": _first_group}),
        PoolFault(name="preempted-page-not-restored", what="a request that resumes has its first page not written anew",
                  why="a prefix that is taken to be in the cache still", needs="preempt, another request in its page, resume",
                  acts={"rewritten": lambda moment, tokens: tokens[moment.engine.setup.shape.page_size :]}),
        PoolFault(name="resumed-without-the-newest", what="a request that resumes lacks the row of its newest token",
                  why="the token that was sampled and not yet written", needs="preempt and resume",
                  acts={"rewritten": lambda moment, tokens: tokens[:-1]}),
        PoolFault(name="rejected-tokens-visible", what="rejected tokens are still counted in the length of the next decode",
                  why="sgl-project/sglang #12295", needs="a rejection, and a decode that does not overwrite all of it",
                  acts={"kept": _remember_longest, "length": _longest}),
        PoolFault(name="length-not-updated-after-rejection", what="rejected tokens stay in the request",
                  why="lengths kept in a captured graph", needs="a rejection and a decode after it",
                  acts={"kept": lambda moment, kept: moment.engine.lengths[moment.request]}),
        PoolFault(name="rejection-frees-live-page", what="a rejection gives up the page that kept tokens lie in too",
                  why="lengths rounded down to pages", needs="a rejection past a partial page, and a request after it",
                  acts={"over": _forget_partial}),
        PoolFault(name="append-one-slot-late", what="the newest row is written one slot further in its page",
                  why="a length that counts the new token already", needs="pages of two tokens",
                  acts={"places": _one_slot_late}),
        PoolFault(name="append-in-the-page-before", what="a row that begins a page is written to the page before",
                  why="the page looked up by the last token", needs="a decode at the edge of a page",
                  acts={"places": _page_of_the_token_before}),
        PoolFault(name="new-rows-leave-a-group-out", what="new rows are written in the first group's layers only",
                  why="draft layers that joined the target's group", needs="two groups", acts={"written": _first_group}),
        PoolFault(name="padded-row-reads-row-0", what="an empty row of the batch is the first row again",
                  why="vllm-project/vllm #37442", needs="a padded batch",
                  acts={"entries": _note_first, "padding": _row_zero}),
        PoolFault(name="padded-row-not-cleared", what="an empty row of the batch keeps an earlier batch's request",
                  why="vllm-project/vllm #35969", needs="a batch, and a padded one with fewer requests",
                  acts={"entries": _note_first, "padding": _row_before}),
        PoolFault(name="layer-stride-ignored", what="pages are taken to lie block by block",
                  why="vllm-project/vllm #45111", needs="two layers in a page", acts={"layout": _tight}),
        PoolFault(name="layer-offset-ignored", what="every layer reads the first layer's rows",
                  why="a view of the pool that is made once", needs="two layers in a page", acts={"layout": _first_layer}),
        PoolFault(name="group-table-stale", what="the second group keeps the page ids that a request had first",
                  why="a block table of its own beside the shared one", needs="two groups, and pages that move",
                  acts={"entries": _table_at_first}),
        PoolFault(name="group-tables-exchanged", what="the second group reads the pages of another request",
                  why="block-id namespaces of two groups", needs="two groups and two requests", acts={"entries": _neighbour}),
    )
}  # fmt: skip
