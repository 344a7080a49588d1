"""Known failures are read, cover what they say, and cannot be kept by neglect."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from harness import known
from harness.case import Case
from harness.known import KnownError, known_failures

ENTRY = """
schema = 1
[[failure]]
name = "tail"
backends = ["aiter-x*"]
regimes = ["r"]
where = { poison = ["nan"] }
when = "a page is partly used"
case = "v1:H=1:N=1:T=16:end"
faults = ["non-finite"]
issue = "aiter #1"
expires = 2099-01-01
analysis = "because"
"""


def read(folder: Path, text: str = ENTRY) -> tuple[known.KnownFailure, ...]:
    """Read a file of known failures."""
    path = folder / f"{len(list(folder.iterdir()))}.toml"
    path.write_text(text)
    return known_failures(path)


def test_the_shipped_entries_are_sound_and_running() -> None:
    assert known_failures() and not [entry.name for entry in known_failures() if entry.overdue(datetime.date.today())]


def test_an_entry_covers_its_region_of_its_backends(tmp_path: Path) -> None:
    (entry,) = read(tmp_path)
    inside = Case.parse("v1:H=4:N=17:T=16:end")
    assert entry.covers("aiter-x@main", inside) and entry.covers("aiter-x", inside, "r")
    assert not entry.covers("other", inside) and not entry.covers("aiter-x", inside, "another")
    assert not entry.covers("aiter-x", inside.replace(poison="large"))
    assert not entry.covers("aiter-x", inside.replace(lengths=(32,)))


def test_an_entry_is_overdue_from_its_day_on(tmp_path: Path) -> None:
    (entry,) = read(tmp_path)
    assert entry.overdue(datetime.date(2099, 1, 1)) and not entry.overdue(datetime.date(2098, 12, 31))


@pytest.mark.parametrize("key", ["issue", "expires", "analysis", "case", "faults", "backends", "name"])
def test_an_entry_without_one_of_its_parts_is_refused(tmp_path: Path, key: str) -> None:
    text = "\n".join(line for line in ENTRY.splitlines() if not line.startswith(f"{key} ="))
    with pytest.raises(KnownError, match=f"lacks {key}"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('issue = "aiter #1"', 'issue = " "', "issue must say something"),
        ("expires = 2099-01-01", 'expires = "soon"', "expires is a date"),
        ("a page is partly used", "it rains", "is none of"),
        ("N=1:T=16", "N=16:T=16", "does not lie in the region"),
        ("v1:H=1", "v0:H=1", "version v0"),
        ('poison = ["nan"]', 'colour = ["red"]', "no field 'colour'"),
        ("schema = 1", "schema = 2", "its schema is 2"),
        ('analysis = "because"', 'analysis = "because"\nwhy = "x"', "unknown why"),
    ],
)
def test_an_entry_at_fault_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(KnownError, match=said):
        read(tmp_path, ENTRY.replace(old, new))


def test_an_entry_without_a_region_covers_its_regimes_wholly(tmp_path: Path) -> None:
    text = "\n".join(line for line in ENTRY.splitlines() if not line.startswith(("where", "when")))
    assert read(tmp_path, text)[0].whole and not read(tmp_path)[0].whole


@pytest.mark.parametrize(
    ("condition", "text", "holds"),
    [
        ("the pool is above 2 GiB", "v1:H=1:N=1:pool=1864136:end", True),
        ("the pool is above 2 GiB", "v1:H=1:N=1:pool=1864135:end", False),
        ("the pool is above 2 GiB", "v1:H=1:N=1:c=e4m3fn:pool=1864136:end", False),
        ("the pool is above 2^31 elements", "v1:H=1:N=1:c=e4m3fn:pool=3728271:end", True),
        ("the pool is above 2^31 elements", "v1:H=1:N=1:pool=3728270:end", False),
        (
            "a query token sees scores below -103 only, and not the last page",
            "v1:H=1:S=2:N=17:T=16:content=sunken:amp=3.0:end",
            True,
        ),
        ("a query token sees scores below -103 only, and not the last page", "v1:H=1:S=2:N=9+17:T=16:amp=30.0:end", True),
        ("a query token sees scores below -103 only, and not the last page", "v1:H=1:S=2:N=17:T=16:content=sunken:end", False),
        (
            "a query token sees scores below -103 only, and not the last page",
            "v1:H=1:S=2:N=18:T=16:content=sunken:amp=3.0:end",
            False,
        ),
        (
            "a query token sees scores below -103 only, and not the last page",
            "v1:H=1:S=2:N=0+2:T=16:content=sunken:amp=3.0:end",
            False,
        ),
    ],
)
def test_conditions_tell_sizes_apart(condition: str, text: str, holds: bool) -> None:
    assert known.CONDITIONS[condition](Case.parse(text)) is holds
