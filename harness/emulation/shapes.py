"""Operations that move elements and do not change them.

1. A reshape keeps the order of elements; one that may reorder them is refused.
2. A change of layout changes nothing.

Source: ``triton.language.core`` of Triton 3.9 and its Gluon counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.emulation.arithmetic import operands
from harness.emulation.findings import fail
from harness.emulation.tensor import OuterSum, Tensor, broadcast, tensor


def expand_dims(input: Tensor, axis: Any) -> Any:
    """Add dimensions of size one."""
    for place in sorted(int(item) for item in (axis if isinstance(axis, Sequence) else (axis,))):
        rank = len(input.shape)
        at = place if place >= 0 else place + rank + 1
        input = input[tuple([slice(None)] * at + [None] + [slice(None)] * (rank - at))]
    return input


def reshape(input: Tensor, *shape: Any, can_reorder: bool = False) -> Any:
    """Change the shape; the elements keep their order."""
    if can_reorder:
        fail("unmodelled", "a reshape that may reorder elements")
    return input.reshape(*shape)


def permute(input: Tensor, *dims: Any) -> Any:
    """Change the order of the dimensions."""
    return input.permute(*dims)


def trans(input: Tensor, *dims: Any) -> Any:
    """Change the order of the dimensions; of a matrix, transpose it."""
    return input.trans(*dims)


def ravel(x: Tensor, can_reorder: bool = False) -> Any:
    """Make it one-dimensional."""
    return reshape(x, (x.numel,), can_reorder=can_reorder)


def broadcast_to(input: Any, *shape: Any) -> Any:
    """Spread over a shape."""
    target = tuple(int(item) for item in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape))
    source = tensor(input)
    return Tensor(source.kind, broadcast(source.value, target), source.span, source.layout)


def broadcast_pair(input: Tensor, other: Tensor) -> Any:
    """Spread the first over the shape of both."""
    return broadcast_to(input, np.broadcast_shapes(input.shape, other.shape))


def join(a: Any, b: Any) -> Tensor:
    """Put two tensors side by side in a new last dimension."""
    x, y = operands(a, b)
    pair = np.broadcast_arrays(np.asarray(x.value), np.asarray(y.value))
    return Tensor(x.kind, np.stack(pair, axis=-1))


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """Take the two halves of a last dimension of size two."""
    if not a.shape or a.shape[-1] != 2:
        fail("type-error", f"split needs a last dimension of 2, not {a!r}")
    halves = (a.value[..., 0], a.value[..., 1])
    one, two = (item if item.ndim else item[()] for item in halves)
    return Tensor(a.kind, one), Tensor(a.kind, two)


def gather(src: Tensor, index: Tensor, axis: Any) -> Tensor:
    """Pick elements along an axis."""
    low, high = int(index.value.min()), int(index.value.max())
    if low < 0 or high >= src.shape[int(axis)]:
        fail("out-of-bounds", f"gather takes element {low if low < 0 else high} of {src!r}", low if low < 0 else high)
    return Tensor(src.kind, np.take_along_axis(src.value, index.value, int(axis)), None, index.layout)


def convert_layout(value: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
    """Carry another layout; values do not change."""
    if isinstance(value, OuterSum):
        return OuterSum(value.kind, value.terms, value.bounds(), layout)
    return Tensor(value.kind, value.value, value.span, layout)
