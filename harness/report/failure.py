"""The failure panel: what failed, how badly, where in the output, what is needed for it, what to run.

1. It reads from the general to the particular; its last line is the command that replays the case.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from harness.backends.protocol import Backend
from harness.explain import explain, explain_crash, explain_violations, told
from harness.inputs import make_inputs
from harness.regimes import ABOUT_GRAPH, GRAPH, RELATIONS, Regimes
from harness.relations import between
from harness.repro import replay_command
from harness.run import Result
from harness.script.text import in_words
from harness.search import Finding

#: Passing neighbours that are named beside the smallest.
OTHERS = 4
#: Faults of an answer, which can be looked at; the others left none, or are not about numbers.
_ANSWERS = frozenset({"mismatch", "inaccurate", "non-finite", "unwritten"})
#: Faults that left no answer, and those of memory that the kernel does not own.
_LOST, _TOUCHED = frozenset({"crash", "hang"}), frozenset({"input-changed", "guard-touched"})


def look(result: Result, backend: Backend, regimes: Regimes, *, device: str) -> list[str]:
    """Run a wrong answer once more and say where it is wrong and which known mistake makes the like of it.

    Args:
        result: what became of the case.
        backend: who answered; it is run in this process, which its answer has shown to be safe.
        regimes: the rules it was judged by.
        device: where it ran.
    """
    fault = result.verdict.fault
    repeated = result.relation == "repeat" and fault in _ANSWERS | {"nondeterministic"}
    if not repeated and (fault not in _ANSWERS | _LOST | _TOUCHED or result.relation is not None):
        return []
    try:
        if fault in _LOST:  # the kernel is not run again: it may take this process with it
            lost = explain_crash(result.case, regimes.of(result.backend, result.case).arithmetic)
            return told(lost, "it reads outside memory, or does not end, on this case too")
        inputs = make_inputs(result.case, device=device, output_format=backend.capabilities.output_format)
        arithmetic = regimes.of(result.backend, result.case).arithmetic
        before = []
        if repeated:  # as the relation does: another call in between
            made = make_inputs(between(result.case), device=device, output_format=backend.capabilities.output_format)
            before.append(made)
            backend.run(made)
        output = backend.run(inputs)
        if fault in _TOUCHED:
            touched = [(violation.fault, violation.buffer) for violation in inputs.violations()]
            return told(explain_violations(result.case, arithmetic, touched), "it writes the same buffer on this case too")
        return str(explain(inputs, output, arithmetic, before=before, rerun=None if before else backend.run)).splitlines()
    except Exception as error:  # an explanation is worth no verdict
        return [f"no explanation: {type(error).__name__}: {error}"]


def panel(
    result: Result,
    *,
    device: str,
    finding: Finding | None = None,
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
    about = {**RELATIONS, GRAPH: ABOUT_GRAPH}
    related = f"  relation        {result.relation}: {about[result.relation]}" if result.relation else ""
    lines = [head, "", textwrap.indent(in_words(result.case), "  "), *([related] if related else []), ""]
    lines += [textwrap.indent(verdict.message.rstrip(), "  ")]
    lines += [f"  ran: {ran}"] if ran else []
    lines += [f"  {line}" for line in looks]
    if finding is not None:
        lines += ["", *_shrunk(finding)]
    lines += [f"  {note}" for note in notes]
    return "\n".join([*lines, replay_command(result.case, result.backend, device, result.relation)])


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
