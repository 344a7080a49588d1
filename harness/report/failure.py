"""A failure as its panel and as its line of the ledger: what failed, how badly, where, what is needed for it, what to run.

1. The panel reads from the general to the particular; its last line is the command that replays the case.
2. The line holds what a report shows of the failure elsewhere and later: the explanation, grids of the error, the
   neighbour, the script, the command.
3. Neither is worth a verdict: what cannot be made is left out, and said.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.measure import CHECKS
from harness.regimes import ABOUT_GRAPH, ABOUT_REFUSAL, GRAPH, REFUSAL, RELATIONS
from harness.report.look import Looked
from harness.repro import replay_command
from harness.run import Result
from harness.script.text import in_words
from harness.search import Finding
from harness.serving.search import TraceFinding
from harness.serving.trace import trace_of

#: Passing neighbours that are named beside the smallest.
OTHERS = 4
#: Worst rows and elements that a panel lists; the repro has more.
WORST_ROWS, WORST_ELEMENTS = 1, 2
#: Longest script that goes into a ledger, characters; a longer one stays the file that it is.
LONGEST_SCRIPT = 200_000


def failure_fields(
    result: Result,
    *,
    device: str,
    finding: Finding | TraceFinding | None,
    looked: Looked,
    notes: Sequence[str],
    rules: str | None = None,
) -> Mapping[str, Any]:
    """State what a report shows of a failing result, for the ledger.

    Args:
        result: what became of the case.
        device: where it ran.
        finding: how it was shrunk, if it was.
        looked: where it is wrong and what it looks like.
        notes: lines about what was saved.
        rules: the regimes file, where it is not the project's.
    """
    walk = finding.walk if isinstance(finding, Finding) else None
    script = next((note.removeprefix("script: ") for note in notes if note.startswith("script: ")), "")
    return {
        "backend": result.backend,
        "regime": result.regime,
        "case": str(result.case),
        "relation": result.relation,
        "device": device,
        "command": replay_command(result.case, result.backend, device, result.relation, rules=rules),
        "looks": list(looked.lines),
        "notes": list(notes),
        "grids": looked.grids,
        "first": str(finding.first) if finding else None,
        "neighbour": str(walk.neighbour) if walk and walk.neighbour else None,
        "difference": walk.difference if walk else "",
        "others": list(walk.others[:OTHERS]) if walk else [],
        "complete": finding.walk.complete if finding else True,
        "script": _read(script),
    }


def _read(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8") if path else ""
    except OSError:
        return ""
    return text if len(text) <= LONGEST_SCRIPT else ""


def panel(
    result: Result,
    *,
    device: str,
    finding: Finding | TraceFinding | None = None,
    looks: Sequence[str] = (),
    notes: Sequence[str] = (),
    rules: str | None = None,
) -> str:
    """Write the panel of a failing result.

    Args:
        result: what became of the case.
        device: where it ran.
        finding: how it was shrunk, if it was.
        looks: lines about where it is wrong and what it looks like.
        notes: lines about what was saved.
        rules: the regimes file, where it is not the project's.
    """
    verdict = result.verdict
    head = f"{verdict.kind}{f' {verdict.fault}' if verdict.fault else ''}: {result.backend} × {result.regime or 'no regime'}"
    ran = ", ".join(f"{key} {value}" for key, value in result.what_ran.items())
    about = {**RELATIONS, GRAPH: ABOUT_GRAPH, REFUSAL: ABOUT_REFUSAL}
    related = f"  relation        {result.relation}: {about[result.relation]}" if result.relation in about else ""
    lines = [head, "", textwrap.indent(in_words(result.case), "  "), *([related] if related else []), *_steps(result), ""]
    lines += [f"  {line}" for line in badly(result)]
    lines += [f"  ran: {ran}"] if ran else []
    lines += [f"  {line}" for line in looks]
    if finding is not None:
        lines += ["", *(_shrunk(finding) if isinstance(finding, Finding) else _shortened(finding))]
    lines += [f"  {note}" for note in notes]
    return "\n".join([*lines, replay_command(result.case, result.backend, device, result.relation, rules=rules)])


def badly(result: Result) -> list[str]:
    """Say how badly a case failed: each check that it breaks, and the worst rows and elements; else the verdict's words."""
    measured = result.verdict.measurements
    broken = {name: ratio for name, ratio in measured.ratios.items() if not ratio <= 1}
    if not broken or not measured.worst_rows:
        return result.verdict.message.rstrip().splitlines()
    lines = [f"{CHECKS[name]}: {name} {ratio:.3g} of its limit" for name, ratio in broken.items()]
    return lines + [str(found) for found in (*measured.worst_rows[:WORST_ROWS], *measured.worst_elements[:WORST_ELEMENTS])]


def _steps(result: Result) -> list[str]:
    """List the steps of a serving trace; the case above is its last decode."""
    trace = trace_of(result.relation)
    if trace is None:
        return []
    where = result.verdict.message.partition(":")[0]
    at = [f"  wrong at {where}"] if where.startswith("step ") else []
    return ["", f"  {trace.about}:", *(f"    {line}" for line in trace.lines), *at]


def _shortened(finding: TraceFinding) -> list[str]:
    first, walk = finding.first, finding.walk
    lines = [f"  first seen in a trace of {len(first.steps)} steps: {first}"] if first != walk.trace else []
    if not walk.complete:
        lines.append("  the time for shrinking ended first: a shorter trace may fail too (mla-gate shrink walks on)")
    return lines


def _shrunk(finding: Finding) -> list[str]:
    walk = finding.walk
    lines = [f"  first seen as {finding.first}"] if finding.first != walk.case else []
    if walk.neighbour is not None:
        lines.append(f"  passes with {walk.difference}: {walk.neighbour}")
        if walk.others:
            more = f"; and {len(walk.others) - OTHERS} more" if len(walk.others) > OTHERS else ""
            lines.append(f"  and with {'; with '.join(walk.others[:OTHERS])}{more}")
    else:
        lines.append("  no smaller case nearby passes: every one that may be asked fails too")
    if not walk.complete:
        lines.append("  the time for shrinking ended first: a smaller case may fail too (mla-gate shrink walks on)")
    return lines
