"""Backends keep the protocol, and the suite that says so finds those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed

import pytest
import torch

from harness.backends.conformance import CHECKS, PROBES, Check
from harness.backends.protocol import Backend, Capabilities, NotInstalled, Output, UnknownBackend, Unsupported
from harness.backends.registry import defaults, make
from harness.backends.torch_sdpa import TorchSdpa
from harness.case import Case
from harness.inputs import Inputs, make_inputs
from references.oracle import oracle

CPU = torch.device("cpu")
DEFAULTS = defaults()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_backend_keeps_the_protocol(name: str, check: Check) -> None:
    backend = DEFAULTS[name]
    if isinstance(backend, NotInstalled):
        pytest.skip(str(backend))
    assert check(backend, CPU, PROBES) == []


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_backend_has_one_version(name: str) -> None:
    if isinstance(DEFAULTS[name], NotInstalled):
        pytest.skip(str(DEFAULTS[name]))
    with pytest.raises(ValueError, match="has no versions to choose from"):
        make(f"{name}@1.0")


def test_a_module_that_overlooks_the_version_asked_for_is_refused() -> None:
    assert make("python:tests.stubs:right@old").name == "python:tests.stubs:right@old"
    with pytest.raises(UnknownBackend, match=r"it must be called '.*:right@old'"):
        make("python:tests.faulty:right@old")


class Broken:
    """torch-sdpa with one thing wrong."""

    def __init__(
        self,
        *,
        name: str = "broken",
        capabilities: Capabilities | None = None,
        why_not: Callable[[Case, torch.device], str | None] | None = None,
        before: Callable[[Inputs], object] = lambda inputs: None,
        after: Callable[[Inputs, Output], Output] = lambda inputs, output: output,
    ) -> None:
        self._right = TorchSdpa("torch-sdpa")
        self.name = name
        self.capabilities = capabilities or self._right.capabilities
        self.why_not = why_not or self._right.why_not
        self._before, self._after = before, after

    def run(self, inputs: Inputs) -> Output:
        self._before(inputs)
        return self._after(inputs, self._right.run(inputs))


class Counter:
    """Something that differs at every call."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


def refusing(inputs: Inputs) -> None:
    raise Unsupported("no")


def only_bf16(case: Case, device: torch.device) -> str | None:
    if device.type != "cpu":
        return "a CPU only"
    return None if case.query_format == case.cache_format == "bf16" else "bf16 only"


def written_then_refused(inputs: Inputs) -> None:
    if only_bf16(inputs.case, inputs.device):
        inputs.out.zero_()
        raise Unsupported("bf16 only")


def crashing(inputs: Inputs) -> None:
    if only_bf16(inputs.case, inputs.device):
        raise RuntimeError("an assertion in a kernel")


def touched(inputs: Inputs, output: Output) -> Output:
    inputs.cache.view(torch.uint8)[0, 0, 0] ^= 1
    return output


def overran(inputs: Inputs, output: Output) -> Output:
    past = inputs.out.as_strided((1,), (1,), inputs.out.storage_offset() + inputs.out.numel())
    past.zero_()
    return output


def with_hole(inputs: Inputs, output: Output) -> Output:
    output.out[0, -1, 0, 3] = torch.nan
    return output


def with_dirty_empty_rows(inputs: Inputs, output: Output) -> Output:
    for request, length in enumerate(inputs.case.lengths):
        if length < inputs.case.query_tokens:
            output.out[request, 0] = 1
    return output


def from_the_truth_s_map(inputs: Inputs, output: Output) -> Output:
    output.out[0, -1, 0, 0] = float(inputs.slots.float().mean())
    return output


def changing(counter: Counter) -> Callable[[Inputs, Output], Output]:
    def after(inputs: Inputs, output: Output) -> Output:
        output.out[0, -1, 0, 0] += counter.next()
        return output

    return after


def undecided(counter: Counter) -> Callable[[Case, torch.device], str | None]:
    return lambda case, device: f"reason {counter.next()}" if device.type == "cpu" else "no"


BROKEN: dict[str, tuple[str, Backend, str]] = {
    "nameless": ("names_itself", Broken(name=" "), "its name is empty"),
    "accepts a device it cannot have": ("states_its_contract", Broken(why_not=lambda case, device: None), "'meta'"),
    "empty reason": ("states_its_contract", Broken(why_not=lambda case, device: ""), "neither None nor a reason"),
    "changes its mind": ("states_its_contract", Broken(why_not=undecided(Counter())), "changes its mind"),
    "does nothing": ("states_its_contract", Broken(why_not=lambda case, device: "no"), "no probe lies inside"),
    "device not listed": (
        "states_its_contract",
        Broken(capabilities=Capabilities(devices=frozenset({"cuda"})), why_not=only_bf16),
        "do not list",
    ),
    "answers what it cannot": ("refuses_what_it_cannot", Broken(why_not=only_bf16), "it answered a case"),
    "crashes on what it cannot": ("refuses_what_it_cannot", Broken(why_not=only_bf16, before=crashing), "RuntimeError"),
    "writes and refuses": (
        "refuses_what_it_cannot",
        Broken(why_not=only_bf16, before=written_then_refused),
        "wrote to the output",
    ),
    "flat output": (
        "answers_in_shape",
        Broken(after=lambda inputs, output: changed(output, out=output.out.flatten(0, 1))),
        "out is",
    ),
    "wide output": (
        "answers_in_shape",
        Broken(after=lambda inputs, output: changed(output, out=output.out.float())),
        "torch.float32",
    ),
    "lse kept back": (
        "answers_in_shape",
        Broken(after=lambda inputs, output: changed(output, lse=None)),
        "no log-sum-exp",
    ),
    "lse unasked": (
        "answers_in_shape",
        Broken(after=lambda inputs, output: changed(output, lse=output.out[..., 0].float())),
        "not asked for",
    ),
    "says nothing": (
        "says_what_ran",
        Broken(after=lambda inputs, output: changed(output, what_ran={})),
        "names no kernel",
    ),
    "says a float": (
        "says_what_ran",
        Broken(after=lambda inputs, output: changed(output, what_ran={"kernel": "k", "splits": 1.5})),
        "neither text nor a whole number",
    ),
    "changes an input": ("owns_only_its_outputs", Broken(after=touched), "input-changed"),
    "writes past its output": ("owns_only_its_outputs", Broken(after=overran), "guard-touched"),
    "leaves a hole": ("writes_every_row", Broken(after=with_hole), "not finite"),
    "dirty empty rows": ("keeps_its_policy_for_empty_rows", Broken(after=with_dirty_empty_rows), "are not zero"),
    "writes what it leaves untouched": (
        "keeps_its_policy_for_empty_rows",
        Broken(capabilities=Capabilities(empty_rows="untouched")),
        "were written",
    ),
    "differs between runs": ("repeats_itself", Broken(after=changing(Counter())), "differs between two runs"),
    "reads the truth's map": ("reads_the_tables", Broken(after=from_the_truth_s_map), "inputs.slots"),
}


@pytest.mark.parametrize(("check", "backend", "says"), BROKEN.values(), ids=BROKEN)
def test_the_suite_finds_a_backend_that_breaks_the_protocol(check: str, backend: Backend, says: str) -> None:
    found = CHECKS[check](backend, CPU, PROBES)
    assert any(says in breach for breach in found), found


def test_the_suite_finds_a_missing_part_of_the_protocol() -> None:
    assert CHECKS["names_itself"](object(), CPU, PROBES)  # type: ignore[arg-type]


def test_every_check_is_shown_to_fail() -> None:
    assert {check for check, _, _ in BROKEN.values()} == set(CHECKS)


def test_a_suite_without_cases_does_not_pass() -> None:
    backend = Broken()
    plain = [PROBES[0]]
    assert CHECKS["keeps_its_policy_for_empty_rows"](backend, CPU, plain) != []
    assert CHECKS["states_its_contract"](Broken(why_not=lambda case, device: "no"), CPU, plain) != []


@pytest.mark.parametrize("case", PROBES, ids=str)
def test_torch_sdpa_rounds_once(case: Case) -> None:
    inputs = make_inputs(case)
    output, truth = TorchSdpa("torch-sdpa").run(inputs), oracle(inputs.problem())
    # fp32 work at most doubles the one rounding to bf16, however small the element
    step = torch.finfo(torch.bfloat16).eps * truth.out.abs() + torch.finfo(torch.float32).eps * 64 * inputs_scale(inputs)
    assert ((output.out.double() - truth.out).abs() <= step).all()
    if output.lse is not None:
        seen = torch.isfinite(truth.lse)
        step = torch.finfo(torch.float32).eps * 64 * (1 + truth.lse[seen].abs())
        assert ((output.lse.double()[seen] - truth.lse[seen]).abs() <= step).all()
        assert torch.equal(output.lse == -torch.inf, ~seen)


def inputs_scale(inputs: Inputs) -> float:
    case = inputs.case
    live = inputs.cache[inputs.slots // case.page_size, inputs.slots % case.page_size]
    return float(live.float().abs().max()) * case.cache_scale


def test_torch_sdpa_takes_heads_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(heads=7, query_tokens=2, lengths=(130, 5))
    whole, cut = make_inputs(case), make_inputs(case)
    backend = TorchSdpa("torch-sdpa")
    backend.run(whole)
    monkeypatch.setattr("harness.backends.torch_sdpa._SCORES", 3 * 2 * 130)
    assert backend.run(cut).what_ran["blocks"] == 3 + 1
    step = torch.finfo(torch.bfloat16).eps
    assert ((whole.out.float() - cut.out.float()).abs() <= step * whole.out.float().abs() + step**3).all()
