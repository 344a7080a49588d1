"""Every operation of the table agrees with numpy, and with Triton's interpreter once that is mended."""

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

import triton

from harness.emulation import emulate
from harness.emulation.interpreter import TRITON_RELEASE, interpreted, mended
from tests.emulation.portable_case import Case, difference, launch
from tests.emulation.portable_cases import CASES

_ML = {
    torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float16: np.float16, torch.float32: np.float32,
}  # fmt: skip


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
        return tensor.float().numpy()
    return tensor.numpy()


def _tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if dtype in _ML:
        cast = np.ascontiguousarray(np.asarray(values).astype(_ML[dtype]))
        carrier = {1: np.uint8, 2: np.int16, 4: np.int32}[cast.itemsize]
        return torch.from_numpy(cast.view(carrier)).view(dtype)
    return torch.from_numpy(np.ascontiguousarray(np.asarray(values))).to(dtype)


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.twin], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_operation_agrees_with_numpy(case: Case) -> None:
    with emulate():
        actual = launch(case)
    expected = _tensor(case.twin(*(_array(item) for item in case.inputs())), case.out[1]).reshape(case.out[0])
    assert difference(actual, expected, case.ulps) is None


@pytest.mark.skipif(not triton.__version__.startswith(TRITON_RELEASE), reason=f"the mends are for Triton {TRITON_RELEASE}")
@pytest.mark.parametrize("case", [case for case in CASES.values() if not case.lanes], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_an_operation_agrees_with_the_mended_interpreter(case: Case) -> None:
    with emulate():
        actual = launch(case)
    with mended():
        expected = launch(case, wrap=interpreted)
    assert difference(actual, expected, case.ulps) is None


def test_a_difference_in_one_bit_is_seen() -> None:
    one = torch.tensor([1.0, torch.nan, -0.0])
    assert difference(one, one.clone(), 0) is None
    assert "1 elements differ; at (2,)" in str(difference(one, torch.tensor([1.0, torch.nan, 0.0]), 0))
    near = torch.tensor([1.0 + 2.0**-22, torch.nan, 0.0])
    assert difference(near, one, 2) is None and difference(near, one, 1) is not None
