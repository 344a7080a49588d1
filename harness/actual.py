"""What a backend answered, flat over rows, and what is wrong with it before anything is measured.

1. Rows are (query token, head) pairs of a request, token-major: [B, R, L] elements, R = S·H.
2. An element that is as outputs begin (``memory.UNWRITTEN``) was never written; any other NaN was.
3. Rows that see no token are the backend's policy: zeros with an lse of minus infinity, untouched, or undefined.

Source: the policies are those of ``backends.protocol``; docs/numerics.md, "What is checked", last line of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.backends.protocol import EMPTY_ROWS, Output
from harness.case import Case
from harness.memory import unwritten
from references.formats import Format, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Actual:
    """An answer as the judge looks at it."""

    case: Case
    #: Format of the output.
    known: Format
    #: Output values, fp64 [B, R, L].
    out: Tensor
    #: Elements of it that were never written, bool [B, R, L].
    unwritten: Tensor
    #: Log-sum-exp, fp32 [B, R]; None if none was asked for or came back.
    lse: Tensor | None
    #: Rows that see a token, bool [B, R].
    live: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Blemish:
    """Something wrong with an answer that no measuring is needed for."""

    #: One of the faults of a verdict.
    fault: str
    #: How many elements or rows, and where the first is.
    message: str


def flatten(case: Case, output: Output, known: Format) -> Actual:
    """Lay out an answer whose output is in ``known``'s storage type."""
    shape = (case.batch, case.query_tokens * case.heads)
    codes = output.out.reshape(*shape, case.latent)
    seen = torch.tensor(case.lengths)[:, None] - case.query_tokens + 1 + torch.arange(case.query_tokens)
    lse = output.lse.reshape(shape) if case.lse and output.lse is not None else None
    return Actual(
        case=case,
        known=known,
        out=decode(codes, known).double(),
        unwritten=unwritten(codes),
        lse=lse,
        live=(seen > 0).repeat_interleave(case.heads, dim=1).to(codes.device, non_blocking=True),
    )


def blemish(actual: Actual, empty_rows: str) -> Blemish | None:
    """Find elements that are unwritten or not numbers, and rows that see nothing against the policy.

    Raises:
        ValueError: if there is no such policy.
    """
    if empty_rows not in EMPTY_ROWS:
        raise ValueError(f"empty_rows is one of {', '.join(EMPTY_ROWS)}, not {empty_rows!r}")
    live, lse = actual.live, actual.lse
    found = [("unwritten", "output elements were never written", actual.unwritten & live[..., None])]
    if lse is not None:
        found.append(("unwritten", "log-sum-exps were never written", (unwritten(lse) & live)[..., None]))
    found.append(("non-finite", "output elements are NaN", actual.out.isnan() & live[..., None]))
    if lse is not None:
        found.append(("non-finite", "log-sum-exps are not finite", (~lse.isfinite() & live)[..., None]))
    for (fault, what, wrong), hit in zip(found, torch.stack([wrong.any() for _, _, wrong in found]).tolist(), strict=True):
        if hit:
            return Blemish(fault=fault, message=_count(wrong, actual.case.heads, what))
    if all(length >= actual.case.query_tokens for length in actual.case.lengths):
        return None
    return None if empty_rows == "undefined" else _blemish_of_empty_rows(actual, empty_rows)


def _blemish_of_empty_rows(actual: Actual, policy: str) -> Blemish | None:
    empty, lse = ~actual.live, actual.lse
    wrong = (~actual.unwritten if policy == "untouched" else actual.out != 0) & empty[..., None]
    stale = actual.unwritten & wrong
    if lse is not None:
        wrong_lse = (~unwritten(lse) if policy == "untouched" else lse != -torch.inf) & empty
        wrong = wrong | wrong_lse[..., None]
        stale = stale | (unwritten(lse) & wrong_lse)[..., None]
    if not bool(wrong.any()):
        return None
    fault = "unwritten" if bool(stale.any()) else "non-finite" if bool((actual.out.isnan() & wrong).any()) else "mismatch"
    wanted = "left untouched" if policy == "untouched" else "zero with a log-sum-exp of minus infinity"
    rows = wrong.any(-1, keepdim=True)
    return Blemish(fault=fault, message=_count(rows, actual.case.heads, f"rows that see no token are not {wanted}"))


def _count(wrong: Tensor, heads: int, what: str) -> str:
    """Say how many and where the first is: [B, R, L]."""
    request, row, element = (int(index) for index in wrong.nonzero()[0])
    token, head = divmod(row, heads)
    return f"{int(wrong.sum())} {what}, the first at request {request}, query token {token}, head {head}, element {element}"
