"""What every backend must keep, whoever wrote it: a suite that an author calls on a new one.

1. A check takes a backend, a device and probe cases, and returns what it found broken, in words; nothing found is an empty
   list. It never judges accuracy: that is the gate's.
2. Every check runs the backend on fresh inputs, so that none depends on another.
3. A check that had no case to look at says so, as a breach: a suite that looked at nothing has not passed.

A test module of a backend is ``@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)`` over
``assert check(backend, device, PROBES) == []``.

Source: the protocol, ``harness.backends.protocol``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from harness.backends.protocol import Backend, Output, Unsupported
from harness.case import Case
from harness.inputs import Inputs, make_inputs
from harness.memory import unwritten
from references.formats import FORMATS, as_integers

Check = Callable[[Backend, torch.device, Sequence[Case]], list[str]]

#: Small cases that differ in one thing each; every backend finds some inside its contract and most find some outside.
PROBES: tuple[Case, ...] = (
    Case(heads=12, lengths=(130,)),
    Case(heads=16, lengths=(70, 0, 200), placement="permuted", amplitude=3.0),
    Case(heads=16, query_tokens=3, lengths=(2, 0, 65), page_size=16, table="ragged", placement="scattered"),
    Case(heads=16, lengths=(100,), cache_format="e4m3fn", cache_scale=0.37, placement="permuted"),
    Case(heads=16, lengths=(100,), query_format="e4m3fnuz", cache_format="e4m3fnuz", query_scale=1.7, cache_scale=0.37),
    Case(heads=8, lengths=(90,), query_format="fp16", cache_format="e5m2", page_size=64, query_layout="fused"),
    Case(heads=5, lengths=(90, 33), query_format="fp32", cache_format="fp32", latent=100, rope=24, token_padding=3),
    Case(heads=128, lengths=(40,), query_layout="transposed", table_padding=3, page_size=16, page_padding=7),
    Case(heads=16, lengths=(64, 3), lse=False, placement="high"),
    Case(heads=16, lengths=(64,), query_format="fp16", cache_format="bf16"),
)


def names_itself(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that the backend satisfies the protocol, with a name and capabilities."""
    if not isinstance(backend, Backend):
        return ["it lacks a part of the protocol: name, capabilities, why_not and run"]
    return [] if backend.name.strip() else ["its name is empty"]


def states_its_contract(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that ``why_not`` gives None or a reason, the same one each time, and refuses a device it does not know."""
    found = [] if any(True for _ in _inside(backend, device, probes)) else [f"no probe lies inside its contract on {device}"]
    for case in probes:
        first, again = backend.why_not(case, device), backend.why_not(case, device)
        if first is not None and not (isinstance(first, str) and first.strip()):
            found.append(f"why_not gives {first!r}, neither None nor a reason: {case}")
        if first != again:
            found.append(f"why_not changes its mind from {first!r} to {again!r}: {case}")
    if backend.why_not(probes[0], torch.device("meta")) is None:
        found.append("why_not accepts the device 'meta', on which nothing can be computed")
    if device.type not in backend.capabilities.devices and any(True for _ in _inside(backend, device, probes)):
        found.append(f"why_not accepts {device}, which its capabilities do not list")
    return found


def refuses_what_it_cannot(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that outside the contract ``run`` raises Unsupported and writes nothing."""
    found = []
    for case in probes:
        if backend.why_not(case, device) is None:
            continue
        inputs = _inputs(backend, case, device)
        before = as_integers(inputs.out).clone()
        try:
            backend.run(inputs)
        except Unsupported:
            if not torch.equal(before, inputs.out.view(before.dtype)):
                found.append(f"it refused and wrote to the output all the same: {case}")
        except Exception as error:
            found.append(f"it raised {type(error).__name__} where it must raise Unsupported ({error}): {case}")
        else:
            found.append(f"it answered a case that it says it cannot do: {case}")
    return found


def answers_in_shape(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check the shapes, types and devices of answers, and that the log-sum-exp comes when it must and not otherwise."""
    found = []
    for case, inputs, output in _answers(backend, device, probes):
        shape = (case.batch, case.query_tokens, case.heads)
        storage = FORMATS[backend.capabilities.output_format].storage
        found += _unlike("out", output.out, (*shape, case.latent), storage, inputs.device, case)
        if case.lse and backend.capabilities.returns_lse:
            if output.lse is None:
                found.append(f"no log-sum-exp, though asked for and promised: {case}")
            else:
                found += _unlike("lse", output.lse, shape, torch.float32, inputs.device, case)
        elif output.lse is not None:
            found.append(f"a log-sum-exp that was not asked for or not promised: {case}")
    return found


def says_what_ran(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that an answer names its kernel, in words and whole numbers."""
    found = []
    for case, _, output in _answers(backend, device, probes):
        if not output.what_ran.get("kernel"):
            found.append(f"what_ran names no kernel: {case}")
        found += [
            f"what_ran[{key!r}] is {value!r}, neither text nor a whole number: {case}"
            for key, value in output.what_ran.items()
            if type(key) is not str or type(value) not in (str, int)
        ]
    return found


def owns_only_its_outputs(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that inputs are bit for bit as they were and that no guard band is touched."""
    return [
        f"{violation.fault}: {violation.message}: {case}"
        for case, inputs, _ in _answers(backend, device, probes)
        for violation in inputs.violations()
    ]


def writes_every_row(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that every element of a row that sees a token is finite."""
    found = []
    for case, inputs, output in _answers(backend, device, probes):
        seeing = _seeing(case, inputs.device)
        if not torch.isfinite(output.out.float()[seeing]).all():
            found.append(f"elements of out are not finite: {case}")
        if output.lse is not None and not torch.isfinite(output.lse[seeing]).all():
            found.append(f"elements of lse are not finite: {case}")
    return found


def keeps_its_policy_for_empty_rows(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check what becomes of rows that see no token."""
    policy, found, looked = backend.capabilities.empty_rows, [], False
    for case, inputs, output in _answers(backend, device, [case for case in probes if min(case.lengths) < case.query_tokens]):
        looked = True
        empty = ~_seeing(case, inputs.device)
        if policy == "zeros":
            if output.out.float()[empty].abs().max() != 0:
                found.append(f"rows that see nothing are not zero: {case}")
            if output.lse is not None and not (output.lse[empty] == -torch.inf).all():
                found.append(f"the log-sum-exp of rows that see nothing is not -inf: {case}")
        elif policy == "untouched" and not unwritten(output.out[empty]).all():
            found.append(f"rows that see nothing were written, and the policy is 'untouched': {case}")
    return found if looked or policy == "undefined" else [f"no probe inside the contract has empty rows ({policy})"]


def repeats_itself(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that a second run on the same inputs, its outputs holding zeros this time, gives the same bits."""
    found = []
    for case, inputs, output in _answers(backend, device, probes):
        first = [tensor.clone() for tensor in (output.out, output.lse) if tensor is not None]
        inputs.out.zero_()
        if inputs.lse is not None:
            inputs.lse.zero_()
        again = backend.run(inputs)
        second = [tensor for tensor in (again.out, again.lse) if tensor is not None]
        seeing = _seeing(case, inputs.device)
        rows = ... if backend.capabilities.empty_rows == "zeros" else seeing
        for name, one, two in zip(("out", "lse"), first, second, strict=False):
            if not torch.equal(as_integers(one)[rows], as_integers(two)[rows]):
                found.append(f"{name} differs between two runs on the same inputs: {case}")
    return found


def reads_the_tables(backend: Backend, device: torch.device, probes: Sequence[Case]) -> list[str]:
    """Check that the answer does not come from the truth's own map of the pool."""
    found = []
    for case, inputs, output in _answers(backend, device, probes):
        first = output.out.clone()
        inputs.out.fill_(torch.nan)
        blind = dataclasses.replace(inputs, slots=torch.zeros_like(inputs.slots))
        seeing = _seeing(case, inputs.device)
        if not torch.equal(as_integers(first)[seeing], as_integers(backend.run(blind).out)[seeing]):
            found.append(f"out changes with inputs.slots, which is the truth's own map: {case}")
    return found


#: Every check by name.
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        check.__name__: check
        for check in (
            names_itself,
            states_its_contract,
            refuses_what_it_cannot,
            answers_in_shape,
            says_what_ran,
            owns_only_its_outputs,
            writes_every_row,
            keeps_its_policy_for_empty_rows,
            repeats_itself,
            reads_the_tables,
        )
    }
)


def _inside(backend: Backend, device: torch.device, probes: Sequence[Case]) -> Iterator[Case]:
    return (case for case in probes if backend.why_not(case, device) is None)


def _inputs(backend: Backend, case: Case, device: torch.device) -> Inputs:
    return make_inputs(case, device=device, output_format=backend.capabilities.output_format)


def _answers(backend: Backend, device: torch.device, probes: Sequence[Case]) -> Iterator[tuple[Case, Inputs, Output]]:
    for case in _inside(backend, device, probes):
        inputs = _inputs(backend, case, device)
        yield case, inputs, backend.run(inputs)


def _seeing(case: Case, device: torch.device) -> Tensor:
    """Mark the query tokens that see a cached token, [B, S]."""
    lengths = torch.tensor(case.lengths, device=device)[:, None]
    return lengths - case.query_tokens + torch.arange(case.query_tokens, device=device) + 1 > 0


def _unlike(
    name: str, actual: Tensor, shape: tuple[int, ...], storage: torch.dtype, device: torch.device, case: Case
) -> list[str]:
    expected = f"{list(shape)} of {storage} on {device.type}"
    found = f"{list(actual.shape)} of {actual.dtype} on {actual.device.type}"
    return [] if expected == found else [f"{name} is {found}, and must be {expected}: {case}"]
