"""Where an output is wrong, and which kinds of mistakes that speaks for.

1. An element is not written, no number, or further off than any rounding; a row may be off though each of its elements is not.
2. What is wrong is told axis by axis: requests, query tokens, heads, latent tiles.
3. Signs only order what is tried; they exclude nothing.

Source: the kinds are those of ``harness.faults.record``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.case import Case
from harness.faults.catalogue import FAULTS
from harness.faults.record import KINDS
from harness.memory import unwritten
from harness.tokens import LED_BY_ONE
from references.budget import Budget
from references.problem import Answer

Tensor = torch.Tensor

#: Elements of a latent tile.
TILE = 64
#: What is told first by what is wrong: a sign, and the kinds of faults that it speaks for.
SIGNS: Mapping[str, str] = {
    "unwritten": "GLEFK",
    "only lse": "I",
    "some heads": "E",
    "some requests": "LDKME",
    "some query tokens": "FKHR",
    "strange": "JKHCDBO",
    "everywhere": "NQOPRUHCDTSV",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Which elements of an output are wrong, and how."""

    #: Elements never written, NaN or infinite, and further off than rounding can take them, bool [B, S, H, L].
    unwritten: Tensor
    strange: Tensor
    gross: Tensor
    #: Root mean square error of each row in units of its rounding, [B, S, H].
    ratio: Tensor
    #: Rows whose lse is wrong, bool [B, S, H]; None where none was returned.
    lse: Tensor | None

    @classmethod
    def of(cls, actual: tuple[Tensor, Tensor | None], truth: Answer, bound: Budget) -> Wrong:
        """Compare an output with the truth."""
        out, right = actual[0].double(), truth.out.double()
        error = (out - right).abs()
        missing = unwritten(actual[0])
        strange = ~torch.isfinite(out) & ~missing & (out != right)
        variance = bound.variance.sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
        lse = None
        if actual[1] is not None:
            lse = ~(((actual[1].double() - truth.lse).abs() <= bound.lse_hard) | (actual[1].double() == truth.lse))
        return cls(
            unwritten=missing,
            strange=strange,
            gross=~(error <= bound.hard) & ~(missing | strange),
            ratio=(error.square().sum(-1) / variance).sqrt(),
            lse=lse,
        )

    def told(self, case: Case) -> tuple[str, ...]:
        """Say where it is wrong, axis by axis."""
        lines = []
        for what, hit in (
            ("not written", self.unwritten),
            ("NaN or infinite", self.strange),
            ("further off than rounding can take them", self.gross),
        ):
            if bool(hit.any()):
                lines.append(f"{int(hit.sum())} of {hit.numel()} elements are {what}{_axes(case, hit)}")
        rows = self.ratio > LED_BY_ONE
        if not lines and bool(rows.any()):
            worst = float(self.ratio.max())
            lines.append(f"rows up to {worst:.3g} times off what rounding does on average{_axes(case, rows[..., None])}")
        if self.lse is not None and bool(self.lse.any()):
            hit = self.lse
            lines.append(f"lse is wrong in {int(hit.sum())} of {hit.numel()} rows{_axes(case, hit[..., None])}")
        elif lines and self.lse is not None:
            lines.append("lse is right everywhere")
        return tuple(lines) or ("no element stands out",)

    def likely(self) -> list[str]:
        """Order the faults by what the wrong elements speak for; all of them, the likely ones first."""
        rows = (self.unwritten | self.strange | self.gross).any(-1)
        if not bool(rows.any()):
            rows = self.ratio > LED_BY_ONE
        signs = {
            "unwritten": bool(self.unwritten.any()),
            "only lse": self.lse is not None and bool(self.lse.any()) and not bool(rows.any()),
            "some heads": not bool(rows.any(0).any(0).all()),
            "some requests": not bool(rows.any(-1).any(-1).all()),
            "some query tokens": not bool(rows.any(-1).any(0).all()),
            "strange": bool(self.strange.any()),
            "everywhere": True,
        }
        kinds = "".join(SIGNS[sign] for sign, seen in signs.items() if seen)
        place = {kind: kinds.find(kind) if kind in kinds else len(kinds) for kind in KINDS}
        return sorted(FAULTS, key=lambda name: (FAULTS[name].history, place[FAULTS[name].kind]))


def _axes(case: Case, wrong: Tensor) -> str:
    """Say which requests, query tokens, heads and latent tiles hold a wrong element, [B, S, H, L or 1]; of one row nothing."""
    parts = []
    for name, count, hit in (
        ("request", case.batch, wrong.any(-1).any(-1).any(-1)),
        ("query token", case.query_tokens, wrong.any(-1).any(-1).any(0)),
        ("head", case.heads, wrong.any(-1).any(0).any(0)),
    ):
        parts.append(_ranges(name, torch.nonzero(hit).flatten().tolist(), count))
    if wrong.shape[-1] > 1:
        tiles = sorted({index // TILE for index in torch.nonzero(wrong.any(0).any(0).any(0)).flatten().tolist()})
        parts.append(_ranges("latent tile", tiles, -(-wrong.shape[-1] // TILE)))
    told = "; ".join(part for part in parts if part)
    return f": {told}" if told else ""


def _ranges(name: str, hits: Sequence[int], count: int) -> str:
    """Write indices as ranges: "heads 16-31 of 32"; all of one says nothing."""
    if len(hits) == count:
        return "" if count == 1 else f"all {count} {name}s"
    runs: list[list[int]] = []
    for hit in hits:
        if runs and hit == runs[-1][1] + 1:
            runs[-1][1] = hit
        else:
            runs.append([hit, hit])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:8]) + (", …" if len(runs) > 8 else "")
    return f"{name}{'s' if len(hits) > 1 else ''} {text} of {count}"
