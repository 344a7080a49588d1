"""The commands about one case: replay, shrink, show.

1. A case is named by its id, or by the JSON file of a repro, which also says whom to ask and where.
2. It runs in a child process that may be lost, unless it was asked to run in this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.backends.protocol import Backend
    from harness.case import Case
    from harness.plan import Plan
    from harness.run import Result


class CommandError(ValueError):
    """A command that cannot be carried out as it was given; the message says what to do."""


def replay(given: Any) -> int:
    """Run one case again and judge it; return the exit status."""
    from harness.ledger import result_line
    from harness.report.failure import panel
    from harness.report.look import look_again

    case, relation, backend, plan = _asked(given)
    with _runner(given, relation, backend, plan) as run:
        result = run(case)
    if given.json:
        print_json(result_line(result, "replay"))
    elif result.verdict.kind in ("FAIL", "ERROR"):
        child = given.isolation == "worker"
        looked = look_again(result, plan.regimes, device=str(plan.device), pictures=False, child=child)
        print(panel(result, device=str(plan.device), looks=looked.lines, rules=plan.regimes.option))
    else:
        print(f"{result.verdict.kind}: {result.backend} × {result.regime or 'no regime'}\n  {result.verdict.message}")
    # A case that was not run is no pass: exit status 2.
    return {"FAIL": 1, "ERROR": 1, "UNSUPPORTED": 2}.get(result.verdict.kind, 0)


def shrink(given: Any) -> int:
    """Walk from a failing case to the smallest near it; return the exit status, which is that of a failure."""
    from harness.report.failure import panel
    from harness.report.look import look_again
    from harness.repro import save
    from harness.search import Finding, nature
    from harness.serving.trace import is_trace
    from harness.shrink import shrink as shrink_case

    case, relation, backend, plan = _asked(given)
    if is_trace(relation):
        return _shrink_trace(given, str(relation), backend, plan)
    results: dict[Any, Result] = {}

    def fails(near: Case) -> bool | None:
        results[near] = run(near)
        if results[near].verdict.kind == "UNSUPPORTED":
            return None
        return nature(results[near]) == wanted

    wanted = None
    with _runner(given, relation, backend, plan) as run:
        fails(case)
        wanted = nature(results[case])
        if wanted is None:
            raise CommandError(f"{backend.name} does not fail on {case}: its verdict is {results[case].verdict.kind}")
        walk = shrink_case(case, fails, seconds=given.seconds)
    finding = Finding(result=results[walk.case], first=case, walk=walk)
    notes = save(finding.result, backend, plan.regimes, given.repro_dir, device=str(plan.device), finding=finding)
    if given.json:
        print_json({
            "case": str(walk.case), "neighbour": walk.neighbour and str(walk.neighbour), "difference": walk.difference,
            "asked": walk.asked, "complete": walk.complete, "notes": notes,
        })  # fmt: skip
    else:
        child = given.isolation == "worker"
        looked = look_again(finding.result, plan.regimes, device=str(plan.device), pictures=False, child=child)
        print(
            panel(
                finding.result,
                device=str(plan.device),
                finding=finding,
                looks=looked.lines,
                notes=notes,
                rules=plan.regimes.option,
            )
        )
    return 1


def _shrink_trace(given: Any, relation: str, backend: Backend, plan: Plan) -> int:
    """Walk from a failing trace to the shortest near it; return the exit status, which is that of a failure."""
    from harness.report.failure import panel
    from harness.repro import save
    from harness.search import nature
    from harness.serving.search import TraceFinding
    from harness.serving.shrink import shrink as shrink_trace
    from harness.serving.trace import Trace

    first = Trace.parse(relation)
    results: dict[Trace, Result] = {}

    def fails(near: Trace) -> bool | None:
        with _runner(given, str(near), backend, plan) as run:
            results[near] = run(near.case)
        return None if results[near].verdict.kind == "UNSUPPORTED" else nature(results[near]) == wanted

    wanted = None
    fails(first)
    wanted = nature(results[first])
    if wanted is None:
        raise CommandError(f"{backend.name} does not fail on {first}: its verdict is {results[first].verdict.kind}")
    walk = shrink_trace(first, fails, seconds=given.seconds)
    finding = TraceFinding(result=results[walk.trace], first=first, walk=walk)
    notes = save(finding.result, backend, plan.regimes, given.repro_dir, device=str(plan.device), finding=finding)
    if given.json:
        found = {"trace": str(walk.trace), "steps": walk.trace.lines, "asked": walk.asked, "complete": walk.complete}
        print_json(found | {"notes": notes})
    else:
        print(panel(finding.result, device=str(plan.device), finding=finding, notes=notes, rules=plan.regimes.option))
    return 1


@contextmanager
def _runner(given: Any, relation: str | None, backend: Backend, plan: Plan) -> Iterator[Callable[[Case], Result]]:
    """Make what runs a case: a child process that may be lost, or this process where that was asked for."""
    from harness.answer import answer
    from harness.worker import Worker

    if given.isolation == "worker":
        with Worker(device=str(plan.device), regimes=given.regimes_file) as worker:
            yield lambda case: worker.run(case, backend.name, relation)
    else:
        yield lambda case: answer(case, relation, backend, plan.regimes, device=plan.device)


def _asked(given: Any) -> tuple[Case, str | None, Backend, Plan]:
    """Find the case, its relation, the backend and where it runs, from an id or a repro and the options."""
    from harness.plan import make_plan
    from harness.regimes import load

    if given.aiter_source:
        from harness.backends.aiter_source import name_sources

        name_sources(given.aiter_source)
    case, relation, repro = _read_case(given.case)
    name = given.backend or (repro and repro.backend)
    if not name:
        raise CommandError("an id says nothing of whom to ask: add --backend NAME (mla-gate backends lists them)")
    device = given.device or (repro and repro.device)
    if given.regimes_file is None and repro and repro.rules:
        given.regimes_file = Path(repro.rules)
    plan = make_plan(load(given.regimes_file), device=device, backends=[name])
    return case, given.relation or relation, plan.backends[0], plan


def _read_case(text: str) -> tuple[Case, str | None, Any]:
    """Read the case and the relation that an id or a file names; the relation of a serving trace's id is the id."""
    from harness.case import Case
    from harness.repro import load as load_repro
    from harness.serving.trace import Trace, is_trace

    if Path(text).is_file() or text.endswith(".json"):
        repro = load_repro(text)
        return repro.case, repro.relation, repro
    if is_trace(text.strip()):
        return Trace.parse(text).case, text.strip(), None
    return Case.parse(text), None, None


def show(given: Any) -> int:
    """Say a case in words and shapes; return the exit status."""
    from harness.inputs import make_inputs
    from harness.ledger import plain
    from harness.script.text import in_words
    from harness.serving.trace import is_trace

    case, relation, _ = _read_case(given.case)
    if is_trace(relation):
        return _show_trace(str(relation), as_json=given.json)
    inputs = make_inputs(case)
    shapes = {
        name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, strides {list(tensor.stride())}"
        for name in ("query_nope", "query_rope", "cache", "block_table", "kv_indptr", "kv_indices", "lengths", "out", "lse")
        if (tensor := getattr(inputs, name)) is not None
    }
    if given.json:
        return print_json({"id": str(case), "case": plain(case), "tensors": shapes})
    print(f"{case}\n\n{in_words(case)}\n")
    for name, shape in shapes.items():
        print(f"{name:<15} {shape}")
    return 0


def _show_trace(text: str, *, as_json: bool) -> int:
    """Say a trace in words; return the exit status."""
    from harness.script.text import in_words
    from harness.serving.steps import VERBS
    from harness.serving.trace import Trace

    trace = Trace.parse(text)
    if as_json:
        return print_json({"id": str(trace), "pool": trace.about, "steps": trace.lines, "case": str(trace.case)})
    print(f"{trace}\n\n{trace.about}:")
    for line, step in zip(trace.lines, trace.steps, strict=True):
        print(f"  {line:<44} {VERBS[step.verb].about}")
    print(f"\nits last decode:\n{in_words(trace.case)}")
    return 0


def print_json(value: Any) -> int:
    """Print a value as JSON; return the exit status of a command that only prints."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
    return 0
