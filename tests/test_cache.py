"""The paged pool: where tokens lie and what the tables say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cache import block_table, place, ragged_table
from harness.case import PLACEMENTS, Case

paged = st.builds(
    Case,
    heads=st.just(1),
    query_tokens=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4).map(tuple),
    page_size=st.sampled_from([1, 3, 16, 64]),
    placement=st.sampled_from(PLACEMENTS),
    pool_rows=st.sampled_from([0, 1000, 1 << 30]),
    table_padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)


@given(paged)
def test_the_tables_lead_to_the_slots(case: Case) -> None:
    placement, size = place(case), case.page_size
    padded = block_table(placement, case.table_padding)
    indptr, indices = ragged_table(placement)
    ends = np.cumsum([0, *case.lengths])
    for request, length in enumerate(case.lengths):
        expected = placement.slots[ends[request] : ends[request + 1]]
        tokens = np.arange(length)
        for pages in (padded[request], indices[indptr[request] : indptr[request + 1]]):
            actual = pages[tokens // size].astype(np.int64) * size + tokens % size
            assert np.array_equal(actual, expected)


@given(paged)
def test_every_live_page_lies_in_the_pool_and_page_0_is_dead(case: Case) -> None:
    placement = place(case)
    live = placement.live_pages
    assert len(live) == 0 or 0 <= live.min() <= live.max() < placement.pages
    assert placement.pages * case.page_size >= case.pool_rows
    assert case.placement == "identity" or 0 not in live


@given(paged)
def test_only_a_shared_placement_shares_pages(case: Case) -> None:
    pages = np.concatenate(place(case).tables)
    assert case.placement == "shared" or len(np.unique(pages)) == len(pages)


def test_shared_requests_share_whole_pages_and_no_new_token() -> None:
    case = Case(heads=1, lengths=(40, 40, 17), page_size=16, query_tokens=2, placement="shared")
    first, second, third = place(case).tables
    assert (first == second).tolist() == [True, True, False]
    assert third.tolist()[:0] == [] and len(set(third.tolist()) & set(first.tolist())) == 0
    longer = place(case.replace(lengths=(40, 40, 18))).tables
    assert longer[2][0] == longer[0][0] and longer[2][1] not in longer[0]


def test_a_high_placement_reaches_the_last_row_of_the_pool() -> None:
    case = Case(heads=1, lengths=(5,), placement="high", pool_rows=3_728_271)
    assert place(case).slots.max() == 3_728_270


def test_a_scattered_pool_keeps_dead_pages_between() -> None:
    placement = place(Case(heads=1, lengths=(50,), placement="scattered"))
    assert placement.pages > 4 * 50 and len(np.unique(placement.slots)) == 50


def test_unused_entries_of_the_table_are_absurd() -> None:
    table = block_table(place(Case(heads=1, lengths=(3, 1), table_padding=3)), 3)
    assert table.shape == (2, 6)
    unused = table[1, 1:]
    assert not np.any((unused >= 0) & (unused < 4))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_seed_fixes_the_placement(placement: str) -> None:
    case = Case(heads=1, lengths=(33, 20), page_size=4, placement=placement, seed=5)
    assert np.array_equal(place(case).slots, place(case).slots)
