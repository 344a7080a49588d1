"""Base against change: what two versions answered to the same cases.

1. A pair is one question (case and relation) put to both. A question that one was not asked is no pair, and is counted.
2. A case fails newly where the change fails and the base does not, or fails in another nature: a crash in place of a wrong
   number is news. It passes newly where the base fails and the change does not.
3. Errors are compared over the cases that both executed, by ``harness.paired``; bits by their fingerprints. The error of a
   log-sum-exp is not compared where one fails: that one is measured from the oracle, which is nearer than the reference.
4. A comparison that has no pair is no comparison, and says so.

Kinds of line: ``against`` (a regime of a backend that a run means to compare), ``baseline`` (one case on the baseline),
``result``, and ``failure`` or ``moved`` for the likely cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.case import Case
from harness.ledger import LedgerError, Line, number
from harness.paired import Paired, moved, paired
from harness.report.rows import CONTRACT, row_name
from harness.search import EXECUTED, nature_of
from harness.shrink import size

#: Measured errors that are compared.
METRICS = ("rho", "element", "lse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A backend in a regime beside its baseline."""

    backend: str
    regime: str
    baseline: str
    #: Questions put to both.
    pairs: int
    #: Why questions were not compared -> how many.
    unpaired: Mapping[str, int]
    #: Cases that fail newly, that pass newly, and that fail on both in the same nature; the smallest first.
    failing: tuple[str, ...]
    passing: tuple[str, ...]
    both: tuple[str, ...]
    #: Cases whose answers are not the same bits, the smallest first, of those whose bits are known.
    differing: tuple[str, ...]
    known: int
    #: Every error compared, and those that moved.
    errors: tuple[Paired, ...]
    moved: tuple[Paired, ...]
    #: What the first failure found, or else the largest growth of an error, looks like; empty where nothing fits.
    cause: str

    @property
    def reason(self) -> str | None:
        """Say why the comparison fails, or None."""
        if self.failing:
            return f"{len(self.failing)} fail newly"
        return None if self.pairs else "nothing was compared"


def comparisons(lines: Iterable[Line]) -> list[Comparison]:
    """Compare what the lines of one or several ledgers hold of backends and their baselines; none where no run compared."""
    lines = list(lines)
    answers = {_key(line, line["of"]): line for line in reversed(lines) if line["kind"] == "baseline"}
    asked = [line for line in lines if line["kind"] == "result" and line["phase"] != "shrink"]
    baselines = {line["backend"]: line["baseline"] for line in lines if line["kind"] == "against"}
    groups: dict[tuple[str, str], list[Line]] = {
        (line["backend"], line["regime"]): [] for line in lines if line["kind"] == "against"
    }
    for line in asked:
        if line["backend"] in baselines:
            groups.setdefault((line["backend"], row_name(line)), []).append(line)
    pairs = {group: _pairs(results, answers) for group, results in groups.items()}
    tests = {group: [_errors(metric, found) for metric in METRICS] for group, found in pairs.items()}
    telling = moved([test for several in tests.values() for test in several])
    causes = _causes(lines)
    return [
        _comparison(group, baselines[group[0]], groups[group], pairs[group], tests[group], telling, causes.get(group, ""))
        for group in groups
    ]


def across(base: Sequence[Line], change: Sequence[Line]) -> list[Comparison]:
    """Compare the results of two runs: each backend of the change with the one of its name, or else of its stem, in the base.

    Raises:
        LedgerError: if a backend has none or several to be compared with, or nothing was asked of both.
    """
    there = list(dict.fromkeys(line["backend"] for line in base if line["kind"] == "result"))
    made: list[Line] = []
    for backend in dict.fromkeys(line["backend"] for line in change if line["kind"] == "result"):
        stem = backend.partition("@")[0]
        near = [backend] if backend in there else [name for name in there if name.partition("@")[0] == stem] or there
        if len(near) != 1:
            raise LedgerError(
                f"{backend} cannot be compared: the base has {', '.join(near) or 'no results'}, not one of its name"
            )
        regimes = dict.fromkeys(row_name(line) for line in change if line["kind"] == "result" and line["backend"] == backend)
        made += [{"kind": "against", "backend": backend, "regime": regime, "baseline": near[0]} for regime in regimes]
        asked = (line for line in base if line["kind"] == "result" and line["backend"] == near[0])
        made += [{**line, "kind": "baseline", "of": backend} for line in asked if line["phase"] != "shrink"]
    own = [line for line in change if line["kind"] not in ("against", "baseline")]
    found = comparisons([*made, *own])
    if not any(one.pairs for one in found):
        raise LedgerError("the two runs have no case in common: compare runs of one seed and profile")
    return found


def _key(line: Line, backend: str) -> tuple[str, str, str | None]:
    return backend, line["case"], line["relation"]


def _pairs(results: Sequence[Line], answers: Mapping[tuple[str, str, str | None], Line]) -> list[tuple[Line | None, Line]]:
    """Put the baseline's answer, if there is one, beside each result; a question that was asked twice counts once."""
    once = {_key(line, line["backend"]): line for line in reversed(results)}
    return [(answers.get(key), line) for key, line in reversed(once.items())]


def _unasked(base: Line | None, change: Line, regime: str) -> str | None:
    """Say why two answers are no pair, or None."""
    if base is None:
        return "not asked of the baseline"
    for who, line in (("the baseline", base), ("the change", change)):
        if line["verdict"] == "ERROR":
            return f"an error of the gate itself on {who}"
        if line["verdict"] == "UNSUPPORTED" and regime != CONTRACT:
            return f"not run on {who}: {line['message'].partition(chr(10))[0]}"
    return None


def _errors(metric: str, pairs: Iterable[tuple[Line | None, Line]]) -> Paired:
    both = [(base, change) for base, change in pairs if base is not None]
    if metric == "lse":
        both = [(base, change) for base, change in both if "FAIL" not in (base["verdict"], change["verdict"])]
    values = [(_measured(base, metric), _measured(change, metric)) for base, change in both]
    return paired(metric, [(base, change) for base, change in values if base is not None and change is not None])


def _measured(line: Line, metric: str) -> float | None:
    measurements = line["measurements"]
    if line["verdict"] not in EXECUTED or not measurements["rows"]:
        return None
    value = measurements[metric] if metric in measurements else measurements["ratios"].get(metric)
    return None if value is None else number(value)


def _comparison(
    group: tuple[str, str],
    baseline: str,
    results: Sequence[Line],
    pairs: Sequence[tuple[Line | None, Line]],
    tests: Sequence[Paired],
    telling: Sequence[Paired],
    cause: str,
) -> Comparison:
    """Count one backend in one regime."""
    reasons = [_unasked(base, change, group[1]) for base, change in pairs]
    kept = [
        (base, change) for (base, change), reason in zip(pairs, reasons, strict=True) if reason is None and base is not None
    ]
    natures = [(_nature(base), _nature(change), change) for base, change in kept]
    bits = [(base["bits"], change["bits"], change) for base, change in kept if base.get("bits") and change.get("bits")]
    return Comparison(
        backend=group[0],
        regime=group[1],
        baseline=baseline,
        pairs=len(kept),
        unpaired=dict(Counter(filter(None, reasons))),
        failing=_cases(change for one, two, change in natures if two is not None and one != two),
        passing=_cases(change for one, two, change in natures if two is None and one is not None),
        both=_cases(change for one, two, change in natures if two is not None and one == two),
        differing=_cases(change for one, two, change in bits if one != two),
        known=len(bits),
        errors=tuple(tests),
        moved=tuple(test for test in tests if any(test is one for one in telling)),
        cause=cause,
    )


def _nature(line: Line) -> str | None:
    return nature_of(line["verdict"], line["fault"])


def _cases(lines: Iterable[Line]) -> tuple[str, ...]:
    """Name cases, the smallest first."""
    return tuple(dict.fromkeys(line["case"] for line in sorted(lines, key=lambda line: size(Case.parse(line["case"])))))


def _causes(lines: Iterable[Line]) -> dict[tuple[str, str], str]:
    """Find what the failures look like, and where there is none the growth of an error: what is said first of each row."""
    causes: dict[tuple[str, str], str] = {}
    for line in sorted((line for line in lines if line["kind"] in ("failure", "moved")), key=lambda line: line["kind"]):
        said = next((look for look in line["looks"] if look.startswith("what:")), "")
        if said:
            causes.setdefault((line["backend"], line["regime"]), said.removeprefix("what:").strip())
    return causes
