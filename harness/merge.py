"""Several ledgers as one record: the processes, shards, GPUs and hosts of what was asked.

1. A ledger counts once, however often it is named or copied.
2. Ledgers that differ in what their numbers depend on (seed, profile, commit, versions, device) are merged and said to differ.
3. A shard that is missing leaves its rows planned and empty, so that the merged table fails and names them.
4. A ledger that was cut short counts up to the cut; the search it was in did not finish, and its row says so.
5. Merged in any order, the same ledgers give the same record; the shards of a run give that of the run unsharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.ledger import Ledger, LedgerError, Line, read_all
from harness.report.rows import Row, row_name, rows

#: What a header's numbers depend on, outside its environment, and how it is called.
_OPTIONS = {"seed": "seeds", "profile": "profiles", "examples": "numbers of examples"}
#: What differs between the processes of one run, and means nothing for its numbers.
_INDIFFERENT = frozenset({"platform"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What several ledgers say together."""

    #: The ledgers, each once, by when they were begun.
    ledgers: tuple[Ledger, ...]
    #: Their lines: the regimes that were planned first, then everything in the order of the ledgers.
    lines: tuple[Line, ...]
    #: What a reader must know of them: what is mixed, what is missing, what was cut short; one sentence each.
    remarks: tuple[str, ...]

    @property
    def rows(self) -> list[Row]:
        """Count the verdict table."""
        return rows(self.lines)

    @property
    def cut(self) -> tuple[Path, ...]:
        """List the ledgers that end before their run did."""
        return tuple(ledger.path for ledger in self.ledgers if not ledger.complete)


def merge(paths: Iterable[Path | str]) -> Merged:
    """Read ledgers, or folders of them, and merge them.

    Raises:
        LedgerError: if one cannot be read, or none is named.
    """
    return merge_ledgers(read_all(paths))


def merge_ledgers(read: Iterable[Ledger], *, whole: bool = True) -> Merged:
    """Merge ledgers that have been read; ``whole`` says whether shards that are not among them are missing.

    Raises:
        LedgerError: if there is none, or if shards do not belong together.
    """
    ledgers = _once(read)
    if not ledgers:
        raise LedgerError("there is no ledger to merge")
    splits = [line for ledger in ledgers for line in ledger.lines if line["kind"] == "split"]
    missing = _missing(splits) if whole else []
    lines = [line for ledger in ledgers for line in ledger.lines] + [line for _, line in missing]
    order = {unit: place for split in splits for place, unit in enumerate(_units(split))}
    # Rows stand in the order in which they are first named: that of the run, whichever shard came first.
    lines.sort(key=lambda line: (line["kind"] != "planned", order.get(_unit(line), len(order))))
    remarks = [*_mixed(ledgers), *dict.fromkeys(told for told, _ in missing), *_cut(ledgers)]
    return Merged(ledgers=ledgers, lines=tuple(lines), remarks=tuple(remarks))


def _once(read: Iterable[Ledger]) -> tuple[Ledger, ...]:
    """Order ledgers by when they began, and leave out those that are the beginning of another."""
    kept: list[Ledger] = []
    for ledger in sorted(read, key=lambda one: (str(one.header.get("started", "")), -len(one.lines), json.dumps(one.header))):
        if not any(ledger.header == one.header and ledger.lines == one.lines[: len(ledger.lines)] for one in kept):
            kept.append(ledger)
    return tuple(kept)


def _missing(splits: list[Line]) -> list[tuple[str, Line]]:
    """Find the shards that are not there: a sentence, and the line that plans each row it would have held."""
    found: list[tuple[str, Line]] = []
    sizes = {split["of"] for split in splits}
    if len(sizes) > 1:
        named = " and ".join(map(str, sorted(sizes)))
        raise LedgerError(f"shards of {named} parts do not belong together: report each run alone")
    lists = {json.dumps(split["units"]) for split in splits}
    if len(lists) > 1:
        raise LedgerError("the shards were cut from different lists of rows: their backends, regimes or devices differ")
    there = {split["shard"] for split in splits}
    for size in sizes:
        units = _units(splits[0])
        for shard in sorted(set(range(1, size + 1)) - there):
            held = units[shard - 1 :: size]
            named = ", ".join(f"{backend} × {regime}" for backend, regime in held)
            told = f"shard {shard} of {size} is missing, and with it {named}"
            empty = {"kind": "planned", "demanding": False}
            found += [(told, {**empty, "backend": backend, "regime": regime}) for backend, regime in held]
    return found


def _units(split: Line) -> list[tuple[str, str]]:
    return [(str(backend), str(regime)) for backend, regime in split["units"]]


def _unit(line: Line) -> tuple[str, str]:
    return (str(line.get("backend")), row_name(line)) if "regime" in line else ("", "")


def _mixed(ledgers: Iterable[Ledger]) -> list[str]:
    """Say in which of the things that numbers depend on the ledgers differ."""
    found: dict[str, dict[str, None]] = {}
    for ledger in ledgers:
        for what, value in _depends(ledger.header).items():
            found.setdefault(what, {})[value] = None
    return [f"the ledgers have several {what}: {', '.join(values)}" for what, values in found.items() if len(values) > 1]


def _depends(header: Mapping[str, Any]) -> dict[str, str]:
    environment = header.get("environment") or {}
    named = {f"values of {key}": str(value) for key, value in environment.items() if key not in _INDIFFERENT}
    # Processes of one run share GPUs of one kind by their index.
    named["values of device"] = str(environment.get("device", "")).partition(":")[0]
    return {word: str(header.get(key)) for key, word in _OPTIONS.items() if key in header} | named


def _cut(ledgers: Iterable[Ledger]) -> list[str]:
    told = [f"{ledger.path} ends before its run did: what it holds is counted" for ledger in ledgers if not ledger.complete]
    return told + [f"{ledger.path} has {ledger.damaged} lines that cannot be read" for ledger in ledgers if ledger.damaged]
