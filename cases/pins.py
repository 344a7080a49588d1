"""The pinned cases: those that every run asks, with the reason for each.

1. A file of ``pinned/`` holds cases of one theme: a version, why the theme, and a name, an id and a reason for each case.
2. A fault in a file is an error that names the file and the case.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.case import Case, CaseError

FOLDER = Path(__file__).parent / "pinned"
VERSION = 1


class PinError(ValueError):
    """A file of pinned cases that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A case that every run asks."""

    #: Name of the file and of the case in it.
    name: str
    case: Case
    #: What it is asked for.
    why: str


@functools.cache
def pinned(folder: Path = FOLDER) -> tuple[Pin, ...]:
    """Read the pinned cases, by file and in order.

    Raises:
        PinError: if a file is at fault.
    """
    return tuple(pin for path in sorted(folder.glob("*.json")) for pin in _read(path))


def _read(path: Path) -> list[Pin]:
    try:
        body: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PinError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(body, dict) or body.get("mla-gate") != "pinned" or body.get("version") != VERSION:
        raise PinError(f'{path}: must hold "mla-gate": "pinned" and "version": {VERSION}')
    pins = []
    for entry in body.get("cases", []):
        lacking = [key for key in ("name", "case", "why") if not isinstance(entry, dict) or not entry.get(key)]
        if lacking:
            raise PinError(f"{path}: a case lacks {', '.join(lacking)}: {entry!r}")
        try:
            case = Case.parse(entry["case"])
        except CaseError as error:
            raise PinError(f"{path}: {entry['name']}: {error}") from error
        pins.append(Pin(name=f"{path.stem}-{entry['name']}", case=case, why=entry["why"]))
    if not pins:
        raise PinError(f"{path}: holds no case")
    return pins
