"""The yardstick of one case: how far a correct kernel's output may lie from the truth, and how far an output does.

1. Everything is fp64 and flat over rows: R = S·H rows a request, [B, R, L] elements.
2. A ratio is a measurement over its limit; above 1 a check is broken. Limits come from the regime alone.
3. Rows that see no token are no rows here; the judge holds them to the backend's policy.

Source: docs/numerics.md, "What is checked".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.actual import Actual
from harness.extremes import NARROW, element_limit, row_limit
from harness.regimes import Regime
from harness.weights import Weights, weigh
from references.budget import budget
from references.formats import FORMATS
from references.problem import Answer, Problem, visible

#: The checks, and what breaking each means.
CHECKS = {
    "hard": "an element is further off than any rounding can take it",
    "row": "a row is further off than roundings together take it: a systematic error",
    "element": "one element is further off than its own roundings take it",
    "lse": "the log-sum-exp is off: splits, base or scale",
    "accuracy": "the answer conforms to its arithmetic, but is too inaccurate to use",
}
#: Unit roundoff of the reference; a format that is as fine has the oracle for its truth.
FINE = FORMATS["fp32"].unit_roundoff
#: Elements of a row from which on its relative error is a mean: of eight independent ones it is within twice its root mean
#: square but once in 10^4 rows, of one it is anything.
MEAN = 8
#: Bytes of softmax weights that a yardstick keeps; those of more requests are worked out anew when they are asked for.
KEPT_BYTES = 512 << 20
#: Rows that wrong answers are looked for in first where a request has many more.
SOME_ROWS = 16
#: Divides by what may be zero: a zero over it is zero, anything else is beyond every limit.
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """The truth of a case and the limits around it."""

    regime: Regime
    #: The truth, fp64 [B, R, L].
    out: Tensor
    #: Its log-sum-exp, fp64 [B, R].
    lse: Tensor
    #: The truth in fp64 whatever ``out`` is, as wrong answers are worked out from it, [B, R, L].
    exact: Tensor
    #: Variance of a correct kernel's error, fp64 [B, R, L].
    variance: Tensor
    #: Hard bound W, fp64 [B, R, L].
    hard: Tensor
    #: Limit of the lse's error: the smaller of its hard bound's and its statistical one, fp64 [B, R].
    lse_limit: Tensor
    #: Standard deviation of ρ² of a correct kernel, fp64 [B, R].
    spread: Tensor
    #: Limit of z, fp64 [B, R].
    row_limit: Tensor
    #: Limit of |e|/√V.
    element_limit: float
    #: Rows that see a token, bool [B, R], and how many.
    live: Tensor
    rows: int
    #: What a row's error is relative to where accuracy is asked, fp64 [B, R]: its norm, or the norm that such weights and
    #: values have in random directions, where they happen to cancel.
    size: Tensor
    #: Rows whose accuracy is the kernel's doing, bool [B, R]: their scores are small enough, and they are a mean of elements.
    conditioned: Tensor
    problem: Problem
    #: Softmax weights of requests, as far as they fit in memory.
    kept: dict[tuple[tuple[int, ...], bool], Weights]

    @property
    def requests(self) -> list[int]:
        """Requests in which some row sees a token."""
        return [request for request, length in enumerate(self.problem.lengths) if length]

    @property
    def some(self) -> Tensor | None:
        """Rows of a request that are looked at first, int64 [n]; None where all are, as on a GPU, where they cost the same."""
        rows, device = self.live.shape[1], self.live.device
        if device.type != "cpu" or rows <= 2 * SOME_ROWS:
            return None
        return torch.arange(SOME_ROWS, device=device) * rows // SOME_ROWS

    def weights(self, requests: tuple[int, ...], *, some: bool = False) -> Weights:
        """Weigh requests, all rows or some; what is kept of an earlier time is not worked out again."""
        known = self.kept.get((requests, some))
        if known is not None:
            return known
        found = weigh(self.problem, requests, self.some if some else None)
        if sum(weights.size for weights in self.kept.values()) + found.size <= KEPT_BYTES:
            self.kept[requests, some] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """What was measured of some rows: the values, and each check over its limit."""

    #: ρ, fp64 [..., R].
    rho: Tensor
    #: z, fp64 [..., R].
    z: Tensor
    #: ‖e‖ over the row's size, fp64 [..., R].
    relative: Tensor
    #: Largest |e|/√V of a row, fp64 [..., R].
    element: Tensor
    #: Check -> ratio to its limit, fp64 [..., R].
    checks: dict[str, Tensor]

    def worst(self) -> Tensor:
        """Take the largest ratio of each row, fp64 [..., R]."""
        return torch.stack(list(self.checks.values())).amax(0)

    def largest(self) -> dict[str, float]:
        """Take the largest ratio of each check; NaN where a row has none."""
        return dict(zip(self.checks, torch.stack(list(self.checks.values())).flatten(1).amax(1).tolist(), strict=True))


def measure_truth(problem: Problem, answer: Answer, regime: Regime) -> Yardstick:
    """Lay the yardstick of a problem.

    Args:
        problem: the problem.
        answer: its truth, from the reference or the oracle.
        regime: arithmetic and limits.
    """
    batch, rows = problem.batch, problem.query_tokens * problem.heads
    bound = budget(problem, regime.arithmetic)
    out = answer.out.double().reshape(batch, rows, problem.latent)
    spread = bound.spread.reshape(batch, rows)
    seen = torch.tensor([visible(length, problem.query_tokens) for length in problem.lengths])
    live, limits = seen > 0, regime.limits
    count = int(live.sum()) * problem.heads
    live = live.repeat_interleave(problem.heads, dim=1).to(out.device, non_blocking=True)
    lse_quantile = element_limit(count, limits.false_alarm)
    return Yardstick(
        regime=regime,
        out=out,
        lse=answer.lse.double().reshape(batch, rows),
        exact=bound.exact.reshape(out.shape),
        variance=bound.variance.reshape(out.shape),
        hard=bound.hard.reshape(out.shape),
        lse_limit=torch.minimum(bound.lse_hard * limits.lse, bound.lse_variance.sqrt() * lse_quantile).reshape(batch, rows),
        spread=spread,
        row_limit=row_limit(spread, limits.false_alarm, count),
        element_limit=element_limit(count * problem.latent, limits.false_alarm),
        live=live,
        rows=count,
        size=torch.maximum(out.norm(dim=-1), bound.scattered.reshape(batch, rows)),
        conditioned=(bound.largest_score.reshape(batch, rows) <= limits.conditioned) & (problem.latent >= MEAN),
        problem=problem,
        kept={},
    )


def recentre(yardstick: Yardstick, answer: Answer) -> Yardstick:
    """Lay a yardstick around another truth of the same problem; budgets do not depend on it."""
    out, lse = answer.out.double().reshape(yardstick.out.shape), answer.lse.double().reshape(yardstick.lse.shape)
    return replace(yardstick, out=out, lse=lse)


def measure(yardstick: Yardstick, error: Tensor, lse_error: Tensor | None, at: Any = ...) -> Ratios:
    """Measure errors of all requests and rows, or of some.

    Args:
        yardstick: the case's.
        error: output less truth, fp64 [..., B, R, L], or [..., G, R, L] of some requests.
        lse_error: the same of the lse, fp64 [..., B, R] or [..., G, R]; None where there is none.
        at: index of these requests and rows in [B, R].
    """
    regime, variance = yardstick.regime, yardstick.variance[at]
    size = error.abs()
    square = error.square().sum(-1)
    mean_square = square / variance.sum(-1).clamp_min(_TINY)
    z = (mean_square - 1) / yardstick.spread[at].clamp_min(NARROW)
    element = (size / variance.sqrt().clamp_min(_TINY)).amax(-1)
    relative = square.sqrt() / yardstick.size[at].clamp_min(_TINY)
    checks = {
        "hard": (size / yardstick.hard[at].clamp_min(_TINY)).amax(-1) / regime.limits.hard,
        "row": z / yardstick.row_limit[at],
        "element": element / yardstick.element_limit,
        "accuracy": torch.where(yardstick.conditioned[at], relative, 0.0) / regime.accuracy,
    }
    if lse_error is not None:
        checks["lse"] = lse_error.abs() / yardstick.lse_limit[at].clamp_min(_TINY)
    live = yardstick.live[at]
    return Ratios(
        rho=mean_square.sqrt(),
        z=z,
        relative=relative,
        element=element,
        checks={name: torch.where(live, ratio, 0.0) for name, ratio in checks.items()},
    )


def measure_actual(actual: Actual, yardstick: Yardstick) -> Ratios:
    """Measure an answer."""
    error, lost = errors(actual, yardstick)
    lse_error = None if actual.lse is None else actual.lse.double() - yardstick.lse
    found = measure(yardstick, error, lse_error)
    found.checks["hard"].masked_fill_(lost.any(-1) & yardstick.live, torch.inf)
    return found


def errors(actual: Actual, yardstick: Yardstick) -> tuple[Tensor, Tensor]:
    """Take output less truth, and find what no rounding explains where the truth lies beyond the format; [B, R, L] each.

    There the budget has no number. Infinity of the truth's sign and the largest value are right; anything below the last
    binade, of the other sign, or infinite where it need not be, is not.
    """
    values, truth, maximum = actual.out, yardstick.out, actual.known.maximum
    beyond = truth.abs() + yardstick.hard > maximum
    alike = values.sign() == truth.sign()
    right = beyond & alike & (values.abs() >= maximum)
    lost = ((truth.abs() > maximum) & ~(alike & (values.abs() >= maximum / 2))) | (beyond & ~right & values.isinf())
    return torch.where(right | lost, 0.0, values - truth), lost


def per_element(yardstick: Yardstick, error: Tensor) -> Tensor:
    """Divide errors by the nearer of each element's two limits, fp64 [B, R, L]."""
    size = error.abs()
    hard = size / yardstick.hard.clamp_min(_TINY) / yardstick.regime.limits.hard
    return torch.maximum(hard, size / yardstick.variance.sqrt().clamp_min(_TINY) / yardstick.element_limit)


def stray(yardstick: Yardstick, certain: Answer) -> Tensor:
    """Measure how far a truth lies from a more certain one, in units of what fp32 explains, fp64 [B, R].

    Source: fp32 sums err in proportion to the magnitudes they add up, and a score's error moves its row in proportion.
    """
    strayed = torch.zeros_like(yardstick.lse)
    for request in yardstick.requests:
        weights = yardstick.weights((request,))
        unit = FINE * (1 + weights.magnitudes()[0])
        sizes = weights.probabilities[0] @ weights.norms()[0].sqrt()
        certainly = certain.out[request].reshape_as(yardstick.out[request])
        distance = (yardstick.out[request] - certainly).norm(dim=-1)
        lse = (yardstick.lse[request] - certain.lse[request].flatten()).abs()
        worst = torch.maximum(distance / (unit * sizes).clamp_min(_TINY), lse / unit)
        strayed[request] = torch.where(yardstick.live[request], worst, 0.0)
    return strayed
