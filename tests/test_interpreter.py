"""The interpreter's mends: each fault of the interpreter as shipped, and what the mended one does instead."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from harness.emulation import interpreter_floats as floats  # noqa: E402
from harness.emulation.interpreter import interpreted, mended  # noqa: E402
from harness.emulation.interpreter_memory import IntegerFault, MemoryFault  # noqa: E402

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.9."), reason="the mends are for Triton 3.9's interpreter; elsewhere kernels run natively"
)

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


@triton.jit
def cast(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def cast_toward_zero(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty, fp_downcast_rounding="rtz"))


@triton.jit
def product(left, right, out, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, SIZE)
    cell = at[:, None] * SIZE + at[None, :]
    found = tl.dot(tl.load(left + cell), tl.load(right + cell), input_precision=PRECISION)
    tl.store(out + cell, found)


@triton.jit
def combine(left, right, out, COUNT: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(left + at), tl.load(right + at)
    if HOW == "add":
        z = x + y
    elif HOW == "multiply":
        z = x * y
    elif HOW == "subtract":
        z = x - y
    elif HOW == "negate":
        z = -x
    elif HOW == "maximum":
        z = tl.maximum(x, y)
    elif HOW == "less":
        z = (x < y).to(tl.float32)
    elif HOW == "equal":
        z = (x == y).to(tl.float32)
    elif HOW == "fma":
        z = tl.fma(x, y, x)
    tl.store(out + at, z)


@triton.jit
def scaled(source, target, factor, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at) * factor)


@triton.jit
def take(source, target, first, COUNT: tl.constexpr, LIMIT: tl.constexpr):
    at = tl.arange(0, COUNT)
    found = tl.load(source + first + at, mask=at < LIMIT)
    tl.store(target + at, found)


@triton.jit
def put(target, first, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + first + at, at.to(tl.float32))


@triton.jit
def indirect(source, target, stride, page):
    wanted = tl.load(page)
    tl.store(target, tl.load(source + wanted * stride))


@triton.jit
def total_of(source, target, COUNT: tl.constexpr, HOW: tl.constexpr):
    values = tl.load(source + tl.arange(0, COUNT))
    if HOW == "sum":
        tl.store(target, tl.sum(values, 0))
    elif HOW == "max":
        tl.store(target, tl.max(values, 0))
    elif HOW == "argmax":
        tl.store(target, tl.argmax(values, 0))


@triton.jit
def count_up(target):
    tl.atomic_add(target, 1)


@triton.jit
def last_program(target):
    tl.store(target, tl.program_id(0))


def run(kernel: Any, *args: Any, grid: tuple[int, ...] = (1,), mend: bool = True, **constants: Any) -> None:
    with mended() if mend else nullcontext():
        interpreted(kernel)[grid](*args, **constants)


def codes_of(values: np.ndarray, name: str) -> torch.Tensor:
    """Give a numpy array of the format's own type as a torch tensor of the same bits."""
    raw = torch.from_numpy(np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}" if values.dtype.itemsize > 1 else "u1"))
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
    # through fp32 the tie would be exact, and even
    assert floats.encode(just_above_a_tie, "bf16") == 0x3F81
    assert floats.encode(just_above_a_tie.astype(np.float32), "bf16") == 0x3F80


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


def test_a_signed_product_that_leaves_int32_is_reported() -> None:
    source, target = torch.zeros(4), torch.zeros(1)
    page = torch.tensor([70000], dtype=torch.int32)
    with pytest.raises(IntegerFault, match=r"70000 x 40000 leaves int32 .*test_interpreter\.py:\d+: .*wanted \* stride"):
        run(indirect, source, target, 40000, page)
    run(indirect, source, target, 1, torch.tensor([3], dtype=torch.int32))
    left = torch.tensor([2**31 - 1], dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    run(combine, left, left, out, COUNT=1, HOW="add", mend=False)
    assert int(out) == -2, "the shipped interpreter wraps without a word"
    for how in ("add", "multiply"):
        with pytest.raises(IntegerFault):
            run(combine, left, left, out, COUNT=1, HOW=how)
    with pytest.raises(IntegerFault):
        run(combine, -left, left, out, COUNT=1, HOW="subtract")


@pytest.mark.parametrize("how", ["add", "multiply", "subtract"])
def test_int64_faults_are_exactly_those_that_leave_int64(how: str) -> None:
    edge = [-(2**63), -(2**63) + 1, -(2**32), -2, -1, 0, 1, 2, 2**31, 2**32, 2**63 - 1]
    for x in edge:
        for y in edge:
            exact = {"add": x + y, "multiply": x * y, "subtract": x - y}[how]
            left, right, out = (torch.tensor([v], dtype=torch.int64) for v in (x, y, 0))
            if -(2**63) <= exact < 2**63:
                run(combine, left, right, out, COUNT=1, HOW=how)
                assert int(out) == exact
            else:
                with pytest.raises(IntegerFault):
                    run(combine, left, right, out, COUNT=1, HOW=how)


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [-1, 9, 1 << 20, -(1 << 20), 1 << 30])
def test_a_load_outside_its_allocation_is_reported_with_the_line(first: int) -> None:
    source, target = torch.zeros(16), torch.zeros(8)
    with pytest.raises(MemoryFault, match=r"load of 4 bytes at byte -?\d+ of source, which has 64 bytes .*"
                                          r"test_interpreter\.py:\d+: found = tl\.load"):  # fmt: skip
        run(take, source, target, first, COUNT=8, LIMIT=8)


def test_a_store_outside_its_allocation_is_reported_and_writes_nothing_elsewhere() -> None:
    beside = torch.zeros(64)
    with pytest.raises(MemoryFault, match="store of 4 bytes at byte 64 of target"):
        run(put, beside[:16].clone(), 12, COUNT=8)
    assert not beside.any()


def test_masked_lanes_may_point_anywhere() -> None:
    source, target = torch.arange(16.0), torch.full((8,), 9.0)
    run(take, source, target, 12, COUNT=8, LIMIT=4)
    assert target.tolist() == [12, 13, 14, 15, 0, 0, 0, 0]
    run(take, source, target, 1 << 29, COUNT=8, LIMIT=0)
    assert target.tolist() == [0] * 8


def test_masked_lanes_without_other_can_be_poisoned() -> None:
    source, target = torch.arange(16.0), torch.zeros(8)
    with mended(undefined="poison"):
        interpreted(take)[(1,)](source, target, 0, COUNT=8, LIMIT=4)
    assert torch.isnan(target[4:]).all() and torch.equal(target[:4], source[:4])


def test_slices_of_one_storage_are_neighbours() -> None:
    whole, target = torch.arange(32.0), torch.zeros(8)
    run(take, whole[8:16], target, -8, COUNT=8, LIMIT=8)
    assert torch.equal(target, whole[:8])


def test_an_address_that_splits_an_element_is_reported() -> None:
    bytes_, target = torch.zeros(67, dtype=torch.uint8), torch.zeros(8)
    crooked = bytes_[1:65]
    assert crooked.storage_offset() == 1

    class Crooked:
        """A tensor whose pointer is read as fp32, one byte off."""

        dtype = torch.float32
        device = crooked.device

        def data_ptr(self) -> int:
            return crooked.data_ptr()

        def untyped_storage(self) -> Any:
            return crooked.untyped_storage()

        def storage_offset(self) -> int:
            return 1

        def element_size(self) -> int:
            return 1

    with pytest.raises(MemoryFault, match="no multiple of 4"):
        run(take, Crooked(), target, 0, COUNT=8, LIMIT=8)


def test_the_shipped_interpreter_reads_whatever_lies_at_an_address() -> None:
    whole = torch.arange(64.0)
    beside, target = whole[:16], torch.zeros(8)
    run(take, beside, target, 16, COUNT=8, LIMIT=8, mend=False)
    assert torch.equal(target, whole[16:24])


def test_atomics_reach_the_launch_s_memory() -> None:
    count = torch.zeros(1, dtype=torch.int32)
    run(count_up, count, grid=(5,))
    assert int(count) == 5


def test_programs_can_run_in_reverse() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    for reverse, expected in ((False, 3), (True, 0)):
        with mended(reverse=reverse):
            interpreted(last_program)[(4,)](target)
        assert int(target) == expected


def test_a_tensor_that_is_not_on_the_cpu_is_refused() -> None:
    with pytest.raises(Exception, match="meta"):
        run(take, torch.zeros(16, device="meta"), torch.zeros(8), 0, COUNT=8, LIMIT=8)


# --- the context ------------------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    import triton.runtime.interpreter as source

    owners = [tl, tl.core, tl.math, tl.standard, tl.random, tl.tensor, tl.dtype, source, source.InterpreterBuilder,
              source.ReduceOps, source.GridExecutor, source.InterpretedFunction, source.interpreter_builder]  # fmt: skip
    return {f"{owner}.{name}": value for owner in owners for name, value in vars(owner).items()
            if name not in ("grid_idx", "grid_dim", "rewritten_fn")}  # fmt: skip


@pytest.mark.parametrize("ends_with_an_error", [False, True])
def test_everything_is_as_shipped_after_the_context(ends_with_an_error: bool) -> None:
    values = torch.zeros(4)
    run(total_of, values, torch.zeros(1), COUNT=4, HOW="sum")
    before = state()
    if ends_with_an_error:
        with pytest.raises(MemoryFault):
            run(take, values, values, 100, COUNT=4, LIMIT=4)
    else:
        run(total_of, values, torch.zeros(1), COUNT=4, HOW="sum")
    after = state()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []


def test_the_context_is_entered_once() -> None:
    with mended(), pytest.raises(RuntimeError, match="mended already"), mended():
        pass


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    with pytest.raises(RuntimeError, match=r"written for Triton 3\.9, and this is Triton 3\.6\.0"), mended():
        pass


def test_an_error_in_a_kernel_names_its_line() -> None:
    with pytest.raises(Exception, match=r"test_interpreter\.py:\d+: "):
        run(product, torch.zeros(16, 16), torch.zeros(16, 16, dtype=torch.float16), torch.zeros(16, 16), SIZE=16,
            PRECISION="ieee")  # fmt: skip
