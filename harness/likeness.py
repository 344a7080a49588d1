"""How near the answer of a known mistake comes to an actual one.

1. Distances are relative to the truth, so that the best mistake can be compared with none at all; lse counts in natural-log
   units.
2. NaN is like NaN, unwritten like unwritten, infinity like itself; where one of two values is no number, the price is that of
   an average element of the truth.
3. Two answers agree within rounding if no element differs by more than two roundings may.

Source: hard bounds of ``references.budget``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.backends.protocol import Output
from harness.case import Case
from harness.faults.backend import Planted, together
from harness.faults.catalogue import FAULTS
from harness.faults.scene import Hang, IllegalAccess
from harness.faults.variant import Variant, of_regime
from harness.inputs import Inputs, make_inputs
from harness.memory import empty, unwritten
from references.arithmetic import Arithmetic
from references.budget import budget
from references.problem import Answer

Tensor = torch.Tensor

#: Calls after which a mistake that comes and goes is taken not to be it.
CALLS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A mistake that would explain the output."""

    #: Faults planted together, one or two.
    names: tuple[str, ...]
    #: Distance of its answer from the actual one, relative to the truth.
    residual: float
    #: Whether every element agrees as far as two roundings may differ.
    within_rounding: bool

    def __str__(self) -> str:
        what = ", and ".join(FAULTS[name].what for name in self.names)
        how = "reproduces it within rounding" if self.within_rounding else "comes near it"
        return f"as if {what} ({' + '.join(self.names)}): {how}, residual {self.residual:.2%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How distances are taken: the truth, and its norm."""

    out: Tensor
    lse: Tensor
    norm: float
    #: Mean square of an element of the truth: the price of a finite value against NaN.
    square: float

    @classmethod
    def of(cls, answer: Answer) -> Scale:
        """Lay the scale of a truth."""
        square = float(answer.out.double().square().mean())
        norm = math.sqrt(square * answer.out.numel())
        return cls(out=answer.out.double(), lse=answer.lse.double(), norm=norm or 1.0, square=square or 1.0)

    def distance(self, one: tuple[Tensor, Tensor | None], two: tuple[Tensor, Tensor | None]) -> float:
        """Take the distance of two answers, relative to the truth; lse counts in natural-log units."""
        total = _squares(one[0], two[0], self.square) / self.norm**2
        if one[1] is not None and two[1] is not None:
            total += _squares(one[1], two[1], 1.0) / max(1, one[1].numel())
        return math.sqrt(total)


def _squares(one: Tensor, two: Tensor, price: float) -> float:
    """Sum the squared differences; where they are not two numbers and not alike, the price is paid instead."""
    same = alike(one, two)
    one, two = one.double(), two.double()
    finite = torch.isfinite(one) & torch.isfinite(two)
    return float((one - two)[finite].square().sum()) + price * float((~(finite | same)).sum())


def alike(one: Tensor, two: Tensor) -> Tensor:
    """Tell where two tensors are equal, both unwritten, or both NaN but written."""
    nan = torch.isnan(one) & torch.isnan(two)
    return (one == two) | (nan & (unwritten(one) == unwritten(two)))


class Trial:
    """Faults answering the same inputs, in buffers of their own."""

    def __init__(self, inputs: Inputs, variant: Variant, before: Sequence[Inputs]) -> None:
        out, lse = torch.empty_like(inputs.out), None if inputs.lse is None else torch.empty_like(inputs.lse)
        self.inputs = dataclasses.replace(inputs, out=out, lse=lse)
        self.variant, self.before = variant, before

    def answer(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        """Answer with some faults planted.

        Raises:
            IllegalAccess: if they read outside memory.
        """
        return next(self.answers(names))

    def answers(self, names: tuple[str, ...]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Answer again and again with some faults planted: one answer, or for those with a history as many as it takes."""
        backend = Planted(name="+".join(names), variant=self.variant, acts=together(*names))
        history = any(FAULTS[name].history for name in names)
        for earlier in self.before if history else ():
            backend.run(earlier)
        for _ in range(CALLS if history and len(names) == 1 else 1):
            for buffer in (self.inputs.out, self.inputs.lse):
                if buffer is not None:
                    empty(buffer)
            output = backend.run(self.inputs)
            yield output.out, output.lse


def rank(
    trial: Trial,
    groups: Sequence[tuple[str, ...]],
    actual: tuple[Tensor, Tensor | None],
    scale: Scale,
    hard: tuple[Tensor, Tensor],
    end: float,
) -> tuple[list[Candidate], int]:
    """Compare the answers of groups of faults with the actual one, until the time is over; with how many were left."""
    found: list[Candidate] = []
    for index, names in enumerate(groups):
        if time.thread_time() > end:
            return found, len(groups) - index
        if any(violates(name) for name in names):
            continue
        try:
            rated: list[Candidate] = []
            for answer in trial.answers(names):
                near = agree(actual, answer, hard)
                rated.append(Candidate(names=names, residual=scale.distance(actual, answer), within_rounding=near))
                if near:
                    break
        except (IllegalAccess, Hang, IndexError, RuntimeError):
            continue
        found.append(min(rated, key=lambda one: one.residual))
        if len(names) > 1 and found[-1].within_rounding:
            return found, 0
    return found, 0


def violates(name: str) -> bool:
    """Tell whether a fault touches memory that it does not own: those are told by what they touched."""
    return name.startswith("writes-")


def agree(one: tuple[Tensor, Tensor | None], two: tuple[Tensor, Tensor | None], hard: tuple[Tensor, Tensor]) -> bool:
    """Tell whether two answers differ by no more than two roundings may, everywhere."""
    for a, b, bound in zip(one, two, hard, strict=True):
        if a is None or b is None:
            continue
        close = (a.double() - b.double()).abs() <= 2 * bound
        if not bool((close | alike(a, b)).all()):
            return False
    return True


def _others(case: Case) -> Iterator[dict[str, Any]]:
    """List what a case may have otherwise: a smallest case is one that shows least of what mistakes differ in."""
    yield {"content": "slots", "amplitude": 1.0}
    yield {"lengths": (*case.lengths, 130, 0, 67), "content": "gaussian", "amplitude": 1.0, "lse": True}
    yield {"lengths": (*case.lengths, 67), "page_size": 16, "placement": "permuted", "poison": "large"}
    yield {"lengths": (*(length + 97 for length in case.lengths), 5), "query_tokens": 3}
    yield {"lengths": (*case.lengths, 40), "heads": 20}
    yield {"lengths": (*case.lengths, 40), "query_layout": "transposed", "token_padding": 8, "page_padding": 64}
    yield {"cache_scale": 0.37, "query_scale": 1.7, "softmax_scale": 0.1}
    yield {"poison": "large" if case.poison == "nan" else "nan"}
    yield {"seed": case.seed + 1}


def break_ties(
    kept: list[Candidate], inputs: Inputs, arithmetic: Arithmetic, rerun: Callable[[Inputs], Output], end: float
) -> list[Candidate]:
    """Ask the kernel again on inputs that tell the best candidates apart, and put those that disagree last."""
    case = inputs.case
    tied = [one for one in kept if one.within_rounding]
    for change in _others(case):
        if len(tied) < 2 or time.thread_time() > end:
            break
        try:
            coded = make_inputs(case.replace(**change), output_format=format_of(inputs.out))
            output = rerun(coded)
        except Exception:  # no such case, or it fails in another way there, which this output cannot tell
            continue
        actual = (output.out.cpu().clone(), None if output.lse is None else output.lse.cpu().clone())
        bound = budget(coded.problem(), arithmetic)
        trial = Trial(coded, of_regime(arithmetic), ())
        agreeing = []
        for one in tied:
            try:
                answer = trial.answer(one.names)
            except (IllegalAccess, Hang, IndexError, RuntimeError):
                continue
            if agree(actual, answer, (bound.hard, bound.lse_hard)):
                agreeing.append(one)
        tied = agreeing or tied
    return tied + [one for one in kept if one not in tied]


def format_of(tensor: Tensor) -> str:
    """Name the format of an output tensor."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[tensor.dtype]
