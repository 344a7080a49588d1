"""The verdict table and the failure panel, as plain text.

1. The table has a row for each backend and regime that was planned, an empty one included, and says why a row fails.
2. Nothing depends on colour or on the width of the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.rows import CONTRACT, Row

_HEADS = (
    "backend", "regime", "cases", "failures", "untrusted", "worst ratio", "never seen", "compiled", "graphs", "traces",
    "time", "verdict",
)  # fmt: skip
#: Columns whose entries are words; numbers stand to the right.
_WORDS = frozenset({"backend", "regime", "worst ratio", "never seen", "verdict"})


def table(found: Sequence[Row]) -> list[str]:
    """Draw the verdict table, one string a line."""
    body = [_cells(row) for row in found]
    widths = [max(len(cells[column]) for cells in (_HEADS, *body)) for column in range(len(_HEADS))]

    def draw(cells: Sequence[str]) -> str:
        shown = [
            cell.ljust(width) if head in _WORDS else cell.rjust(width)
            for head, cell, width in zip(_HEADS, cells, widths, strict=True)
        ]
        return "  ".join(shown).rstrip()

    return [draw(_HEADS), "  ".join("─" * width for width in widths), *map(draw, body)]


def verdict(found: Sequence[Row]) -> str:
    """Say in one line how a run ended."""
    bad = [row for row in found if row.reason]
    executed = sum(row.executed for row in found)
    if not found:
        return "mla-gate: nothing was gated"
    if bad:
        named = ", ".join(f"{row.backend} × {row.regime} ({row.reason})" for row in bad)
        return f"mla-gate: FAIL after {executed} cases: {named}"
    return f"mla-gate: PASS, {executed} cases executed"


def notes(found: Sequence[Row]) -> list[str]:
    """Say which cases were not run and why, and where no graph or trace was asked for, one string a line."""
    said = [
        f"not run: {row.backend} × {row.regime}: {row.unrun} of {row.executed + row.unrun} cases; {row.short}"
        for row in found
        if row.unrun
    ]
    for what in ("graphs", "traces"):
        reasons: dict[str, list[str]] = {}
        for row in found:
            if reason := getattr(row, f"no_{what}"):
                reasons.setdefault(reason, []).append(row.regime)
        said += [f"no {what} asked of {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
    return said


def _cells(row: Row) -> tuple[str, ...]:
    contract = row.regime == CONTRACT
    share = f"{row.untrusted / row.executed:.1%}" if row.executed else "–"
    worst = f"{row.worst:.3g} {row.metric}" if row.metric else "–"
    cases = f"{row.executed}" + (f" (+{row.unrun} not run)" if row.unrun else "")
    never = ", ".join(row.unseen) if row.unseen else ("–" if contract or not row.seen else "none")
    return (
        row.backend,
        row.regime,
        cases,
        str(row.failures + row.errors),
        "–" if contract else share,
        worst,
        never,
        str(row.compiled) if row.compiled else "–",
        "–" if contract else "not asked" if row.no_graphs else str(row.graphs),
        "–" if contract else "not asked" if row.no_traces else str(row.traces),
        f"{row.seconds:.1f} s",
        f"FAIL: {row.reason}" if row.reason else f"PASS, {row.unrun} not run" if row.unrun else "PASS",
    )
