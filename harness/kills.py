"""What became of the faults before the gate, and the table of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from harness.faults.catalogue import FAULTS
from harness.faults.record import KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What became of one fault."""

    name: str
    #: Whether a case was a FAIL, after how many cases and seconds of CPU time.
    found: bool
    cases: int
    seconds: float
    #: Fault word of the verdict, and the measured checks that were broken.
    fault: str = ""
    checks: tuple[str, ...] = ()
    #: The check or fault word that no other accompanied in any failing case asked; empty where another did.
    needs: str = ""
    #: First failing case, and the smallest.
    first: str = ""
    smallest: str = ""
    #: Requests, cached tokens, heads and query tokens of the smallest.
    size: tuple[int, int, int, int] = (0, 0, 0, 0)
    #: First name of the explanation, whether it is right (or its answer the same), whether its kind is.
    named: str = ""
    right: bool = False
    right_kind: bool = False
    explain_seconds: float = 0.0


def table(kills: Sequence[Kill]) -> str:
    """Print the kill matrix as a Markdown table, with its summary."""
    lines = [
        "| fault | kind | found by | cases | seconds | smallest: B, ΣN, H, S | explained as |",
        "|---|---|---|---|---|---|---|",
    ]
    for kill in kills:
        cells = [kill.name, FAULTS[kill.name].kind, _by(kill), kill.cases, f"{kill.seconds:.1f}"]
        cells += [", ".join(map(str, kill.size)), _said(kill)] if kill.found else ["", ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "", *summary(kills)])


def _by(kill: Kill) -> str:
    checks = f" ({', '.join(kill.checks)})" if kill.checks else ""
    return kill.fault + checks if kill.found else "**not found**"


def _said(kill: Kill) -> str:
    if kill.named == kill.name:
        return kill.name
    return f"{kill.named or 'nothing'} ({'same answer' if kill.right else 'wrong'})"


def summary(kills: Sequence[Kill]) -> list[str]:
    """Sum a hunt up."""
    found = [kill for kill in kills if kill.found]
    kinds = {FAULTS[kill.name].kind for kill in kills}
    lines = [f"{len(found)} of {len(kills)} faults found, of {len(kinds)} of the {len(KINDS)} kinds"]
    if not found:
        return lines
    counts, seconds = sorted(kill.cases for kill in found), sorted(kill.seconds for kill in found)
    exact, right = sum(kill.named == kill.name for kill in found), sum(kill.right for kill in found)
    kind = sum(kill.right_kind for kill in found)
    spent = sorted(kill.explain_seconds for kill in found)
    return [
        *lines,
        f"median after {median_low(counts)} cases and {median_low(seconds):.2f} s of CPU time, at most {counts[-1]} cases",
        f"explained first by its own name: {exact} of {len(found)} ({exact / len(found):.1%}); by it or by one with the same "
        f"answer: {right} ({right / len(found):.1%}); by its kind: {kind} ({kind / len(found):.1%}); "
        f"median explanation {median_low(spent):.1f} s, longest {spent[-1]:.1f} s of CPU time",
        "",
        *_checks(found),
    ]


def _checks(found: Sequence[Kill]) -> list[str]:
    """Print what each check and fault word saw, and which faults nothing else sees."""
    signs = [kill.checks or (kill.fault,) for kill in found]
    lines = ["| check | saw at first | alone | needed, as nothing else saw it in any case |", "|---|---|---|---|"]
    for name, count in Counter(name for names in signs for name in names).most_common():
        alone = sum(names == (name,) for names in signs)
        needing = ", ".join(kill.name for kill in found if kill.needs == name)
        lines.append(f"| {name} | {count} | {alone} | {needing or '–'} |")
    return lines
