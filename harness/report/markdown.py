"""The report as Markdown, for a pull request and for the summary of a CI step.

1. The verdict and what fails come first; what is long is folded.
2. It stays below LONGEST, which is what a comment may have: later failures are then only named.
3. What a kernel, a case or a message says cannot become markup: it stands in code, or is escaped.

Source: GitHub's Markdown; a comment there has 65,536 characters at most.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.report.failures import Failure
from harness.report.html import duration
from harness.report.model import Report
from harness.report.rows import CONTRACT

#: Characters of the text.
LONGEST = 60_000
#: Newly failing cases that are named, the smallest first.
NAMED = 3
#: The file that CI shows as a step's summary is named by this variable.
SUMMARY = "GITHUB_STEP_SUMMARY"


def markdown(report: Report) -> str:
    """Write a report as Markdown."""
    head = [f"## {'✔' if report.passed else '✘'} mla-gate: {'PASS' if report.passed else 'FAIL'}", ""]
    head += [f"{report.executed} cases executed, {duration(report.seconds)} of cases.", "", *_table(report), ""]
    head += [f"- {_escaped(remark)}" for remark in report.remarks]
    head += _beside(report)
    tail = [
        "",
        *_folded("What it ran on", [f"- {key}: {_escaped('; '.join(found))}" for key, found in report.environment.items()]),
    ]
    tail += [f"<sub>{_escaped(_asked(report.headers))}</sub>", ""]
    body: list[str] = []
    room = LONGEST - sum(len(line) + 1 for line in (*head, *tail))
    for place, failure in enumerate(report.failures):
        told = _failure(failure)
        room -= sum(len(line) + 1 for line in told)
        if room < 0:
            body += ["", f"… and {len(report.failures) - place} more failures: the ledger and the HTML report have them."]
            break
        body += told
    return "\n".join([*head, *body, *tail])


def append_to_summary(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Append a text to the summary of the CI step, where there is one; say why where that fails."""
    path = environment.get(SUMMARY)
    if not path:
        return None
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")
    except OSError as error:
        return f"{SUMMARY}={path} cannot be written: {error.strerror}"
    return None


def _table(report: Report) -> list[str]:
    lines = [
        "| verdict | backend | regime | cases | failures | untrusted | worst ratio | time |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for part in report.parts:
        row = part.row
        word = f"✘ FAIL: {row.reason}" if row.reason else "✔ PASS" + (f", {row.unrun} not run" if row.unrun else "")
        untrusted = f"{row.untrusted / row.executed:.1%}" if row.executed and row.regime != CONTRACT else "–"
        worst = f"{row.worst:.3g} {row.metric}" if row.metric else "–"
        cells = [word, _code(row.backend), _code(row.regime), row.executed, row.failures + row.errors, untrusted, worst]
        lines.append("| " + " | ".join(_cell(str(cell)) for cell in (*cells, duration(row.seconds))) + " |")
    return lines


def _beside(report: Report) -> list[str]:
    if not report.comparisons:
        return []
    lines = [
        "",
        "### Base against change",
        "",
        "| | backend | regime | baseline | compared | fail newly | pass newly | fail on both |",
    ]
    lines.append("|---|---|---|---|--:|--:|--:|--:|")
    for one in report.comparisons:
        word = f"✘ WORSE: {one.reason}" if one.reason else "✔ no new failure"
        cells = [word, _code(one.backend), _code(one.regime), _code(one.baseline), one.pairs]
        cells += [len(one.failing), len(one.passing), len(one.both)]
        lines.append("| " + " | ".join(_cell(str(cell)) for cell in cells) + " |")
    lines.append("")
    for one in report.comparisons:
        who = f"{_code(one.backend)} × {_code(one.regime)}"
        lines += [f"- {who} fails newly: {_code(case)}" for case in one.failing[:NAMED]]
        lines += [f"- {who}: {_escaped(str(test))}" for test in one.moved]
        lines += [f"- {who}: likely cause: {_escaped(one.cause)}"] if one.cause and (one.failing or one.moved) else []
    return lines


def _failure(failure: Failure) -> list[str]:
    lines = ["", f"### ✘ {failure.kind}: {_code(failure.backend)} × {_code(failure.regime)}", ""]
    lines += _block(failure.words or failure.case)
    if failure.about:
        lines += [_escaped(failure.about), ""]
    if failure.steps:
        lines += _block("\n".join(failure.steps))
    lines += [f"- {name}: **{ratio:.3g}** of its limit; {meaning}" for name, meaning, ratio in failure.checks]
    if not failure.checks:
        lines += _block(_clipped(failure.message, 2000))
    lines += [f"- {_escaped(look.strip())}" for look in failure.shown["looks"]]
    if failure.shown["neighbour"]:
        lines += [f"- passes with {_escaped(failure.shown['difference'])}: {_code(failure.shown['neighbour'])}"]
    if failure.shown["command"]:
        lines += ["", *_block(failure.shown["command"], "sh")]
    if failure.checks:
        lines += _folded("the worst rows and elements", _block(_clipped(failure.message, 4000)))
    return lines


def _folded(title: str, lines: Iterable[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _block(text: str, language: str = "text") -> list[str]:
    """Fence a text; the fence is longer than any run of backquotes in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text, fence, ""]


def _code(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~@])", r"\\\1", text).replace("\n", " ")


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most} characters left out"


def _asked(headers: Iterable[Mapping[str, object]]) -> str:
    told = (
        f"profile {header.get('profile')}, --seed {header.get('seed')}, begun {header.get('started')}" for header in headers
    )
    return "; ".join(dict.fromkeys(told))
