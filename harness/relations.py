"""Relations between two runs of one case: what must not change when something irrelevant does.

1. A relation is data: which cases it applies to, what the other run is, and how the first run's answer is carried over.
2. Where the regime says the arithmetic promises it, both answers are the same bits. Elsewhere each is judged by its own
   budget, so both agree within the sum of the two.
3. A difference is a FAIL that names the relation: ``nondeterministic`` for the same call repeated, ``variant`` for the others.
4. ``repeat`` runs another case in between and looks at the first answer again: one that lies in memory which the next call
   uses, or that depends on the call before, is found.

Source: the relations are those that engines rely on: pages move, batches are put together anew, tables are padded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.backends.protocol import Backend, Output
from harness.cache import permutation, stream
from harness.case import Case
from harness.compilations import compiled
from harness.inputs import PLAIN, Arrangement, Inexact
from harness.regimes import RELATIONS, Regimes
from harness.run import Attempt, Listener, Result, attempt, settled
from harness.verdict import Verdict

#: The other run of a case: its case and arrangement; None where the relation does not apply.
Other = Callable[[Case], tuple[Case, Arrangement] | None]
#: Carries the first run's tensor over to the other run's arrangement; True for out, False for lse.
Carry = Callable[[Tensor, Arrangement, bool], Tensor]

_REQUESTS, _HEADS = 6, 7  # stream names


def _moved(case: Case) -> tuple[Case, Arrangement] | None:
    if case.content == "slots" or case.placement == "shared":  # there the values depend on the place
        return None
    return case.replace(placement="permuted" if case.placement != "permuted" else "scattered"), PLAIN


def _appended(case: Case) -> tuple[Case, Arrangement] | None:
    if case.placement not in ("identity", "permuted") or case.pool_rows:
        return None
    return case.replace(pool_rows=sum(case.lengths) + 64 * case.page_size), PLAIN


def _widened(case: Case) -> tuple[Case, Arrangement] | None:
    return (case.replace(table_padding=case.table_padding + 5), PLAIN) if case.table == "padded" else None


def _picked(case: Case, requests: tuple[int, ...]) -> tuple[Case, Arrangement] | None:
    if case.content == "slots" or case.placement == "shared":
        return None
    return case, Arrangement(requests=requests)


def _permuted(case: Case) -> tuple[Case, Arrangement] | None:
    order = permutation(stream(case.seed, _REQUESTS), case.batch).tolist()
    if order == sorted(order):
        order = order[::-1]
    return _picked(case, tuple(order)) if case.batch > 1 else None


def _replicated(case: Case) -> tuple[Case, Arrangement] | None:
    return _picked(case, (*range(case.batch), *range(case.batch)))


def _alone(case: Case) -> tuple[Case, Arrangement] | None:
    return _picked(case, (case.seed % case.batch,)) if case.batch > 1 else None


def _heads(case: Case) -> tuple[Case, Arrangement] | None:
    order = permutation(stream(case.seed, _HEADS), case.heads).tolist()
    if order == sorted(order):
        order = order[::-1]
    return (case, Arrangement(heads=tuple(order))) if case.heads > 1 else None


def _shifted(case: Case) -> tuple[Case, Arrangement] | None:
    return case, Arrangement(cache_shift=1)


def _exchanged(case: Case) -> tuple[Case, Arrangement] | None:
    return case.replace(query_scale=case.query_scale * 2, cache_scale=case.cache_scale / 2), PLAIN


def _poisoned(case: Case) -> tuple[Case, Arrangement] | None:
    return case.replace(poison="large" if case.poison == "nan" else "nan"), PLAIN


def _carry(tensor: Tensor, arrangement: Arrangement, out: bool) -> Tensor:
    if arrangement.requests is not None:
        tensor = tensor[list(arrangement.requests)]
    if arrangement.heads is not None:
        tensor = tensor[:, :, list(arrangement.heads)]
    return tensor


def _carry_halved(tensor: Tensor, arrangement: Arrangement, out: bool) -> Tensor:
    return tensor / 2 if out else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One relation."""

    #: Its name, a key of regimes.RELATIONS.
    name: str
    #: Makes the other run.
    other: Other
    #: Carries the first answer over.
    carry: Carry = _carry

    @property
    def about(self) -> str:
        """What is otherwise in the other run, in words."""
        return RELATIONS[self.name]


#: All relations, by name.
ALL: Mapping[str, Relation] = {
    relation.name: relation
    for relation in (
        Relation(name="repeat", other=lambda case: (case, PLAIN)),
        Relation(name="pages-moved", other=_moved),
        Relation(name="pages-appended", other=_appended),
        Relation(name="table-widened", other=_widened),
        Relation(name="requests-permuted", other=_permuted),
        Relation(name="request-replicated", other=_replicated),
        Relation(name="request-alone", other=_alone),
        Relation(name="heads-permuted", other=_heads),
        Relation(name="scale-shifted", other=_shifted),
        Relation(name="scales-exchanged", other=_exchanged, carry=_carry_halved),
        Relation(name="dead-rows-changed", other=_poisoned),
    )
}


def run_relation(
    case: Case,
    name: str,
    backend: Backend,
    regimes: Regimes,
    *,
    device: torch.device | str = "cpu",
    on_stage: Listener = lambda stage: None,
) -> Result:
    """Run a case and its other under a relation and compare the two answers.

    A case that the relation does not apply to is UNSUPPORTED, with the reason; a first run that does not pass is reported as
    itself.
    """
    start, device, before = time.perf_counter(), torch.device(device), compiled()
    relation = ALL[name]

    def run(case: Case, arrangement: Arrangement) -> Attempt:
        return attempt(case, backend, regimes, device=device, arrangement=arrangement, on_stage=on_stage)

    def result(tried: Attempt, verdict: Verdict) -> Result:
        told = Attempt(
            verdict=verdict,
            regime=tried.regime,
            inputs=tried.inputs,
            output=tried.output,
            run_seconds=tried.run_seconds,
            compiled=compiled() - before,
        )
        return told.result(case, backend, time.perf_counter() - start, relation=name)

    pair = relation.other(case)
    first = settled(run(case, PLAIN), lambda: run(case, PLAIN))
    if first.verdict.kind not in ("PASS", "UNTRUSTED") or first.output is None:
        return result(first, first.verdict)
    if pair is None:
        return result(first, Verdict(kind="UNSUPPORTED", message=f"{name} does not apply to this case"))
    kept, seen = _copy(first.output), _seen(case).to(device)
    if name == "repeat":
        run(between(case), PLAIN)
        changed = f"{case}: the first answer changed during the next call"
        found = _difference(changed, kept, first.output, seen, PLAIN, _carry)
        if found:
            return result(first, Verdict(kind="FAIL", fault=_fault(name), message=found))
    try:
        second = run(*pair)
    except Inexact as reason:
        return result(first, Verdict(kind="UNSUPPORTED", message=f"{name} does not apply to this case: {reason}"))
    if second.verdict.kind not in ("PASS", "UNTRUSTED") or second.output is None:
        if second.verdict.kind != "FAIL":
            return result(first, second.verdict)
        told = f"right, but wrong when {relation.about}:\n{second.verdict.message}"
        return result(first, Verdict(kind="FAIL", fault=_fault(name), message=told, measurements=second.verdict.measurements))
    assert first.regime is not None
    if name in first.regime.exact:
        other = f"{case}: another answer when {relation.about}"
        found = _difference(other, kept, second.output, seen, pair[1], relation.carry)
        if found:
            return result(first, Verdict(kind="FAIL", fault=_fault(name), message=found))
    return result(first, first.verdict)


def between(case: Case) -> Case:
    """Make the case of the call between: the same shapes, other values, scales and table, and lengths no longer than these.

    Whatever a kernel, a graph or a cache keeps by shape is then another's when the first case is asked again.
    """
    return case.replace(
        seed=case.seed ^ 1,
        lengths=tuple(length - length // 3 for length in case.lengths),
        softmax_scale=case.softmax_scale * 1.25,
        cache_scale=case.cache_scale * 0.75,
        query_scale=case.query_scale * 1.5,
    )


def _fault(name: str) -> str:
    return "nondeterministic" if name == "repeat" else "variant"


def _copy(output: Output) -> Output:
    return Output(out=output.out.clone(), lse=None if output.lse is None else output.lse.clone())


def _seen(case: Case) -> Tensor:
    """Tell which rows see a token, bool [B, S, H]: what the others hold is the judge's affair."""
    newest = torch.tensor(case.lengths)[:, None] - case.query_tokens + torch.arange(case.query_tokens)
    return (newest >= 0)[:, :, None].expand(-1, -1, case.heads)


def _difference(what: str, first: Output, second: Output, seen: Tensor, arrangement: Arrangement, carry: Carry) -> str | None:
    """Say where two answers are not the same numbers, zeros of either sign alike, or None."""
    hidden = ~_carry(seen, arrangement, False)
    for name, one, other in (("out", first.out, second.out), ("lse", first.lse, second.lse)):
        if one is None or other is None:
            continue
        expected = carry(one, arrangement, name == "out")
        same = (expected == other) | (hidden[..., None] if name == "out" else hidden)
        if not bool(same.all()):
            places = torch.nonzero(~same)
            index = tuple(places[0].tolist())
            return (
                f"{what}: {len(places)} of {same.numel()} elements of {name} differ, the first at {list(index)}: "
                f"{float(expected[index])!r} became {float(other[index])!r}"
            )
    return None
