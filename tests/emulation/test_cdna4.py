"""Each CDNA4 operation agrees with numpy and ml_dtypes, and copies land when they may."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.7")

from harness.emulation import EmulationFault, emulate
from tests.emulation import cdna4_kernels as kernels

LIVE = 11
EXTREMES = pytest.mark.parametrize("copies", ["early", "late"])


def _moved(how: str, copies: str) -> tuple[np.ndarray, np.ndarray]:
    x = torch.arange(1024, dtype=torch.float32)
    out = torch.full((16, 64), -2.0)
    with emulate(copies=copies):
        kernels.moves[(1,)](x, out, LIVE, HOW=how)
    return x.view(16, 64).numpy(), out.numpy()


def _where_live(x: np.ndarray, other: float) -> np.ndarray:
    return np.where(np.arange(16)[:, None] < LIVE, x, np.float32(other))


@EXTREMES
@pytest.mark.parametrize(
    ("how", "other"),
    [
        ("buffer", 0.0),
        ("buffer other", 5.0),
        ("store", -2.0),
        ("copy", 0.0),
        ("copy other", 3.0),
        ("global", np.nan),
        ("global other", 4.0),
        ("stale", 9.0),
    ],
)
def test_a_masked_lane_becomes_what_gfx950_makes_of_it(how: str, other: float, copies: str) -> None:
    x, out = _moved(how, copies)
    np.testing.assert_array_equal(out, _where_live(x, other))


@EXTREMES
def test_lanes_that_form_no_rows_are_read_one_by_one(copies: str) -> None:
    x, out = _moved("elements", copies)
    at = np.arange(1024).reshape(16, 64)
    np.testing.assert_array_equal(out, np.where(at % 3 == 0, x.ravel()[at * 7 % 1024], -1.0))


@EXTREMES
def test_slices_of_shared_memory_are_where_they_are(copies: str) -> None:
    x, out = _moved("slices", copies)
    np.testing.assert_array_equal(out, np.concatenate([x[8:], x[:8]]))
    np.testing.assert_array_equal(_moved("unmasked", copies)[1], x)


def test_shared_memory_begins_as_nan() -> None:
    assert np.isnan(_moved("other half", "early")[1]).all()


@pytest.mark.parametrize(
    ("commit", "wait", "landed"),
    [(3, 0, 3), (3, 1, 2), (3, 2, 1), (3, 3, 0), (2, 0, 3), (2, 1, 1), (1, 1, 0), (0, 0, 3)],
)
def test_a_late_copy_lands_in_the_wait_that_retires_its_group(commit: int, wait: int, landed: int) -> None:
    x = torch.arange(1, 65, dtype=torch.float32)
    for copies, count in (("early", 3), ("late", landed)):
        out = torch.full((3, 64), -1.0)
        with emulate(copies=copies):
            kernels.groups[(1,)](x, out, WAIT=wait, COMMIT=commit)
        # What was never committed is in no group that a wait for others retires.
        expected = torch.stack([x if index < count else torch.zeros(64) for index in range(3)])
        assert torch.equal(out, expected), copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_mfma_multiplies_exact_operands(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    # Small whole numbers: every format holds them, and fp32 sums of their products are exact.
    a, b, c = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((16, 64), (64, 32), (16, 32)))
    out = torch.empty(16, 32)
    with emulate():
        kernels.multiply[(1,)](a.to(dtype), b.to(dtype), c, out, M=16, N=32, K=64)
    assert torch.equal(out, a @ b + c)


_FORMATS = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("left", _FORMATS)
@pytest.mark.parametrize("right", _FORMATS)
def test_scaled_mfma_agrees_with_ml_dtypes(left: str, right: str) -> None:
    rows, columns, inner = 16, 32, 128
    random = np.random.Generator(np.random.Philox(5))

    def operand(name: str, shape: tuple[int, int], axis: int) -> tuple[np.ndarray, np.ndarray]:
        values = random.integers(-3, 4, shape).astype(np.float32).astype(_FORMATS[name])
        codes = values.view(np.uint8)
        if name == "e2m1":
            low, high = (codes[::2], codes[1::2]) if axis == 0 else (codes[:, ::2], codes[:, 1::2])
            codes = (low & 15) | (high << 4)
        return values.astype(np.float64), codes

    a, a_codes = operand(left, (rows, inner), 1)
    b, b_codes = operand(right, (inner, columns), 0)
    a_scale, b_scale = (random.integers(126, 129, (size, inner // 32)).astype(np.uint8) for size in (rows, columns))
    wide = [np.repeat(codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1) for codes in (a_scale, b_scale)]
    expected = (a * wide[0]) @ (b * wide[1].T)
    out = torch.empty(rows, columns)
    with emulate():
        kernels.multiply_scaled[(1,)](
            *(torch.from_numpy(item.copy()) for item in (a_codes, a_scale, b_codes, b_scale)), out,
            AF=left, BF=right, M=rows, N=columns, KA=a_codes.shape[1], KB=b_codes.shape[0], K=inner,
        )  # fmt: skip
    np.testing.assert_array_equal(out.numpy(), expected.astype(np.float32))


def test_offsets_of_a_buffer_operation_must_be_32_bits_wide() -> None:
    from harness.emulation.cdna4 import buffer_load
    from harness.emulation.formats import INT64
    from harness.emulation.memory import Allocation, Pointer
    from harness.emulation.tensor import Tensor

    base = Pointer(Allocation("X", torch.zeros(4)), Tensor(INT64, 0))
    with pytest.raises(EmulationFault, match="int32 or uint32 offsets"):
        buffer_load(base, Tensor(INT64, np.zeros(4, np.int64)))


def test_a_buffer_operation_counts_from_its_base() -> None:
    from harness.emulation.cdna4 import buffer_load
    from harness.emulation.formats import INT32, INT64
    from harness.emulation.memory import Allocation, Pointer
    from harness.emulation.tensor import Tensor

    memory = Allocation("X", torch.arange(64, dtype=torch.float32))
    base = Pointer(memory, Tensor(INT64, 32))
    assert list(buffer_load(base, Tensor(INT32, np.arange(4))).value) == [32, 33, 34, 35]
    with pytest.raises(EmulationFault, match="byte -4 from the base"):
        # Hardware takes the offset as unsigned: it does not reach what lies before the base.
        buffer_load(base, Tensor(INT32, np.arange(4) - 1))
    with pytest.raises(EmulationFault, match="1 past its last"):
        buffer_load(base, Tensor(INT32, np.arange(4) + 29))
