"""Where values come from and what becomes of a program: ids, ranges, constants, checks, prints.

1. A function here has the signature of the one it stands for.
2. A promise that a kernel makes to the compiler is checked: a broken one is undefined behaviour.
3. Hints that change speed only, and barriers within a program that runs as one, do nothing.

Source: ``triton.language.core`` of Triton 3.9 and its Gluon counterpart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, INT32, Array, Kind
from harness.emulation.program import now
from harness.emulation.promotion import constant
from harness.emulation.tensor import Tensor, bit_cast, tensor


def program_id(axis: Any) -> Tensor:
    """This program's number along a grid axis."""
    return Tensor(INT32, now.ids[int(axis)])


def num_programs(axis: Any) -> Tensor:
    """How many programs the grid has along an axis."""
    return Tensor(INT32, now.grid[int(axis)])


def num_warps() -> int:
    """How many warps the launch asked for."""
    return now.warps


_RANGES: dict[tuple[int, int], Array] = {}


def arange(start: Any, end: Any, layout: object = None) -> Tensor:
    """Count from start to end, exclusive; the size must be a power of two."""
    first, last = int(start), int(end)
    size = last - first
    if size <= 0 or size & (size - 1):
        fail("type-error", f"arange({first}, {last}): the size must be a power of two", size)
    values = _RANGES.get((first, last))
    if values is None:
        values = _RANGES[first, last] = np.arange(first, last, dtype=np.int64)
        values.flags.writeable = False
    return Tensor(INT32, values, (first, last - 1), layout)


def full(shape: Any, value: Any, dtype: Kind, layout: object = None) -> Tensor:
    """Make a tensor of one value."""
    size = tuple(int(item) for item in shape)
    if isinstance(value, Tensor):
        if value.numel != 1:
            fail("type-error", f"full takes one value, not {value!r}")
        fill = value.cast(dtype).value
    else:
        fill = constant(value, dtype)
    if not size:
        return Tensor(dtype, fill if not isinstance(fill, np.ndarray) else fill.reshape(-1)[0], None, layout)
    return Tensor(dtype, np.full(size, fill, dtype.register), None, layout)


def zeros(shape: Any, dtype: Kind, layout: object = None) -> Tensor:
    """Make a tensor of zeros."""
    return (
        Tensor(dtype, np.zeros(tuple(int(item) for item in shape), dtype.register), None, layout)
        if shape
        else full((), 0, dtype)
    )


def full_like(input: Tensor, value: Any, shape: Any = None, dtype: Any = None, layout: object = None) -> Tensor:
    """Make a tensor of one value, like another."""
    return full(input.shape if shape is None else shape, value, dtype or input.kind, layout or input.layout)


def zeros_like(input: Tensor, shape: Any = None, dtype: Any = None, layout: object = None) -> Tensor:
    """Make a tensor of zeros, like another."""
    return full_like(input, 0, shape, dtype, layout)


def to_tensor(value: Any) -> Tensor:
    """Make a constant a tensor."""
    return tensor(value)


def same(input: Any, *_: Any, **__: Any) -> Any:
    """Return the value: a hint about it changes nothing."""
    return input


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing: an instruction to the compiler or a barrier within a program that runs as one."""


def static_assert(cond: Any, msg: Any = "") -> None:
    """Require a condition when the kernel is compiled."""
    if isinstance(cond, Tensor) or not cond:
        fail("assertion", f"static_assert does not hold{': ' + str(msg) if msg else ''}")


def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    """Require a condition of every lane that is not masked."""
    flags = tensor(cond).cast(BOOL)
    if mask is not None:
        flags = flags | ~tensor(mask)
    if not np.all(flags.value):
        fail("assertion", f"device_assert does not hold{': ' + str(msg) if msg else ''}")


def assume(cond: Any) -> None:
    """Require what the kernel promises: the compiler builds on it, so a broken promise is undefined behaviour."""
    if not np.all(tensor(cond).value):
        fail("assumption", "the kernel promises the compiler a condition that does not hold")


def device_print(*values: Any, **_: Any) -> None:
    """Keep what a kernel prints."""
    now.printed.append(" ".join(repr(item.value) if isinstance(item, Tensor) else str(item) for item in values))


def bit_cast_to(input: Any, dtype: Kind) -> Tensor:
    """Read the bits as another type."""
    return bit_cast(tensor(input), dtype)
