"""The mla-gate command.

1. Exit status: 0 where all is well, 1 where a kernel fails, 2 where the question was wrong.
2. What a program may want is there as JSON (``--json``), on the standard output and alone.
3. An error is one line that says what was asked, what was found and what to do; no traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import cli_case, cli_ledger, cli_routes, cli_shapes
from harness.cli_case import CommandError, print_json
from harness.profiles import DEFAULT, PROFILES

CASES = Path(__file__).resolve().parent.parent / "cases"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if rest and given.command != "run":
        parser.error(
            f"mla-gate {given.command} does not know {' '.join(rest)}: mla-gate {given.command} --help says what it knows"
        )
    given.rest = [text for text in rest if text != "--"]
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
    from harness.serving.trace import TraceError
    from harness.shapes import ShapesError

    known = (CommandError, NotInstalled, UnknownBackend, CaseError, LedgerError, PlanError, NoRegime, RegimesError, ReproError)
    return (*known, TraceError, ShapesError)


def _parser() -> argparse.ArgumentParser:
    from harness.regimes import GRAPH, REFUSAL, RELATIONS

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

    cli_routes.add_options(
        add("routes", cli_routes.routes, "List the routes of engines to kernels, or check some against the kernels' contracts.")
    )

    shown = add(
        "demo", _demo, "Break a kernel on purpose, and watch it be found, shrunk, explained and replayed.", as_json=False
    )
    shown.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:INDEX (default: a GPU where there is one)")
    shown.add_argument("--folder", type=Path, default=Path(".mla-gate/demo"), metavar="DIR",
                       help="where its files go (default: .mla-gate/demo)")  # fmt: skip

    run = add("run", _run, "Run the gate: what pytest does on the cases, with its options and those of the plugin: "
              "--seed, --device, --examples, --repro-dir, -n 2, -k …; `pytest -p harness.plugin --help` lists them all.",
              as_json=False)  # fmt: skip
    run.add_argument("--backend", action="append", default=[], metavar="NAME", help="gate this backend; may be repeated")
    run.add_argument("--regime", action="append", default=[], metavar="NAME", help="gate only this regime; may be repeated")
    run.add_argument("--profile", choices=tuple(PROFILES), default=DEFAULT, help=f"how much is asked (default: {DEFAULT})")

    for name, act, about in (
        ("replay", cli_case.replay, "Run one case or serving trace again and judge it: an id, or the JSON file of a repro."),
        ("shrink", cli_case.shrink, "Walk from a failing case to the smallest one near it that fails in the same way."),
        ("show", cli_case.show, "Say a case in words and shapes, or a serving trace step by step."),
    ):
        command = add(name, act, about)
        command.add_argument("case", metavar="ID|FILE",
                             help="id of a case (v1:…:end) or of a serving trace (trace1:…:end), or a repro file")  # fmt: skip
        if name == "show":
            continue
        command.add_argument("--backend", metavar="NAME", help="whom to ask (default: the repro's)")
        command.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:INDEX (default: the repro's, else a GPU)")
        command.add_argument(
            "--relation", choices=(*RELATIONS, GRAPH, REFUSAL), help="relation between two runs (default: the repro's)"
        )
        command.add_argument("--regimes-file", type=Path, metavar="FILE", help="judge by this file")
        command.add_argument("--isolation", choices=("worker", "off"), default="worker",
                             help="run in a child process that may be lost, or in this one (default: worker)")  # fmt: skip
        command.add_argument("--aiter-source", action="append", default=[], metavar="DIR[=LABEL]", help="checkout of AITER")
        if name == "shrink":
            command.add_argument("--seconds", type=float, default=120.0, help="how long to walk (default: 120)")
            command.add_argument("--repro-dir", type=Path, default=Path("repros"), help="where the repro goes")

    shapes = add("shapes", cli_shapes.shapes, "List the production shapes: what each needs, and the first profile for a CPU.")
    shapes.add_argument("names", nargs="*", metavar="NAME", help="only rows whose name begins so; every case of them is listed")

    report = add("report", cli_ledger.report, "Merge ledgers (shards, GPUs, hosts) and print their verdict table.")
    report.add_argument("ledgers", nargs="+", metavar="LEDGER", help="ledger files, or folders of them; one cut short counts")
    report.add_argument("--html", type=Path, metavar="FILE", help="write it as one HTML file")
    report.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write it as Markdown, and append it to a CI step's summary where there is one")  # fmt: skip
    report.add_argument("--junit", type=Path, metavar="FILE", help="write it as JUnit's XML")
    compare = add("compare", cli_ledger.compare, "Compare the ledgers of two runs of the same cases: base against change.")
    compare.add_argument("base", metavar="BASE", help="ledger file or folder of the base")
    compare.add_argument("change", metavar="CHANGE", help="ledger file or folder of the change")
    compare.add_argument("--fail-on", choices=("new", "all"), default="new",
                         help="what ends it with status 1: new failures, or all of the change (default: new)")  # fmt: skip
    return parser


def _demo(given: Any) -> int:
    from harness.demo import demo

    return demo(given)


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
        return print_json(rows)
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
        return print_json(plain(rows))
    for row in rows:
        where = "; ".join(f"{field}: {_rule(rule)}" for field, rule in row.where.allowed.items())
        print(f"{row.name}  ({', '.join(row.backends)})")
        print(f"  where       {where or 'every case'}")
        arithmetic = ", ".join(f"{key} {value}" for key, value in plain(row.arithmetic).items())
        print(f"  arithmetic  {arithmetic}")
        if row.query is not None:
            print(f"  query       rounded to {row.query.format} by the scale {row.query.scale} before the kernel sees it")
        print(f"  limits      {row.limits.name}; a row is fit for use up to a relative error of {row.accuracy:g}")
        print(f"  why         {' '.join(row.why.split())}\n")
    return 0


def _rule(rule: Any) -> str:
    return " or ".join(map(str, rule)) if isinstance(rule, tuple) else str(rule)


class _Interrupts:
    """Sees whether a session was interrupted; pytest's own status for that is also the one of a fault in collection."""

    seen = False

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        """Hear of what ended a session early."""
        self.seen = self.seen or excinfo.type is KeyboardInterrupt


def _run(given: Any) -> int:
    import pytest

    options = ["-p", "harness.plugin", str(CASES), "--profile", given.profile]
    options += [text for name in given.backend for text in ("--backend", name)]
    options += [text for name in given.regime for text in ("--regime", name)]
    watch = _Interrupts()
    status = int(pytest.main([*options, *given.rest], plugins=[watch]))
    return status if status in (0, 1) else 130 if watch.seen else 2


if __name__ == "__main__":
    sys.exit(main())
