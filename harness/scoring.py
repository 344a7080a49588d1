"""Which wrong answers a passing case would have let through, and which small ones it would have seen.

1. A wrong answer goes through the same checks as the actual one. A null model is scored bare; a sensitivity on top of the
   actual answer's own errors, as a kernel with that mistake would have shown it.
2. The longest request is asked first, then the others, some at a time; a model that was seen once need not be seen again.
3. A null model that is the truth, but for fp64 noise, is no evidence either way. One whose output is the truth and whose lse
   no check tells apart is taken for it too: there is nothing that a kernel with that mistake would have done wrong.

Source: docs/numerics.md, "When a pass means nothing".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.actual import Actual
from harness.measure import Yardstick, measure
from harness.models import MODELS, NULLS, SENSITIVITIES, Model, View, Wrong
from references.problem import pick, place

#: fp64 values of scores, queries and rows that are worked on at a time where several requests are asked together.
_TOGETHER = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How the models of one case fared; one that does not apply is not here."""

    #: Null model -> "seen", "passed", or "same" as the truth.
    nulls: dict[str, str] = field(default_factory=dict)
    #: Sensitivity -> whether it would have been seen.
    sensitivities: dict[str, bool] = field(default_factory=dict)


def score(actual: Actual, yardstick: Yardstick) -> Score:
    """Score every model on a case."""
    states: dict[str, str] = {}
    asked = MODELS
    for requests, some in _in_turn(yardstick):
        if not asked:
            break
        for name, found in _ask(asked, actual, yardstick, requests, some=some).items():
            # A request in which a model is right says nothing against one in which it passes.
            states[name] = next(state for state in ("seen", "passed", "same") if state in (found, states.get(name)))
        # What does not apply to the longest request applies to none.
        asked = {name: asked[name] for name, state in states.items() if state != "seen"}
    return Score(
        nulls={name: states[name] for name in NULLS if name in states},
        sensitivities={name: states[name] == "seen" for name in SENSITIVITIES if name in states},
    )


def _in_turn(yardstick: Yardstick) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the requests that see a token, and whether some of their rows are enough for now.

    The longest comes first and alone, as it mostly sees all there is to see; some of its rows do too, where it has many.
    """
    problem, group = yardstick.problem, list[int]()
    first, *others = sorted(yardstick.requests, key=lambda request: -problem.lengths[request])
    if yardstick.some is not None:
        yield (first,), True
    yield (first,), False
    cost = problem.query_tokens * problem.heads + problem.width
    for request in others:
        if group and (len(group) + 1) * problem.lengths[group[0]] * cost > _TOGETHER:
            yield tuple(group), False
            group = []
        group.append(request)
    if group:
        yield tuple(group), False


def _ask(
    asked: Mapping[str, Model], actual: Actual, yardstick: Yardstick, requests: tuple[int, ...], *, some: bool
) -> dict[str, str]:
    """Ask models of some requests: the state of each that applies to any of them."""
    device = yardstick.out.device
    at: tuple[Any, ...] = (place(requests, device)[:, None], yardstick.some) if some else (pick(requests, device),)
    view = _view(actual, yardstick, requests, at, some=some)
    wrongs = {name: wrong for name, model in asked.items() if (wrong := model.answer(view)) is not None}
    if not wrongs:
        return {}
    truth, limit = view.truth, yardstick.regime.limits.distinct
    error = torch.stack([wrong.out for wrong in wrongs.values()]).sub_(truth)
    far = error.norm(dim=-1) > limit * truth.norm(dim=-1)
    # Which are sensitivities, and which say anything of the lse: one that does not is not held to it.
    kinds = [[name in SENSITIVITIES for name in wrongs], [wrong.lse is not None for wrong in wrongs.values()]]
    fine, says = place(kinds, device)[..., None, None]
    error.addcmul_(fine[..., None], actual.out[at] - yardstick.out[at])
    lse_error = None
    if actual.lse is not None:
        noise = (actual.lse[at].double() - yardstick.lse[at]).masked_fill(~yardstick.live[at], 0.0)
        lse = torch.stack([view.weights.lse if wrong.lse is None else wrong.lse for wrong in wrongs.values()])
        lse_error = torch.where(says, lse - view.weights.lse + fine * noise, 0.0)
    seen = measure(yardstick, error, lse_error, at).worst() > 1
    told = torch.stack([seen, far & yardstick.live[at]]).any(-1).tolist()
    return {
        name: state
        for name, wrong, *hits in zip(wrongs, wrongs.values(), *told, strict=True)
        if (state := _state(wrong, name in SENSITIVITIES, *hits)) is not None
    }


def _state(wrong: Wrong, fine: bool, seen: list[bool], far: list[bool]) -> str | None:
    """Sum up what became of a model in each request that it applies to; a sensitivity that is not seen has passed."""
    applies = wrong.applies or [True] * len(seen)
    if not any(applies):
        return None
    if any(one and applied for one, applied in zip(seen, applies, strict=True)):
        return "seen"
    return "passed" if fine or any(one and applied for one, applied in zip(far, applies, strict=True)) else "same"


def _view(actual: Actual, yardstick: Yardstick, requests: tuple[int, ...], at: tuple[Any, ...], *, some: bool) -> View:
    case, arithmetic = actual.case, yardstick.regime.arithmetic
    launch = {"heads": case.heads, "query_tokens": case.query_tokens, "batch": case.batch}
    return View(
        case=case,
        weights=yardstick.weights(requests, some=some),
        out=yardstick.exact,
        truth=yardstick.exact[at],
        rows=yardstick.some if some else None,
        split_edges=[arithmetic.splits.edges(case.lengths[request], **launch)[1:-1] for request in requests],
        tile=arithmetic.tile,
    )
