"""A region of case space: the cases that a rule covers.

1. A region is a product: each named field has the values it allows, and a field that is not named allows all of its own.
2. ``lengths`` speaks of every request of a case, ``batch`` of their number; the other names are fields of Case.
3. Whether a region is empty, and whether two regions share a case, is decided exactly, without enumerating cases.
4. A field, a word or a number that no Case can have is refused when the region is read.

Source: sets of whole numbers here are intervals with a step, so that an intersection is an interval with a step too.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.case import CONTENTS, PLACEMENTS, POISONS, QUERY_LAYOUTS, TABLES, Case
from references.formats import FORMATS


class RegionError(ValueError):
    """A region that cannot be read, or that holds no case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The whole numbers from ``minimum`` to ``maximum`` that a multiple divides, some excluded."""

    #: Smallest.
    minimum: int
    #: Largest.
    maximum: int
    #: Every number is a multiple of this.
    multiple_of: int = 1
    #: Numbers left out.
    excluded: frozenset[int] = frozenset()

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int)
            and self.minimum <= value <= self.maximum
            and value % self.multiple_of == 0
            and value not in self.excluded
        )

    def meet(self, other: Numbers) -> Numbers:
        """Intersect two sets of numbers."""
        return Numbers(
            minimum=max(self.minimum, other.minimum),
            maximum=min(self.maximum, other.maximum),
            multiple_of=math.lcm(self.multiple_of, other.multiple_of),
            excluded=self.excluded | other.excluded,
        )

    def empty(self) -> bool:
        """Tell whether no number is left: at most as many steps are tried as numbers are excluded."""
        first = -(-self.minimum // self.multiple_of) * self.multiple_of
        candidates = range(first, self.maximum + 1, self.multiple_of)[: len(self.excluded) + 1]
        return all(value in self.excluded for value in candidates)

    def __str__(self) -> str:
        text = str(self.minimum) if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"
        if self.multiple_of > 1:
            text += f" in multiples of {self.multiple_of}"
        if self.excluded:
            text += f" but not {', '.join(map(str, sorted(self.excluded)))}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A set of words."""

    #: The words allowed.
    allowed: frozenset[object]

    def __contains__(self, value: object) -> bool:
        return value in self.allowed

    def meet(self, other: Words) -> Words:
        """Intersect two sets of words."""
        return Words(allowed=self.allowed & other.allowed)

    def empty(self) -> bool:
        """Tell whether no word is left."""
        return not self.allowed

    def __str__(self) -> str:
        return " or ".join(sorted(map(str, self.allowed)))


#: What each field can be at all. A test holds the numbers to those that Case accepts.
DOMAIN: Mapping[str, Numbers | Words] = {
    "heads": Numbers(minimum=1, maximum=256),
    "query_tokens": Numbers(minimum=1, maximum=16),
    "lengths": Numbers(minimum=0, maximum=1 << 31),
    "batch": Numbers(minimum=1, maximum=65536),
    "latent": Numbers(minimum=1, maximum=4096),
    "rope": Numbers(minimum=0, maximum=4096),
    "page_size": Numbers(minimum=1, maximum=1 << 20),
    "table_padding": Numbers(minimum=0, maximum=1 << 20),
    "pool_rows": Numbers(minimum=0, maximum=1 << 40),
    "token_padding": Numbers(minimum=0, maximum=1 << 20),
    "page_padding": Numbers(minimum=0, maximum=1 << 30),
    "query_format": Words(allowed=frozenset(FORMATS)),
    "cache_format": Words(allowed=frozenset(FORMATS)),
    "table": Words(allowed=frozenset(TABLES)),
    "placement": Words(allowed=frozenset(PLACEMENTS)),
    "query_layout": Words(allowed=frozenset(QUERY_LAYOUTS)),
    "content": Words(allowed=frozenset(CONTENTS)),
    "poison": Words(allowed=frozenset(POISONS)),
    "lse": Words(allowed=frozenset({True, False})),
}

#: Keys of a table of numbers: what each turns into.
_NUMBER_KEYS: Mapping[str, str] = {"min": "minimum", "max": "maximum", "multiple_of": "multiple_of", "not": "excluded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The cases whose every named field is among the values allowed."""

    #: Field name -> values allowed; a field that is not here is free.
    allowed: Mapping[str, Numbers | Words | tuple[Numbers, ...]]

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Region:
        """Read a region from its table: a list of values, or for numbers a table of min, max, multiple_of, not.

        Raises:
            RegionError: if a field, key or value is unknown, or no case can lie in the region.
        """
        allowed: dict[str, Numbers | Words | tuple[Numbers, ...]] = {}
        for field, rule in table.items():
            if field not in DOMAIN:
                raise RegionError(f"no field {field!r}: a region may name {', '.join(DOMAIN)}")
            domain = DOMAIN[field]
            allowed[field] = _words(field, rule, domain) if isinstance(domain, Words) else _numbers(field, rule, domain)
        return cls(allowed=allowed)

    def why_outside(self, case: Case) -> str | None:
        """Say which field keeps a case outside, or None if it lies inside."""
        for field, rule in self.allowed.items():
            values = case.lengths if field == "lengths" else (getattr(case, field),)
            for value in values:
                if not any(value in part for part in _parts(rule)):
                    return f"{field} {value} is not {' or '.join(map(str, _parts(rule)))}"
        return None

    def __contains__(self, case: object) -> bool:
        return isinstance(case, Case) and self.why_outside(case) is None

    def overlaps(self, other: Region) -> bool:
        """Tell whether some case could lie in both: every field that both name must share a value."""
        return all(
            any(not _meet(one, two).empty() for one in _parts(rule) for two in _parts(other.allowed[field]))
            for field, rule in self.allowed.items()
            if field in other.allowed
        )


def _parts(rule: Numbers | Words | tuple[Numbers, ...]) -> tuple[Numbers | Words, ...]:
    return rule if isinstance(rule, tuple) else (rule,)


def _meet(one: Numbers | Words, two: Numbers | Words) -> Numbers | Words:
    if isinstance(one, Numbers) and isinstance(two, Numbers):
        return one.meet(two)
    if isinstance(one, Words) and isinstance(two, Words):
        return one.meet(two)
    raise TypeError(f"{one} and {two} are values of different fields")


def _words(field: str, rule: Any, domain: Words) -> Words:
    if not isinstance(rule, list) or not rule:
        raise RegionError(f"{field} takes a list of words with one at least, not {rule!r}")
    for word in rule:
        if word not in domain:
            raise RegionError(f"{field} cannot be {word!r}: it is {domain}")
    return Words(allowed=frozenset(rule))


def _numbers(field: str, rule: Any, domain: Numbers) -> tuple[Numbers, ...]:
    if isinstance(rule, list) and rule:
        rules: list[dict[str, Any]] = [{"min": value, "max": value} for value in rule]
    elif isinstance(rule, dict) and rule:
        rules = [rule]
    else:
        raise RegionError(f"{field} takes a list of numbers, or a table of {', '.join(_NUMBER_KEYS)}, not {rule!r}")
    parts = []
    for table in rules:
        unknown = set(table) - set(_NUMBER_KEYS)
        if unknown:
            raise RegionError(f"{field} has no key {', '.join(sorted(unknown))}: it has {', '.join(_NUMBER_KEYS)}")
        given: dict[str, Any] = {_NUMBER_KEYS[key]: frozenset(value) if key == "not" else value for key, value in table.items()}
        whole = [number for value in given.values() for number in (value if isinstance(value, frozenset) else [value])]
        if any(type(number) is not int for number in whole) or given.get("multiple_of", 1) < 1:
            raise RegionError(f"{field} takes whole numbers, and multiples from 1, not {table!r}")
        part = dataclasses.replace(domain, **given)
        if part.meet(domain).empty() or not domain.minimum <= part.minimum <= part.maximum <= domain.maximum:
            raise RegionError(f"{field} leaves no value between {domain.minimum} and {domain.maximum}: {table!r}")
        parts.append(part)
    return tuple(parts)


def globs_meet(one: str, two: str) -> bool:
    """Tell whether some name matches both patterns; ``*`` stands for any text, every other character for itself."""
    if "*" not in one:
        return fnmatch.fnmatchcase(one, two)
    if "*" not in two:
        return fnmatch.fnmatchcase(two, one)
    (head, *_, tail), (other_head, *_, other_tail) = one.split("*"), two.split("*")
    # With a star in each, what lies between the fixed ends can always be written out: only the ends can clash.
    starts = head.startswith(other_head) or other_head.startswith(head)
    ends = tail.endswith(other_tail) or other_tail.endswith(tail)
    return starts and ends
