"""Measurements to verdict.

1. What a kernel changed that it does not own comes first: a truth read from changed inputs is no truth.
2. Then what needs no measuring: elements not written, values that are no numbers, rows that see no token. Then the checks.
3. A failed check is confirmed with the fp64 oracle before it is a FAIL. If the reference strays from the oracle by more
   than fp32 explains, the verdict is ERROR: the fault is ours.
4. A pass counts only if no null model would have passed; it carries which sensitivities it would have seen.
5. Limits and arithmetic are the regime's; nothing here is a tolerance.

Source: docs/numerics.md, "What is checked" and "When a pass means nothing".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from harness.actual import Actual, blemish, flatten
from harness.backends.protocol import Output
from harness.findings import worst_elements, worst_rows
from harness.inputs import Inputs
from harness.measure import CHECKS, FINE, Ratios, Yardstick, measure_actual, measure_truth, recentre, stray
from harness.models import NULLS
from harness.regimes import Regime
from harness.scoring import Score, score
from harness.verdict import ElementFinding, Measurements, RowFinding, Verdict
from references.decode import mla_decode
from references.formats import FORMATS
from references.oracle import oracle
from references.precision import full_precision
from references.problem import Answer, Problem

__all__ = ["Known", "Verdict", "judge"]


@dataclass(frozen=False, slots=True, kw_only=True)
class Known:
    """What judging has found out about one case in one regime; several answers to the same inputs may share it."""

    #: The yardstick around the truth that answers are first held to.
    yardstick: Yardstick | None = None
    #: The yardstick around the oracle's truth.
    certain: Yardstick | None = None


def judge(
    inputs: Inputs,
    output: Output,
    regime: Regime,
    *,
    empty_rows: str = "zeros",
    models: bool = True,
    known: Known | None = None,
) -> Verdict:
    """Judge what a backend answered.

    Args:
        inputs: what it was given, after the run.
        output: what it answered, in the shapes asked for.
        regime: the rules that cover this case of this backend.
        empty_rows: the backend's policy for rows that see no token, one of EMPTY_ROWS.
        models: whether wrong answers are scored too; a pass without them is not shown to be worth anything.
        known: what is known of these inputs from an earlier answer to them.

    Raises:
        ValueError: if there is no such policy.
    """
    with torch.no_grad(), full_precision():
        return _judge(inputs, output, regime, empty_rows, models, known or Known())


def _judge(inputs: Inputs, output: Output, regime: Regime, empty_rows: str, models: bool, known: Known) -> Verdict:
    where = f"{inputs.case}\n  regime {regime.name}"
    violations = sorted(inputs.violations(), key=lambda violation: violation.fault != "input-changed")
    if violations:
        found = "; ".join(f"{violation.fault}: {violation.message}" for violation in violations)
        return Verdict(kind="FAIL", fault=violations[0].fault, message=f"{where}: {found}")
    stored = FORMATS[regime.arithmetic.output]
    if output.out.dtype != stored.storage:
        message = f"{where} says the output is {stored.storage}, it is {output.out.dtype}: mend the row"
        return Verdict(kind="ERROR", message=message)
    actual = flatten(inputs.case, output, stored)
    found_blemish = blemish(actual, empty_rows)
    if found_blemish is not None:
        return Verdict(kind="FAIL", fault=found_blemish.fault, message=f"{where}: {found_blemish.message}")
    if not any(inputs.case.lengths):
        return Verdict(kind="PASS", message=f"{where}: no row sees a token; only the policy was checked")
    return _weigh(regime.understood(inputs.problem()), actual, regime, models, where, known)


def _weigh(problem: Problem, actual: Actual, regime: Regime, models: bool, where: str, known: Known) -> Verdict:
    """Hold a well-formed answer to the truth."""
    exact = actual.known.unit_roundoff <= FINE
    if known.yardstick is None:
        known.yardstick = measure_truth(problem, oracle(problem) if exact else mla_decode(problem), regime)
    yardstick = known.yardstick
    ratios = measure_actual(actual, yardstick)
    largest = ratios.largest()
    if any(map(math.isnan, largest.values())):
        return Verdict(kind="ERROR", message=f"{where}: ours: the budget has no number for some row")
    if max(largest.values()) > 1 and not exact:
        if known.certain is None:
            certain = oracle(problem)
            doubt = _doubt(yardstick, certain, actual.case.heads)
            if doubt is not None:
                return Verdict(kind="ERROR", message=f"{where}: {doubt}")
            known.certain = recentre(yardstick, certain)
        yardstick = known.certain
        ratios = measure_actual(actual, yardstick)
        largest = ratios.largest()
    if max(largest.values()) > 1:
        return _fail(actual, yardstick, ratios, largest, where)
    return _pass(actual, yardstick, ratios, largest, models, where)


def _doubt(yardstick: Yardstick, certain: Answer, heads: int) -> str | None:
    """Hold the reference to the oracle, and say how far it strays if that is too far."""
    strayed = stray(yardstick, certain).nan_to_num(nan=torch.inf)
    limit = yardstick.regime.limits.doubt
    if bool((strayed <= limit).all()):
        return None
    request, row = divmod(int(strayed.argmax()), strayed.shape[1])
    return (
        f"ours: the fp32 reference strays from the fp64 oracle by {float(strayed.max()):.3g} units of what fp32 explains "
        f"(limit {limit:.3g}), most in row {[request, *divmod(row, heads)]}; nothing is known of the backend"
    )


def _fail(actual: Actual, yardstick: Yardstick, ratios: Ratios, largest: dict[str, float], where: str) -> Verdict:
    broken = {name: ratio for name, ratio in largest.items() if ratio > 1}
    rows, elements = worst_rows(actual, yardstick, ratios), worst_elements(actual, yardstick)
    said = "; ".join(f"{CHECKS[name]} ({name} {ratio:.3g} of its limit)" for name, ratio in broken.items())
    listed = "\n    ".join(str(found) for found in (*rows, *elements))
    return Verdict(
        kind="FAIL",
        fault="inaccurate" if set(broken) == {"accuracy"} else "mismatch",
        message=f"{where}: {said}\n    {listed}",
        measurements=_measurements(actual, yardstick, ratios, largest, Score(), rows=rows, elements=elements),
    )


def _pass(actual: Actual, yardstick: Yardstick, ratios: Ratios, largest: dict[str, float], models: bool, where: str) -> Verdict:
    scored = score(actual, yardstick) if models else Score()
    measurements = _measurements(actual, yardstick, ratios, largest, scored)
    passed = [name for name, state in scored.nulls.items() if state == "passed"]
    if passed:
        told = "; ".join(f"{name} ({NULLS[name].about})" for name in passed)
        message = f"{where}: the pass proves nothing, since a wrong answer passes too: {told}"
        return Verdict(kind="UNTRUSTED", message=message, measurements=measurements)
    worst = max(measurements.ratios, key=lambda name: measurements.ratios[name])
    message = f"{where}: worst is {worst} at {measurements.ratios[worst]:.3g} of its limit"
    return Verdict(kind="PASS", message=message, measurements=measurements)


def _measurements(
    actual: Actual,
    yardstick: Yardstick,
    ratios: Ratios,
    largest: dict[str, float],
    scored: Score,
    *,
    rows: tuple[RowFinding, ...] = (),
    elements: tuple[ElementFinding, ...] = (),
) -> Measurements:
    figures = torch.stack([ratios.rho, ratios.z, ratios.element, ratios.relative])
    rho, z, element, relative = figures.masked_fill(~yardstick.live, -torch.inf).flatten(1).amax(1).tolist()
    return Measurements(
        rows=yardstick.rows,
        elements=yardstick.rows * actual.case.latent,
        ratios=largest,
        rho=rho,
        z=z,
        element=element,
        relative=relative,
        nulls=scored.nulls,
        sensitivities=scored.sensitivities,
        worst_rows=rows,
        worst_elements=elements,
    )
