"""The rules of judging: which arithmetic and which limits hold where.

1. Rules are rows of ``cases/regimes.toml``; no limit stands in Python.
2. A row is checked when it is read: an unknown key, format, relation, limit set or backend, a missing reason, a number that no
   kernel has, an empty region and two rows that claim the same case of the same backend are errors that name the row and the
   file. What only the backend itself knows, such as its output format, is checked when a run is planned.
3. Every case of a backend has one regime or none; none is an error that says which rows came near and what kept them out.

Source: docs/numerics.md derives what the limits bound; each row's ``why`` says what its numbers were measured on.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.registry import is_name, names
from harness.case import Case
from harness.region import Region, RegionError, globs_meet
from harness.rounded_query import RoundedQuery
from references.arithmetic import Arithmetic
from references.problem import Problem

#: The rules that the project ships.
RULES = Path(__file__).resolve().parent.parent / "cases" / "regimes.toml"
SCHEMA = 1
#: What a regime may be called: its name is that of a folder and of a test too.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Tokens of a tile, and splits of a launch, at most: 2^16 rows of 576 bytes are 36 MiB, more than any program holds.
_MOST_TILE = _MOST_SPLITS = 1 << 16

#: Relations between two runs whose outputs are the same bits in a regime, or only within the budget.
RELATIONS: Mapping[str, str] = {
    "repeat": "the same call again",
    "pages-moved": "the pages lie elsewhere in the pool",
    "pages-appended": "the pool has more dead pages",
    "table-widened": "the block table has more unused columns",
    "requests-permuted": "the requests come in another order",
    "request-replicated": "a request stands several times in the batch",
    "request-alone": "a request is decoded alone",
    "heads-permuted": "the heads come in another order",
    "scale-shifted": "a power of two moves between cache codes and cache scale",
    "scales-exchanged": "a power of two moves between query scale and cache scale",
    "dead-rows-changed": "slots that no request uses hold something else",
}
#: The relation of a question that asks for a captured graph (harness/graphs.py), and what it is.
GRAPH, ABOUT_GRAPH = "graph", "a captured graph is replayed over other inputs in the same memory"
#: The relation of a question outside a backend's contract (harness/refusal.py), and what it is.
REFUSAL, ABOUT_REFUSAL = "refusal", "the backend says that it cannot do the case, and must refuse it"


class RegimesError(ValueError):
    """A regimes file that cannot be used; the message names the row, the file and the fault."""


class NoRegime(LookupError):
    """No row covers this case of this backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far measurements may go."""

    #: Name of the set.
    name: str
    #: Probability that a correct kernel breaks one statistical check of one case, all its rows and elements looked at.
    false_alarm: float
    #: Largest |e| / W of an element.
    hard: float
    #: Largest lse error over its budget.
    lse: float
    #: Largest |score| of a row, natural-log units, up to which its accuracy is the kernel's doing.
    conditioned: float
    #: Relative distance from the truth below which a wrong answer is the truth.
    distinct: float
    #: Relative distance between reference and oracle beyond which the truth itself is in doubt, units of fp32 rounding.
    doubt: float
    #: Where the numbers come from.
    why: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("float", float) and not (type(value) is float and math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be a positive float, not {value!r}")
        if self.false_alarm >= 1:
            raise ValueError(f"false_alarm is a probability below 1, not {self.false_alarm}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One row: a region of one or several backends with one arithmetic."""

    #: Its name, one word.
    name: str
    #: Backends it covers; ``*`` stands for any text.
    backends: tuple[str, ...]
    #: The cases it covers.
    where: Region
    #: What the kernels round, and where.
    arithmetic: Arithmetic
    #: How far measurements may go.
    limits: Limits
    #: Largest relative error of a row (2-norm over L) with which an answer is fit for use.
    accuracy: float
    #: Relations whose outputs are the same bits; the others hold within the budget.
    exact: frozenset[str]
    #: What the numbers rest on.
    why: str
    #: How the query is rounded before the kernel sees it, by a route; None where it is not.
    query: RoundedQuery | None = None

    def understood(self, problem: Problem) -> Problem:
        """State the problem that answers are held to."""
        return problem if self.query is None else self.query.of(problem)

    def covers(self, backend: str) -> bool:
        """Tell whether a backend is among those of this row."""
        return any(fnmatch.fnmatchcase(backend, pattern) for pattern in self.backends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regimes:
    """All rows of one file."""

    #: The rows, in file order.
    rows: tuple[Regime, ...]
    #: The file they were read from.
    path: Path

    def of(self, backend: str, case: Case) -> Regime:
        """Find the row that covers a case of a backend.

        Raises:
            NoRegime: if there is none; the message says what kept each row of the backend from it.
        """
        near = []
        for row in self.rows:
            if row.covers(backend):
                reason = row.where.why_outside(case)
                if reason is None:
                    return row
                near.append(f"{row.name}: {reason}")
        found = "; ".join(near) if near else "no row names this backend"
        raise NoRegime(f"no regime of {backend} covers {case} ({found}); add a row to {self.path}")

    def named(self, name: str) -> Regime:
        """Find a row by name.

        Raises:
            NoRegime: if there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise NoRegime(f"no regime is called {name!r}: {self.path} has {', '.join(row.name for row in self.rows)}")

    @property
    def option(self) -> str | None:
        """Its file as an option must name it; None where it is the project's own."""
        return None if self.path == RULES else str(self.path.absolute())

    def for_backend(self, backend: str) -> tuple[Regime, ...]:
        """List the rows of a backend."""
        return tuple(row for row in self.rows if row.covers(backend))


def load(path: Path | str | None = None) -> Regimes:
    """Read and check a regimes file; the project's own if none is named.

    Raises:
        RegimesError: if the file cannot be read or a row is at fault.
    """
    return _load_own() if path is None else _load(Path(path))


@functools.cache
def _load_own() -> Regimes:
    return _load(RULES)


def _load(path: Path) -> Regimes:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RegimesError(f"{path}: cannot be read as TOML: {error}") from error
    try:
        _keys(table, {"schema", "limits", "regime"}, "the file")
        if table["schema"] != SCHEMA:
            raise ValueError(f"its schema is {table['schema']!r}, this mla-gate reads {SCHEMA}")
        limits = {name: _limits(name, entry) for name, entry in _table(table["limits"], "limits").items()}
        if not isinstance(table["regime"], list) or not table["regime"]:
            raise ValueError("it needs rows, each under [[regime]]")
        rows = tuple(_row(number, entry, limits) for number, entry in enumerate(table["regime"], start=1))
        _check_apart(rows)
    except ValueError as error:
        raise RegimesError(f"{path}: {error}") from error
    return Regimes(rows=rows, path=path)


def _table(value: Any, owner: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{owner} must be a table, not {value!r}")
    return value


def _keys(table: dict[str, Any], known: set[str], owner: str) -> None:
    unknown, missing = set(table) - known, known - set(table)
    if unknown:
        raise ValueError(f"{owner} has no key {', '.join(sorted(unknown))}: it has {', '.join(sorted(known))}")
    if missing:
        raise ValueError(f"{owner} lacks {', '.join(sorted(missing))}")


def _reason(entry: dict[str, Any], owner: str) -> None:
    if not isinstance(entry["why"], str) or not entry["why"].strip():
        raise ValueError(f"{owner} needs a reason: why = what its numbers rest on")


def _limits(name: str, entry: Any) -> Limits:
    owner = f"limits {name!r}"
    entry = _table(entry, owner)
    _keys(entry, {field.name for field in dataclasses.fields(Limits)} - {"name"}, owner)
    _reason(entry, owner)
    try:
        return Limits(name=name, **entry)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from error


def _row(number: int, entry: Any, limits: Mapping[str, Limits]) -> Regime:
    entry = _table(entry, f"row {number}")
    owner = f"regime {entry['name']!r} (row {number})" if isinstance(entry.get("name"), str) else f"row {number}"
    _keys({"query": None} | entry, {field.name for field in dataclasses.fields(Regime)}, owner)
    _reason(entry, owner)
    if not isinstance(entry["name"], str) or not _NAME.fullmatch(entry["name"]):
        raise ValueError(f"{owner} needs a name of one word: letters, digits, dots and dashes, not {entry['name']!r}")
    for key in ("backends", "exact"):
        if not isinstance(entry[key], list) or not all(isinstance(word, str) and word for word in entry[key]):
            raise ValueError(f"{owner}: {key} takes a list of names, not {entry[key]!r}")
    if not entry["backends"]:
        raise ValueError(f"{owner} covers no backend")
    for pattern in entry["backends"]:
        if not is_name(pattern):
            raise ValueError(f"{owner} covers {pattern!r}, which no backend is called: there are {', '.join(names())}")
    if set(entry["exact"]) - set(RELATIONS):
        raise ValueError(f"{owner}: exact names {', '.join(sorted(set(entry['exact']) - set(RELATIONS)))}, which is none of "
                         f"{', '.join(RELATIONS)}")  # fmt: skip
    if entry["limits"] not in limits:
        raise ValueError(f"{owner} names the limits {entry['limits']!r}: the file has {', '.join(limits)}")
    accuracy = entry["accuracy"]
    if type(accuracy) is not float or not 0 < accuracy < 1:
        raise ValueError(f"{owner}: accuracy must be a positive float below 1, for zeros are 1 off; not {accuracy!r}")
    try:
        where = Region.from_table(_table(entry["where"], "where"))
        arithmetic = Arithmetic.from_table(_table(entry["arithmetic"], "arithmetic"))
        query = RoundedQuery.from_table(_table(entry["query"], "query")) if "query" in entry else None
    except (RegionError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{owner}: {error}") from error
    splits = arithmetic.splits
    for what, value, most in (
        ("tile", arithmetic.tile, _MOST_TILE),
        ("splits.tile", splits.tile, _MOST_TILE),
        ("splits.count", splits.count, _MOST_SPLITS),
    ):
        if value > most:
            raise ValueError(f"{owner}: {what} is {most} at most, not {value}: no kernel holds so many")
    return Regime(
        name=entry["name"],
        backends=tuple(entry["backends"]),
        where=where,
        arithmetic=arithmetic,
        limits=limits[entry["limits"]],
        accuracy=accuracy,
        exact=frozenset(entry["exact"]),
        why=entry["why"].strip(),
        query=query,
    )


def _check_apart(rows: tuple[Regime, ...]) -> None:
    for index, one in enumerate(rows):
        for two in rows[:index]:
            if one.name == two.name:
                raise ValueError(f"two rows are called {one.name!r}")
            shared = [(a, b) for a in one.backends for b in two.backends if globs_meet(a, b)]
            if shared and one.where.overlaps(two.where):
                raise ValueError(
                    f"regimes {two.name!r} and {one.name!r} overlap: both claim some case of {' and '.join(set(shared[0]))}"
                )
