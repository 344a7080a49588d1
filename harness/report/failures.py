"""The failures that ledgers tell of, each once, with what is known of it.

1. A finding stands for every random case that failed like it; a failing case that was not drawn stands for itself.
2. One whose line of evidence is missing, because its run was killed or is an older one's, stands here with what there is.

Source: the kinds of line are those of ``harness.ledger``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.case import Case, CaseError
from harness.ledger import Line, number
from harness.measure import CHECKS
from harness.regimes import ABOUT_GRAPH, ABOUT_REFUSAL, GRAPH, REFUSAL, RELATIONS
from harness.report.rows import CONTRACT, Row
from harness.report.spread import Histogram, rhos
from harness.script.text import in_words
from harness.search import EXECUTED
from harness.serving.trace import TraceError, is_trace, trace_of

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
    #: What was asked beyond one run (a relation, a graph, a serving trace), in words, and the trace's steps; or None.
    relation: str | None
    about: str
    steps: tuple[str, ...]
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


def failures_of(anchor: str, row: Row, lines: Sequence[Line]) -> list[Failure]:
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
        case = case_of(line["case"])
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
                steps=_steps(relation),
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


def _about(relation: str | None) -> str:
    """Say what a question asked beyond one run of a case; nothing where that was all."""
    if is_trace(relation):
        return "The case is the last decode of a serving trace."
    known = {**RELATIONS, GRAPH: ABOUT_GRAPH, REFUSAL: ABOUT_REFUSAL}.get(relation or "", "")
    return f"One run is held to another, {relation}: {known}." if known else ""


def _steps(relation: str | None) -> tuple[str, ...]:
    """List a serving trace: its pool, and what was done on it."""
    try:
        trace = trace_of(relation)
    except TraceError:  # of another version
        return (str(relation),)
    return (trace.about, *trace.lines) if trace else ()


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


def executed_of(lines: Iterable[Line]) -> list[Line]:
    """List the results that count: of cases that were executed, those asked while shrinking left out."""
    return [line for line in lines if line["kind"] == "result" and line["phase"] != "shrink" and line["verdict"] in EXECUTED]


def case_of(text: str) -> Case | None:
    try:
        return Case.parse(text)
    except CaseError:  # of another version: it still counts, and its axes cannot be told
        return None
