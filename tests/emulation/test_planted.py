"""Each planted fault is named, with its kind and its line; the sound kernel is not."""

import mmap
import resource
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from harness.emulation import EmulationFault, emulate, run_all_extremes
from tests.emulation import planted

REQUESTS, COUNT, ROWS = 2, 40, 64
#: Rows of a pool whose last rows lie past 2**31 elements: 8 GiB of addresses.
FAR = 2**31 // planted.WIDTH + 4096


def _launch(plant: str, rows: int = ROWS, high: int = 0):
    generator = torch.Generator().manual_seed(1)
    if high:
        cache = torch.frombuffer(mmap.mmap(-1, high * planted.WIDTH * 4), dtype=torch.float32).view(high, planted.WIDTH)
    else:
        cache = torch.randn(rows, planted.WIDTH, generator=generator)
    table = torch.stack([torch.randperm(rows, generator=generator)[:COUNT] for _ in range(REQUESTS)]).int()
    if high:
        table += 2**29 + 1000 if plant == "far" else high - rows
        cache[high - rows :] = torch.randn(rows, planted.WIDTH, generator=generator)
    out = torch.full((REQUESTS, planted.WIDTH), float("nan"))
    if plant == "neighbour":
        out.zero_()

    def run():
        planted.sum_rows[(REQUESTS,)](
            cache, table, out, table.stride(0), cache.stride(0), out.stride(0), COUNT,
            PLANT=plant, TILE=planted.TILE, WIDTH=planted.WIDTH, num_warps=4,
        )  # fmt: skip
        return out

    expected = None if plant == "far" else torch.stack([cache[ids.long()].double().sum(0) for ids in table])
    return run, out, expected


def _found(plant: str, **how: int):
    run, _, _ = _launch(plant, **how)
    with pytest.raises(EmulationFault) as caught:
        run_all_extremes(run)
    return caught.value.finding


def test_the_sound_kernel_is_right_at_every_extreme():
    run, out, expected = _launch("")
    run_all_extremes(run)
    assert ((out.double() - expected).abs() <= COUNT * expected.abs().max() * 2.0**-24).all()


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        ("no wait", "race"),
        ("high wait", "race"),
        ("reuse", "race"),
        ("table", "out-of-bounds"),
        ("past output", "out-of-bounds"),
        ("neighbour", "cross-program"),
        ("unknown", "unknown-operation"),
        ("promise", "assumption"),
        ("zero", "division-by-zero"),
    ],
)
def test_a_planted_fault_is_named_with_its_line(plant: str, kind: str):
    found = _found(plant)
    assert (found.kind, found.line) == (kind, planted.line_of(plant)), found
    assert Path(found.file) == Path(planted.__file__)
    assert found.kernel == "sum_rows"


def test_a_row_offset_past_2_gib_overflows_int32_in_its_line():
    found = _found("overflow", high=FAR)
    assert (found.kind, found.line) == ("int-overflow", planted.line_of("overflow")), found
    assert int(found.value) >= 2**31
    assert found.program == (0, 0, 0)


def test_a_pool_of_8_gib_costs_only_its_live_rows():
    run, out, expected = _launch("", high=FAR)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_all_extremes(run)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"{grown >> 10} MiB"
    assert ((out.double() - expected).abs() <= COUNT * expected.abs().max() * 2.0**-24).all()


def test_a_buffer_operation_past_its_31_bits_is_named():
    found = _found("far", high=FAR)
    assert (found.kind, found.line) == ("buffer-range", planted.line_of("far")), found


def test_the_unknown_operation_is_named():
    assert "gl.erf" in _found("unknown").message


def test_a_race_names_the_copy_that_is_in_flight():
    found = _found("high wait")
    assert "the copy of line" in found.message


def test_a_dependency_names_the_other_program():
    assert "program number" in _found("neighbour").message


def test_nothing_is_left_of_a_session():
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    inside = []

    def stumble():
        with emulate():
            inside.append(JITFunction.run)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()
    assert inside[0] is not before and JITFunction.run is before
    assert not torch.isnan(torch.empty(1 << 10)).all()


def test_sessions_do_not_nest():
    with emulate(), pytest.raises(RuntimeError, match="do not nest"), emulate():
        pass


def test_new_memory_is_poisoned_inside_a_session_only():
    with emulate():
        assert torch.isnan(torch.empty(8)).all()
        assert torch.isnan(torch.zeros(8, dtype=torch.bfloat16).new_empty(4)).all()
        assert (torch.empty(8, dtype=torch.int32) == -1).all()


def test_a_triton_kernel_runs_in_the_same_pass():
    out = torch.full((100,), float("nan"))
    with emulate() as session:
        planted.scale[(2,)](torch.ones(100), out, 2.5, 100, BLOCK=64)
    assert (out == 2.5).all()
    assert session.launches == [("scale", 2)]


def test_matrix_products_have_one_thread_inside_a_session_only():
    from harness.emulation.threads import _blas

    found = _blas()
    if found is None:
        pytest.skip("numpy's BLAS here is not OpenBLAS")
    before = found[0]()
    with emulate():
        assert found[0]() == 1
    assert found[0]() == before
