"""Full precision is set for the length of a block and no longer.

1. On a CPU the settings are looked at; where there is a GPU, the products themselves.

Source: references/precision.py.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from references.decode import mla_decode
from references.oracle import oracle
from references.precision import full_precision, multiplies_bf16, narrow_operands, settings
from tests.problems import random_problem

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a product's own precision cannot be seen here")


def values() -> list[object]:
    return [getattr(owner, name) for owner, name, _ in settings()]


def full() -> list[object]:
    return [value for _, _, value in settings()]


#: Ways in which a process may have lowered the precision of fp32 products, as code.
LOWERED = {
    "new": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "old": "torch.backends.cuda.matmul.allow_tf32 = True",
    "global": "torch.set_float32_matmul_precision('medium')",
    "reductions": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True",
}


@pytest.mark.parametrize("lowered", LOWERED.values(), ids=LOWERED)
def test_precision_is_full_inside_and_as_before_afterwards(lowered: str) -> None:
    # In a process of its own: torch refuses to mix its older and its newer settings.
    code = f"""
import torch
{lowered}
from references.precision import full_precision, multiplies_bf16, narrow_operands, settings
values = lambda: [getattr(owner, name) for owner, name, _ in settings()]
full = [value for _, _, value in settings()]
before = values()
assert before != full
try:
    with full_precision():
        assert values() == full
        raise KeyError
except KeyError:
    pass
assert values() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def products(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply with full and with narrow operands."""
    with full_precision():
        full = left @ right
        with narrow_operands():
            return full, left @ right


def test_narrow_operands_lose_nothing_that_bf16_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).bfloat16().float() for shape in ((4, 128, 576), (4, 576, 512)))
    exact = left.double() @ right.double()
    sizes = left.abs().double() @ right.abs().double()
    full, narrow = products(left, right)
    # A sum of 576 products, each sum rounded to nearest: random signs leave a small part of the 576 u that are possible.
    for actual in (full, narrow):
        assert ((actual - exact).abs() / sizes).max().item() <= 32 * 2.0**-24
    # Cutting off instead of rounding would lean to one side.
    lean = ((narrow - exact) * exact.sign() / sizes).mean().item()
    assert abs(lean) <= 2.0**-24


@pytest.mark.skipif(not multiplies_bf16(), reason="this processor has no bf16 dot products: nothing is narrowed")
def test_narrowing_what_bf16_does_not_hold_would_be_seen() -> None:
    left, right = torch.full((4, 128, 576), 1 + 2.0**-12), torch.ones((4, 576, 512))
    full, narrow = products(left, right)
    assert full[0, 0, 0].item() == 576 * (1 + 2.0**-12) != narrow[0, 0, 0].item()


@pytest.mark.parametrize("formats", [("fp32", "e4m3fn"), ("bf16", "fp16"), ("fp16", "bf16"), ("bf16", "fp32")])
def test_the_reference_narrows_only_what_bf16_holds(formats: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("references.decode.narrow_operands", None)
    mla_decode(random_problem(query_format=formats[0], cache_format=formats[1]))
    with pytest.raises(TypeError):
        mla_decode(random_problem(query_format="bf16", cache_format="e4m3fn"))


@pytest.mark.parametrize("value", [2.0**-130, 2.0**70])
def test_the_reference_narrows_no_query_that_meets_subnormals(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("references.decode.narrow_operands", None)
    problem = random_problem(cache_format="bf16")
    query = problem.query.clone()
    query[0, 0, 0, 0] = value
    mla_decode(dataclasses.replace(problem, query=query))


def test_autocast_is_off_inside() -> None:
    one = torch.full((2, 2), 1 + 2.0**-20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (one @ one).dtype == torch.bfloat16
        with full_precision():
            assert (one @ one).dtype == torch.float32
            assert values() == full()
        assert (one @ one).dtype == torch.bfloat16


def test_autocast_around_the_reference_changes_nothing() -> None:
    problem = random_problem()
    expected = mla_decode(problem)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = mla_decode(problem)
    assert torch.equal(expected.out, actual.out) and torch.equal(expected.lse, actual.lse)


@GPU
def test_tf32_would_be_seen_and_is_not_used() -> None:
    side = 1024
    # 1 + 2^-13 has a bit that TF32 drops; a product of such rows with ones is exact in fp32.
    left, right = torch.full((side, side), 1 + 2.0**-13, device="cuda"), torch.ones((side, side), device="cuda")
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert (left @ right)[0, 0].item() != side * (1 + 2.0**-13)
        with full_precision():
            assert (left @ right)[0, 0].item() == side * (1 + 2.0**-13)
    finally:
        torch.set_float32_matmul_precision(previous)


@GPU
@pytest.mark.parametrize("cache_format", ["bf16", "e4m3fn", "e4m3fnuz", "fp32"])
def test_the_reference_on_a_gpu_is_as_good_as_on_a_cpu(cache_format: str) -> None:
    problem = random_problem((3000, 1, 0, 65), heads=16, latent=512, rope=64, cache_format=cache_format)
    there = dataclasses.replace(problem, query=problem.query.cuda(), cache=problem.cache.cuda(), slots=problem.slots.cuda())
    truth = oracle(problem)
    remote = oracle(there)
    here, actual = mla_decode(problem), mla_decode(there)
    assert (remote.out.cpu() - truth.out).abs().max() <= 2.0**-40 * truth.out.abs().max()
    # A CPU's fp32 error on the same problem is the measure; TF32's would be a thousand times as large.
    assert (actual.out.cpu() - truth.out).abs().max() <= 16 * (here.out - truth.out).abs().max()
    assert torch.equal(actual.lse.cpu().isinf(), truth.lse.isinf())
