"""Guarded memory: what a run may not touch."""

from __future__ import annotations

import pytest
import torch

from harness.memory import LAZY_BYTES, Arena, NotEnoughMemory


def sealed_arena() -> tuple[Arena, torch.Tensor, torch.Tensor]:
    arena = Arena("cpu")
    given = arena.allocate("lengths", 5, torch.int32).copy_(torch.arange(5))
    out = arena.allocate("out", 7, torch.bfloat16, output=True)
    arena.seal()
    return arena, given, out


def test_a_run_that_writes_only_its_output_violates_nothing() -> None:
    arena, _, out = sealed_arena()
    assert torch.isnan(out).all()
    out.fill_(1)
    assert arena.violations() == []


@pytest.mark.parametrize(("offset", "where"), [(-1, "1 to 2 bytes before its start"), (7, "0 to 1 bytes past its end")])
def test_a_write_beside_the_output_is_found(offset: int, where: str) -> None:
    arena, _, out = sealed_arena()
    out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(1)
    (violation,) = arena.violations()
    assert (violation.fault, violation.buffer) == ("guard-touched", "out")
    assert where in violation.message


def test_a_changed_input_is_found_with_its_first_byte() -> None:
    arena, given, _ = sealed_arena()
    given[3] = 77
    (violation,) = arena.violations()
    assert (violation.fault, violation.buffer) == ("input-changed", "lengths")
    assert "the first at byte 12" in violation.message


def test_a_nan_that_turns_into_another_nan_is_a_change() -> None:
    arena = Arena("cpu")
    given = arena.allocate("query", 2, torch.float32)
    given.view(torch.int32).fill_(-1)
    arena.seal()
    given.view(torch.int32)[1] = 0x7FC00000
    assert [violation.fault for violation in arena.violations()] == ["input-changed"]


def test_a_large_pool_takes_no_memory_until_touched() -> None:
    arena = Arena("cpu")
    pool = arena.allocate("cache", 1 << 38, torch.uint8)  # more than the machine has
    arena.watch_rows("cache", 16, torch.tensor([3, 1 << 28]))
    arena.seal()
    pool[(1 << 32) + 3] = 1
    assert pool.numel() > LAZY_BYTES
    (violation,) = arena.violations()
    assert violation.fault == "input-changed" and f"the first at byte {(1 << 32) + 3}" in violation.message


def test_inputs_taken_over_in_place_are_the_new_ones_and_outputs_are_unwritten_again() -> None:
    arena, given, out = sealed_arena()
    other = Arena("cpu")
    other.allocate("lengths", 3, torch.int32).copy_(torch.tensor([9, 8, 7]))
    out.fill_(1)
    arena.take(other)
    assert given.tolist() == [9, 8, 7, 3, 4] and bool(torch.isnan(out).all())
    assert arena.violations() == []
    with pytest.raises(ValueError, match="only 12 have room"):
        other.take(arena)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(NotEnoughMemory, match="GiB"):
        Arena("cpu").allocate("out", 1 << 50, torch.uint8, output=True)


def test_more_addresses_than_there_are_is_refused() -> None:
    with pytest.raises(NotEnoughMemory, match="GiB of addresses"):
        Arena("cpu").allocate("cache", 1 << 50, torch.uint8)
