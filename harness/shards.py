"""Shards: the parts of one run that CI asks on several machines.

1. The unit is a row of the verdict table: its searches are asked whole by one shard, with the seed they have in the unsharded
   run, and what is pinned of it beside them. The production shapes of a backend are units of their own, since they spread
   over rows. So the merged rows are the unsharded ones, cases and findings included, as long as no search is cut by its time
   limit and Hypothesis's example databases are the same.
2. Units with a search are dealt out first, one to each shard by turns, then the others: the search is what takes time.
3. More shards than units are an error: one of them would ask nothing, and look green.
4. A shard writes down the units of all, so that merging sees which are missing.

Source: a search is one sequence of draws; cut into parts it would ask other cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.plan import Plan
from harness.regimes import NoRegime
from harness.report.rows import CONTRACT, NONE

#: A row of the table: its backend and its regime; or a backend and the name of its shapes.
Unit = tuple[str, str]


def units_of(items: Sequence[pytest.Item], plan: Plan) -> tuple[list[Unit], dict[Unit, list[pytest.Item]]]:
    """List the units of collected tests, those with a search first, and the tests of each."""
    held: dict[Unit, list[pytest.Item]] = {}
    searched: dict[Unit, None] = {}
    for item in items:
        unit = _unit(item, plan)
        held.setdefault(unit, []).append(item)
        if "pair" in _parameters(item):
            searched[unit] = None
    return list(searched | dict.fromkeys(held)), held


def shard_of(items: Sequence[pytest.Item], plan: Plan, shard: int, size: int) -> tuple[list[Unit], list[pytest.Item]]:
    """Choose the tests of one shard; also the units of all.

    Raises:
        pytest.UsageError: if there are fewer units than shards.
    """
    units, held = units_of(items, plan)
    if size > len(units):
        named = ", ".join(f"{backend} × {regime}" for backend, regime in units) or "none"
        raise pytest.UsageError(
            f"--shard {shard}/{size}: a run is split by its rows, and this one has {len(units)} ({named}): "
            f"ask for {len(units)} shards at most"
        )
    mine = set(units[shard - 1 :: size])
    return units, [item for unit, several in held.items() if unit in mine for item in several]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    spec = getattr(item, "callspec", None)
    return dict(spec.params) if spec else {}


def _unit(item: pytest.Item, plan: Plan) -> Unit:
    """Name the row that a test counts in; a test of another kind is a row of its own."""
    given = _parameters(item)
    pair = given.get("pair") or given.get("graphed") or given.get("served")
    if pair is not None:
        return pair.backend.name, pair.regime.name
    backend, asked = given.get("backend"), given.get("pin") or given.get("known")
    if backend is None:
        return "", item.nodeid
    name = backend.name
    if row := given.get("row"):
        return name, f"(shapes {row.name})"
    if asked is None:
        return name, CONTRACT
    try:
        return name, plan.regimes.of(name, asked.case).name
    except NoRegime:
        return name, NONE
