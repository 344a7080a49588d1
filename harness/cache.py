"""The paged pool: where each request's tokens lie, and what surrounds them.

1. A page holds T token slots; slot = page * T + offset. ``Placement.slots`` is the truth's own map; the kernel gets tables.
2. Except under "identity" page 0 is dead: a masked lane that falls back to slot 0 reads poison.
3. Unused table entries hold ids that no pool has (int32 max, -1, the first id past the pool, by turns).
4. Under "straddling" live pages lie below, across and above each line that the pool spans (``lines``); in a pool that spans
   none, around its middle.
5. Placement draws from Philox by (seed, stream): the same case has the same pages everywhere.

Source: vLLM and SGLang block tables; the field faults of kinds C, D and A (page geometry, tables, offsets).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.case import Case
from references.formats import FORMATS

#: Bytes and elements of a pool, and page ids, that outgrow a signed or an unsigned type of 32 bits, or one of 16 or 24.
BYTE_LINES, ELEMENT_LINES, PAGE_LINES = (1 << 31, 1 << 32), (1 << 31, 1 << 32), (1 << 16, 1 << 24)
#: A scattered pool has this many times the pages it needs.
SCATTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the tokens of a case lie."""

    #: P, pages of the pool.
    pages: int
    #: Page ids of each request, in order of its tokens.
    tables: tuple[NDArray[np.int64], ...]
    #: Token slots of all requests, one after another, int64 [sum N].
    slots: NDArray[np.int64]

    @property
    def live_pages(self) -> NDArray[np.int64]:
        """Page ids that some request uses, sorted, int64."""
        return np.unique(np.concatenate(self.tables)) if self.tables else np.zeros(0, np.int64)


def stream(seed: int, name: int, part: int = 0) -> np.random.Philox:
    """Open the Philox stream of a seed: ``name`` tells what it is for, ``part`` which piece of it."""
    return np.random.Philox(key=np.array([seed, name], np.uint64), counter=np.array([0, 0, 0, part], np.uint64))


def permutation(bits: np.random.Philox, count: int) -> NDArray[np.int64]:
    """Permute 0 … count - 1 by raw bits, so that no distribution of numpy's is in the way."""
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


_PAGES = 1  # stream name


def place(case: Case) -> Placement:
    """Place the tokens of a case in a pool."""
    size = case.page_size
    counts, fresh = _page_counts(case)
    needed, pages = sum(fresh), pool_pages(case)
    if case.placement == "identity":
        ids = np.arange(needed, dtype=np.int64)
    elif case.placement == "high":
        ids = np.arange(pages - needed, pages, dtype=np.int64)[permutation(stream(case.seed, _PAGES), needed)]
    elif case.placement == "straddling":
        ids = _around_lines(case, needed, pages)[permutation(stream(case.seed, _PAGES), needed)]
    elif case.placement == "scattered":
        # Spread over the whole pool without listing it: one page in each of `needed` equal spans.
        span = (pages - 1) // max(needed, 1)
        offsets = (stream(case.seed, _PAGES, 1).random_raw(needed) % np.uint64(max(span, 1))).astype(np.int64)
        ids = (1 + np.arange(needed, dtype=np.int64) * span + offsets)[permutation(stream(case.seed, _PAGES), needed)]
    else:
        ids = 1 + permutation(stream(case.seed, _PAGES), needed)
    tables: list[NDArray[np.int64]] = []
    taken = 0
    for count, own in zip(counts, fresh, strict=True):
        head = tables[0][: count - own] if count > own else ids[:0]
        tables.append(np.concatenate([head, ids[taken : taken + own]]))
        taken += own
    slots = [
        (table[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)[:length]
        for table, length in zip(tables, case.lengths, strict=True)
    ]
    return Placement(pages=pages, tables=tuple(tables), slots=np.concatenate(slots))


def lines(case: Case) -> list[int]:
    """List the pages across which the lines lie that a case's pool spans, ascending."""
    size, pages = FORMATS[case.cache_format].storage.itemsize, pool_pages(case)
    page = case.page_size * (case.width + case.token_padding) + case.page_padding
    across = {line // (page * size) for line in BYTE_LINES} | {line // page for line in ELEMENT_LINES} | set(PAGE_LINES)
    return sorted(line for line in across if 1 < line < pages - 1)


def _around_lines(case: Case, needed: int, pages: int) -> NDArray[np.int64]:
    """Choose the pages nearest to the lines, one about each line by turns; int64 [needed]."""
    across = np.array(lines(case) or [(pages + 1) // 2], np.int64)
    reach = -(-needed // len(across))
    while True:
        steps = np.arange(reach + 1, dtype=np.int64)
        steps = np.stack([steps, -steps], axis=1).reshape(-1)[1:]  # 0, 0, 1, -1, ... without the second 0
        ids = (across + steps[:, None]).reshape(-1)
        ids = ids[(ids > 0) & (ids < pages)]
        first = np.sort(np.unique(ids, return_index=True)[1])[:needed]
        if len(first) == needed:
            return np.asarray(ids[first])
        reach *= 2


def _page_counts(case: Case) -> tuple[list[int], list[int]]:
    """Count each request's pages, and those of them that it does not share with the first request.

    Requests share whole pages that lie below the new tokens of both.
    """
    counts = [-(-length // case.page_size) for length in case.lengths]
    if case.placement != "shared":
        return counts, counts
    first, *others = case.lengths
    common = [max(min(first, length) - case.query_tokens, 0) // case.page_size for length in others]
    return counts, [count - alike for count, alike in zip(counts, [0, *common], strict=True)]


def pool_pages(case: Case) -> int:
    """Count P, the pages of a case's pool."""
    needed = sum(_page_counts(case)[1])
    dead = 0 if case.placement == "identity" else 1
    spread = SCATTER if case.placement == "scattered" else 1
    return max(spread * needed + dead, -(-case.pool_rows // case.page_size), 1)


def absurd_ids(count: int, pages: int) -> NDArray[np.int32]:
    """Make ids that no pool has, for table entries that nobody may follow; int32 [count]."""
    kinds = np.array([np.iinfo(np.int32).max, -1, min(pages, np.iinfo(np.int32).max)], np.int64)
    return kinds[np.arange(count) % len(kinds)].astype(np.int32)


def block_table(placement: Placement, padding: int) -> NDArray[np.int32]:
    """Write the padded table: page ids int32 [B, W], W the pages of the longest request (at least 1) + padding."""
    width = max(1, *(len(table) for table in placement.tables)) + padding
    rows = np.tile(absurd_ids(width, placement.pages), (len(placement.tables), 1))
    for row, table in zip(rows, placement.tables, strict=True):
        row[: len(table)] = table
    return rows


def ragged_table(placement: Placement) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Write the ragged table: kv_indptr int32 [B + 1] in pages, and kv_indices, page ids int32 [sum]."""
    ends = np.cumsum([0, *(len(table) for table in placement.tables)])
    return ends.astype(np.int32), np.concatenate(placement.tables).astype(np.int32)
