"""Which wrong answers a passing case would have let through, and which small ones it would have seen.

1. A wrong answer goes through the same checks as the actual one. A null model is scored bare; a sensitivity on top of the
   actual answer's own errors, as a kernel with that mistake would have shown it.
2. Requests are asked one after another until one sees the model; what is seen once need not be seen again.
3. A null model that is the truth, but for fp64 noise, is no evidence either way.

Source: docs/numerics.md, "When a pass means nothing".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from harness.actual import Actual
from harness.measure import Yardstick, measure
from harness.models import NULLS, SENSITIVITIES, Model, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How the models of one case fared; one that does not apply is not here."""

    #: Null model -> "seen", "passed", or "same" as the truth.
    nulls: dict[str, str] = field(default_factory=dict)
    #: Sensitivity -> whether it would have been seen.
    sensitivities: dict[str, bool] = field(default_factory=dict)


def score(actual: Actual, yardstick: Yardstick) -> Score:
    """Score every model on a case."""
    found = Score()
    truth = torch.zeros_like(yardstick.out)
    for request in yardstick.requests():
        weights = yardstick.weights(request)
        truth[request] = weights.sum_values(weights.probabilities)
    for request in yardstick.requests():
        view = _view(actual, yardstick, truth, request)
        _score_nulls(view, actual, yardstick, found.nulls)
        _score_sensitivities(view, actual, yardstick, found.sensitivities)
    return found


def _view(actual: Actual, yardstick: Yardstick, truth: torch.Tensor, request: int) -> View:
    case, arithmetic = actual.case, yardstick.regime.arithmetic
    length = case.lengths[request]
    edges = arithmetic.splits.edges(length, heads=case.heads, query_tokens=case.query_tokens, batch=case.batch)
    weights = yardstick.weights(request)
    return View(case=case, weights=weights, out=truth, split_edges=edges[1:-1], tile=arithmetic.tile)


def _score_nulls(view: View, actual: Actual, yardstick: Yardstick, nulls: dict[str, str]) -> None:
    for name, model in NULLS.items():
        if nulls.get(name) == "seen":
            continue
        state = _score_null(model, view, yardstick, actual.lse is not None)
        # A request in which the model is right says nothing against one in which it passes.
        if state is not None and (state != "same" or name not in nulls):
            nulls[name] = state


def _score_null(model: Model, view: View, yardstick: Yardstick, with_lse: bool) -> str | None:
    wrong = model.answer(view)
    if wrong is None:
        return None
    request, distinct = view.weights.request, yardstick.regime.limits.distinct
    live = yardstick.live[request]
    error = wrong.out - view.truth
    far = error.norm(dim=-1) > distinct * view.truth.norm(dim=-1)
    lse_error = wrong.lse - view.weights.lse if with_lse and wrong.lse is not None else None
    if lse_error is not None:
        far = far | (lse_error.abs() > distinct)
    if not bool(far[live].any()):
        return "same"
    return "seen" if bool((measure(yardstick, error, lse_error, request).worst() > 1).any()) else "passed"


def _score_sensitivities(view: View, actual: Actual, yardstick: Yardstick, seen: dict[str, bool]) -> None:
    request, weights = view.weights.request, view.weights
    noise = actual.out[request] - yardstick.out[request]
    lse_noise = None if actual.lse is None else actual.lse[request].double() - yardstick.lse[request]
    for name, model in SENSITIVITIES.items():
        wrong = None if seen.get(name) else model.answer(view)
        if wrong is None:
            continue
        lse_error = None if lse_noise is None or wrong.lse is None else lse_noise + (wrong.lse - weights.lse)
        found = measure(yardstick, noise + (wrong.out - view.truth), lse_error, request)
        seen[name] = bool((found.worst() > 1).any())
