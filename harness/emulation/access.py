"""Operations on memory that exist on every target: loads, stores, atomics, and allocation of LDS.

1. Cache modifiers and eviction hints change speed only. A keyword that would change values stops the kernel.
2. A masked lane loads ``other``, or zero where none is given: Triton leaves it undefined, and zero is what its targets do.
3. Atomics are read and written at once; two lanes of one program that meet in one element are refused.

Source: ``triton.language.core`` and ``semantic`` of Triton 3.9 and their Gluon counterparts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.emulation.elements import maximum, minimum
from harness.emulation.findings import fail
from harness.emulation.formats import Kind
from harness.emulation.lanes import locate, read, write
from harness.emulation.memory import Pointer
from harness.emulation.program import now
from harness.emulation.shared import SharedMemory
from harness.emulation.tensor import Tensor, broadcast, tensor


def _pointer(value: Any, name: str) -> Pointer:
    if not isinstance(value, Pointer):
        fail("type-error", f"{name} needs a pointer, not {value!r}")
    return value


def mask_of(mask: Any) -> Tensor | None:
    """Make a mask a tensor; None stays None."""
    return None if mask is None else tensor(mask)


def other_of(other: Any, kind: Kind) -> Any:
    """Find the register value of masked lanes: what was given, else zero."""
    if other is None or (not isinstance(other, Tensor) and other == 0):
        return 0
    return tensor(other).cast(kind).value


def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Tensor:
    """Read global memory; masked lanes give ``other``, or zero where none is given."""
    source = _pointer(pointer, "load")
    _check_hints(hints, "load")
    kind = source.memory.kind
    place = locate(source.memory, source.offset, mask_of(mask), "reads")
    return Tensor(kind, read(place, other_of(other, kind)), None, source.layout)


def store(pointer: Any, value: Any, mask: Any = None, **hints: Any) -> None:
    """Write global memory where it is not masked."""
    target = _pointer(pointer, "store")
    _check_hints(hints, "store")
    place = locate(target.memory, target.offset, mask_of(mask), "writes")
    write(place, tensor(value).cast(target.memory.kind).value)


_HINTS = {"cache_modifier", "eviction_policy", "volatile", "cache_policy", "boundary_check", "padding_option"}


def _check_hints(hints: dict[str, Any], name: str) -> None:
    for hint, value in hints.items():
        if hint not in _HINTS or (hint in ("boundary_check", "padding_option") and value not in ((), "", None)):
            fail("unmodelled", f"{name} with {hint}={value!r}")


def _atomic(name: str, combine: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
    def apply(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
        target = _pointer(pointer, name)
        kind = target.memory.kind
        place = locate(target.memory, target.offset, mask_of(mask), "updates")
        if place.shape and np.unique(np.asarray(place.index)).size != np.asarray(place.index).size:
            fail("unmodelled", f"{name} of which two lanes meet in one element")
        old = Tensor(kind, read(place, 0))
        update = tensor(val).cast(kind)
        new = combine(old, update)
        write(place, broadcast(new.cast(kind).value, place.shape) if place.shape else new.cast(kind).value)
        return old

    apply.__name__ = name
    return apply


atomic_add = _atomic("atomic_add", operator.add)
atomic_max = _atomic("atomic_max", maximum)
atomic_min = _atomic("atomic_min", minimum)
atomic_xchg = _atomic("atomic_xchg", lambda old, new: new)


def allocate_shared_memory(element_ty: Kind, shape: Any, layout: object, value: Any = None) -> SharedMemory:
    """Allocate LDS for the program; it begins poisoned."""
    size = tuple(int(item) for item in shape)
    memory = SharedMemory(
        now.copies, element_ty, now.lds.allocate(element_ty, size, fastest_axis(layout, len(size))), layout, size
    )
    if value is not None:
        memory.store(value)
    return memory


def fastest_axis(layout: object, rank: int) -> int:
    """Find the axis along which a shared layout is contiguous; only speed depends on it."""
    bases = getattr(layout, "offset_bases", None)
    if bases:
        inner = max(range(len(bases[0])), key=lambda axis: bases[0][axis])
        return inner + rank - len(bases[0])
    order = getattr(layout, "order", None)
    return int(order[0]) + rank - len(order) if order else rank - 1
