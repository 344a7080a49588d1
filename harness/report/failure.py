"""The failure panel: what failed, how badly, where in the output, what is needed for it, what to run.

1. It reads from the general to the particular; its last line is the command that replays the case.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from harness.backends.protocol import Backend
from harness.explain import explain
from harness.inputs import make_inputs
from harness.regimes import ABOUT_GRAPH, ABOUT_SERVING, GRAPH, RELATIONS, SERVING, Regimes
from harness.repro import replay_command
from harness.run import Result
from harness.script.text import in_words
from harness.search import Finding
from harness.serving.search import TraceFinding
from harness.serving.trace import Trace

#: Passing neighbours that are named beside the smallest.
OTHERS = 4
#: Faults of an answer, which can be looked at; the others left none, or are not about numbers.
_ANSWERS = frozenset({"mismatch", "inaccurate", "non-finite", "unwritten"})


def look(result: Result, backend: Backend, regimes: Regimes, *, device: str) -> list[str]:
    """Run a wrong answer once more and say where it is wrong and which known mistake makes the like of it.

    Args:
        result: what became of the case.
        backend: who answered; it is run in this process, which its answer has shown to be safe.
        regimes: the rules it was judged by.
        device: where it ran.
    """
    if result.verdict.fault not in _ANSWERS or result.relation is not None:
        return []
    try:
        inputs = make_inputs(result.case, device=device, output_format=backend.capabilities.output_format)
        arithmetic = regimes.of(result.backend, result.case).arithmetic
        return str(explain(inputs, backend.run(inputs), arithmetic, rerun=backend.run)).splitlines()
    except Exception as error:  # an explanation is worth no verdict
        return [f"no explanation: {type(error).__name__}: {error}"]


def panel(
    result: Result,
    *,
    device: str,
    finding: Finding | TraceFinding | None = None,
    looks: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write the panel of a failing result.

    Args:
        result: what became of the case.
        device: where it ran.
        finding: how it was shrunk, if it was.
        looks: lines about where it is wrong and what it looks like.
        notes: lines about what was saved.
    """
    verdict = result.verdict
    head = f"{verdict.kind}{f' {verdict.fault}' if verdict.fault else ''}: {result.backend} × {result.regime or 'no regime'}"
    ran = ", ".join(f"{key} {value}" for key, value in result.what_ran.items())
    about = {**RELATIONS, GRAPH: ABOUT_GRAPH, SERVING: ABOUT_SERVING}
    related = f"  relation        {result.relation}: {about[result.relation]}" if result.relation else ""
    lines = [head, "", textwrap.indent(in_words(result.case), "  "), *([related] if related else [])]
    lines += [*_served(result), ""]
    lines += [textwrap.indent(verdict.message.rstrip(), "  ")]
    lines += [f"  ran: {ran}"] if ran else []
    lines += [f"  {line}" for line in looks]
    if finding is not None:
        lines += ["", *(_shrunk(finding) if isinstance(finding, Finding) else _shortened(finding))]
    lines += [f"  {note}" for note in notes]
    return "\n".join([*lines, replay_command(result.trace or result.case, result.backend, device, result.relation)])


def _served(result: Result) -> list[str]:
    """List the steps of a serving trace."""
    if result.trace is None:
        return []
    trace = Trace.parse(result.trace)
    return ["", f"  {trace.about}:", *(f"    {line}" for line in trace.lines)]


def _shortened(finding: TraceFinding) -> list[str]:
    """Say what a trace was shrunk from."""
    first, walk = finding.first, finding.walk
    lines = [f"  first seen in a trace of {len(first.steps)} steps: {first}"] if first != walk.trace else []
    if not walk.complete:
        lines.append("  the time for shrinking ended first: a shorter trace may fail too")
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
