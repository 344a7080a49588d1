"""Base against change as plain text.

1. One line a backend and regime, then what each line stands for: the smallest cases, the likely cause, the errors that moved.
2. What was not compared is said, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare import Comparison

_HEADS = ("backend", "regime", "baseline", "compared", "fail newly", "pass newly", "fail on both", "other bits", "errors")
#: Columns whose entries are words; numbers stand to the right.
_WORDS = frozenset({"backend", "regime", "baseline", "errors"})
#: Cases that are named of each kind.
NAMED = 2


def section(found: Sequence[Comparison]) -> list[str]:
    """Draw the comparison, one string a line; nothing where nothing was to be compared."""
    if not found:
        return []
    body = [_cells(one) for one in found]
    widths = [max(len(cells[column]) for cells in (_HEADS, *body)) for column in range(len(_HEADS))]

    def draw(cells: Sequence[str]) -> str:
        shown = (
            cell.ljust(width) if head in _WORDS else cell.rjust(width)
            for head, cell, width in zip(_HEADS, cells, widths, strict=True)
        )
        return "  ".join(shown).rstrip()

    lines = ["", "base against change", draw(_HEADS), "  ".join("─" * width for width in widths), *map(draw, body)]
    for one in found:
        said = _notes(one)
        lines += [f"{one.backend} × {one.regime}", *(f"  {line}" for line in said)] if said else []
    return [*lines, _verdict(found)]


def _cells(one: Comparison) -> tuple[str, ...]:
    errors = ", ".join(f"{test.metric} × {test.ratio:.3g}" for test in one.moved)
    counts = (one.pairs, len(one.failing), len(one.passing), len(one.both))
    bits = f"{len(one.differing)} of {one.known}" if one.known else "–"
    return (one.backend, one.regime, one.baseline, *map(str, counts), bits, errors or "no move seen")


def _notes(one: Comparison) -> list[str]:
    said = [
        f"{what}: {', '.join(cases[:NAMED])}{f' and {len(cases) - NAMED} more' if len(cases) > NAMED else ''}"
        for what, cases in (
            ("fails newly", one.failing),
            ("passes newly", one.passing),
            ("fails on both", one.both),
            ("other bits", one.differing),
        )
        if cases
    ]
    said += [str(test) for test in one.moved]
    said += [f"likely cause: {one.cause}"] if one.cause and (one.failing or one.moved) else []
    return said + [f"{count} not compared: {reason}" for reason, count in one.unpaired.items()]


def _verdict(found: Sequence[Comparison]) -> str:
    bad = [f"{one.backend} × {one.regime} ({one.reason})" for one in found if one.reason]
    both, pairs = sum(len(one.both) for one in found), sum(one.pairs for one in found)
    shared = f"; {both} cases fail on both" if both else ""
    if bad:
        told = f"WORSE: {', '.join(bad)}"
    elif any(one.moved or one.passing or one.differing for one in found):
        told = f"no new failure in {pairs} cases, and the differences above"
    else:
        told = f"no difference in {pairs} cases"
    return f"against the baseline: {told}{shared}"
