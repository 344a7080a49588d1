"""The contract check: every discrete cell of a route against the kernels' contracts, nothing run.

Rules kept here:

1. The domain is all head counts to 128, query tokens to 16, batches, both caches, a pool below and one above 4 GiB, and
   every setting of the route on every architecture it is described for.
2. Every cell is counted: it ends well, or it is in a group with how it ends; one that the engine refuses when it starts is
   counted apart.
3. Cells that end in the same way are one group, shown as ranges; no cell is lost in them, for a group keeps its cells.

Source: the axes are those that engines choose kernels by (vLLM, SGLang).
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.case import Case
from harness.routes.contracts import HARMLESS, Contracts, Problem
from harness.routes.record import Route
from harness.routes.way import Found, find_way

#: Head counts, query tokens, batches and caches of the domain.
HEADS, QUERY_TOKENS, BATCHES, CACHES = range(1, 129), range(1, 17), (1, 2, 16, 32, 64, 512), ("bf16", "e4m3fn")
#: Pools and their bytes; the lines that kernels are reported to break at are 2^31 and 2^32.
POOLS: Mapping[str, int] = {"small pool": 1 << 20, "pool past 4 GiB": 5 << 30}
#: Tokens of each request: as many as the most query tokens, and more.
_LENGTH = 64
#: A page that every engine has.
_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the domain."""

    heads: int
    query_tokens: int
    batch: int
    #: Cache format.
    cache: str
    #: Key of POOLS.
    pool: str
    arch: str
    #: Settings as KEY=VALUE, in the route's order.
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cells that end in the same way."""

    #: How the first of them ends.
    found: Found
    #: Whether others say the same of their own numbers.
    varies: bool
    #: All of them.
    cells: tuple[Cell, ...]

    @property
    def harmless(self) -> bool:
        """Whether no cell of it fails."""
        return self.found.problem.outcome in HARMLESS


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of a route found."""

    route: Route
    #: AITER release whose Gluon kernel was asked; "" for none.
    release: str
    #: Cells that the engine serves, and those that it refuses when it starts.
    served: int
    refused: int
    #: Cells that end badly.
    failing: int
    #: How they end, and what is changed without an error, worst first.
    groups: tuple[Group, ...]


def check(route: Route, *, heads: Sequence[int] = HEADS, release: str | None = None) -> Checked:
    """Check a route.

    Args:
        route: which.
        heads: its head counts, or some of them.
        release: AITER release to call; None for the one that the engine met.
    """
    release = route.aiter if release is None else release
    ended: dict[tuple[str, str, bool, str], list[tuple[Found, Cell]]] = defaultdict(list)
    served, refused, failing = 0, 0, 0
    choices = [dict(zip(route.settings, values, strict=True)) for values in itertools.product(*route.settings.values())]
    for cache, count, tokens, batch in itertools.product(CACHES, heads, QUERY_TOKENS, BATCHES):
        case = Case(
            heads=count, query_tokens=tokens, lengths=(_LENGTH,) * batch, page_size=_PAGE, cache_format=cache, lse=False
        )
        places = list(itertools.product(route.arch, choices, POOLS))
        if route.why_not(case) is not None:
            refused += len(places)
            continue
        for arch, chosen, pool in places:
            served += 1
            settings = tuple(f"{key}={value}" for key, value in chosen.items())
            cell = Cell(
                heads=count, query_tokens=tokens, batch=batch, cache=cache, pool=pool, arch=arch, settings=settings
            )  # fmt: skip
            ends = _ends(route, case, Contracts(arch=arch, release=release), chosen, POOLS[pool])
            failing += any(found.problem.outcome not in HARMLESS for found in ends)
            for found in ends:
                # What a reason says of this one cell (its heads, its batch) does not make it another reason.
                reason = re.sub(r"\d+", "N", found.problem.reason)
                ended[found.problem.outcome, found.problem.kernel, found.behind, reason].append((found, cell))
    groups = [
        Group(found=pairs[0][0], varies=len({found for found, _ in pairs}) > 1, cells=tuple(cell for _, cell in pairs))
        for pairs in ended.values()
    ]
    groups.sort(key=lambda group: (group.harmless, group.found.behind, -len(group.cells)))
    return Checked(route=route, release=release, served=served, refused=refused, failing=failing, groups=tuple(groups))


def _ends(route: Route, case: Case, contracts: Contracts, settings: Mapping[str, str], pool: int) -> tuple[Found, ...]:
    way = find_way(route, case, contracts, settings, pool=pool)
    if way is not None:
        return way.found
    return (Found(problem=Problem(outcome="refusal", kernel=route.name, reason="no rule of the route covers it")),)


def show(checked: Checked) -> list[str]:
    """Write down what was found, a few lines a group."""
    route = checked.route
    release = f", AITER {checked.release}" if checked.release else ""
    lines = [f"{route.name} ({', '.join(route.arch)}{release}): {route.about}"]
    for group in checked.groups:
        problem = group.found.problem
        behind = "once the query is left as it was, " if group.found.behind else ""
        such = "such as " if group.varies else ""
        lines.append(f"  {problem.outcome:<10} {problem.kernel}: {behind}{such}{problem.reason}")
        lines += [f"  {'':<10}   {text}" for text in ranges(group.cells, route)]
    ended = (
        f"{checked.failing} of {checked.served} cells end badly"
        if checked.failing
        else f"no cell of {checked.served} ends badly"
    )
    lines.append(f"  {ended}; {checked.refused} more are refused when the engine starts")
    return lines


def ranges(cells: Iterable[Cell], route: Route) -> list[str]:
    """Say which cells these are, in ranges: one line for each shape of batches over query tokens, and where it holds."""
    shapes: dict[tuple[str, str, str, tuple[str, ...]], dict[int, dict[int, set[int]]]] = {}
    for cell in cells:
        place = (cell.arch, cell.cache, cell.pool, cell.settings)
        shapes.setdefault(place, {}).setdefault(cell.heads, {}).setdefault(cell.query_tokens, set()).add(cell.batch)
    # Heads with the same tokens and batches go together, then places with the same heads.
    alike: dict[str, list[tuple[str, str, str, tuple[str, ...]]]] = defaultdict(list)
    for place, by_heads in shapes.items():
        alike[_shape(by_heads)].append(place)
    lines = []
    for shape, places in alike.items():
        where = [
            _named("cache", {place[1] for place in places}, CACHES),
            _named("", {place[2] for place in places}, tuple(POOLS)),
        ]
        where += [_named("", {place[0] for place in places}, route.arch)]
        for key, values in route.settings.items():
            chosen = {pair.partition("=")[2] for place in places for pair in place[3] if pair.startswith(f"{key}=")}
            where.append(_named(key, chosen, values))
        lines.append("; ".join([shape, *filter(None, where)]))
    return lines


def _named(name: str, found: set[str], known: Sequence[str]) -> str:
    """Name the values found of an axis; nothing where it is all of them."""
    return "" if found == set(known) else f"{name} {'|'.join(sorted(found, key=list(known).index))}".strip()


def _shape(by_heads: Mapping[int, Mapping[int, set[int]]]) -> str:
    """Write heads, tokens and batches as ranges: ``heads 1-15: tokens 1, batches 2-512; tokens 2-16, all batches``."""
    alike: dict[str, list[int]] = defaultdict(list)
    for heads, by_tokens in by_heads.items():
        batches: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for tokens, found in by_tokens.items():
            batches[tuple(sorted(found))].append(tokens)
        text = ", ".join(
            f"tokens {runs(own, QUERY_TOKENS)} of batches {runs(found, BATCHES)}" for found, own in batches.items()
        )
        alike[text].append(heads)
    return "; ".join(f"heads {runs(heads, HEADS)}: {text}" for text, heads in alike.items())


def runs(found: Sequence[int], known: Sequence[int]) -> str:
    """Write some values of an axis as runs of neighbours on it: ``1-15, 32``."""
    parts: list[list[int]] = []
    for place in sorted(map(list(known).index, found)):
        if parts and parts[-1][-1] == place - 1:
            parts[-1].append(place)
        else:
            parts.append([place])
    return ", ".join(f"{known[part[0]]}-{known[part[-1]]}" if len(part) > 1 else str(known[part[0]]) for part in parts)
