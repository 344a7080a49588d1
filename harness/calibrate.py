"""The distribution of what the judge measures, on a backend that is right: what limits rest on.

``python -m harness.calibrate --backend NAME`` runs random cases of every regime of a backend and prints a table a regime;
``python -m harness.calibrate --ledger DIR`` prints the tables of what runs of the gate measured.

1. The cases are those that the gate draws, with a seed that is printed; the same seed gives the same cases.
2. Nothing is left out: cases that fail are counted and named, and their measurements are in the table.
3. Of a run of the gate its random cases count, as they were drawn: not those that shrinking tried.
4. A quantile is of cases: of each the largest row, or element, counts, as it does for the limit.

Source: docs/numerics.md, "Calibration"; each regime's ``why`` quotes a table that this made.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from harness.backends import registry
from harness.backends.protocol import Backend
from harness.case import Case
from harness.inputs import make_inputs
from harness.ledger import Line, number, read_all
from harness.measure import measure_truth, stray
from harness.profiles import PROFILES, Profile
from harness.regimes import Regime, Regimes, load
from harness.run import Result, run_case
from harness.strategies import NoSuchCase, cases
from harness.verdict import Measurements, Verdict
from references.decode import mla_decode
from references.oracle import oracle
from references.precision import full_precision

#: Shares of the cases below which a column of the table lies; 1 is the largest of all.
SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)
#: Lines of the table: what is measured of a case.
LINES: dict[str, Callable[[Measurements], float]] = {
    "rho": lambda found: found.rho,
    "z": lambda found: found.z,
    "z / limit": lambda found: found.ratios["row"],
    "|e| / sqrt V": lambda found: found.element,
    "|e| / sqrt V / limit": lambda found: found.ratios["element"],
    "|e| / W": lambda found: found.ratios["hard"],
    "lse / limit": lambda found: found.ratios.get("lse", 0.0),
    "relative error": lambda found: found.relative,
    "accuracy / limit": lambda found: found.ratios["accuracy"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found of one backend in one regime."""

    #: Names of both.
    backend: str
    regime: str
    #: Results that were judged, in order.
    results: list[Result] = field(default_factory=list)
    #: What each took of this process's CPU, seconds; none where a ledger was read.
    seconds: list[float] = field(default_factory=list)
    #: Distance of the reference from the oracle, in units that ``doubt`` limits; by case where asked for.
    strays: list[float] = field(default_factory=list)

    def measured(self) -> list[Measurements]:
        """List the measurements of cases that have any row."""
        return [result.verdict.measurements for result in self.results if result.verdict.measurements.rows]

    @property
    def failed(self) -> bool:
        """Tell whether a case failed."""
        return any(result.verdict.kind in ("FAIL", "ERROR") for result in self.results)

    def table(self) -> str:
        """Print it: verdicts, quantiles, shares of sensitivities seen and of null models passed."""
        kinds = Counter(result.verdict.fault or result.verdict.kind for result in self.results)
        found = self.measured()
        lines = [
            f"{self.backend} in {self.regime}: {len(self.results)} cases, {sum(m.rows for m in found)} rows: {dict(kinds)}"
        ]
        lines.append(f"{'':24}" + "".join(f"{f'{share:.1%}' if share < 1 else 'max':>12}" for share in SHARES))
        for name, take in LINES.items():
            lines.append(f"{name:24}" + _quantiles([take(one) for one in found]))
        if self.strays:
            lines.append(f"{'reference / oracle':24}" + _quantiles(self.strays))
        if self.seconds:
            mean = sum(self.seconds) / len(self.seconds)
            lines.append(f"{f'CPU s ({mean:.3g} a case)':24}" + _quantiles(self.seconds))
        lines.extend(self._furthest())
        for title, count in (("seen", self._seen()), ("passed", self._passed())):
            lines.append(f"{title}: " + (", ".join(f"{name} {share}" for name, share in count.items()) or "none"))
        named = [result for result in self.results if result.verdict.kind in ("FAIL", "ERROR", "UNTRUSTED")]
        return "\n".join(lines + [f"  {result.verdict.kind} {_told(result)}" for result in named])

    def _furthest(self) -> list[str]:
        """Name the case that went furthest in each check, so that it can be looked at."""
        rows = [result for result in self.results if result.verdict.measurements.rows]
        checks = sorted({check for result in rows for check in result.verdict.measurements.ratios})
        lines = []
        for check in checks:
            worst = max(rows, key=lambda result, check=check: result.verdict.measurements.ratios.get(check, 0.0))  # type: ignore[misc]
            lines.append(f"furthest in {check} ({worst.verdict.measurements.ratios[check]:.3g} of the limit): {worst.case}")
        if self.strays:
            furthest = self.strays.index(max(self.strays))
            lines.append(f"furthest from the oracle: {self.results[furthest].case}")
        return lines

    def _seen(self) -> dict[str, str]:
        asked: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        for one in self.measured():
            asked.update(list(one.sensitivities))  # a mapping would add up its values
            seen.update(name for name, saw in one.sensitivities.items() if saw)
        return {name: f"{seen[name] / count:.0%} of {count}" for name, count in asked.items()}

    def _passed(self) -> dict[str, str]:
        passed = Counter(name for one in self.measured() for name, state in one.nulls.items() if state == "passed")
        return {name: f"{count}" for name, count in passed.items()}


def _told(result: Result) -> str:
    """Say what became of a case; the judge's own messages begin with its id, those of a crash do not."""
    message, case = result.verdict.message, str(result.case)
    return message if message.startswith(case) else f"{case}: {message}"


def calibrate(
    backend: Backend,
    regime: Regime,
    regimes: Regimes,
    profile: Profile,
    *,
    examples: int,
    start: int = 0,
    device: torch.device | str = "cpu",
    with_strays: bool = False,
) -> Calibration:
    """Run random cases of a regime on a backend that is taken to be right.

    Raises:
        NoSuchCase: if the backend accepts no case of the regime.
    """
    found = Calibration(backend=backend.name, regime=regime.name)

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(regime, profile, backend, device))
    def ask(case: Case) -> None:
        began = time.process_time()
        found.results.append(run_case(case, backend, regimes, device=device))
        found.seconds.append(time.process_time() - began)
        if with_strays:
            found.strays.append(_stray(case, regime, device))

    ask()
    return found


def calibrations_of(lines: Iterable[Line]) -> list[Calibration]:
    """Collect what runs of the gate measured, by backend and regime; a case that was asked in two runs counts once."""
    found: dict[tuple[str, str], Calibration] = {}
    seen = set()
    for line in lines:
        if line["kind"] != "result" or line["phase"] != "search" or line["regime"] is None:
            continue
        question = (line["backend"], line["regime"], line["case"], line["relation"])
        if question in seen:
            continue
        seen.add(question)
        kept = found.setdefault(question[:2], Calibration(backend=line["backend"], regime=line["regime"]))
        kept.results.append(_result(line))
    return list(found.values())


def _result(line: Line) -> Result:
    """Read back what the tables need of a result."""
    told = line["measurements"] or {}
    measured = Measurements(
        rows=told.get("rows", 0),
        elements=told.get("elements", 0),
        ratios={check: number(ratio) for check, ratio in told.get("ratios", {}).items()},
        nulls=told.get("nulls", {}),
        sensitivities=told.get("sensitivities", {}),
        rho=number(told.get("rho", 0)),
        z=number(told.get("z", 0)),
        element=number(told.get("element", 0)),
        relative=number(told.get("relative", 0)),
    )
    verdict = Verdict(kind=line["verdict"], fault=line["fault"], message=line["message"], measurements=measured)
    return Result(case=Case.parse(line["case"]), backend=line["backend"], regime=line["regime"], verdict=verdict)


def _stray(case: Case, regime: Regime, device: torch.device | str) -> float:
    problem = make_inputs(case, device=device).problem()
    with torch.no_grad(), full_precision():
        return float(stray(measure_truth(problem, mla_decode(problem), regime), oracle(problem)).max())


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "   nothing was measured"
    ordered = sorted(values)
    return "".join(f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:12.4g}" for share in SHARES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line; 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m harness.calibrate", description=__doc__)
    parser.add_argument("--backend", action="append", default=[], help="a backend that is right (repeatable)")
    parser.add_argument("--ledger", action="append", default=[], help="run of the gate: its folder (repeatable)")
    parser.add_argument("--regime", action="append", help="only this regime (repeatable)")
    parser.add_argument("--cases", type=int, default=2000, help="cases of each backend and regime")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="smoke", help="how large cases are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--doubt", action="store_true", help="compare the reference with the oracle too")
    options = parser.parse_args(arguments)
    if not options.backend and not options.ledger:
        parser.error("name a backend to run, or the ledger of a run of the gate")
    regimes, failed = load(), False
    for found in calibrations_of(line for ledger in read_all(options.ledger) for line in ledger.lines):
        print(found.table() + "\n", flush=True)
        failed = failed or found.failed
    for name in options.backend:
        backend = registry.make(name)
        for regime in regimes.for_backend(backend.name):
            if options.regime and regime.name not in options.regime:
                continue
            try:
                found = calibrate(
                    backend,
                    regime,
                    regimes,
                    PROFILES[options.profile],
                    examples=options.cases,
                    start=options.seed,
                    device=options.device,
                    with_strays=options.doubt,
                )
            except NoSuchCase as reason:
                print(f"{backend.name} in {regime.name}: no case: {reason}\n")
                continue
            print(found.table() + f"\nseed {options.seed}, profile {options.profile}, {options.device}\n", flush=True)
            failed = failed or found.failed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
