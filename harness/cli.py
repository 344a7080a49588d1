"""The mla-gate command.

1. Exit status: 0 where all is well, 1 where a kernel fails, 2 where the question was wrong.
2. What a program may want is there as JSON (``--json``), on the standard output and alone.
3. An error is one line that says what was asked, what was found and what to do; no traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.profiles import DEFAULT, PROFILES

if TYPE_CHECKING:
    from harness.backends.protocol import Backend
    from harness.case import Case
    from harness.plan import Plan
    from harness.run import Result

CASES = Path(__file__).resolve().parent.parent / "cases"


class CommandError(ValueError):
    """A command that cannot be carried out as it was given; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    given = _parser().parse_args(arguments)
    # Triton reads this when it is imported: later is too late.
    if not _sees_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        return int(given.act(given))
    except _expected() as error:
        print(f"mla-gate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mla-gate: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _expected() -> tuple[type[Exception], ...]:
    from harness.backends.protocol import NotInstalled, UnknownBackend
    from harness.case import CaseError
    from harness.ledger import LedgerError
    from harness.plan import PlanError
    from harness.regimes import NoRegime, RegimesError
    from harness.repro import ReproError

    return (CommandError, NotInstalled, UnknownBackend, CaseError, LedgerError, PlanError, NoRegime, RegimesError, ReproError)


def _parser() -> argparse.ArgumentParser:
    from harness.regimes import RELATIONS

    parser = argparse.ArgumentParser(
        prog="mla-gate",
        description="Gate MLA decode kernels: random cases against an fp32 reference over the dequantised cache.",
        epilog="Exit status: 0 all is well, 1 a kernel fails, 2 the question was wrong. mla-gate COMMAND --help says more.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, act: Callable[[Any], int], about: str, *, as_json: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(act=act)
        if as_json:
            command.add_argument("--json", action="store_true", help="print JSON and nothing else")
        return command

    add("backends", _backends, "List the backends: which can run here, and why the others cannot.")
    regimes = add("regimes", _regimes, "List the regimes: region, arithmetic, limits, and what they rest on.")
    regimes.add_argument("--backend", metavar="NAME", help="only those of this backend")
    regimes.add_argument("--regimes-file", type=Path, metavar="FILE", help="read this file (default: cases/regimes.toml)")

    run = add("run", _run, "Run the gate: what `pytest` on the cases does, with the same options.", as_json=False)
    run.add_argument("--backend", action="append", default=[], metavar="NAME", help="gate this backend; may be repeated")
    run.add_argument("--regime", action="append", default=[], metavar="NAME", help="gate only this regime; may be repeated")
    run.add_argument("--profile", choices=tuple(PROFILES), default=DEFAULT, help=f"how much is asked (default: {DEFAULT})")
    run.add_argument("rest", nargs=argparse.REMAINDER, metavar="-- PYTEST-OPTION …",
                     help="options of the plugin and of pytest: --seed, --device, --repro-dir, -n 2, -k …")  # fmt: skip

    for name, act, about in (
        ("replay", _replay, "Run one case again and judge it: an id, or the JSON file of a repro."),
        ("shrink", _shrink, "Walk from a failing case to the smallest one near it that fails in the same way."),
        ("show", _show, "Say a case in words and shapes."),
    ):
        command = add(name, act, about)
        command.add_argument("case", metavar="ID|FILE", help="id of a case (v1:…:end), or a repro file")
        if name == "show":
            continue
        command.add_argument("--backend", metavar="NAME", help="whom to ask (default: the repro's)")
        command.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:INDEX (default: the repro's, else a GPU)")
        command.add_argument("--relation", choices=tuple(RELATIONS), help="relation between two runs (default: the repro's)")
        command.add_argument("--regimes-file", type=Path, metavar="FILE", help="judge by this file")
        command.add_argument("--aiter-source", action="append", default=[], metavar="DIR[=LABEL]", help="checkout of AITER")
        if name == "shrink":
            command.add_argument("--seconds", type=float, default=120.0, help="how long to walk (default: 120)")
            command.add_argument("--repro-dir", type=Path, default=Path("repros"), help="where the repro goes")

    report = add("report", _report, "Print the verdict table of ledgers, one cut short included.")
    report.add_argument("ledgers", nargs="+", metavar="LEDGER", help="ledger files, or folders of them")
    return parser


def _backends(given: Any) -> int:
    from harness.backends import registry
    from harness.backends.protocol import NotInstalled

    rows = []
    for name, entry in registry.ENTRIES.items():
        row: dict[str, Any] = {"name": name, "about": entry.about, "default": entry.default, "runs": True, "why_not": None}
        if entry.family:
            row["name"] = f"{name}:…"
        else:
            try:
                row["devices"] = sorted(registry.make(name).capabilities.devices)
            except NotInstalled as reason:
                row |= {"runs": False, "why_not": str(reason)}
        rows.append(row)
    if given.json:
        return _print_json(rows)
    for row in rows:
        state = "by name" if row["runs"] and not row["default"] else "runs" if row["runs"] else "cannot run here"
        print(f"{row['name']:<22} {state:<16} {row['about']}")
        if row["why_not"]:
            print(f"{'':<22} {row['why_not']}")
    return 0


def _regimes(given: Any) -> int:
    from harness.backends.registry import entry_of
    from harness.ledger import plain
    from harness.regimes import load

    rules = load(given.regimes_file)
    if given.backend:
        entry_of(given.backend)
    rows = rules.for_backend(given.backend) if given.backend else rules.rows
    if given.json:
        return _print_json(plain(rows))
    for row in rows:
        where = "; ".join(f"{field}: {_rule(rule)}" for field, rule in row.where.allowed.items())
        print(f"{row.name}  ({', '.join(row.backends)})")
        print(f"  where       {where or 'every case'}")
        arithmetic = ", ".join(f"{key} {value}" for key, value in plain(row.arithmetic).items())
        print(f"  arithmetic  {arithmetic}")
        print(f"  limits      {row.limits.name}; a row is fit for use up to a relative error of {row.accuracy:g}")
        print(f"  why         {' '.join(row.why.split())}\n")
    return 0


def _rule(rule: Any) -> str:
    return " or ".join(map(str, rule)) if isinstance(rule, tuple) else str(rule)


def _run(given: Any) -> int:
    import pytest

    options = ["-p", "harness.plugin", str(CASES), "--profile", given.profile]
    options += [text for name in given.backend for text in ("--backend", name)]
    options += [text for name in given.regime for text in ("--regime", name)]
    rest = given.rest[1:] if given.rest[:1] == ["--"] else given.rest
    status = int(pytest.main([*options, *rest]))
    return status if status in (0, 1) else 130 if status == pytest.ExitCode.INTERRUPTED else 2


def _replay(given: Any) -> int:
    from harness.ledger import result_line
    from harness.report.failure import panel

    case, relation, backend, plan = _asked(given)
    result = _run_one(case, relation, backend, plan)
    if given.json:
        _print_json(result_line(result, "replay"))
    elif result.verdict.kind in ("FAIL", "ERROR"):
        print(panel(result, device=str(plan.device)))
    else:
        print(f"{result.verdict.kind}: {result.backend} × {result.regime or 'no regime'}\n  {result.verdict.message}")
    return 1 if result.verdict.kind in ("FAIL", "ERROR") else 0


def _shrink(given: Any) -> int:
    from harness.repro import save
    from harness.report.failure import panel
    from harness.run import Result
    from harness.search import Finding, nature
    from harness.shrink import shrink

    case, relation, backend, plan = _asked(given)
    results: dict[Any, Result] = {}

    def fails(near: Case) -> bool | None:
        results[near] = _run_one(near, relation, backend, plan)
        if results[near].verdict.kind == "UNSUPPORTED":
            return None
        return nature(results[near]) == wanted

    wanted = None
    fails(case)
    wanted = nature(results[case])
    if wanted is None:
        raise CommandError(f"{backend.name} does not fail on {case}: its verdict is {results[case].verdict.kind}")
    walk = shrink(case, fails, seconds=given.seconds)
    finding = Finding(result=results[walk.case], first=case, walk=walk)
    notes = save(finding.result, backend, plan.regimes, given.repro_dir, device=str(plan.device), finding=finding)
    if given.json:
        _print_json({
            "case": str(walk.case), "neighbour": walk.neighbour and str(walk.neighbour), "difference": walk.difference,
            "asked": walk.asked, "complete": walk.complete, "notes": notes,
        })  # fmt: skip
    else:
        print(panel(finding.result, device=str(plan.device), finding=finding, notes=notes))
    return 1


def _run_one(case: Case, relation: str | None, backend: Backend, plan: Plan) -> Result:
    from harness.answer import answer

    return answer(case, relation, backend, plan.regimes, device=plan.device)


def _asked(given: Any) -> tuple[Case, str | None, Backend, Plan]:
    """Find the case, its relation, the backend and where it runs, from an id or a repro and the options."""
    from harness.plan import make_plan
    from harness.regimes import load

    if given.aiter_source:
        from harness.backends.aiter_source import name_sources

        name_sources(given.aiter_source)
    case, repro = _read_case(given.case)
    name = given.backend or (repro and repro.backend)
    if not name:
        raise CommandError("an id says nothing of whom to ask: add --backend NAME (mla-gate backends lists them)")
    device = given.device or (repro and repro.device)
    plan = make_plan(load(given.regimes_file), device=device, backends=[name])
    return case, given.relation or (repro and repro.relation), plan.backends[0], plan


def _read_case(text: str) -> tuple[Case, Any]:
    from harness.case import Case
    from harness.repro import load as load_repro

    if Path(text).is_file() or text.endswith(".json"):
        repro = load_repro(text)
        return repro.case, repro
    return Case.parse(text), None


def _show(given: Any) -> int:
    from harness.inputs import make_inputs
    from harness.ledger import plain
    from harness.script.text import in_words

    case, _ = _read_case(given.case)
    inputs = make_inputs(case)
    shapes = {
        name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, strides {list(tensor.stride())}"
        for name in ("query_nope", "query_rope", "cache", "block_table", "kv_indptr", "kv_indices", "lengths", "out", "lse")
        if (tensor := getattr(inputs, name)) is not None
    }
    if given.json:
        return _print_json({"id": str(case), "case": plain(case), "tensors": shapes})
    print(f"{case}\n\n{in_words(case)}\n")
    for name, shape in shapes.items():
        print(f"{name:<15} {shape}")
    return 0


def _report(given: Any) -> int:
    from harness.ledger import plain, read_all
    from harness.report.rows import rows
    from harness.report.terminal import table, verdict

    ledgers = read_all(given.ledgers)
    found = rows(line for ledger in ledgers for line in ledger.lines)
    cut = [str(ledger.path) for ledger in ledgers if not ledger.complete]
    bad = any(row.reason for row in found)
    if given.json:
        _print_json({"rows": [plain(row) | {"reason": row.reason} for row in found], "cut": cut})
        return int(bad)
    print("\n".join([*table(found), "", verdict(found)]))
    for path in cut:
        print(f"mla-gate: {path} ends before its run did: what it holds is counted")
    return int(bad or not found)


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
