"""Where the generator went in case space, and where it did not.

1. Only executed cases count, random and pinned; those asked while shrinking do not.
2. What could have been drawn comes from the run itself, for it knew the backend's contract. A value that could have been
   drawn and never was stands there with a zero; where the run did not write it down, that is said.
3. Long axes are told by powers of two.

Source: the fields of a case, and the ``domain`` lines of the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.case import Case
from harness.ledger import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One axis: each value or range of values, and how many cases had it."""

    #: The axis, in words.
    name: str
    #: (value, cases), in the axis's order.
    counts: tuple[tuple[str, int], ...]
    #: Whether what could have been drawn is known, so that a zero means something.
    known: bool

    @property
    def missed(self) -> tuple[str, ...]:
        """List what could have been drawn and never was."""
        return tuple(value for value, count in self.counts if not count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Two axes against each other: how many cases had both."""

    rows: str
    columns: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    #: By row.
    counts: tuple[tuple[int, ...], ...]

    @property
    def most(self) -> int:
        """Give the largest count."""
        return max(map(max, self.counts))


def by_twos(value: int) -> str:
    """Name the range of powers of two that a number lies in: 0, 1, 2, 3–4, 5–8, …"""
    if value <= 2:
        return str(value)
    high = 1 << (value - 1).bit_length()
    return f"{high // 2 + 1}–{high}"


def _twos(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(by_twos(int(value)) for value in sorted(values)))


def _plainly(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(_word(value) for value in values))


def _numbers(values: Iterable[Any]) -> list[str]:
    return _plainly(sorted(values))


def _word(value: Any) -> str:
    return "yes" if value is True else "no" if value is False else f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A field of a case, and how its values are told."""

    name: str
    field: str
    #: Turns values into words, in the axis's order.
    told: Callable[[Iterable[Any]], list[str]]

    def values(self, case: Case) -> set[Any]:
        """List the values that a case has: of lengths one for each request."""
        return set(case.lengths) if self.field == "lengths" else {getattr(case, self.field)}

    def words(self, cases: Iterable[Case], domain: Mapping[str, Sequence[Any]]) -> list[str]:
        """List what could have been drawn and what was."""
        had = (value for case in cases for value in self.values(case))
        return self.told([*dict.fromkeys((*domain.get(self.field, ()), *had))])


AXES: Mapping[str, Axis] = {
    field: Axis(name=name, field=field, told=told)
    for name, field, told in (
        ("heads", "heads", _twos),
        ("requests", "batch", _twos),
        ("tokens of a request", "lengths", _twos),
        ("query tokens", "query_tokens", _numbers),
        ("content", "content", _plainly),
        ("query format", "query_format", _plainly),
        ("cache format", "cache_format", _plainly),
        ("tokens a page", "page_size", _numbers),
        ("placement", "placement", _plainly),
        ("pool rows", "pool_rows", _numbers),
        ("block table", "table", _plainly),
        ("query layout", "query_layout", _plainly),
        ("amplitude", "amplitude", _numbers),
        ("cache scale", "cache_scale", _numbers),
        ("query scale", "query_scale", _numbers),
        ("latent width", "latent", _numbers),
        ("lse asked for", "lse", _plainly),
        ("dead memory", "poison", _plainly),
    )
}
#: Axes that are crossed; of a case's requests the longest counts.
CROSSED = (("heads", "lengths"), ("content", "cache_format"))


def reaches(cases: Sequence[Case], domain: Mapping[str, Sequence[Any]]) -> tuple[Reach, ...]:
    """Count what the executed cases had on each axis, against what could have been drawn (field -> values)."""
    found = []
    for field, axis in AXES.items():
        had: Counter[str] = Counter()
        for case in cases:
            had.update(set(axis.told(axis.values(case))))
        counts = tuple((word, had[word]) for word in axis.words(cases, domain))
        if len(counts) > 1:
            found.append(Reach(name=axis.name, counts=counts, known=field in domain))
    return tuple(found)


def crossings(cases: Sequence[Case], domain: Mapping[str, Sequence[Any]]) -> tuple[Crossing, ...]:
    """Count the executed cases on two axes at a time."""
    return tuple(_cross(cases, AXES[rows], AXES[columns], domain) for rows, columns in CROSSED) if cases else ()


def _cross(cases: Sequence[Case], rows: Axis, columns: Axis, domain: Mapping[str, Sequence[Any]]) -> Crossing:
    def word(axis: Axis, case: Case) -> str:
        return axis.told([max(axis.values(case))])[0]

    counts = Counter((word(rows, case), word(columns, case)) for case in cases)
    names = rows.words(cases, domain), columns.words(cases, domain)
    return Crossing(
        rows=rows.name,
        columns="longest request" if columns.field == "lengths" else columns.name,
        row_names=tuple(names[0]),
        column_names=tuple(names[1]),
        counts=tuple(tuple(counts[row, column] for column in names[1]) for row in names[0]),
    )


def domain_of(lines: Iterable[Line]) -> dict[str, list[Any]]:
    """Join the ``domain`` lines of a regime of a backend; empty where there is none."""
    joined: dict[str, dict[Any, None]] = {}
    for line in lines:
        if line["kind"] == "domain":
            for field, values in line.items():
                if field not in ("kind", "backend", "regime"):
                    joined.setdefault(field, {}).update(dict.fromkeys(values))
    return {field: list(values) for field, values in joined.items()}
