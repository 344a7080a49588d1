"""The interpreter's mends: each fault of the interpreter as shipped, and what the mended one does instead."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from harness.emulation import interpreter_floats as floats
from tests.interpreter_kernels import FOREIGN, cast, cast_toward_zero, combine, product, run, scaled, total_of

pytestmark = pytest.mark.skipif(FOREIGN is not None, reason=str(FOREIGN))

#: Triton's name: torch's type, ml_dtypes' type
KINDS = {
    "bf16": (torch.bfloat16, ml_dtypes.bfloat16),
    "fp8e4nv": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "fp8e4b8": (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz),
    "fp8e5": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "fp8e5b16": (torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz),
    "fp16": (torch.float16, np.float16),
    "fp32": (torch.float32, np.float32),
}
EIGHT = [name for name in KINDS if name.startswith("fp8")]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def codes_of(values: np.ndarray, name: str) -> torch.Tensor:
    """Give a numpy array of the format's own type as a torch tensor of the same bits."""
    raw = torch.from_numpy(
        np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}" if values.dtype.itemsize > 1 else "u1")
    )
    return raw.view(KINDS[name][0])


def numbers_of(codes: torch.Tensor, name: str) -> np.ndarray:
    return codes.view(_WORDS[codes.element_size()]).numpy().view(KINDS[name][1])


def all_codes(name: str) -> torch.Tensor:
    bits = 8 if name in EIGHT else 16
    return codes_of(np.arange(1 << bits).astype(f"u{bits // 8}").view(KINDS[name][1]), name)


def hard_floats(name: str, count: int = 1 << 18) -> np.ndarray:
    """Make fp32 values for a conversion: random bit patterns, and every tie of the format and its neighbours."""
    random = np.random.Generator(np.random.Philox(7)).integers(0, 1 << 32, count, dtype=np.uint64)
    values = random.astype(np.uint32).view(np.float32)
    finite = np.abs(all_codes_as_floats(name))
    finite = np.unique(finite[np.isfinite(finite)]).astype(np.float64)
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf)), finite.astype(np.float32)]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    chosen = np.concatenate([*near, *(-part for part in near), special])
    values[: len(chosen)] = chosen
    return values


def all_codes_as_floats(name: str) -> np.ndarray:
    return numbers_of(all_codes(name), name).astype(np.float32)


def same(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Compare values, zeros by sign, NaN with NaN."""
    a, e = actual.astype(np.float32), expected.astype(np.float32)
    return ((a == e) & (np.signbit(a) == np.signbit(e))) | (np.isnan(a) & np.isnan(e))


# --- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EIGHT, "bf16", "fp16"])
def test_every_code_decodes_to_its_value(name: str) -> None:
    codes = all_codes(name)
    found = torch.empty(len(codes), dtype=torch.float32)
    run(cast, codes, found, COUNT=len(codes))
    assert same(found.numpy(), numbers_of(codes, name)).all()


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("target", ["bf16", "fp16"])
def test_every_fp8_code_widens_exactly(name: str, target: str) -> None:
    codes = all_codes(name)
    found = torch.empty(len(codes), dtype=KINDS[target][0])
    run(cast, codes, found, COUNT=len(codes))
    assert same(numbers_of(found, target), numbers_of(codes, name)).all()


@pytest.mark.parametrize("source", ["bf16", "fp16"])
@pytest.mark.parametrize("target", [*EIGHT, "bf16", "fp16"])
def test_every_sixteen_bit_code_narrows_to_nearest_even(source: str, target: str) -> None:
    codes = all_codes(source)
    found = torch.empty(len(codes), dtype=KINDS[target][0])
    run(cast, codes, found, COUNT=len(codes))
    check_narrowing(numbers_of(codes, source).astype(np.float32), found, target)


@pytest.mark.parametrize("name", [*EIGHT, "bf16", "fp16"])
def test_fp32_narrows_to_nearest_even(name: str) -> None:
    values = hard_floats(name)
    found = torch.empty(len(values), dtype=KINDS[name][0])
    run(cast, torch.from_numpy(values), found, COUNT=len(values))
    check_narrowing(values, found, name)


def check_narrowing(values: np.ndarray, found: torch.Tensor, name: str) -> None:
    with np.errstate(all="ignore"):
        expected = values.astype(KINDS[name][1])
    right = same(numbers_of(found, name), expected)
    if name in EIGHT:  # ml_dtypes does not saturate; the conversion does, infinities included
        finite = all_codes_as_floats(name)
        largest = np.nanmax(np.where(np.isfinite(finite), finite, np.nan))
        beyond = np.abs(values) > largest
        right |= beyond & same(numbers_of(found, name), np.copysign(largest, values))
    assert right.all(), values[~right][:5]


@pytest.mark.parametrize("name", [*EIGHT, "bf16", "fp16"])
def test_rounding_toward_zero_never_grows_a_value(name: str) -> None:
    values = hard_floats(name)
    found = torch.empty(len(values), dtype=KINDS[name][0])
    run(cast_toward_zero, torch.from_numpy(values), found, COUNT=len(values))
    actual = numbers_of(found, name).astype(np.float32)
    finite = np.unique(np.abs(all_codes_as_floats(name)[np.isfinite(all_codes_as_floats(name))]))
    known = np.isfinite(values)
    expected = finite[np.searchsorted(finite, np.abs(values[known]), side="right") - 1]
    assert (np.abs(actual[known]) == expected).all()


def test_fp64_narrows_with_one_rounding() -> None:
    just_above_a_tie = np.array([1 + 2.0**-8 + 2.0**-40], np.float64)
    found = torch.empty(1, dtype=torch.bfloat16)
    run(cast, torch.from_numpy(just_above_a_tie), found, COUNT=1)
    assert float(found) == 1 + 2.0**-7, "through fp32 it would be a tie, and even below"


@pytest.mark.parametrize(
    ("name", "value", "shipped", "why"),
    [
        ("bf16", 1 + 2.0**-7 - 2.0**-12, 1.0, "truncates instead of rounding"),
        ("fp8e4nv", 1.96875, 1.0, "loses the carry out of the mantissa"),
        ("fp8e4nv", 1.0625, 1.125, "rounds a tie up instead of to even"),
        ("fp8e4nv", 2.0**-9 * 1.75, 2.0**-9, "truncates a subnormal"),
        ("fp8e4nv", float("inf"), 256.0, "gives a power of two for infinity"),
    ],
)
def test_the_shipped_interpreter_narrows_wrongly(name: str, value: float, shipped: float, why: str) -> None:
    found = torch.empty(1, dtype=KINDS[name][0])
    run(cast, torch.tensor([value]), found, COUNT=1, mend=False)
    assert same(numbers_of(found, name), np.array([shipped], np.float32)).all(), why
    run(cast, torch.tensor([value]), found, COUNT=1)
    assert not same(numbers_of(found, name), np.array([shipped], np.float32)).any(), why


@pytest.mark.parametrize("name", ["fp8e4nv", "fp8e4b8"])
def test_the_shipped_interpreter_decodes_fp8_nan_to_a_number(name: str) -> None:
    codes = all_codes(name)
    found = torch.empty(256, dtype=torch.float32)
    run(cast, codes, found, COUNT=256, mend=False)
    wrong = ~same(found.numpy(), numbers_of(codes, name))
    assert np.isnan(numbers_of(codes, name).astype(np.float32))[wrong].all()
    assert np.isfinite(found.numpy()[wrong]).all() and wrong.any()


# --- arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", *EIGHT])
def test_a_dot_multiplies_values(name: str) -> None:
    kind = KINDS[name][1]
    generator = np.random.Generator(np.random.Philox(3))
    left, right = (generator.standard_normal((16, 16)).astype(np.float32).astype(kind) for _ in "ab")
    left[0, :2] = np.array([2.0**-9, -0.0]).astype(kind)
    found = torch.empty(16, 16)
    expected = left.astype(np.float64) @ right.astype(np.float64)
    args = codes_of(left, name), codes_of(right, name), found
    run(product, *args, SIZE=16, PRECISION="ieee")
    assert np.allclose(found.numpy(), expected, rtol=2.0**-20, atol=2.0**-20)
    if name == "bf16":
        run(product, *args, SIZE=16, PRECISION="ieee", mend=False)
        assert not np.allclose(found.numpy(), expected, rtol=0.5), "the shipped dot multiplies codes"


def test_nan_in_an_fp8_operand_reaches_the_product() -> None:
    left = np.ones((16, 16), np.float32).astype(ml_dtypes.float8_e4m3fn)
    left[3, 4] = np.nan
    found = torch.empty(16, 16)
    args = codes_of(left, "fp8e4nv"), codes_of(np.ones_like(left), "fp8e4nv"), found
    run(product, *args, SIZE=16, PRECISION="ieee")
    assert torch.isnan(found[3]).all() and torch.isfinite(found[2]).all()
    run(product, *args, SIZE=16, PRECISION="ieee", mend=False)
    assert torch.isfinite(found[3]).all(), "the shipped dot loses it"


def test_tf32_drops_mantissa_bits_where_a_kernel_asks_for_it() -> None:
    value = torch.full((16, 16), 1 + 2.0**-12)
    exact = float((value[0].double() * value[0].double()).sum())
    found = {}
    for precision in ("ieee", "tf32"):
        out = torch.empty(16, 16)
        run(product, value, value, out, SIZE=16, PRECISION=precision)
        found[precision] = float(out[0, 0])
    assert found["ieee"] == np.float32(exact)
    assert found["tf32"] == 16.0
    run(product, value, value, out, SIZE=16, PRECISION="tf32", mend=False)
    assert float(out[0, 0]) == found["ieee"], "the shipped interpreter hides TF32"


@pytest.mark.parametrize("how", ["add", "multiply", "subtract", "negate", "maximum", "less", "equal", "fma"])
def test_bf16_arithmetic_is_of_values(how: str) -> None:
    generator = np.random.Generator(np.random.Philox(5))
    left, right = (generator.standard_normal(4096).astype(np.float32).astype(ml_dtypes.bfloat16) for _ in "ab")
    right[:64] = left[:64]
    x, y = left.astype(np.float64), right.astype(np.float64)
    expected = {
        "add": x + y, "multiply": x * y, "subtract": x - y, "negate": -x, "maximum": np.maximum(x, y),
        "less": (x < y) * 1.0, "equal": (x == y) * 1.0, "fma": x * y + x,
    }[how]  # fmt: skip
    flag = how in ("less", "equal")
    out = torch.empty(4096, dtype=torch.float32 if flag else torch.bfloat16)
    args = codes_of(left, "bf16"), codes_of(right, "bf16"), out
    wanted = expected if flag else floats.decode(floats.encode(expected, "bf16"), "bf16")
    run(combine, *args, COUNT=4096, HOW=how)
    assert (out.float().numpy() == wanted).all()
    if how != "equal":  # codes that are equal are equal values, bar zeros
        try:
            run(combine, *args, COUNT=4096, HOW=how, mend=False)
        except Exception:
            return
        assert (out.float().numpy() != wanted).any(), "the shipped interpreter computes with codes"


@pytest.mark.parametrize(("source", "target"), [(torch.int32, torch.bfloat16), (torch.bfloat16, torch.int32)])
def test_integers_and_bf16_convert_by_value(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.arange(-512, 512).to(source)
    found = torch.empty(1024, dtype=target)
    run(cast, values, found, COUNT=1024)
    assert torch.equal(found, values.to(target))
    if target is torch.bfloat16:
        run(cast, values, found, COUNT=1024, mend=False)
        assert not torch.equal(found, values.to(target)), "the shipped interpreter takes the integer for a code"


def test_a_float_argument_is_an_fp32_scalar() -> None:
    values = torch.full((16,), 1.0, dtype=torch.bfloat16)
    out = torch.empty(16)
    run(scaled, values, out, 1 + 2.0**-12, COUNT=16)
    assert float(out[0]) == 1 + 2.0**-12
    run(scaled, values, out, 1 + 2.0**-12, COUNT=16, mend=False)
    assert float(out[0]) != 1 + 2.0**-12, "the shipped interpreter takes it for a weak Python number"


@pytest.mark.parametrize(("how", "expected"), [("sum", 4.5), ("max", 3.0), ("argmax", 2.0)])
def test_bf16_reductions_are_of_values(how: str, expected: float) -> None:
    values = torch.tensor([-1.0, 2.5, 3.0, 0.0], dtype=torch.bfloat16)
    out = torch.empty(1, dtype=torch.float32 if how != "argmax" else torch.int32)
    run(total_of, values, out, COUNT=4, HOW=how)
    assert float(out) == expected


@pytest.mark.parametrize("how", ["max", "argmax"])
def test_a_reduction_of_nan_alone_does_not_stop_the_kernel(how: str) -> None:
    out = torch.zeros(1, dtype=torch.float32 if how == "max" else torch.int32)
    run(total_of, torch.full((4,), torch.nan), out, COUNT=4, HOW=how)
    assert bool(torch.isnan(out)) if how == "max" else int(out) == 0
