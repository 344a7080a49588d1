"""A run as its reports tell it: rows, regimes, failures, environments, made once from merged ledgers.

1. Every form of report is written from this record, and so says the same.
2. A failure stands here once, however many lines speak of it; one whose line of evidence is missing, because its run was
   killed or is an older one's, stands here with what there is.
3. Nothing is run and no backend is imported: a report is made anywhere, and later.

Source: the kinds of line are those of ``harness.ledger``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.case import Case, CaseError
from harness.compare import Comparison, comparisons
from harness.ledger import Line, number
from harness.measure import CHECKS
from harness.merge import Merged
from harness.regimes import ABOUT_GRAPH, ABOUT_REFUSAL, GRAPH, REFUSAL, RELATIONS
from harness.report.coverage import Crossing, Reach, crossings, domain_of, reaches
from harness.report.rows import CONTRACT, Row, left_out, row_name
from harness.report.spread import Histogram, ratios, rhos, untrusted
from harness.report.terminal import notes, verdict
from harness.script.text import in_words
from harness.search import EXECUTED
from harness.serving.trace import Trace, TraceError, is_trace

#: Passes nearest to a limit that are listed of a regime.
NEAREST = 8
#: What is shown of a failure that no ``failure`` line speaks of.
NOTHING: Mapping[str, Any] = {
    "command": "", "looks": (), "notes": (), "grids": (), "first": None, "neighbour": None, "difference": "", "others": (),
    "complete": True, "script": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failing case, and what is known of it."""

    #: Where it is found in a document.
    anchor: str
    backend: str
    regime: str
    #: Regime of the row of the verdict table that counts it.
    row: str
    #: Its id, and the facts of it in words.
    case: str
    words: str
    #: "finding" (shrunk from a random case), or the phase in which it was asked: "pinned", "contract", "search".
    phase: str
    #: The relation between two runs that it broke, and what that is; None for one run.
    relation: str | None
    about: str
    #: The verdict, its kind of fault, its words.
    verdict: str
    fault: str
    message: str
    #: Broken checks: name, meaning, ratio to the limit; the furthest first.
    checks: tuple[tuple[str, str, float], ...]
    #: Worst rows and elements, as the ledger has them.
    worst_rows: tuple[Line, ...]
    worst_elements: tuple[Line, ...]
    #: ρ of its worst row and the limit of that; None where none was measured.
    rho: float | None
    rho_limit: float | None
    #: ρ of all cases of the regime.
    spread: Histogram | None
    #: What a report shows beyond the verdict: the ledger's ``failure`` line, or NOTHING where there is none.
    shown: Line

    @property
    def kind(self) -> str:
        """Name its verdict and fault."""
        return f"{self.verdict} {self.fault}".strip()


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
        failures += _failures(f"failure-{index}", row, lines)
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
    cases = [case for line in executed if (case := _case(line["case"])) is not None]
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


def executed_of(lines: Iterable[Line]) -> list[Line]:
    """List the results that count: of cases that were executed, those asked while shrinking left out."""
    return [line for line in lines if line["kind"] == "result" and line["phase"] != "shrink" and line["verdict"] in EXECUTED]


def _case(text: str) -> Case | None:
    try:
        return Case.parse(text)
    except CaseError:  # of another version: it still counts, and its axes cannot be told
        return None


def _nearest(executed: Iterable[Line]) -> tuple[tuple[float, str, str], ...]:
    found = []
    for line in executed:
        measured = (line["measurements"] or {}).get("ratios") or {}
        if line["verdict"] == "PASS" and measured:
            name, ratio = max(measured.items(), key=lambda item: number(item[1]))
            found.append((number(ratio), name, str(line["case"])))
    return tuple(sorted(found, reverse=True)[:NEAREST])


def _failures(anchor: str, row: Row, lines: Sequence[Line]) -> list[Failure]:
    """List the failures of a row, each once: what was shrunk, and what failed without being a random case."""
    shown = {_key(line): line for line in lines if line["kind"] == "failure"}
    failing = {_key(line): line for line in lines if line["kind"] == "finding"}
    for line in lines:
        if line["kind"] == "result" and line["phase"] != "shrink" and _failed(line, row):
            failing.setdefault(_key(line), line)
    executed = executed_of(lines)
    made = []
    for place, (key, line) in enumerate(failing.items()):
        rho, limit = _rho(line)
        relation = line.get("relation")
        case = _case(line["case"])
        measured = line.get("measurements") or {}
        broken = {name: number(ratio) for name, ratio in (measured.get("ratios") or {}).items() if not number(ratio) <= 1}
        made.append(
            Failure(
                anchor=f"{anchor}-{place}",
                backend=line["backend"],
                regime=line["regime"] or row.regime,
                row=row.regime,
                case=line["case"],
                words=in_words(case) if case else "",
                phase="finding" if line["kind"] == "finding" else line["phase"],
                relation=relation,
                about=_about(relation),
                verdict=line["verdict"],
                fault=line["fault"] or "",
                message=line["message"],
                checks=tuple(
                    (name, CHECKS.get(name, name), broken[name]) for name in sorted(broken, key=broken.__getitem__)[::-1]
                ),
                worst_rows=tuple(measured.get("worst_rows") or ()),
                worst_elements=tuple(measured.get("worst_elements") or ()),
                rho=rho,
                rho_limit=limit,
                spread=rhos(executed, *(mark for mark in (rho, limit) if mark is not None)) if rho is not None else None,
                shown={**NOTHING, **shown.get(key, {})},
            )
        )
    return made


def _key(line: Line) -> tuple[Any, ...]:
    return (line["case"], line.get("relation"))


def _failed(line: Line, row: Row) -> bool:
    """Tell whether a result is a failure of its own; a random one that was shrunk is told by its finding.

    One that is excused, because its baseline shares it, is the comparison's to tell.
    """
    if line.get("excused"):
        return False
    if line["verdict"] == "ERROR":
        return True
    if row.regime == CONTRACT:
        return bool(line["verdict"] != "UNSUPPORTED")
    return bool(line["verdict"] == "FAIL" and line["phase"] != "search")


def _rho(line: Line) -> tuple[float | None, float | None]:
    """Read ρ of the worst row, and the ρ at which its check breaks, off the z that it had and may have."""
    rows = (line.get("measurements") or {}).get("worst_rows") or ()
    if not rows:
        return None, None
    worst = max(rows, key=lambda row: number(row["rho"]))
    rho, z, limit = (number(worst[name]) for name in ("rho", "z", "z_limit"))
    if not z > 0 or not rho > 1:
        return rho, None
    return rho, float((1 + limit * (rho**2 - 1) / z) ** 0.5)


def _about(relation: str | None) -> str:
    """Say what a relation is; of a serving trace its steps."""
    if relation is not None and is_trace(relation):
        with contextlib.suppress(TraceError):
            return f"a decode after these steps of an engine: {'; '.join(map(str, Trace.parse(relation).steps))}"
    return {**RELATIONS, GRAPH: ABOUT_GRAPH, REFUSAL: ABOUT_REFUSAL}.get(relation or "", "")
