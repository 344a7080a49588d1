"""Measurements to verdict.

1. What a kernel changed that it does not own comes first: a truth read from changed inputs is no truth.
2. Then policy: rows that see no token, elements not written, values that are no numbers. Then the measured checks.
3. A failed check is confirmed with the fp64 oracle before it is a FAIL. If the reference strays from the oracle by more
   than fp32 explains, the verdict is ERROR: the fault is ours.
4. A pass counts only if no null model would have passed; it carries which sensitivities it would have seen.
5. Limits and arithmetic are the regime's; nothing here is a tolerance.

Source: docs/numerics.md, "What is checked" and "When a pass means nothing".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.backends.protocol import EMPTY_ROWS, Output
from harness.inputs import Inputs
from harness.measure import CHECKS, FINE, Ratios, Yardstick, measure, measure_truth, stray
from harness.models import NULLS, SENSITIVITIES, Model, View
from harness.regimes import Regime
from harness.verdict import ElementFinding, Measurements, RowFinding, Verdict
from references.decode import mla_decode
from references.formats import FORMATS, decode, ulp
from references.formats import round as round_to
from references.oracle import oracle
from references.precision import full_precision
from references.problem import Answer, Problem

__all__ = ["Verdict", "judge"]

#: Rows and elements that a verdict lists.
LISTED_ROWS, LISTED_ELEMENTS = 4, 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(slots=True)
class Known:
    """What judging has found out about one case in one regime; several answers to the same inputs may share it."""

    #: The truth, and whether it is the oracle's.
    truth: tuple[Answer, bool] | None = None
    yardstick: Yardstick | None = None
    #: The oracle's truth, and the yardstick around it.
    certain: tuple[Answer, Yardstick] | None = None


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
        output: what it answered.
        regime: the rules that cover this case of this backend.
        empty_rows: the backend's policy for rows that see no token, one of EMPTY_ROWS.
        models: whether wrong answers are scored too; a pass without them is not shown to be worth anything.
        known: what is known of these inputs from an earlier answer to them.
    """
    with torch.no_grad(), full_precision():
        return _Bench(inputs, output, regime, empty_rows, models, known or Known()).verdict()


class _Bench:
    """One judging; the steps share what was measured before."""

    def __init__(
        self, inputs: Inputs, output: Output, regime: Regime, empty_rows: str, models: bool, known: Known
    ) -> None:
        if empty_rows not in EMPTY_ROWS:
            raise ValueError(f"empty_rows is one of {', '.join(EMPTY_ROWS)}, not {empty_rows!r}")
        self.inputs, self.output, self.regime = inputs, output, regime
        self.empty_rows, self.models, self.known = empty_rows, models, known
        case = inputs.case
        self.shape = (case.batch, case.query_tokens * case.heads)

    def verdict(self) -> Verdict:
        """Go through the checks in their order."""
        touched = self._ownership()
        if touched is not None and touched.fault == "input-changed":
            return touched
        found = self._form() or touched
        if found is not None:
            return found
        problem = self.inputs.problem()
        live = self._live(problem)
        found = self._policy(live)
        if found is not None:
            return found
        known = self.known
        truth, exact = known.truth = known.truth or self._truth(problem)
        yardstick = known.yardstick = known.yardstick or measure_truth(problem, truth, self.regime)
        ratios = self._measure(yardstick)
        if bool(ratios.worst().isnan().any()):
            message = f"{self.inputs.case}\n  ours: the budget of regime {self.regime.name} has no number for some row"
            return Verdict(kind="ERROR", message=message)
        if not exact and bool((ratios.worst() > 1).any()):
            if known.certain is None:
                truth = oracle(problem)
                doubt = self._doubt(yardstick, truth)
                if doubt is not None:
                    return doubt
                known.certain = truth, measure_truth(problem, truth, self.regime)
            _, yardstick = known.certain
            ratios = self._measure(yardstick)
        if bool((ratios.worst() > 1).any()):
            return self._fail(yardstick, ratios)
        return self._pass(yardstick, ratios)

    # -- what is not numerics ---------------------------------------------------------------------------------------

    def _fault(self, fault: str, message: str, measurements: Measurements | None = None) -> Verdict:
        where = f"{self.inputs.case}\n  regime {self.regime.name}"
        return Verdict(kind="FAIL", fault=fault, message=f"{where}: {message}", measurements=measurements or Measurements())

    def _ownership(self) -> Verdict | None:
        violations = sorted(self.inputs.violations(), key=lambda violation: violation.fault != "input-changed")
        if not violations:
            return None
        found = "; ".join(f"{violation.fault}: {violation.message}" for violation in violations)
        return self._fault(violations[0].fault, found)

    def _form(self) -> Verdict | None:
        """Hold the answer to the regime's output format; another one is a row that does not describe its backend."""
        wanted, given = FORMATS[self.regime.arithmetic.output].storage, self.output.out.dtype
        if given == wanted:
            return None
        message = f"{self.inputs.case}\n  regime {self.regime.name} says the output is {wanted}, it is {given}: mend the row"
        return Verdict(kind="ERROR", message=message)

    def _live(self, problem: Problem) -> Tensor:
        tokens = torch.tensor(problem.lengths)[:, None] - problem.query_tokens + 1 + torch.arange(problem.query_tokens)
        live = (tokens > 0).repeat_interleave(problem.heads, dim=1)
        return live.to(self.output.out.device)

    def _policy(self, live: Tensor) -> Verdict | None:
        """Find elements that are unwritten or no numbers, and empty rows against the policy."""
        case, out = self.inputs.case, self.output.out.reshape(*self.shape, -1)
        lse = self._lse()
        untouched = _poisoned(out)
        if bool((untouched & live[..., None]).any()):
            return self._fault("unwritten", _count(untouched & live[..., None], case.heads, "output elements never written"))
        if lse is not None and bool((_poisoned(lse) & live).any()):
            return self._fault("unwritten", _count((_poisoned(lse) & live)[..., None], case.heads, "lse never written"))
        values = decode(out, FORMATS[self.regime.arithmetic.output])
        broken = values.isnan() & live[..., None]
        if bool(broken.any()):
            return self._fault("non-finite", _count(broken, case.heads, "output elements are NaN"))
        if lse is not None and bool((~lse.isfinite() & live).any()):
            return self._fault("non-finite", _count((~lse.isfinite() & live)[..., None], case.heads, "lse are not finite"))
        return self._empty_rows(values, untouched, lse, ~live)

    def _empty_rows(self, values: Tensor, untouched: Tensor, lse: Tensor | None, empty: Tensor) -> Verdict | None:
        policy = self.empty_rows
        if policy == "undefined" or not bool(empty.any()):
            return None
        wrong = (~untouched if policy == "untouched" else values != 0) & empty[..., None]
        if lse is not None:
            wrong_lse = (~_poisoned(lse) if policy == "untouched" else lse != -torch.inf) & empty
            wrong = wrong | wrong_lse[..., None]
        if not bool(wrong.any()):
            return None
        rows = wrong.any(-1, keepdim=True)
        stale = bool((untouched & wrong).any()) or (lse is not None and bool((_poisoned(lse) & rows[..., 0]).any()))
        fault = "unwritten" if stale else "non-finite" if bool((values.isnan() & wrong).any()) else "mismatch"
        wanted = "left untouched" if policy == "untouched" else "zero with an lse of minus infinity"
        return self._fault(fault, _count(rows, self.inputs.case.heads, f"rows that see no token are not {wanted}"))

    def _lse(self) -> Tensor | None:
        if not self.inputs.case.lse or self.output.lse is None:
            return None
        return self.output.lse.reshape(self.shape)

    # -- numerics ---------------------------------------------------------------------------------------------------

    def _truth(self, problem: Problem) -> tuple[Answer, bool]:
        """Compute the truth, and say whether it is the oracle's."""
        if FORMATS[self.regime.arithmetic.output].unit_roundoff <= FINE:
            return oracle(problem), True
        return mla_decode(problem), False

    def _measure(self, yardstick: Yardstick) -> Ratios:
        known = FORMATS[self.regime.arithmetic.output]
        values = decode(self.output.out, known).double().reshape(yardstick.out.shape)
        error = _error(values, yardstick, known.maximum)
        lse = self._lse()
        return measure(yardstick, error, None if lse is None else lse.double() - yardstick.lse)

    def _doubt(self, yardstick: Yardstick, certain: Answer) -> Verdict | None:
        """Hold the reference to the oracle."""
        strayed = stray(yardstick, certain).nan_to_num(nan=torch.inf)
        limit = self.regime.limits.doubt
        if bool((strayed <= limit).all()):
            return None
        request, row = divmod(int(strayed.argmax()), strayed.shape[1])
        token, head = divmod(row, self.inputs.case.heads)
        message = (
            f"{self.inputs.case}\n  ours: the fp32 reference strays from the fp64 oracle by {float(strayed.max()):.3g} units "
            f"of what fp32 explains (limit {limit:.3g}), most in row {[request, token, head]}; nothing is known of the backend"
        )
        return Verdict(kind="ERROR", message=message)

    def _fail(self, yardstick: Yardstick, ratios: Ratios) -> Verdict:
        broken = {name: float(ratio.max()) for name, ratio in ratios.checks.items() if bool((ratio > 1).any())}
        fault = "inaccurate" if set(broken) == {"accuracy"} else "mismatch"
        measurements = self._measurements(yardstick, ratios, listing=True)
        said = "; ".join(f"{CHECKS[name]} ({name} {ratio:.3g} of its limit)" for name, ratio in broken.items())
        listed = [str(found) for found in (*measurements.worst_rows, *measurements.worst_elements)]
        return self._fault(fault, "\n    ".join([said, *listed]), measurements)

    def _pass(self, yardstick: Yardstick, ratios: Ratios) -> Verdict:
        case = self.inputs.case
        if not yardstick.rows:
            message = f"{case}\n  regime {self.regime.name}: no row sees a token; only the policy was checked"
            return Verdict(kind="PASS", message=message)
        nulls, seen = self._score_models(yardstick) if self.models else ({}, {})
        measurements = self._measurements(yardstick, ratios, nulls=nulls, sensitivities=seen)
        passed = [name for name, state in nulls.items() if state == "passed"]
        where = f"{case}\n  regime {self.regime.name}: "
        if passed:
            told = "; ".join(f"{name} ({NULLS[name].about})" for name in passed)
            message = f"{where}the pass proves nothing, since a wrong answer passes too: {told}"
            return Verdict(kind="UNTRUSTED", message=message, measurements=measurements)
        worst = max(measurements.ratios, key=lambda name: measurements.ratios[name])
        message = f"{where}worst is {worst} at {measurements.ratios[worst]:.3g} of its limit"
        return Verdict(kind="PASS", message=message, measurements=measurements)

    def _score_models(self, yardstick: Yardstick) -> tuple[dict[str, str], dict[str, bool]]:
        """Score every wrong answer, request by request, until it is seen."""
        values = decode(self.output.out, FORMATS[self.regime.arithmetic.output]).double().reshape(yardstick.out.shape)
        noise, lse = values - yardstick.out, self._lse()
        lse_noise = None if lse is None else lse.double() - yardstick.lse
        truth = torch.zeros_like(yardstick.out)
        for request, weights in yardstick.weights.items():
            truth[request] = weights.sum_values(weights.probabilities)
        nulls: dict[str, str] = {}
        seen: dict[str, bool] = {}
        for request, weights in yardstick.weights.items():
            view = self._view(yardstick, truth, request)
            if not bool(yardstick.live[request].any()):
                continue
            for name, model in NULLS.items():
                if nulls.get(name) != "seen":
                    state = _score_null(model, view, yardstick)
                    if (state is not None and nulls.get(name) != "passed") or state == "seen":
                        nulls[name] = state or "same"
            for name, model in SENSITIVITIES.items():
                if not seen.get(name):
                    wrong = model.answer(view)
                    if wrong is None:
                        continue
                    lse_error = None
                    if lse_noise is not None and wrong.lse is not None:
                        lse_error = lse_noise[request] + (wrong.lse - weights.lse)
                    found = measure(yardstick, noise[request] + wrong.out - view.truth, lse_error, request)
                    seen[name] = bool((found.worst() > 1).any())
        return nulls, seen

    def _view(self, yardstick: Yardstick, truth: Tensor, request: int) -> View:
        case, arithmetic = self.inputs.case, self.regime.arithmetic
        edges = arithmetic.splits.edges(
            case.lengths[request], heads=case.heads, query_tokens=case.query_tokens, batch=case.batch
        )
        return View(
            case=case,
            weights=yardstick.weights[request],
            out=truth,
            split_edges=edges[1:-1],
            tile=arithmetic.tile,
        )

    def _measurements(
        self,
        yardstick: Yardstick,
        ratios: Ratios,
        *,
        listing: bool = False,
        nulls: dict[str, str] | None = None,
        sensitivities: dict[str, bool] | None = None,
    ) -> Measurements:
        live, case = yardstick.live, self.inputs.case
        return Measurements(
            rows=yardstick.rows,
            elements=yardstick.rows * case.latent,
            ratios={name: float(ratio.max()) for name, ratio in ratios.checks.items()},
            rho=float(ratios.rho[live].max()),
            z=float(ratios.z[live].max()),
            element=float(ratios.element[live].max()),
            relative=float(ratios.relative[live].max()),
            nulls=nulls or {},
            sensitivities=sensitivities or {},
            worst_rows=self._worst_rows(yardstick, ratios) if listing else (),
            worst_elements=self._worst_elements(yardstick) if listing else (),
        )

    def _worst_rows(self, yardstick: Yardstick, ratios: Ratios) -> tuple[RowFinding, ...]:
        worst = ratios.worst()
        lse = self._lse()
        found = []
        for flat in worst.flatten().topk(min(LISTED_ROWS, worst.numel())).indices.tolist():
            at = divmod(flat, worst.shape[1])
            if worst[at] > 0:
                found.append(
                    RowFinding(
                        index=(at[0], *divmod(at[1], self.inputs.case.heads)),
                        check=max(ratios.checks, key=lambda name, at=at: float(ratios.checks[name][at])),  # type: ignore[misc]
                        ratio=float(worst[at]),
                        rho=float(ratios.rho[at]),
                        z=float(ratios.z[at]),
                        z_limit=float(yardstick.row_limit[at]),
                        relative=float(ratios.relative[at]),
                        lse_expected=float(yardstick.lse[at]),
                        lse_actual=None if lse is None else float(lse[at]),
                    )
                )
        return tuple(found)

    def _worst_elements(self, yardstick: Yardstick) -> tuple[ElementFinding, ...]:
        known, case = FORMATS[self.regime.arithmetic.output], self.inputs.case
        values = decode(self.output.out, known).double().reshape(yardstick.out.shape)
        error = _error(values, yardstick, known.maximum).abs()
        tiny = torch.finfo(torch.float64).tiny
        score = torch.maximum(
            error / yardstick.hard.clamp_min(tiny) / self.regime.limits.hard,
            error / yardstick.variance.sqrt().clamp_min(tiny) / yardstick.element_limit,
        )
        score = torch.where(yardstick.live[..., None], score, 0.0)
        expected = round_to(yardstick.out, known)
        found = []
        for flat in score.flatten().topk(min(LISTED_ELEMENTS, score.numel())).indices.tolist():
            request, rest = divmod(flat, score.shape[1] * score.shape[2])
            row, element = divmod(rest, score.shape[2])
            at = (request, row, element)
            step = float(ulp(yardstick.out[at].reshape(1), known)[0])
            found.append(
                ElementFinding(
                    index=(request, *divmod(row, case.heads), element),
                    oracle=float(yardstick.out[at]),
                    expected=float(expected[at]),
                    actual=float(values[at]),
                    ulps=float((values[at] - expected[at]) / step),
                    hard=float(yardstick.hard[at]),
                    deviation=float(yardstick.variance[at].sqrt()),
                )
            )
        return tuple(found)


def _score_null(model: Model, view: View, yardstick: Yardstick) -> str | None:
    """Score a null model on one request: "seen", "passed", "same" as the truth, or None where it does not apply."""
    wrong = model.answer(view)
    if wrong is None:
        return None
    request = view.weights.request
    error = wrong.out - view.truth
    distance, size = error.norm(dim=-1), view.truth.norm(dim=-1)
    live = yardstick.live[request]
    if not bool((distance > yardstick.regime.limits.distinct * size)[live].any()):
        return "same"
    found = measure(yardstick, error, None, request)
    return "seen" if bool((found.worst() > 1).any()) else "passed"


def _error(values: Tensor, yardstick: Yardstick, maximum: float) -> Tensor:
    """Take output less truth; where the truth lies beyond the format, infinity of its sign and the largest value are right."""
    truth = yardstick.out
    beyond = truth.abs() + yardstick.hard > maximum
    right = beyond & (values.sign() == truth.sign()) & (values.abs() >= maximum)
    return torch.where(right, 0.0, values - truth)


def _poisoned(values: Tensor) -> Tensor:
    """Find elements whose bits are all set, as outputs are before a run."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()])
    return bits == (0xFF if bits.dtype == torch.uint8 else -1)


def _count(wrong: Tensor, heads: int, what: str) -> str:
    """Say how many and where the first is: [B, R, L]."""
    request, row, element = (int(index) for index in wrong.nonzero()[0])
    token, head = divmod(row, heads)
    return f"{int(wrong.sum())} {what}, the first at request {request}, query token {token}, head {head}, element {element}"
