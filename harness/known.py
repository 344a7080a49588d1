"""Known failures: what a backend is known to get wrong, until when that is put up with, and why it is thought so.

1. An entry names an issue, a date on which it expires, an analysis and a minimal case. One without is refused.
2. A search does not ask what an entry covers: it would find the same failure again and nothing behind it. The entry's own
   case is asked in every run instead, and must fail as the entry says: an entry that passes is an error.
3. An entry past its date is an error, whatever its case does.
4. An entry whose case may take the process down is not launched.
5. Versions are told apart: an entry covers the backend versions that it names.

Source: ``cases/known_failures.toml``.
"""

from __future__ import annotations

import datetime
import fnmatch
import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.case import Case
from harness.region import Region
from references.formats import FORMATS

#: The entries that the project ships.
KNOWN = Path(__file__).resolve().parent.parent / "cases" / "known_failures.toml"
SCHEMA = 1
_KEYS = {"name", "backends", "regimes", "where", "when", "case", "faults", "issue", "expires", "launch", "analysis"}


class KnownError(ValueError):
    """A file of known failures that cannot be used; the message names the entry and the fault."""


def _pool_bytes(case: Case) -> int:
    row = (case.width + case.token_padding) * FORMATS[case.cache_format].storage.itemsize
    pages = max(sum(-(-length // case.page_size) for length in case.lengths), -(-case.pool_rows // case.page_size))
    return pages * (case.page_size * row + case.page_padding * FORMATS[case.cache_format].storage.itemsize)


def _hides_a_page_from_sunken_scores(case: Case) -> bool:
    """Tell whether a query token that sees something does not see the last page, and may have scores below -103 only."""
    low = case.amplitude >= 30 or (case.content == "sunken" and case.amplitude > 1.7)
    edges = ((length - 1) // case.page_size * case.page_size for length in case.lengths if length)
    starts = zip((length for length in case.lengths if length), edges, strict=True)
    return low and any(0 < edge and length - case.query_tokens + 1 <= edge for length, edge in starts)


#: What a region of fields cannot say, by name.
CONDITIONS: Mapping[str, Callable[[Case], bool]] = MappingProxyType(
    {
        "always": lambda case: True,
        "a page is partly used": lambda case: any(length % case.page_size for length in case.lengths),
        "the pool is above 2 GiB": lambda case: _pool_bytes(case) > 1 << 31,
        "the pool is above 2^31 elements": lambda case: (
            _pool_bytes(case) // FORMATS[case.cache_format].storage.itemsize > 1 << 31
        ),
        "a query token sees scores below -103 only, and not the last page": _hides_a_page_from_sunken_scores,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """One thing that versions of a backend are known to get wrong."""

    #: Its name, one word.
    name: str
    #: Backends it covers, with labels; ``*`` stands for any text.
    backends: tuple[str, ...]
    #: Regimes it covers; none for all of the backend's.
    regimes: tuple[str, ...]
    #: The cases it covers, by their fields.
    where: Region
    #: What else must hold of a case: one of CONDITIONS.
    when: str
    #: The smallest case that shows it.
    case: Case
    #: Kinds of failure that the case may show.
    faults: tuple[str, ...]
    #: Where it is tracked, or that it has not been reported yet.
    issue: str
    #: The day from which it is an error to have it.
    expires: datetime.date
    #: Whether its case may be launched; False where the process may be lost with it.
    launch: bool
    #: Who is wrong, and how that is known.
    analysis: str

    def names(self, backend: str) -> bool:
        """Tell whether a backend is among those of this entry."""
        return any(fnmatch.fnmatchcase(backend, pattern) for pattern in self.backends)

    def covers(self, backend: str, case: Case, regime: str | None = None) -> bool:
        """Tell whether a case of a backend lies in this entry."""
        if not self.names(backend) or (self.regimes and regime is not None and regime not in self.regimes):
            return False
        return case in self.where and CONDITIONS[self.when](case)

    @property
    def whole(self) -> bool:
        """Whether every case of its regimes lies in it, so that nothing of them can be searched."""
        return not self.where.allowed and self.when == "always"

    def overdue(self, today: datetime.date) -> bool:
        """Tell whether its day has come."""
        return today >= self.expires


@functools.cache
def known_failures(path: Path = KNOWN) -> tuple[KnownFailure, ...]:
    """Read the known failures.

    Raises:
        KnownError: if the file cannot be read or an entry is at fault.
    """
    if not path.exists():
        return ()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise KnownError(f"{path}: cannot be read as TOML: {error}") from error
    if table.get("schema") != SCHEMA:
        raise KnownError(f"{path}: its schema is {table.get('schema')!r}, this mla-gate reads {SCHEMA}")
    return tuple(_read(path, number, entry) for number, entry in enumerate(table.get("failure", []), start=1))


def _read(path: Path, number: int, entry: dict[str, Any]) -> KnownFailure:
    owner = f"{path}: entry {entry.get('name', number)!r}"
    lacking, unknown = _KEYS - {"regimes", "where", "when", "launch"} - set(entry), set(entry) - _KEYS
    if lacking or unknown:
        raise KnownError(
            f"{owner}: lacks {', '.join(sorted(lacking)) or 'nothing'}, unknown {', '.join(sorted(unknown)) or 'nothing'}"
        )
    when, expires = entry.get("when", "always"), entry["expires"]
    if when not in CONDITIONS:
        raise KnownError(f"{owner}: when = {when!r} is none of {', '.join(CONDITIONS)}")
    if not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime):
        raise KnownError(f"{owner}: expires is a date such as 2027-03-01, not {expires!r}")
    for key in ("issue", "analysis", "name"):
        if not isinstance(entry[key], str) or not entry[key].strip():
            raise KnownError(f"{owner}: {key} must say something")
    try:
        case, where = Case.parse(entry["case"]), Region.from_table(entry.get("where", {}))
    except ValueError as error:
        raise KnownError(f"{owner}: {error}") from error
    made = KnownFailure(
        name=entry["name"],
        backends=tuple(entry["backends"]),
        regimes=tuple(entry.get("regimes", ())),
        where=where,
        when=when,
        case=case,
        faults=tuple(entry["faults"]),
        issue=entry["issue"].strip(),
        expires=expires,
        launch=entry.get("launch", True),
        analysis=entry["analysis"].strip(),
    )
    if case not in where or not CONDITIONS[when](case):
        raise KnownError(f"{owner}: its own case {case} does not lie in the region that it covers")
    return made


def covering(backend: str, case: Case, regime: str | None = None) -> KnownFailure | None:
    """Find the entry that covers a case of a backend, or None."""
    return next((entry for entry in known_failures() if entry.covers(backend, case, regime)), None)


def wholly_known(backend: str, regime: str) -> KnownFailure | None:
    """Find the entry that covers every case of a regime of a backend, or None."""
    for entry in known_failures():
        if entry.whole and entry.names(backend) and (not entry.regimes or regime in entry.regimes):
            return entry
    return None
