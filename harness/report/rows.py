"""The rows of the verdict table, counted from ledger lines.

1. A row is a backend in a regime. One that was planned and executed nothing, or did not finish, is a failing one.
2. Cases asked while shrinking are not counted: they are chosen to fail.
3. A fault counts once, however many cases showed it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.ledger import Line, number
from harness.regimes import GRAPH
from harness.search import EXECUTED
from harness.serving.trace import is_trace

#: Regime of the row that counts refusals of cases outside a backend's contract.
CONTRACT = "(contract)"
#: Regime of results that no regime covers.
NONE = "(none)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A backend in a regime: what was asked of it and what came out."""

    backend: str
    regime: str
    #: Cases executed, random and pinned; in the contract row the cases that had to be refused.
    executed: int
    #: Faults: each shrunk one, and each failing case that was pinned or had to be refused.
    failures: int
    #: Our own faults.
    errors: int
    #: Executed cases whose check could not have failed.
    untrusted: int
    #: Cases that were not run, for want of memory or because they are too much work here.
    unrun: int
    #: Why the first of them was not; None where all were.
    short: str | None
    #: Kernels that were compiled.
    compiled: int
    #: Cases among the executed that were captured into a graph and replayed.
    graphs: int
    #: Why no graph was asked for; None where some were.
    no_graphs: str | None
    #: Serving traces among the executed, and why none were asked for; None where some were.
    traces: int
    no_traces: str | None
    #: Worst measured value over its limit, and the metric's name.
    worst: float
    metric: str
    #: Sensitivity -> executed cases that would have seen it.
    seen: Mapping[str, int]
    #: Wall time of cases, shrinking included, seconds.
    seconds: float
    #: Whether a search of this row was planned, and whether it ended.
    planned: bool
    ended: bool
    #: Whether the profile demands that every sensitivity is seen.
    demanding: bool

    @property
    def unseen(self) -> list[str]:
        """List the sensitivities that no executed case saw."""
        return sorted(name for name, count in self.seen.items() if not count)

    @property
    def reason(self) -> str | None:
        """Say why the row fails, or None."""
        if self.failures:
            return "failures"
        if self.errors:
            return "errors of the gate itself"
        if self.planned and not self.executed:
            return "no case executed"
        if self.planned and not self.ended:
            return "not finished"
        if self.demanding and self.unseen:
            return f"never seen: {', '.join(self.unseen)}"
        return None


def rows(lines: Iterable[Line]) -> list[Row]:
    """Count rows from the lines of one run's ledgers; by backend, those that were planned first, in order of appearance."""
    lines = list(lines)
    groups: dict[tuple[str, str], list[Line]] = {
        (line["backend"], row_name(line)): [] for line in lines if line["kind"] == "planned"
    }
    for line in lines:
        if line["kind"] in ("planned", "result", "finding", "gated", "untraced", "unasked"):
            groups.setdefault((line["backend"], row_name(line)), []).append(line)
    backends = list(dict.fromkeys(backend for backend, _ in groups))
    found = [_count(backend, regime, group) for (backend, regime), group in groups.items()]
    return sorted(found, key=lambda row: (backends.index(row.backend), row.regime == CONTRACT))


def left_out(lines: Iterable[Line]) -> list[str]:
    """Say which regimes of which backends a run left out, and why; each once, however many processes say so."""
    said = (f"not gated: {line['backend']} × {line['regime']}: {line['reason']}" for line in lines if line["kind"] == "beyond")
    return list(dict.fromkeys(said))


def row_name(line: Line) -> str:
    """Name the regime of the row that a line counts in."""
    return CONTRACT if line.get("phase") == "contract" else line["regime"] or NONE


def _count(backend: str, regime: str, lines: Sequence[Line]) -> Row:
    results = [line for line in lines if line["kind"] == "result"]
    asked = [line for line in results if line["phase"] != "shrink"]
    verdicts = Counter(line["verdict"] for line in asked)
    executed = [line for line in asked if line["verdict"] in EXECUTED]
    # A random case that fails is counted by the finding it shrinks to.
    failing = sum(line["verdict"] == "FAIL" and line["phase"] != "search" and not line.get("excused") for line in asked)
    unasked = [line for line in lines if line["kind"] == "unasked"]  # each process of a run says the same
    short = [line["reason"] for line in unasked] + [line["message"] for line in asked if line["verdict"] == "UNSUPPORTED"]
    worst, metric = _worst(executed)
    planned = [line for line in lines if line["kind"] == "planned"]
    ended = {line.get("part", 0) for line in lines if line["kind"] == "gated" and line.get("relation") is None}
    return Row(
        backend=backend,
        regime=regime,
        executed=len(asked) if regime == CONTRACT else len(executed),
        failures=failing + sum(line["kind"] == "finding" for line in lines),
        errors=verdicts["ERROR"],
        untrusted=verdicts["UNTRUSTED"],
        unrun=0 if regime == CONTRACT else verdicts["UNSUPPORTED"] + max((line["cases"] for line in unasked), default=0),
        short=next((said for said in short if said), None),
        compiled=sum(line.get("compiled", 0) for line in results),
        graphs=sum(line["relation"] == GRAPH for line in executed),
        traces=sum(is_trace(line["relation"]) for line in executed),
        no_traces=next((line["reason"] for line in lines if line["kind"] == "untraced"), None),
        no_graphs=next((line["no_graphs"] for line in lines if line.get("no_graphs")), None),
        worst=worst,
        metric=metric,
        seen=_seen(executed),
        seconds=sum(line["seconds"] for line in results),
        planned=bool(planned),
        ended=len(ended) >= max((line.get("parts", 1) for line in planned), default=1),
        demanding=any(line["demanding"] for line in planned),
    )


def _worst(executed: Sequence[Line]) -> tuple[float, str]:
    worst, metric = -math.inf, ""
    for line in executed:
        for name, ratio in ((line["measurements"] or {}).get("ratios") or {}).items():
            value = number(ratio)
            if not value <= worst:  # NaN counts as worse than anything
                worst, metric = value, name
    return (worst, metric) if metric else (0.0, "")


def _seen(executed: Sequence[Line]) -> dict[str, int]:
    seen: dict[str, int] = {}
    for line in executed:
        for name, sees in ((line["measurements"] or {}).get("sensitivities") or {}).items():
            seen[name] = seen.get(name, 0) + bool(sees)
    return seen
