"""The ledger: results on disk as they come, one JSON object a line.

1. The first line is a header with the version and what the run ran on. Every later line has a ``kind``.
2. A line is written whole and at once. A run that is killed leaves every verdict it reached; a last line that was cut
   off is left out when the ledger is read.
3. Numbers that JSON lacks are written as the words ``inf``, ``-inf`` and ``nan``.
4. A ledger of a newer version is refused; a kind of line that this version does not know is passed over.

Kinds of line: ``planned`` (a regime of a backend that the run means to gate), ``result`` (one case), ``finding`` (one
fault, shrunk), ``failure`` (what a report shows of a failing case), ``domain`` (the values that a search may draw), ``gated``
(a search that ended), ``beyond`` (a regime that the run left out), ``untraced`` (a regime without serving traces),
``unasked`` (production shapes that need more than there is), ``split`` (which rows of which shard), ``against``,
``baseline`` and ``moved`` (harness/compare.py), ``end`` (the run's own end).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.run import Result

VERSION = 1
#: A line as read: its kind and the rest.
Line = Mapping[str, Any]


class LedgerError(ValueError):
    """A ledger that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One ledger as read."""

    #: Where it was read from.
    path: Path
    #: The header: version, started, command, profile, seed, environment.
    header: Line
    #: Every line after it.
    lines: tuple[Line, ...]
    #: Lines that could not be read: the last one of a run that was killed, or damage.
    damaged: int

    @property
    def complete(self) -> bool:
        """Tell whether the run reached its own end."""
        return any(line["kind"] == "end" for line in self.lines)


class Writer:
    """Writes one ledger. Only one process writes to it.

    A line that the disk does not take is kept in ``lost``, and ``trouble`` says why; it never ends the run.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        """Open the file; None keeps every line in ``lost``."""
        self.path = path
        self.lost: list[Line] = []
        self.trouble = ""
        self._file: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._write({"mla-gate": "ledger", "version": VERSION, **header})

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        self._write({"kind": kind, **fields})

    def close(self) -> None:
        """Close the file; nothing is held back."""
        if self._file is not None:
            os.close(self._file)

    def _write(self, line: Mapping[str, Any]) -> None:
        made = plain(line)
        # What is no text, as a file name may be, is written by its codes.
        text = (json.dumps(made, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")
        if self._file is None:
            self.lost.append(made)
            return
        done = 0
        try:
            # One write a line as a rule: a process killed in between leaves whole lines.
            while done < len(text):
                done += os.write(self._file, text[done:])
        except OSError as error:
            self.trouble = error.strerror or str(error)
            self.lost.append(made)
            if done:  # half a line would spoil the next one
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, os.fstat(self._file).st_size - done)


def plain(value: Any) -> Any:
    """Turn records, tuples, sets, paths and odd numbers into what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, frozenset | set):
        return [plain(entry) for entry in sorted(value)]
    if isinstance(value, Iterable):
        return [plain(entry) for entry in value]
    return str(value)


def number(value: Any) -> float:
    """Read a number back, ``inf`` and ``nan`` included."""
    return float(value)


def result_line(result: Result, phase: str) -> dict[str, Any]:
    """State a result for the ledger.

    Args:
        result: what became of a case.
        phase: "search", "shrink", "pinned" or "contract".
    """
    verdict = result.verdict
    return {
        "phase": phase,
        "case": str(result.case),
        "relation": result.relation,
        "backend": result.backend,
        "regime": result.regime,
        "verdict": verdict.kind,
        "fault": verdict.fault,
        "message": verdict.message,
        "measurements": plain(verdict.measurements),
        "seconds": round(result.seconds, 6),
        "run_seconds": round(result.run_seconds, 6),
        "compiled": result.compiled,
        "what_ran": dict(result.what_ran),
        "bits": result.bits,
    }


def read(path: Path | str) -> Ledger:
    """Read a ledger, one cut short included.

    Raises:
        LedgerError: if it is no ledger, is empty, or is of a newer version.
    """
    path = Path(path)
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror}") from error
    header = _parse(texts[0]) if texts else None
    if not header or header.get("mla-gate") != "ledger":
        raise LedgerError(f'{path}: is no ledger: its first line must be a header with "mla-gate": "ledger"')
    if header.get("version") != VERSION:
        found = header.get("version")
        raise LedgerError(f"{path}: is of version {found}, this mla-gate reads {VERSION}: use the one that wrote it")
    parsed = [_parse(text) for text in texts[1:] if text.strip()]
    lines = tuple(line for line in parsed if line is not None and "kind" in line)
    return Ledger(path=path, header=header, lines=lines, damaged=len(parsed) - len(lines))


def read_all(paths: Iterable[Path | str]) -> list[Ledger]:
    """Read several ledgers; a folder stands for every ``*.jsonl`` in it, deeper ones too.

    Raises:
        LedgerError: if one cannot be read, or a folder holds none.
    """
    return [read(path) for path in _files(paths)]


def _files(paths: Iterable[Path | str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.rglob("*.jsonl"))
        if not found:
            raise LedgerError(f"{path}: no *.jsonl in this folder")
        yield from found


def _parse(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
