"""What a wrong output looks like: where it is wrong, and which known mistake would have made it.

1. *Where* is read off the error: requests, query tokens, heads and latent tiles; with slot-coded content also which tokens,
   pages and splits are missing, doubled or foreign (``harness.tokens``).
2. *What* is a ranking: every fault of the catalogue answers the same inputs in the regime's arithmetic, and the one whose
   answer is nearest to the actual one comes first. Two faults may be named together where no single one will do.
3. A fault is only named if it takes away more of the error than it leaves. Otherwise nothing fits, and that is said.
4. The time is bounded: what was not tried is said too.

Source: the faults are those of ``harness.faults``; distances are relative to the truth, so that "residual 0.2 %, against
63 % for the truth" compares the best fault with no fault at all.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.backends.protocol import Output
from harness.case import Case
from harness.faults.backend import Planted, together
from harness.faults.catalogue import FAULTS
from harness.faults.model import Hang, IllegalAccess
from harness.faults.record import KINDS
from harness.faults.variant import Variant
from harness.inputs import Inputs, make_inputs
from harness.tokens import LED_BY_ONE, Sighting, sight
from references.arithmetic import Arithmetic
from references.budget import Budget, budget
from references.decode import mla_decode
from references.problem import Answer

Tensor = torch.Tensor

#: Seconds that an explanation may take.
PATIENCE = 3.0
#: Candidates that are shown, and that are tried in pairs.
SHOWN, PAIRED = 3, 6
#: Calls after which a mistake that comes and goes is taken not to be it.
CALLS = 30
#: Elements of a latent tile.
TILE = 64


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
class Explanation:
    """What is known of a wrong output."""

    #: Where it is wrong, in words, one line each.
    where: tuple[str, ...]
    #: What happened to tokens, in words; empty where it cannot be told.
    tokens: tuple[str, ...]
    #: Distance of the actual output from the truth, relative to the truth.
    residual: float
    #: Candidates that take away more of the error than they leave, best first.
    candidates: tuple[Candidate, ...]
    #: Answers compared, and those there would have been.
    tried: int
    untried: int
    #: Time it took, seconds.
    seconds: float

    def __str__(self) -> str:
        lines = [f"where: {line}" for line in (*self.where, *self.tokens)]
        for candidate in self.candidates[:SHOWN]:
            lines.append(f"what:  {candidate}, against {self.residual:.2%} for the truth")
        if not self.candidates:
            lines.append(f"what:  none of {self.tried} known mistakes comes near it (the truth is {self.residual:.2%} away)")
        if self.untried:
            lines.append(f"       {self.untried} more were not tried for lack of time")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Scale:
    """How distances are taken: the truth, and its norm."""

    out: Tensor
    lse: Tensor
    norm: float
    #: Mean square of an element of the truth: the price of a finite value against NaN.
    square: float

    @classmethod
    def of(cls, answer: Answer) -> _Scale:
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
    alike = _alike(one, two)
    one, two = one.double(), two.double()
    finite = torch.isfinite(one) & torch.isfinite(two)
    return float((one - two)[finite].square().sum()) + price * float((~(finite | alike)).sum())


def _alike(one: Tensor, two: Tensor) -> Tensor:
    """Tell where two tensors are equal, both unwritten, or both NaN but written."""
    nan = torch.isnan(one) & torch.isnan(two)
    return (one == two) | (nan & (_unwritten(one) == _unwritten(two)))


def _unwritten(values: Tensor) -> Tensor:
    """Find elements whose bits are all set, as outputs begin."""
    if values.element_size() == values.double().element_size():
        return torch.isnan(values)
    bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])
    return bits == (255 if bits.dtype == torch.uint8 else -1)


def explain(
    inputs: Inputs,
    output: Output,
    arithmetic: Arithmetic,
    *,
    before: Sequence[Inputs] = (),
    rerun: Callable[[Inputs], Output] | None = None,
    patience: float = PATIENCE,
) -> Explanation:
    """Explain a wrong output.

    Args:
        inputs: what the kernel was given.
        output: what it answered; it may lie in the output buffers of ``inputs``.
        arithmetic: that of the regime.
        before: inputs of the calls before, oldest first, for mistakes that outlive a call.
        rerun: runs the kernel once more on other inputs, for slot-coded content.
        patience: seconds it may take.
    """
    began = time.perf_counter()
    actual = (output.out.detach().cpu().clone(), None if output.lse is None else output.lse.detach().cpu().clone())
    inputs = _on_host(inputs)
    problem = inputs.problem()
    truth = mla_decode(problem)
    scale = _Scale.of(truth)
    bound = budget(problem, arithmetic)
    wrong = Wrong.of(actual, truth, bound)
    where = wrong.told(inputs.case)
    residual = scale.distance(actual, (truth.out, truth.lse))
    trial = _Trial(inputs, Variant(name="regime", arithmetic=arithmetic), before)
    hard = (bound.hard, bound.lse_hard)
    end = began + patience
    found: list[Candidate] = []
    singles, untried = _rank(trial, [(name,) for name in wrong.likely()], actual, scale, hard, end)
    found += singles
    tried = len(FAULTS) - untried
    close = sorted((one for one in singles if one.residual < residual), key=lambda one: one.residual)
    if not any(one.within_rounding for one in close) and close:
        pairs = [(one.names[0], name) for one in close[:PAIRED] for name in FAULTS if name != one.names[0]]
        more, left = _rank(trial, pairs, actual, scale, hard, end)
        tried, untried = tried + len(pairs) - left, untried + left
        best = close[0].residual
        found += [pair for pair in more if pair.residual < best / 2]
    tokens = _tokens(inputs, actual, arithmetic, rerun)
    # More is taken away than left: half of the squared error.
    kept = [one for one in found if one.residual**2 < residual**2 / 2]
    order = list(FAULTS)
    kept.sort(key=lambda one: (not one.within_rounding, len(one.names), one.residual, order.index(one.names[0])))
    if rerun is not None and not before:
        kept = _break_ties(kept, inputs, arithmetic, rerun, end)
    return Explanation(
        where=where,
        tokens=tokens,
        residual=residual,
        candidates=tuple(kept),
        tried=tried,
        untried=untried,
        seconds=time.perf_counter() - began,
    )


def _break_ties(
    kept: list[Candidate], inputs: Inputs, arithmetic: Arithmetic, rerun: Callable[[Inputs], Output], end: float
) -> list[Candidate]:
    """Ask the kernel again on inputs that tell the best candidates apart, and put those that disagree last."""
    case = inputs.case
    tied = [one for one in kept if one.within_rounding]
    others = ({"content": "slots", "amplitude": 1.0}, {"poison": "large" if case.poison == "nan" else "nan"}, {"seed": case.seed + 1})
    for change in others:
        if len(tied) < 2 or time.perf_counter() > end:
            break
        coded = make_inputs(case.replace(**change), output_format=_format_of(inputs.out))
        try:
            output = rerun(coded)
        except Exception:  # it fails in another way there, which this output cannot tell
            continue
        actual = (output.out.cpu().clone(), None if output.lse is None else output.lse.cpu().clone())
        bound = budget(coded.problem(), arithmetic)
        trial = _Trial(coded, Variant(name="regime", arithmetic=arithmetic), ())
        agreeing = []
        for one in tied:
            try:
                answer = trial.answer(one.names)
            except (IllegalAccess, Hang, IndexError, RuntimeError):
                continue
            if _agree(actual, answer, (bound.hard, bound.lse_hard)):
                agreeing.append(one)
        tied = agreeing or tied
    return tied + [one for one in kept if one not in tied]


def explain_crash(case: Case, arithmetic: Arithmetic) -> tuple[str, ...]:
    """Name the faults that read outside memory, or do not end, on this case."""
    trial = _Trial(make_inputs(case, output_format=arithmetic.output), Variant(name="regime", arithmetic=arithmetic), ())
    names = []
    for name in FAULTS:
        if _violates(name):
            continue
        try:
            trial.answer((name,))
        except (IllegalAccess, Hang):
            names.append(name)
    return tuple(names)


def explain_violations(case: Case, arithmetic: Arithmetic, buffers: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Name the faults that touch the same memory: (fault, buffer) as violations have them."""
    wanted, names = set(buffers), []
    variant = Variant(name="regime", arithmetic=arithmetic)
    for name, fault in FAULTS.items():
        if "end" in fault.acts:
            inputs = make_inputs(case, output_format=arithmetic.output)
            Planted(name=name, variant=variant, acts=together(name)).run(inputs)
            if {(violation.fault, violation.buffer) for violation in inputs.violations()} == wanted:
                names.append(name)
    return tuple(names)


class _Trial:
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
                    buffer.view(torch.uint8).fill_(0xFF)
            output = backend.run(self.inputs)
            yield output.out, output.lse


def _rank(
    trial: _Trial,
    groups: Sequence[tuple[str, ...]],
    actual: tuple[Tensor, Tensor | None],
    scale: _Scale,
    hard: tuple[Tensor, Tensor],
    end: float,
) -> tuple[list[Candidate], int]:
    """Compare the answers of groups of faults with the actual one, until the time is over; with how many were left."""
    found = []
    for index, names in enumerate(groups):
        if time.perf_counter() > end:
            return found, len(groups) - index
        if any(_violates(name) for name in names):
            continue
        try:
            rated = [
                Candidate(names=names, residual=scale.distance(actual, answer), within_rounding=_agree(actual, answer, hard))
                for answer in trial.answers(names)
            ]
        except (IllegalAccess, Hang, IndexError, RuntimeError):
            continue
        found.append(min(rated, key=lambda one: one.residual))
        if len(names) > 1 and found[-1].within_rounding:
            return found, 0
    return found, 0


def _violates(name: str) -> bool:
    """Tell whether a fault touches memory that it does not own: those are told by what they touched."""
    return name.startswith("writes-")


def _agree(one: tuple[Tensor, Tensor | None], two: tuple[Tensor, Tensor | None], hard: tuple[Tensor, Tensor]) -> bool:
    """Tell whether two answers differ by no more than two roundings may, everywhere."""
    for a, b, bound in zip(one, two, hard, strict=True):
        if a is None or b is None:
            continue
        close = (a.double() - b.double()).abs() <= 2 * bound
        if not bool((close | _alike(a, b)).all()):
            return False
    return True


def _on_host(inputs: Inputs) -> Inputs:
    return inputs if inputs.device.type == "cpu" else make_inputs(inputs.case, output_format=_format_of(inputs.out))


def _format_of(tensor: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[tensor.dtype]


def _tokens(
    inputs: Inputs,
    actual: tuple[Tensor, Tensor | None],
    arithmetic: Arithmetic,
    rerun: Callable[[Inputs], Output] | None,
) -> tuple[str, ...]:
    """Tell what happened to tokens, from this output or from that of the same case with slot-coded content."""
    case = inputs.case
    sightings: tuple[Sighting, ...] = ()
    if case.content == "slots":
        sightings = sight(inputs, actual[0], arithmetic)
    elif rerun is not None:
        coded = make_inputs(case.replace(content="slots", amplitude=1.0), output_format=_format_of(inputs.out))
        try:
            sightings = sight(coded, rerun(coded).out.cpu(), arithmetic)
        except Exception:  # a kernel that fails in another way on other content says nothing about its tokens
            return ()
    return tuple(str(one) for one in sightings)


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
        unwritten = _unwritten(actual[0])
        strange = ~torch.isfinite(out) & ~unwritten & (out != right)
        variance = bound.variance.sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
        lse = None
        if actual[1] is not None:
            lse = ~(((actual[1].double() - truth.lse).abs() <= bound.lse_hard) | (actual[1].double() == truth.lse))
        return cls(
            unwritten=unwritten,
            strange=strange,
            gross=~(error <= bound.hard) & ~(unwritten | strange),
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
                lines.append(f"{int(hit.sum())} of {hit.numel()} elements are {what}: {_axes(case, hit)}")
        rows = self.ratio > LED_BY_ONE
        if not lines and bool(rows.any()):
            worst = float(self.ratio.max())
            lines.append(f"rows up to {worst:.3g} times off what rounding does on average: {_axes(case, rows[..., None])}")
        if self.lse is not None and bool(self.lse.any()):
            hit = self.lse
            lines.append(f"lse is wrong in {int(hit.sum())} of {hit.numel()} rows: {_axes(case, hit[..., None])}")
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
    """Say which requests, query tokens, heads and latent tiles hold a wrong element: [B, S, H, L or 1]."""
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
    return "; ".join(part for part in parts if part)


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
