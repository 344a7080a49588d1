"""The model is right, and each fault is wrong in the way it says, where it says, and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness.backends.protocol import UnknownBackend
from harness.backends.registry import make
from harness.case import Case
from harness.faults.backend import Planted, planted
from harness.faults.catalogue import FAULTS
from harness.faults.record import KINDS, Fault
from harness.faults.scene import Hang, IllegalAccess
from harness.faults.variant import BASE, VARIANTS
from harness.hunt import fresh
from harness.inputs import Inputs, make_inputs
from harness.judge import judge
from harness.regimes import load
from tests.fault_cases import spread

Answer = tuple[torch.Tensor, torch.Tensor | None] | str


def answer(backend: Planted, inputs: Inputs) -> Answer:
    """Run a backend; a crash is its name."""
    try:
        output = backend.run(fresh(inputs))
    except (IllegalAccess, Hang) as error:
        return type(error).__name__
    return output.out.clone(), None if output.lse is None else output.lse.clone()


def same(one: Answer, two: Answer) -> bool:
    """Tell whether two answers are the same bits."""
    if isinstance(one, str) or isinstance(two, str):
        return one == two
    return all(
        a is None or b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_of_the_model_passes_its_own_regime(name: str) -> None:
    backend = Planted(name=f"model:{name}", variant=VARIANTS[name])
    regimes = load()
    for case in spread(6, seed=7):
        if backend.why_not(case, torch.device("cpu")) is None:
            inputs = make_inputs(case, output_format=backend.capabilities.output_format)
            verdict = judge(inputs, backend.run(inputs), regimes.of(backend.name, case), models=False)
            assert verdict.kind == "PASS", verdict.message


@pytest.mark.parametrize("name", VARIANTS)
def test_a_regime_declares_the_arithmetic_of_its_variant(name: str) -> None:
    assert load().named(f"model-{name}").arithmetic == VARIANTS[name].arithmetic


def test_the_catalogue_has_faults_of_every_kind() -> None:
    assert len(FAULTS) >= 60
    assert {fault.kind for fault in FAULTS.values()} == set(KINDS)
    assert all(fault.report and fault.what and fault.needs for fault in FAULTS.values())


def test_each_fault_acts_on_the_cases_it_names_and_on_no_others() -> None:
    acted: set[str] = set()
    for case in spread(24, seed=3):
        inputs = make_inputs(case)
        right: dict[str, Answer] = {}
        for name, fault in FAULTS.items():
            backend = planted(name)
            if fault.variant not in right:
                right[fault.variant] = answer(Planted(name="model", variant=VARIANTS[fault.variant]), inputs)
            differs = not same(answer(backend, inputs), right[fault.variant])
            touched = bool(inputs.violations())
            if touched:
                inputs = make_inputs(case)
            if differs or touched:
                acted.add(name)
                assert fault.shows(case), f"{name} acts on {case}, which it says cannot show it"
    idle = {name for name in FAULTS if name not in acted and not FAULTS[name].history}
    assert not idle, f"no case shows {', '.join(sorted(idle))}"


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.history])
def test_a_fault_with_a_history_needs_a_call_before(name: str) -> None:
    case = Case(heads=2, lengths=(100, 40), cache_scale=0.37)
    other = case.replace(seed=5, cache_scale=0.5, softmax_scale=0.1, lengths=(60, 30))
    backend, clean = planted(name), Planted(name="model", variant=VARIANTS[BASE])
    right = answer(clean, make_inputs(case))
    before, inputs = make_inputs(other), make_inputs(case)

    def differs() -> bool:
        answer(backend, before)
        return not same(answer(backend, inputs), right)

    assert any(differs() for _ in range(40))


def test_faults_can_be_planted_together() -> None:
    case = Case(heads=2, lengths=(100,), cache_scale=0.37)
    inputs = make_inputs(case)
    both = answer(planted("value-scale-dropped", "lse-base-2"), inputs)
    one, other = answer(planted("value-scale-dropped"), inputs), answer(planted("lse-base-2"), inputs)
    assert not isinstance(both, str) and not isinstance(one, str) and not isinstance(other, str)
    assert torch.equal(both[0], one[0]) and both[1] is not None and other[1] is not None and torch.equal(both[1], other[1])


def test_a_fault_is_a_backend_in_any_variant() -> None:
    assert make("fault:zeros").name == f"fault:zeros@{BASE}"
    assert make("fault:zeros@single").name == "fault:zeros@single"
    assert make("model:exp2").name == "model:exp2"


@pytest.mark.parametrize(
    ("name", "near"), [("fault:zeroes", "zeros"), ("model:singel", "single"), ("fault:zeros@splitz", "splits")]
)
def test_a_misspelt_fault_or_variant_is_told_what_is_near(name: str, near: str) -> None:
    with pytest.raises(UnknownBackend, match=near):
        make(name)


def test_a_read_outside_every_allocation_is_an_error() -> None:
    case = Case(heads=2, lengths=(40, 70), placement="high", pool_rows=3_000_000, page_size=16)  # between 2^31 and 2^32 bytes
    with pytest.raises(IllegalAccess, match="read the row at element"):
        planted("offset-signed-faults").run(make_inputs(case))


@pytest.mark.parametrize(
    "change", [{"kind": "Z"}, {"acts": {"nowhere": lambda scene, value: value}}, {"variant": "none"}, {"acts": {}}]
)
def test_a_record_that_cannot_be_planted_is_refused(change: dict[str, object]) -> None:
    fault: Fault = FAULTS["zeros"]
    with pytest.raises(ValueError, match="fault zeros"):
        dataclasses.replace(fault, **change)  # type: ignore[arg-type]
