"""The report as one HTML file.

1. The file holds everything that it shows: it asks for nothing, by its content policy it could not, and it is read
   without JavaScript; that sorts, unfolds, copies and changes the theme.
2. Nothing is told by colour alone, and every text of a case, a kernel or a message is escaped.
3. It stays below LARGEST, whatever the run: scripts go first, then the details of the later failures; the page says so.

Source: plots are drawn as SVG and tables by the template itself. A plotting library would bake colours and glyphs into
each, where these follow the reader's theme, take a kilobyte and say their numbers to a screen reader.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from harness.ledger import Line, number
from harness.report.failures import Failure
from harness.report.model import Report
from harness.report.spread import Histogram

#: Bytes that the file may have.
LARGEST = 2 << 20
#: Failures told in full, and characters of scripts, from the most that is shown to the least.
ROOM = ((40, 1_000_000), (40, 400_000), (40, 0), (20, 0), (10, 0), (3, 0))
#: Failures that are at least listed.
LISTED = 500
#: Cases of a comparison that are named of each kind, the smallest first.
NAMED = 8
#: ρ at which a cell is as hot as it gets: a thousand times what rounding does.
HOTTEST = 3.0
#: Height of a histogram's bars, units of its view box, which is 200 wide.
HEIGHT = 29.0

_PAGE = Path(__file__).parent / "page"


def html(report: Report) -> str:
    """Write a report as HTML."""
    style, script = (_PAGE / "report.css").read_text("utf-8"), (_PAGE / "report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _templates().get_template("report.html.j2")
    text = ""
    for full, room in ROOM:
        text = template.render(
            report=report,
            full=full,
            listed=LISTED,
            named=NAMED,
            scripts=_scripts(report.failures[:full], room),
            style=style,
            script=script,
            script_hash=f"sha256-{digest}",
        )
        if len(text.encode()) < LARGEST:
            break
    return text


def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "num": _number, "cell": _cell, "heat": _heat, "bars": _bars, "marks": _marks, "time": duration, "sorted": _sorted,
        "grids_of": _grids_of, "facts": _facts,
    }  # fmt: skip
    return made


def _scripts(failures: Iterable[Failure], room: int) -> dict[str, str]:
    """Choose the scripts that are shown, the first failures' first."""
    chosen = {}
    for one in failures:
        script = str(one.shown["script"])
        room -= len(script)
        chosen[one.anchor] = script if room >= 0 else ""
    return chosen


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return "–"
    found = number(value)
    if math.isnan(found):
        return "no number"
    if math.isinf(found):
        return "−∞" if found < 0 else "∞"
    # Thousands are read, powers of ten are decoded.
    return f"{found:,.0f}" if 1000 <= abs(found) < 1e6 and digits == 3 else f"{found:.{digits}g}"


def _cell(value: Any) -> str:
    found = number(value)
    return "∞" if math.isinf(found) else f"{found:.0f}" if found >= 100 else f"{found:.3g}"


def _heat(value: Any, what: str) -> float:
    """Say how hot a cell is, 0 to 1."""
    found = number(value)
    if what == "share":
        return round(min(abs(found - 1), 1.0), 2)
    return round(min(max(math.log10(max(found, 1.0)), 0.0) / HOTTEST, 1.0), 2)


def _sorted(value: Any) -> float:
    """Give a number that a script can order: what is none is the worst."""
    found = number(value)
    return found if math.isfinite(found) else math.copysign(1e308, 1.0 if math.isnan(found) else found)


def _bars(histogram: Histogram) -> str:
    """Draw a histogram's bars as one path."""
    width, most = 200 / len(histogram.counts), max(histogram.counts)
    drawn = []
    for place, count in enumerate(histogram.counts):
        if count:
            # A bar of one case in thousands is still seen.
            height = max(HEIGHT * count / most, 1.0)
            drawn.append(f"M{place * width + 0.5:.1f} 48v{-height:.1f}h{width - 1:.1f}V48z")
    return "".join(drawn)


def _marks(failure: Failure) -> list[tuple[float, str]]:
    found = [(failure.rho, "this case"), (failure.rho_limit, "limit")]
    return [(value, name) for value, name in found if value is not None]


def _grids_of(grids: Iterable[Mapping[str, Any]], role: str) -> list[Line]:
    """Choose the grids of one case; one of a single cell, or of none, says nothing that the ratios do not."""
    own = [grid for grid in grids if grid["role"] == role and max(len(grid["row_names"]), len(grid["column_names"])) > 1]
    return [grid for grid in own if any(value is not None for row in grid["values"] for value in row)]


def _facts(words: str) -> list[tuple[str, str]]:
    """Split a case in words into what each line is about and what it says."""
    return [(line[:16].strip(), line[16:]) for line in words.splitlines()]


def duration(seconds: float) -> str:
    """Say a time."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
