"""What the emulator says of rounding is what Triton's AMD backend makes of it for gfx950; no GPU is needed to ask."""

# A kernel's parameters have Triton's types or none, and its decorator has no Python type.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="compiles kernels with Triton, which is not installed here")

from harness.backends.gfx950 import ARCHITECTURE, LANES  # noqa: E402
from harness.emulation import emulate  # noqa: E402
from tests.emulation import portable_kernels as kernels  # noqa: E402

COUNT = 256
#: fp32's 1 / ln 2, as it stands in the code.
LOG2E = 0x3FB8AA3B


@cache
def code(how: str, dtype: str) -> str:
    """Compile a kernel of one operation for gfx950; its instructions."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=kernels.single,
        signature={"X": f"*{dtype}", "Out": f"*{dtype}", "N": "constexpr", "HOW": "constexpr"},
        constexprs={(2,): COUNT, (3,): how},
    )
    target, options = GPUTarget("hip", ARCHITECTURE, LANES), {"enable_fp_fusion": True}  # the default of Triton 3.9
    text = triton.compile(source, target=target, options=options).asm["amdgcn"]
    return "\n".join(line.strip() for line in text.splitlines() if re.match(r"\s+[vs]_", line))


def emulated(how: str, values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(values)
    with emulate():
        kernels.single[(1,)](values, out, N=COUNT, HOW=how)
    return out


def test_a_negation_flips_the_sign_of_zero_too() -> None:
    assert re.search(r"v_xor_b32\S* v\d+, 0x80000000", code("negate", "fp32"))
    zeros = emulated("negate", torch.tensor([0.0, -0.0, 1.0, -2.0] * (COUNT // 4)))
    assert torch.signbit(zeros)[:4].tolist() == [True, False, True, False]


def test_an_exponential_is_one_of_base_two_of_a_rounded_product() -> None:
    text = code("exp", "fp32")
    assert re.search(rf"v_mul_f32\S* v\d+, 0x{LOG2E:x}, v\d+", text) and "v_exp_f32" in text
    values = torch.linspace(-80, 80, COUNT)
    product = (values * torch.tensor([LOG2E], dtype=torch.int32).view(torch.float32)).double()
    assert torch.equal(emulated("exp", values), product.exp2().float())
    # The rounding of the product is what tells it from an exponential rounded once: up to 40 units here.
    once = values.double().exp()
    units = (emulated("exp", values).double() - once).abs() / torch.from_numpy(np.spacing(once.float().numpy())).double()
    assert 10 < float(units.max()) < 60


def test_bf16_rounds_after_the_product_and_after_the_sum() -> None:
    text = code("half constant", "bf16")
    assert "v_mul_f32" in text and "v_add_f32" in text and not re.search(r"v_(pk_)?(fma|mad|fmac)", text)
    values = torch.linspace(1, 2, COUNT).bfloat16()
    tenth, third = torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(0.3, dtype=torch.bfloat16)
    assert torch.equal(emulated("half constant", values), values * tenth + third)
    once = (values.double() * tenth.double() + third.double()).bfloat16()
    assert not torch.equal(emulated("half constant", values), once)


def test_fp16_is_fused_on_gfx950_and_the_emulator_rounds_twice() -> None:
    """What is not modelled: a product and a sum of fp16 (and of fp32) become one operation there."""
    assert re.search(r"v_(pk_)?fma_f16", code("half constant", "fp16"))
    values = torch.linspace(1, 2, COUNT).half()
    tenth, third = torch.tensor(0.1).half(), torch.tensor(0.3).half()
    twice = values * tenth + third
    once = (values.double() * tenth.double() + third.double()).half()
    assert torch.equal(emulated("half constant", values), twice)
    assert bool(((twice.double() - once.double()).abs() <= torch.from_numpy(np.spacing(once.numpy())).double()).all())
