"""Workspaces begin as poison inside the context, and are torch's own outside it."""

from __future__ import annotations

import pytest
import torch

from harness.backends.workspaces import poisoned_workspaces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_uninitialised_floats_begin_as_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, dtype=dtype)
    with poisoned_workspaces():
        made = [torch.empty(2, 3, dtype=dtype), torch.empty_like(like), like.new_empty(4), torch.empty(0, dtype=dtype)]
    assert all(bool(one.float().isnan().all()) for one in made)


def test_uninitialised_integers_begin_as_minus_one() -> None:
    with poisoned_workspaces():
        assert torch.empty(5, dtype=torch.int32).eq(-1).all()


def test_tensors_with_a_value_keep_it_and_the_context_ends() -> None:
    from torch.overrides import _get_current_function_mode_stack

    with poisoned_workspaces():
        assert torch.zeros(3).eq(0).all() and torch.ones(3).eq(1).all()
    assert not _get_current_function_mode_stack()
