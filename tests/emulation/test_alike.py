"""A launch is spared its second run only where that would write the very same bits."""

# A kernel's parameters have Triton's types or none, and its decorator has no Python type.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402

from harness.emulation import EmulationFault, emulate, run_all_extremes  # noqa: E402
from harness.emulation.alike import Launches  # noqa: E402
from tests.emulation import planted  # noqa: E402


@triton.jit
def lean(X, Out, HOW: tl.constexpr):
    """Copy a number a program, alone or leaning on the others."""
    me = tl.program_id(0)
    value = tl.load(X + me)
    if HOW == "neighbour":
        value += tl.load(Out + (me ^ 1))
    elif HOW == "own":
        tl.store(Out + me, value)
        value += tl.load(Out + me)
    elif HOW == "count":
        tl.atomic_add(Out, value)
    tl.store(Out + (0 if HOW == "last" else me), value)


def twice(launch: Callable[[], object], between: Callable[[], object] = lambda: None) -> int:
    """Run a launcher as the two extremes do; how many launches were spared the second time."""
    first = Launches(None)
    with emulate(keep=True, launches=first) as session:
        launch()
    session.undo()
    between()
    second = Launches(first)
    with emulate(copies="late", order="reverse", keep=True, launches=second):
        launch()
    return second.spared


def test_a_kernel_whose_programs_share_nothing_runs_once_and_writes_twice() -> None:
    values, out = torch.rand(100), torch.zeros(128)
    assert twice(lambda: planted.scale[(2,)](values, out, 2.5, 100, BLOCK=64), lambda: out.fill_(7)) == 1
    assert torch.equal(out[:100], values * 2.5) and bool((out[100:] == 7).all())


@pytest.mark.parametrize("how", ["neighbour", "own", "count", "last"])
def test_a_kernel_that_reads_what_is_written_or_writes_twice_runs_again(how: str) -> None:
    values, out = torch.ones(4), torch.zeros(4)
    assert twice(lambda: lean[(4,)](values, out, HOW=how)) == 0


@pytest.mark.parametrize("how", ["neighbour", "last"])
def test_a_dependency_between_the_programs_of_a_triton_kernel_is_still_named(how: str) -> None:
    values, out = torch.arange(4.0) + 1, torch.zeros(4)
    with pytest.raises(EmulationFault) as found:
        run_all_extremes(lambda: lean[(4,)](values, out, HOW=how))
    assert found.value.finding.kind == "cross-program"


def test_other_bits_of_an_input_run_it_again() -> None:
    values, out = torch.rand(4), torch.zeros(4)
    assert twice(lambda: lean[(4,)](values, out, HOW="alone"), lambda: values.neg_()) == 0
    assert torch.equal(out, values) and bool((out <= 0).all())


def test_other_arguments_run_it_again() -> None:
    values, out, factors = torch.rand(100), torch.zeros(128), iter((2.5, 3.5))
    assert twice(lambda: planted.scale[(2,)](values, out, next(factors), 100, BLOCK=64)) == 0
    assert torch.equal(out[:100], values * 3.5)


def test_two_views_of_one_memory_and_a_large_one_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.rand(8)
    assert twice(lambda: lean[(4,)](both[:4], both[4:], HOW="alone")) == 0
    monkeypatch.setattr("harness.emulation.alike.MOST_BYTES", 8)
    assert twice(lambda: lean[(4,)](torch.ones(4), torch.zeros(4), HOW="alone")) == 0


def test_a_gluon_kernel_runs_again() -> None:
    from tests.emulation.portable_case import launch
    from tests.emulation.portable_cases import CASES

    assert twice(lambda: launch(CASES["gluon convert"])) == 0
