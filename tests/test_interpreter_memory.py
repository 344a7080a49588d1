"""The interpreter's memory, integers and context: what a kernel may not do is reported with its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from harness.emulation.interpreter import interpreted, mended  # noqa: E402
from harness.emulation.interpreter_memory import IntegerFault, MemoryFault  # noqa: E402
from tests.interpreter_kernels import FOREIGN, combine, count_up, indirect, last_program, product, put, run, take, total_of  # noqa: E402

pytestmark = pytest.mark.skipif(FOREIGN is not None, reason=str(FOREIGN))


def test_a_signed_product_that_leaves_int32_is_reported() -> None:
    source, target = torch.zeros(4), torch.zeros(1)
    page = torch.tensor([70000], dtype=torch.int32)
    with pytest.raises(IntegerFault, match=r"70000 x 40000 leaves int32 .*interpreter_kernels\.py:\d+: .*wanted \* stride"):
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
                                          r"interpreter_kernels\.py:\d+: found = tl\.load"):  # fmt: skip
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
    from triton.language.semantic import TritonSemantic

    owners = [
        *(tl, tl.core, tl.math, tl.standard, tl.random, tl.tensor, tl.dtype, tl.core.block_type, TritonSemantic, source),
        *(source.InterpreterBuilder, source.ReduceOps, source.GridExecutor, source.InterpretedFunction),
        source.interpreter_builder,
    ]
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
    with pytest.raises(Exception, match=r"interpreter_kernels\.py:\d+: "):
        run(product, torch.zeros(16, 16), torch.zeros(16, 16, dtype=torch.float16), torch.zeros(16, 16), SIZE=16,
            PRECISION="ieee")  # fmt: skip
