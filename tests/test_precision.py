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
from references.precision import full_precision, onednn_products, prefers_onednn, settings
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
from references.precision import full_precision, onednn_products, prefers_onednn, settings
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
    """Multiply as torch does by itself, and by oneDNN."""
    with full_precision():
        plain = left @ right
        with onednn_products():
            return plain, left @ right


ONEDNN = pytest.mark.skipif(not prefers_onednn(narrow=True), reason="this processor's products never go to oneDNN")


@ONEDNN
@pytest.mark.parametrize("narrow", [True, False])
def test_products_by_onednn_lose_nothing(narrow: bool) -> None:
    if not prefers_onednn(narrow=narrow):
        pytest.skip("this processor narrows what is not narrow already, so it is not asked to")
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((4, 128, 576), (4, 576, 512)))
    if narrow:
        left, right = left.bfloat16().float(), right.bfloat16().float()
    exact = left.double() @ right.double()
    sizes = left.abs().double() @ right.abs().double()
    # A sum of 576 products, each sum rounded to nearest: random signs leave a small part of the 576 u that are possible.
    for actual in products(left, right):
        assert ((actual - exact).abs() / sizes).max().item() <= 32 * 2.0**-24
        # Cutting off instead of rounding would lean to one side.
        assert abs(((actual - exact) * exact.sign() / sizes).mean().item()) <= 2.0**-24


def test_operands_that_were_narrowed_would_be_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in ((4, 128, 576), (4, 576, 512)))
    sizes = left.abs().double() @ right.abs().double()
    narrowed = left.bfloat16().float() @ right.bfloat16().float()
    assert ((narrowed - left.double() @ right.double()).abs() / sizes).max().item() > 32 * 2.0**-24


@pytest.mark.parametrize(
    "formats", [("fp32", "e4m3fn"), ("bf16", "fp16"), ("fp16", "bf16"), ("bf16", "fp32"), ("bf16", "e5m2")]
)
def test_scores_count_as_narrow_only_if_bf16_holds_their_operands(
    formats: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def answer(*, narrow: bool) -> bool:
        asked.append(narrow)
        return False

    monkeypatch.setattr("references.decode.prefers_onednn", answer)
    mla_decode(random_problem(query_format=formats[0], cache_format=formats[1]))
    assert set(asked[::2]) == {formats == ("bf16", "e5m2")}  # scores
    assert set(asked[1::2]) == {False}  # probabilities are no bf16 values


@pytest.mark.parametrize("value", [2.0**-130, 2.0**70])
def test_a_query_that_meets_subnormals_is_not_narrow(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(cache_format="bf16")
    query = problem.query.clone()
    query[0, 0, 0, 0] = value
    monkeypatch.setattr("references.decode.prefers_onednn", lambda *, narrow: pytest.fail("narrow") if narrow else False)
    mla_decode(dataclasses.replace(problem, query=query))
    with pytest.raises(pytest.fail.Exception):
        mla_decode(problem)


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
