"""The baseline beside a backend under test: the same questions, put to another version.

1. Both see the same inputs: a case has the same bytes whoever is asked, and each has memory of its own.
2. The baseline runs in a child of its own, so that neither version can spoil the other's answers. The price is that the
   truth is computed for each.
3. It is asked whatever counts on the backend, and while shrinking only where the backend fails.
4. A failure is shared where the baseline fails on the same question in the same nature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from harness.backends.protocol import Backend
from harness.case import Case
from harness.explain import explain
from harness.inputs import make_inputs
from harness.ledger import result_line
from harness.paired import moved, paired
from harness.regimes import REFUSAL, RELATIONS, NoRegime, Regimes
from harness.run import Result
from harness.search import EXECUTED, nature
from harness.verdict import Verdict

#: Puts a question to a backend: case, backend, relation.
Run = Callable[[Case, Backend, str | None], Result]
#: Phases of cases that the baseline is asked whatever came out.
COUNTED = frozenset({"search", "pinned", "shapes", "contract"})


class Baselines:
    """The baselines of a run's backends, and what they answered."""

    def __init__(self, backends: Mapping[str, Backend], regimes: Regimes, run: Run, write: Callable[..., None]) -> None:
        """Begin.

        Args:
            backends: name of a backend under test -> its baseline; empty where nothing is compared.
            regimes: the rules that answers are judged by.
            run: runs a case on a baseline.
            write: writes a line of the ledger: its kind and fields.
        """
        self.backends, self.regimes, self._run, self._write = backends, regimes, run, write
        self._answers: dict[tuple[str, Case, str | None], Result] = {}

    def beside(self, result: Result, phase: str) -> Result | None:
        """Ask the baseline what a backend was asked, or remember its answer; None where the backend has no baseline."""
        baseline = self.backends.get(result.backend)
        if baseline is None:
            return None
        key = (result.backend, result.case, result.relation)
        if key not in self._answers:
            self._answers[key] = self._ask(result, baseline)
            self._write("baseline", **result_line(self._answers[key], phase), of=result.backend)
        return self._answers[key]

    def _ask(self, result: Result, baseline: Backend) -> Result:
        try:
            if result.relation != REFUSAL:
                self.regimes.of(baseline.name, result.case)
        except NoRegime:
            verdict = Verdict(kind="UNSUPPORTED", message=f"no regime of {baseline.name} covers it")
            return Result(case=result.case, backend=baseline.name, regime=None, relation=result.relation, verdict=verdict)
        answer = self._run(result.case, baseline, result.relation)
        if answer.verdict.kind == "UNSUPPORTED" and result.relation in RELATIONS:
            # The backend failed before it was known whether the relation applies; the baseline did not.
            answer = replace(self._run(result.case, baseline, None), relation=result.relation)
        return answer

    def shares(self, result: Result, phase: str = "shrink") -> bool:
        """Tell whether the baseline fails on a failing result's question in the same nature."""
        if nature(result) is None:
            return False
        answer = self.beside(result, phase)
        return answer is not None and nature(answer) == nature(result)

    def look_at_moves(self, backend: Backend, results: list[Result], device: str) -> None:
        """Where the errors of a search's cases moved, explain the one that grew most, and write it down."""
        pairs = [(base, one) for one in results if (base := self.beside(one, "search")) and _plain(base) and _plain(one)]
        tests = [paired("rho", [(base.verdict.measurements.rho, one.verdict.measurements.rho) for base, one in pairs])]
        if not moved(tests):
            return
        base, most = max(pairs, key=lambda pair: _growth(*pair))
        looks = [str(test) for test in tests] + self._explained(most, backend, device)
        self._write("moved", backend=most.backend, regime=most.regime, case=str(most.case), base=base.verdict.kind, looks=looks)

    def _explained(self, result: Result, backend: Backend, device: str) -> list[str]:
        try:
            inputs = make_inputs(result.case, device=device, output_format=backend.capabilities.output_format)
            arithmetic = self.regimes.of(result.backend, result.case).arithmetic
            return str(explain(inputs, backend.run(inputs), arithmetic, rerun=backend.run)).splitlines()
        except Exception as error:  # an explanation is worth no verdict
            return [f"no explanation: {type(error).__name__}: {error}"]


def _plain(result: Result) -> bool:
    """Tell whether an error was measured, in a run that can be made again."""
    return result.verdict.kind in EXECUTED and result.relation is None and result.verdict.measurements.rows > 0


def _growth(base: Result, change: Result) -> float:
    return change.verdict.measurements.rho / (base.verdict.measurements.rho or 1e-300)
