"""The failure panel: what failed, how badly, where in the output, what is needed for it, what to run.

1. It reads from the general to the particular; its last line is the command that replays the case.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from harness.regimes import RELATIONS
from harness.repro import replay_command
from harness.run import Result
from harness.script.text import in_words
from harness.search import Finding


def panel(result: Result, *, device: str, finding: Finding | None = None, notes: Sequence[str] = ()) -> str:
    """Write the panel of a failing result.

    Args:
        result: what became of the case.
        device: where it ran.
        finding: how it was shrunk, if it was.
        notes: lines about what was saved.
    """
    verdict = result.verdict
    head = f"{verdict.kind}{f' {verdict.fault}' if verdict.fault else ''}: {result.backend} × {result.regime or 'no regime'}"
    ran = ", ".join(f"{key} {value}" for key, value in result.what_ran.items())
    related = f"  relation        {result.relation}: {RELATIONS[result.relation]}" if result.relation else ""
    lines = [head, "", textwrap.indent(in_words(result.case), "  "), *([related] if related else []), ""]
    lines += [textwrap.indent(verdict.message.rstrip(), "  ")]
    lines += [f"  ran: {ran}"] if ran else []
    if finding is not None:
        lines += ["", *_shrunk(finding)]
    lines += [f"  {note}" for note in notes]
    return "\n".join([*lines, replay_command(result.case, result.backend, device, result.relation)])


def _shrunk(finding: Finding) -> list[str]:
    walk = finding.walk
    lines = [f"  first seen as {finding.first}"] if finding.first != walk.case else []
    if walk.neighbour is not None:
        lines.append(f"  passes with {walk.difference}: {walk.neighbour}")
    else:
        lines.append("  no smaller case nearby passes: every one that may be asked fails too")
    if not walk.complete:
        lines.append("  the time for shrinking ended first: a smaller case may fail too (mla-gate shrink walks on)")
    return lines
