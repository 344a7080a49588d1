"""What a wrong output looks like: where it is wrong, and which known mistake would have made it.

1. *Where* is read off the error: requests, query tokens, heads and latent tiles; with slot-coded content also which tokens,
   pages and splits are missing, doubled or foreign (``harness.tokens``).
2. *What* is a ranking: every fault of the catalogue answers the same inputs in the regime's arithmetic, and the one whose
   answer is nearest to the actual one comes first. Two faults may be named together where no single one will do.
3. A fault is only named if it takes away more of the error than it leaves. Otherwise nothing fits, and that is said.
4. The time is bounded: what was not tried is said too. It is processor time, so that a busy machine takes longer and says no
   less.

Source: the faults are those of ``harness.faults``; distances are relative to the truth, so that "residual 0.2 %, against
63 % for the truth" compares the best fault with no fault at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from harness.backends.protocol import Output
from harness.case import Case
from harness.faults.backend import Planted, together
from harness.faults.catalogue import FAULTS
from harness.faults.scene import Hang, IllegalAccess
from harness.faults.variant import of_regime
from harness.inputs import Inputs, make_inputs
from harness.likeness import Candidate, Scale, Trial, break_ties, format_of, rank, violates
from harness.symptoms import Wrong
from harness.tokens import Sighting, sight
from references.arithmetic import Arithmetic
from references.budget import budget
from references.decode import mla_decode

Tensor = torch.Tensor

#: Seconds of this thread's CPU time for the mistakes, so that a busy machine tries as many as a quiet one; where the output is
#: wrong, and which tokens are, takes up to half a second more.
PATIENCE = 2.5
#: Candidates that are shown, and that are tried in pairs.
SHOWN, PAIRED = 3, 6


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
    #: CPU time it took, seconds.
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
        patience: CPU seconds it may take.
    """
    began = time.thread_time()
    actual = (output.out.detach().cpu().clone(), None if output.lse is None else output.lse.detach().cpu().clone())
    inputs = _on_host(inputs)
    problem = inputs.problem()
    truth = mla_decode(problem)
    scale = Scale.of(truth)
    bound = budget(problem, arithmetic)
    wrong = Wrong.of(actual, truth, bound)
    where = wrong.told(inputs.case)
    residual = scale.distance(actual, (truth.out, truth.lse))
    trial = Trial(inputs, of_regime(arithmetic), before)
    end = time.thread_time() + patience
    hard = (bound.hard, bound.lse_hard)
    found: list[Candidate] = []
    # With a call before, the mistakes that need one come first; without one they could not have shown.
    likely = sorted(wrong.likely(), key=lambda name: bool(before) != FAULTS[name].history)
    singles, untried = rank(trial, [(name,) for name in likely], actual, scale, hard, end)
    found += singles
    tried = len(FAULTS) - untried
    close = sorted((one for one in singles if one.residual < residual), key=lambda one: one.residual)
    if not any(one.within_rounding for one in close) and close:
        pairs = [(one.names[0], name) for one in close[:PAIRED] for name in FAULTS if name != one.names[0]]
        more, left = rank(trial, pairs, actual, scale, hard, end)
        tried, untried = tried + len(pairs) - left, untried + left
        best = close[0].residual
        found += [pair for pair in more if pair.residual < best / 2]
    tokens = _tokens(inputs, actual, arithmetic, rerun)
    # More is taken away than left: half of the squared error.
    kept = [one for one in found if one.residual**2 < residual**2 / 2]
    order = list(FAULTS)
    kept.sort(key=lambda one: (not one.within_rounding, len(one.names), one.residual, order.index(one.names[0])))
    if rerun is not None and not before:
        kept = break_ties(kept, inputs, arithmetic, rerun, end)
    return Explanation(
        where=where,
        tokens=tokens,
        residual=residual,
        candidates=tuple(kept),
        tried=tried,
        untried=untried,
        seconds=time.thread_time() - began,
    )


def told(names: Sequence[str], like: str) -> list[str]:
    """Say which mistakes do on a case what the kernel did there: "as if …: it reads outside memory here too"."""
    lines = [f"what:  as if {FAULTS[name].what} ({name}): {like}" for name in names[:SHOWN]]
    more = len(names) - SHOWN
    if not names:
        return [f"what:  of no known mistake could it be said: {like}"]
    return lines + ([f"       and {more} more"] if more > 0 else [])


def explain_crash(case: Case, arithmetic: Arithmetic, *, patience: float = PATIENCE) -> tuple[str, ...]:
    """Name the faults that read outside memory, or do not end, on this case, as far as the time reaches."""
    trial = Trial(make_inputs(case, output_format=arithmetic.output), of_regime(arithmetic), ())
    end, names = time.thread_time() + patience, []
    for name in FAULTS:
        if time.thread_time() > end:
            break
        if violates(name):
            continue
        try:
            trial.answer((name,))
        except (IllegalAccess, Hang):
            names.append(name)
    return tuple(names)


def explain_violations(case: Case, arithmetic: Arithmetic, buffers: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Name the faults that touch the same memory: (fault, buffer) as violations have them."""
    wanted, names = set(buffers), []
    variant = of_regime(arithmetic)
    for name, fault in FAULTS.items():
        if "end" in fault.acts:
            inputs = make_inputs(case, output_format=arithmetic.output)
            Planted(name=name, variant=variant, acts=together(name)).run(inputs)
            if {(violation.fault, violation.buffer) for violation in inputs.violations()} == wanted:
                names.append(name)
    return tuple(names)


def _on_host(inputs: Inputs) -> Inputs:
    return inputs if inputs.device.type == "cpu" else make_inputs(inputs.case, output_format=format_of(inputs.out))


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
        coded = make_inputs(case.replace(content="slots", amplitude=1.0), output_format=format_of(inputs.out))
        try:
            sightings = sight(coded, rerun(coded).out.cpu(), arithmetic)
        except Exception:  # a kernel that fails in another way on other content says nothing about its tokens
            return ()
    return tuple(str(one) for one in sightings)
