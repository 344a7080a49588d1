"""What is said of a failure: the rows and elements that went furthest.

1. Rows are listed by the check that they break most, elements by how far they are past either of their limits.
2. Indices are those of the tensors that the backend was given: request, query token, head, element.

Source: what someone whose merge is blocked asks first.
"""

from __future__ import annotations

import torch

from harness.actual import Actual
from harness.measure import Ratios, Yardstick, errors, per_element
from harness.verdict import ElementFinding, RowFinding
from references.formats import round as round_to
from references.formats import ulp

#: Rows and elements that a verdict lists.
LISTED_ROWS, LISTED_ELEMENTS = 4, 8


def worst_rows(actual: Actual, yardstick: Yardstick, ratios: Ratios) -> tuple[RowFinding, ...]:
    """List the rows that went furthest, the worst first."""
    worst = ratios.worst()
    found = []
    for flat in worst.flatten().topk(min(LISTED_ROWS, worst.numel())).indices.tolist():
        at = request, row = divmod(flat, worst.shape[1])
        if worst[at] <= 0:
            break
        broken = {name: float(ratio[at]) for name, ratio in ratios.checks.items()}
        check = max(broken, key=broken.__getitem__)
        found.append(
            RowFinding(
                index=(request, *divmod(row, actual.case.heads)),
                check=check,
                ratio=broken[check],
                rho=float(ratios.rho[at]),
                z=float(ratios.z[at]),
                z_limit=float(yardstick.row_limit[at]),
                relative=float(ratios.relative[at]),
                lse_expected=float(yardstick.lse[at]),
                lse_actual=None if actual.lse is None else float(actual.lse[at]),
            )
        )
    return tuple(found)


def worst_elements(actual: Actual, yardstick: Yardstick) -> tuple[ElementFinding, ...]:
    """List the elements that went furthest, the worst first; ``yardstick`` holds the oracle's truth."""
    error, lost = errors(actual, yardstick)
    score = per_element(yardstick, error).masked_fill_(lost, torch.inf)
    score = torch.where(yardstick.live[..., None], score, 0.0)
    expected = round_to(yardstick.out, actual.known)
    found = []
    for flat in score.flatten().topk(min(LISTED_ELEMENTS, score.numel())).indices.tolist():
        request, rest = divmod(flat, score.shape[1] * score.shape[2])
        row, element = divmod(rest, score.shape[2])
        at = request, row, element
        spacing = float(ulp(yardstick.out[at].reshape(1), actual.known)[0])
        found.append(
            ElementFinding(
                index=(request, *divmod(row, actual.case.heads), element),
                oracle=float(yardstick.out[at]),
                expected=float(expected[at]),
                actual=float(actual.out[at]),
                ulps=float((actual.out[at] - expected[at]) / spacing),
                hard=float(yardstick.hard[at]),
                deviation=float(yardstick.variance[at].sqrt()),
            )
        )
    return tuple(found)
