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

from harness.case import CONTENTS, Case
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


#: Axes: what they are called, the field, and how its values are told.
AXES: Sequence[tuple[str, str, Callable[[Iterable[Any]], list[str]]]] = (
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


def reaches(cases: Sequence[Case], domain: Mapping[str, Sequence[Any]] | None) -> tuple[Reach, ...]:
    """Count what the executed cases had on each axis, against what could have been drawn (None: not known)."""
    found = []
    for name, field, told in AXES:
        possible = (domain or {}).get(field) or ()
        had: Counter[str] = Counter()
        values: list[Any] = []
        for case in cases:
            own = set(case.lengths) if field == "lengths" else {getattr(case, field)}
            values += own
            had.update(set(told(own)))
        order = told([*possible, *dict.fromkeys(values)])
        counts = tuple((value, had[value]) for value in order)
        if len(counts) > 1:
            found.append(Reach(name=name, counts=counts, known=bool(possible)))
    return tuple(found)


def crossings(cases: Sequence[Case]) -> tuple[Crossing, ...]:
    """Cross heads with the longest request, and content with the cache's format."""
    if not cases:
        return ()
    heads = [by_twos(case.heads) for case in cases]
    longest = [by_twos(max(case.lengths)) for case in cases]
    content, formats = [case.content for case in cases], [case.cache_format for case in cases]
    return (
        _cross("heads", "longest request", heads, longest, _twos(case.heads for case in cases),
               _twos(max(case.lengths) for case in cases)),
        _cross("content", "cache format", content, formats, [name for name in CONTENTS if name in content],
               list(dict.fromkeys(sorted(formats)))),
    )  # fmt: skip


def _cross(
    rows: str, columns: str, first: Sequence[str], second: Sequence[str], row_names: Sequence[str], column_names: Sequence[str]
) -> Crossing:
    counts = Counter(zip(first, second, strict=True))
    table = tuple(tuple(counts[row, column] for column in column_names) for row in row_names)
    return Crossing(
        rows=rows, columns=columns, row_names=tuple(row_names), column_names=tuple(column_names), counts=table
    )  # fmt: skip


def domain_of(lines: Iterable[Line]) -> dict[str, list[Any]] | None:
    """Join the ``domain`` lines of a regime of a backend; None where there is none."""
    joined: dict[str, dict[Any, None]] = {}
    for line in lines:
        if line["kind"] == "domain":
            for field, values in line.items():
                if field not in ("kind", "backend", "regime"):
                    joined.setdefault(field, {}).update(dict.fromkeys(values))
    return {field: list(values) for field, values in joined.items()} or None
