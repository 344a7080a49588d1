"""A run of the gate as one process sees it: it asks, records and reports.

1. Every result goes to the ledger before anything else is done with it.
2. Processes share a run by its folder: each writes a ledger of its own there, and the table is counted from all of them.
3. A folder that cannot be written costs the files, never a verdict: the ledger then goes to a temporary folder, and a
   repro that could not be saved is said to be so in its failure.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from harness.acceptance import acceptance
from harness.answer import answer
from harness.backends.protocol import Backend
from harness.case import Case
from harness.environment import environment
from harness.graphs import why_not_graph
from harness.known import covering
from harness.ledger import Writer, result_line
from harness.plan import Pair, Plan, make_plan
from harness.profiles import PROFILES, Profile
from harness.regimes import load
from harness.relations import ALL
from harness.report.failure import look, panel
from harness.repro import replay_command, save
from harness.run import Result
from harness.search import EXECUTED, Finding, Outcome, Question, Search, questions, search
from harness.serving.search import Served, TraceFinding, serve, why_no_traces
from harness.serving.trace import Trace
from harness.shapes import Shape, ShapeRow, left_of, sort
from harness.strategies import beyond, cases
from harness.worker import Worker

#: Seconds between two lines of progress.
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run was asked for."""

    #: Names of backends; none for the default ones.
    backends: tuple[str, ...] = ()
    #: Names of regimes; none for all.
    regimes: tuple[str, ...] = ()
    #: Name of the profile.
    profile: str = "smoke"
    #: Random cases of each backend and regime; None for the profile's number.
    examples: int | None = None
    #: Device; None for a GPU where there is one.
    device: str | None = None
    #: Seed of the searches.
    seed: int = 0
    #: The regimes file; None for the project's.
    regimes_file: Path | None = None
    #: Where repros go.
    repro_dir: Path = Path("repros")
    #: Folder of this run's ledgers.
    run_dir: Path = Path(".mla-gate/run")
    #: Folder of Hypothesis's example database; None to keep none.
    database: Path | None = None
    #: Name of this process's ledger.
    process: str = "main"
    #: Processes of the run.
    processes: int = 1
    #: "worker": cases run in a child process that may be lost; "off": in this one.
    isolation: str = "worker"


class Gate:
    """One process's part of a run."""

    def __init__(self, options: Options, say: Callable[[str], None] | None = None) -> None:
        """Take what was asked for; ``say`` shows a line of progress."""
        self.options = options
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._next_word = time.monotonic() + PROGRESS_SECONDS

    @cached_property
    def plan(self) -> Plan:
        """Plan the run.

        Raises:
            PlanError, RegimesError: if it cannot be planned as it was asked for.
        """
        options = self.options
        return make_plan(
            load(options.regimes_file), device=options.device, backends=options.backends, regime_names=options.regimes
        )

    @property
    def profile(self) -> Profile:
        """How much the run asks."""
        known, examples = PROFILES[self.options.profile], self.options.examples
        return known if examples is None else dataclasses.replace(known, examples=examples)

    @cached_property
    def ledger(self) -> Writer:
        """Open this process's ledger."""
        header = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "profile": self.options.profile,
            "seed": self.options.seed,
            "process": self.options.process,
            "environment": environment(self.device),
        }
        try:
            return Writer(self.options.run_dir / f"{self.options.process}.jsonl", header)
        except OSError as error:
            trouble = f"mla-gate: {self.options.run_dir} cannot be written ({error.strerror}); the ledger"
        try:
            folder = Path(tempfile.mkdtemp(prefix="mla-gate-"))
            self._say(f"{trouble} is in {folder}")
            return Writer(folder / f"{self.options.process}.jsonl", header)
        except OSError:
            self._say(f"{trouble} is kept in memory only, for the table")
            return Writer(None, header)

    @property
    def opened(self) -> bool:
        """Tell whether this process has a ledger yet."""
        return "ledger" in self.__dict__

    def ask(self, case: Case, backend: Backend, phase: str) -> Result:
        """Run a case on a backend and record the result."""
        result = self.run(case, backend)
        self.record(result, phase)
        return result

    def run(self, case: Case, backend: Backend, relation: str | None = None) -> Result:
        """Run a case on a backend, isolated as the run was asked to.

        A relation that does not apply, and one whose other run is known to fail, leave one run.
        """
        known = ALL.get(relation or "")
        other = known.other(case) if known else None
        if other is not None and covering(backend.name, other[0]) is not None:
            relation = None
        result = self._run(case, relation, backend)
        if relation is not None and result.verdict.kind == "UNSUPPORTED":
            result = self._run(case, None, backend)
        return result

    def _run(self, case: Case, relation: str | None, backend: Backend, trace: str | None = None) -> Result:
        if self.options.isolation == "worker":
            return self._worker.run(case, backend.name, relation, trace)
        return answer(case, relation, backend, self.plan.regimes, device=self.device, trace=trace)

    @cached_property
    def _worker(self) -> Worker:
        return Worker(device=self.device, share=1 / self._sharing, regimes=self.options.regimes_file)

    @property
    def device(self) -> str:
        """Name this process's device: the one asked for by index, else the GPUs by turns, one a process."""
        device = self.plan.device
        if device.type != "cuda" or device.index is not None:
            return str(device)
        return f"cuda:{self._turn % torch.cuda.device_count()}"

    @property
    def _turn(self) -> int:
        """Number this process among those of pytest-xdist, which calls them gw0, gw1, ..."""
        return int("0" + "".join(mark for mark in self.options.process if mark.isdigit()))

    @property
    def _sharing(self) -> int:
        """Count the processes that share this one's GPU."""
        if self.plan.device.type != "cuda":
            return 1
        gpus = 1 if self.plan.device.index is not None else torch.cuda.device_count()
        return -(-self.options.processes // gpus)

    def record(self, result: Result, phase: str) -> None:
        """Write a result to the ledger."""
        self.ledger.write("result", **result_line(result, phase))

    def beyond(self, pair: Pair) -> str | None:
        """Say why a pair is not gated in this profile, or None; a GPU is not held to it."""
        if self.plan.device.type != "cpu":
            return None
        return beyond(pair.regime, self.profile, acceptance(pair.regime, pair.backend, self.plan.device))

    def leave_out(self, pair: Pair, reason: str) -> None:
        """Write down that a pair is not gated, so that the table says so."""
        self.ledger.write("beyond", backend=pair.backend.name, regime=pair.regime.name, reason=reason)

    def shapes(self, row: ShapeRow, backend: Backend) -> list[Shape]:
        """List the production shapes of a row that are asked of a backend."""
        return sort(row, backend, self.plan, self.profile, self.options.seed).chosen

    def leave_shapes(self, backend: Backend) -> None:
        """Write down how many production shapes are not asked of a backend, and what they need."""
        for regime, (count, reason) in left_of(backend, self.plan, self.profile, self.options.seed).items():
            self.ledger.write("unasked", backend=backend.name, regime=regime, cases=count, reason=reason)

    def intend(self, pair: Pair) -> None:
        """Write down that a pair will be gated, so that one that never is shows in the table."""
        demanding = self.profile.demands_sensitivities
        graphs, served = why_not_graph(pair.backend, self.plan.device), self.why_no_traces(pair)
        why = {"no_graphs": graphs, "no_traces": served}
        self.ledger.write("planned", backend=pair.backend.name, regime=pair.regime.name, demanding=demanding, **why)

    def why_no_traces(self, pair: Pair) -> str | None:
        """Say why a pair is asked for no serving traces, or None."""
        return why_no_traces(pair.regime, acceptance(pair.regime, pair.backend, self.plan.device))

    def serve(self, pair: Pair) -> Served:
        """Ask a pair for serving traces, until one fails."""
        seed = zlib.crc32(f"{self.options.seed} {pair} serving".encode())

        def run(trace: Trace) -> Result:
            return self._run(trace.case, None, pair.backend, str(trace))

        served = serve(pair, self.profile, run, self.record, device=self.plan.device, seed=seed)
        if served.finding is not None:
            self.ledger.write("finding", **result_line(served.finding.result, "shrink"), first=str(served.finding.first))
        return served

    def search(self, pair: Pair, relation: str | None = None) -> Outcome:
        """Search a pair for failing cases; ``relation`` asks all of them for that one, such as GRAPH.

        Raises:
            NoSuchCase: if no case of the regime lies in the backend's contract.
        """
        device, name = self.plan.device, f"{pair.backend.name} × {pair.regime.name}"
        accepts = acceptance(pair.regime, pair.backend, device)
        seed = zlib.crc32(" ".join(filter(None, (str(self.options.seed), str(pair), relation))).encode())
        profile = self.profile if relation is None else dataclasses.replace(self.profile, examples=self.profile.graphs)
        drawn = cases(pair.regime, self.profile, pair.backend, device, seed=seed)
        if relation is None:
            strategy = questions(drawn, profile)
        else:
            strategy = drawn.map(lambda case: Question(case=case, relation=relation))
        counts: dict[str, int] = {}

        def heard(result: Result, phase: str) -> None:
            self.record(result, phase)
            kind = phase if phase == "shrink" else result.verdict.kind
            counts[kind] = counts.get(kind, 0) + 1
            if time.monotonic() > self._next_word:
                self._next_word = time.monotonic() + PROGRESS_SECONDS
                done = sum(count for kind, count in counts.items() if kind in EXECUTED)
                shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
                self._say(f"mla-gate: {name}: {done} of {profile.examples} cases; {shown}")

        asked = Search(lambda asked: self.run(asked.case, pair.backend, asked.relation), heard, profile)
        database = self.options.database and self.options.database / pair.backend.name / pair.regime.name
        outcome = search(strategy, asked, accepts, seed=seed, database=database)
        for finding in outcome.findings:
            self.ledger.write(
                "finding",
                **result_line(finding.result, "shrink"),
                first=str(finding.first),
                neighbour=finding.walk.neighbour and str(finding.walk.neighbour),
                difference=finding.walk.difference,
            )
        self.ledger.write(
            "gated",
            backend=pair.backend.name,
            regime=pair.regime.name,
            executed=outcome.executed,
            cut=outcome.cut,
            seconds=outcome.seconds,
        )
        return outcome

    def failed(self, result: Result, backend: Backend, finding: Finding | TraceFinding | None = None) -> str:
        """Save the repro of a failing result, explain it, and write its failure panel."""
        regimes, device = self.plan.regimes, str(self.plan.device)
        notes = save(result, backend, regimes, self.options.repro_dir, device=device, finding=finding)
        looks = look(result, backend, regimes, device=device)
        return panel(result, device=device, finding=finding, looks=looks, notes=notes)

    def command(self, result: Result) -> str:
        """Give the command that replays a result."""
        return replay_command(result.trace or result.case, result.backend, str(self.plan.device), result.relation)

    def close(self, **fields: Any) -> None:
        """Write the end of this process's part."""
        if "_worker" in self.__dict__:
            self._worker.close()
        if self.opened:
            self.ledger.write("end", **fields)
            self.ledger.close()
            if self.ledger.trouble:
                self._say(
                    f"mla-gate: {len(self.ledger.lost)} lines are missing in {self.ledger.path} ({self.ledger.trouble}); "
                    "the table counts them"
                )
