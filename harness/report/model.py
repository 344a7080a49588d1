"""A run as its reports tell it: rows, regimes, failures, environments, made once from merged ledgers.

1. Every form of report is written from this record, and so says the same.
2. A failure stands here once, however many lines speak of it; one whose line of evidence is missing, because its run was
   killed or is an older one's, stands here with what there is.
3. Nothing is run and no backend is imported: a report is made anywhere, and later.

Source: the kinds of line are those of ``harness.ledger``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.compare import Comparison, comparisons
from harness.ledger import Line, number
from harness.merge import Merged
from harness.report.coverage import Crossing, Reach, crossings, domain_of, reaches
from harness.report.failures import Failure, case_of, executed_of, failures_of
from harness.report.rows import Row, left_out, row_name
from harness.report.spread import Histogram, ratios, untrusted
from harness.report.terminal import notes, verdict
from harness.serving.trace import is_trace

#: Passes nearest to a limit that are listed of a regime.
NEAREST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A row of the verdict table, and what lies behind it."""

    row: Row
    anchor: str
    #: Each check's ratios over the executed cases.
    ratios: tuple[Histogram, ...]
    #: Null model -> untrusted cases that it would have passed.
    untrusted: Mapping[str, int]
    #: What was executed, axis by axis, and two axes at a time.
    reaches: tuple[Reach, ...]
    crossings: tuple[Crossing, ...]
    #: Relation between runs, or "one run" -> executed cases.
    relations: Mapping[str, int]
    #: The passes nearest to a limit: ratio, check, case.
    nearest: tuple[tuple[float, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a report says."""

    #: How the run ended, in one line, and whether well.
    verdict: str
    passed: bool
    parts: tuple[Part, ...]
    failures: tuple[Failure, ...]
    #: Backends beside their baselines; none where nothing was compared.
    comparisons: tuple[Comparison, ...]
    #: What a reader must know: what is mixed, missing, cut, not run, left out.
    remarks: tuple[str, ...]
    #: Headers of the ledgers.
    headers: tuple[Line, ...]
    #: Key -> values found in the ledgers' environments.
    environment: Mapping[str, tuple[str, ...]]
    #: Cases executed, and wall time of cases, seconds.
    executed: int
    seconds: float


def make_report(merged: Merged) -> Report:
    """Make the report of merged ledgers."""
    found = merged.rows
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in merged.lines:
        if "backend" in line and "regime" in line:
            groups.setdefault((line["backend"], row_name(line)), []).append(line)
    parts, failures = [], []
    for index, row in enumerate(found):
        lines = groups[row.backend, row.regime]
        parts.append(_part(f"row-{index}", row, lines))
        failures += failures_of(f"failure-{index}", row, lines)
    beside = comparisons(merged.lines)
    environment: dict[str, dict[str, None]] = {}
    for ledger in merged.ledgers:
        for key, value in (ledger.header.get("environment") or {}).items():
            environment.setdefault(key, {})[str(value)] = None
    return Report(
        verdict=verdict(found).removeprefix("mla-gate: "),
        passed=bool(found) and not any(row.reason for row in found) and not any(one.reason for one in beside),
        parts=tuple(parts),
        failures=tuple(failures),
        comparisons=tuple(beside),
        remarks=(*merged.remarks, *notes(found), *left_out(merged.lines)),
        headers=tuple(ledger.header for ledger in merged.ledgers),
        environment={key: tuple(values) for key, values in environment.items()},
        executed=sum(row.executed for row in found),
        seconds=sum(row.seconds for row in found),
    )


def _part(anchor: str, row: Row, lines: Sequence[Line]) -> Part:
    executed = executed_of(lines)
    cases = [case for line in executed if (case := case_of(line["case"])) is not None]
    domain = domain_of(lines)
    relations: dict[str, int] = {}
    for line in executed:
        name = "serving trace" if is_trace(line["relation"]) else line["relation"] or "one run"
        relations[name] = relations.get(name, 0) + 1
    return Part(
        row=row,
        anchor=anchor,
        ratios=ratios(executed),
        untrusted=untrusted(executed),
        reaches=reaches(cases, domain),
        crossings=crossings(cases, domain),
        relations=dict(sorted(relations.items(), key=lambda item: -item[1])),
        nearest=_nearest(executed),
    )


def _nearest(executed: Iterable[Line]) -> tuple[tuple[float, str, str], ...]:
    found = []
    for line in executed:
        measured = (line["measurements"] or {}).get("ratios") or {}
        if line["verdict"] == "PASS" and measured:
            name, ratio = max(measured.items(), key=lambda item: number(item[1]))
            found.append((number(ratio), name, str(line["case"])))
    return tuple(sorted(found, reverse=True)[:NEAREST])
