"""A run of the gate as one process sees it: it asks, records and reports.

1. Every result goes to the ledger before anything else is done with it.
2. Processes share a run by its folder: each writes a ledger of its own there, and the table is counted from all of them.
3. Where there is a baseline, it is asked the same, and what it gets wrong too may count for nothing.
4. A folder that cannot be written costs the files, never a verdict: the ledger then goes to a temporary folder, and a
   repro that could not be saved is said to be so in its failure.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from harness.acceptance import acceptance
from harness.backends.protocol import Backend
from harness.baseline import COUNTED, Baselines
from harness.case import Case
from harness.environment import environment
from harness.graphs import why_not_graph
from harness.isolation import Isolation
from harness.known import covering
from harness.ledger import Writer, result_line
from harness.options import Options
from harness.plan import Pair, Plan, make_plan
from harness.profiles import PROFILES, Profile
from harness.regimes import REFUSAL, load
from harness.relations import ALL
from harness.report.failure import failure_fields, panel
from harness.report.look import look_again
from harness.report.progress import Progress
from harness.repro import replay_command, save
from harness.run import Result
from harness.search import Finding, Outcome, Question, Search, questions, search
from harness.serving.search import TraceFinding
from harness.strategies import beyond, cases, drawable


class Gate:
    """One process's part of a run."""

    def __init__(self, options: Options, say: Callable[[str], None] | None = None) -> None:
        """Take what was asked for; ``say`` shows a line of progress."""
        self.options = options
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._last_word = time.monotonic()

    @cached_property
    def plan(self) -> Plan:
        """Plan the run.

        Raises:
            PlanError, RegimesError: if it cannot be planned as it was asked for.
        """
        options = self.options
        return make_plan(
            load(options.regimes_file),
            device=options.device,
            backends=options.backends,
            regime_names=options.regimes,
            baseline=options.baseline,
        )

    @property
    def profile(self) -> Profile:
        """How much the run asks; a baseline beside it takes as long again."""
        known, examples = PROFILES[self.options.profile], self.options.examples
        if self.options.baseline:
            known = dataclasses.replace(known, seconds=2 * known.seconds)
        return known if examples is None else dataclasses.replace(known, examples=examples)

    @cached_property
    def ledger(self) -> Writer:
        """Open this process's ledger."""
        header = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "profile": self.options.profile,
            "examples": self.profile.examples,
            "seed": self.options.seed,
            "process": self.options.process,
            "baseline": self.options.baseline,
            "fail_on": self.options.fail_on,
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

    def _run(self, case: Case, relation: str | None, backend: Backend) -> Result:
        return self.isolation.run(case, backend, relation)

    def refuse(self, case: Case, backend: Backend) -> Result:
        """Ask a backend for a case that it says it cannot do, and record the result."""
        result = self.isolation.run(case, backend, REFUSAL)
        self.record(result, "contract")
        return result

    @cached_property
    def isolation(self) -> Isolation:
        """Where this process asks its questions."""
        options = self.options
        return Isolation(
            self.plan.device,
            self.plan.regimes,
            process=options.process,
            processes=options.processes,
            versions=2 if self.plan.baselines else 1,
            children=options.isolation == "worker",
        )

    @property
    def device(self) -> str:
        """Name this process's device."""
        return self.isolation.device

    def record(self, result: Result, phase: str) -> None:
        """Write a result to the ledger, and the baseline's where it counts."""
        if phase in COUNTED:
            self.baselines.beside(result, phase)
        excused = {"excused": True} if self.excuses(result) else {}
        self.ledger.write("result", **result_line(result, phase), **excused)

    @cached_property
    def baselines(self) -> Baselines:
        """The backends that this run's are compared with."""
        return Baselines(self.plan.baselines, self.plan.regimes, partial(self.isolation.run, version=1), self.ledger.write)

    def excuses(self, result: Result) -> bool:
        """Tell whether a failure counts for nothing, because the baseline shares it and new ones only were asked for."""
        return self.options.fail_on == "new" and result.verdict.kind == "FAIL" and self.baselines.shares(result)

    def beyond(self, pair: Pair) -> str | None:
        """Say why a pair is not gated in this profile, or None; a GPU is not held to it."""
        if self.plan.device.type != "cpu":
            return None
        return beyond(pair.regime, self.profile, acceptance(pair.regime, pair.backend, self.plan.device))

    def leave_out(self, pair: Pair, reason: str) -> None:
        """Write down that a pair is not gated, so that the table says so."""
        self.ledger.write("beyond", backend=pair.backend.name, regime=pair.regime.name, reason=reason)

    def intend(self, pair: Pair) -> None:
        """Write down that a pair will be gated, so that one that never is shows in the table."""
        demanding = self.profile.demands_sensitivities
        graphs = why_not_graph(pair.backend, self.plan.device)
        named = {"backend": pair.backend.name, "regime": pair.regime.name}
        self.ledger.write("planned", **named, demanding=demanding, no_graphs=graphs, parts=self.parts)
        if pair.backend.name in self.plan.baselines:
            self.ledger.write("against", **named, baseline=self.plan.baselines[pair.backend.name].name)

    @property
    def parts(self) -> int:
        """How many searches a pair's random cases are cut into: one on a CPU, where processes are few."""
        return self.profile.parts if self.plan.device.type == "cuda" else 1

    def search(self, pair: Pair, relation: str | None = None, part: int = 0) -> Outcome:
        """Search a pair for failing cases; ``relation`` asks all of them for that one, such as GRAPH.

        Args:
            pair: who is asked, and in which regime.
            relation: of every question; None for the profile's share of each.
            part: which of the pair's ``parts`` searches this is.

        Raises:
            NoSuchCase: if no case of the regime lies in the backend's contract.
        """
        device, name = self.plan.device, f"{pair.backend.name} × {pair.regime.name}"
        accepts = acceptance(pair.regime, pair.backend, device)
        seed = zlib.crc32(" ".join(filter(None, (str(self.options.seed), str(pair), relation))).encode())
        examples = -(-self.profile.examples // self.parts) if relation is None else self.profile.graphs
        profile = dataclasses.replace(self.profile, examples=examples)
        drawn = cases(pair.regime, self.profile, pair.backend, device, seed=seed)
        if relation is None:
            strategy = questions(drawn, profile)
        else:
            strategy = drawn.map(lambda case: Question(case=case, relation=relation))
        self.ledger.write(
            "domain", backend=pair.backend.name, regime=pair.regime.name, **drawable(pair.regime, profile, accepts)
        )
        progress = Progress(name, profile, self._last_word)

        def heard(result: Result, phase: str) -> None:
            self.record(result, phase)
            line = progress.heard(result, phase)
            if line is not None:
                self._last_word = progress.last_word
                self._say(line)

        compared = bool(self.plan.baselines)
        asked = Search(
            lambda asked: self.run(asked.case, pair.backend, asked.relation),
            heard,
            profile,
            shared=(lambda question, result: self.baselines.shares(result)) if compared else None,
            new_only=self.options.fail_on == "new",
        )
        database = self.options.database and self.options.database / pair.backend.name / pair.regime.name
        # The parts share the kernels that they ask for, and no case.
        outcome = search(strategy, asked, accepts, seed=seed + part, database=database)
        if compared and not outcome.findings:
            self.baselines.look_at_moves(pair.backend, list(asked.results.values()), self.device)
        for finding in outcome.findings:
            self.ledger.write(
                "finding",
                **result_line(finding.result, "shrink"),
                first=str(finding.first),
                neighbour=finding.walk.neighbour and str(finding.walk.neighbour),
                difference=finding.walk.difference,
                shared=finding.shared,
            )
        self.ledger.write(
            "gated",
            backend=pair.backend.name,
            regime=pair.regime.name,
            relation=relation,
            part=part,
            executed=outcome.executed,
            cut=outcome.cut,
            seconds=outcome.seconds,
        )
        return outcome

    def failed(self, result: Result, backend: Backend, finding: Finding | TraceFinding | None = None) -> str:
        """Save the repro of a failing result, explain it, and write its failure panel."""
        regimes, device = self.plan.regimes, str(self.plan.device)
        notes = save(result, backend, regimes, self.options.repro_dir, device=device, finding=finding)
        first = finding.first if isinstance(finding, Finding) else None
        looked = look_again(result, regimes, device=device, first=first, child=self.options.isolation == "worker")
        told = failure_fields(result, device=device, finding=finding, looked=looked, notes=notes, rules=regimes.option)
        self.ledger.write("failure", **told)
        return panel(result, device=device, finding=finding, looks=looked.lines, notes=notes, rules=regimes.option)

    def command(self, result: Result) -> str:
        """Give the command that replays a result."""
        rules = self.plan.regimes.option
        return replay_command(result.case, result.backend, str(self.plan.device), result.relation, rules=rules)

    def close(self, **fields: Any) -> None:
        """Write the end of this process's part."""
        if "isolation" in self.__dict__:
            self.isolation.close()
        if self.opened:
            self.ledger.write("end", **fields)
            self.ledger.close()
            if self.ledger.trouble:
                self._say(
                    f"mla-gate: {len(self.ledger.lost)} lines are missing in {self.ledger.path} ({self.ledger.trouble}); "
                    "the table counts them"
                )
