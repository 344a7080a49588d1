"""What the names of Gluon mean that exist on gfx950 (CDNA4) only.

1. Buffer operations: a masked lane reads ``other``, or zero; its offset is not looked at. A masked lane of a global copy
   leaves LDS as it was.
2. ``mfma`` takes bf16, fp16 and fp8 operands exactly and accumulates in fp32. The order of additions is not the matrix
   unit's; budgets allow for that, bit comparisons do not go through it.
3. ``load_shared_relaxed`` loads like ``load``: that no barrier is emitted does not show in a program that runs as one.

Source: ``triton.experimental.gluon.language.amd.cdna4`` of Triton 3.9; OCP Microscaling Formats 1.0 for mfma_scaled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.emulation.access import mask_of, other_of
from harness.emulation.findings import fail
from harness.emulation.formats import E4M3FN, E5M2, FP32, INT32, UINT8, UINT32, Array, decode
from harness.emulation.lanes import Place, locate, read, write
from harness.emulation.memory import Pointer
from harness.emulation.program import now
from harness.emulation.reductions import matmul
from harness.emulation.shared import SharedMemory
from harness.emulation.tensor import Tensor, tensor

#: The values of the sixteen codes of e2m1.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _check(ptr: Any, offsets: Any, mask: Any, other: Any, name: str) -> Pointer:
    if not isinstance(ptr, Pointer) or ptr.shape:
        fail("type-error", f"{name} needs one base pointer, not {ptr!r}")
    if not isinstance(offsets, Tensor) or offsets.kind not in (INT32, UINT32):
        fail("type-error", f"{name} needs int32 or uint32 offsets, not {offsets!r}")
    if other is not None and mask is None:
        fail("type-error", f"{name} was given other without a mask")
    return ptr


def buffer_load(ptr: Any, offsets: Any, mask: Any = None, other: Any = None, cache: Any = None) -> Tensor:
    """Read global memory through a base and 32-bit offsets."""
    base = _check(ptr, offsets, mask, other, "buffer_load")
    kind = base.memory.kind
    place = locate(base.memory, base.offset + offsets, mask_of(mask), "reads", int(base.offset.value))
    return Tensor(kind, read(place, other_of(other, kind)), None, offsets.layout)


def buffer_store(stored_value: Any, ptr: Any, offsets: Any, mask: Any = None, cache: Any = None) -> None:
    """Write global memory through a base and 32-bit offsets."""
    base = _check(ptr, offsets, mask, None, "buffer_store")
    value = tensor(stored_value)
    if value.kind is not base.memory.kind:
        fail("type-error", f"buffer_store of {value!r} through {base!r}: it does not convert")
    write(locate(base.memory, base.offset + offsets, mask_of(mask), "writes", int(base.offset.value)), value.value)


def buffer_load_to_shared(
    dest: Any, ptr: Any, offsets: Any, mask: Any = None, other: Any = None, cache_modifier: Any = ""
) -> None:
    """Copy global memory to LDS through a base and 32-bit offsets, asynchronously."""
    base = _check(ptr, offsets, mask, other, "buffer_load_to_shared")
    place = locate(base.memory, base.offset + offsets, mask_of(mask), "reads", int(base.offset.value))
    _issue(dest, base, place, 0, other, "buffer_load_to_shared")


def global_load_to_shared(dest: Any, ptr: Any, mask: Any = None, other: Any = None, cache_modifier: Any = "") -> None:
    """Copy global memory to LDS through 64-bit pointers, asynchronously."""
    if not isinstance(ptr, Pointer) or not ptr.shape:
        fail("type-error", f"global_load_to_shared needs a tensor of pointers, not {ptr!r}")
    place = locate(ptr.memory, ptr.offset, mask_of(mask), "reads")
    _issue(dest, ptr, place, None, other, "global_load_to_shared")


def _issue(dest: Any, source: Pointer, place: Place, fill: float | None, other: Any, name: str) -> None:
    if not isinstance(dest, SharedMemory) or dest.shape != place.shape or dest.kind is not source.memory.kind:
        fail("type-error", f"{name} of {source.memory.kind}{list(place.shape)} into {dest!r}: shape and type must be the same")
    now.copies.issue(dest.array, place, fill, None if other is None else other_of(other, dest.kind))


def commit_group() -> None:
    """Close the group of the copies issued since the last."""
    now.copies.commit()


def wait_group(num_outstanding: Any = 0) -> None:
    """Wait until at most so many groups are in flight."""
    if isinstance(num_outstanding, Tensor):
        fail("type-error", "wait_group needs a constant")
    now.copies.wait(int(num_outstanding))


def load_shared_relaxed(smem: Any, layout: object = None) -> Tensor:
    """Load from LDS; the kernel promises that it has waited."""
    if not isinstance(smem, SharedMemory):
        fail("type-error", f"load_shared_relaxed needs shared memory, not {smem!r}")
    return smem.load(layout)


def mfma(a: Any, b: Any, acc: Any, cd_regclass: Any = None) -> Tensor:
    """Multiply matrices and add."""
    if acc is None:
        fail("type-error", "mfma needs an accumulator")
    return matmul(a, b, acc, "mfma", FP32)


def mfma_scaled(
    a: Any, a_scale: Any, a_format: str, b: Any, b_scale: Any, b_format: str, acc: Any, cd_regclass: Any = None
) -> Tensor:
    """Multiply matrices of microscaled values, 32 of which share an e8m0 scale along the inner dimension, and add."""
    left = _scaled(a, a_scale, a_format, -1)
    right = _scaled(b, b_scale, b_format, -2)
    if left.shape[-1] != right.shape[-2]:
        fail("type-error", f"mfma_scaled of {a!r} and {b!r}: inner sizes must agree")
    return Tensor(FP32, np.matmul(left, right) + acc.value, None, acc.layout)


def _scaled(operand: Tensor, scale: Any, name: str, axis: int) -> Array:
    if name == "e2m1":
        codes = operand.value.astype(np.int64) & 0xFF
        pairs = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], axis=-1 if axis == -1 else -2)
        shape = list(operand.shape)
        shape[axis] *= 2
        values = pairs.reshape(shape)
    elif name in ("e4m3", "e5m2"):
        kind = E4M3FN if name == "e4m3" else E5M2
        values = (
            operand.value if operand.kind is kind else decode((operand.value.astype(np.int64) & 0xFF).astype(np.uint8), kind)
        )
    else:
        fail("type-error", f"mfma_scaled knows e2m1, e4m3 and e5m2, not {name!r}")
    if scale is None:
        return np.asarray(values, np.float32)
    if not isinstance(scale, Tensor) or scale.kind is not UINT8 or not scale.shape:
        fail("unmodelled", f"mfma_scaled with the scale {scale!r}: only uint8 tensors (e8m0) are modelled")
    codes = scale.value.astype(np.int64)
    factors = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))
    if axis == -2:
        factors = np.swapaxes(factors, -1, -2)
    if factors.shape[axis] * 32 != values.shape[axis]:
        fail("unmodelled", f"mfma_scaled with scales {list(scale.shape)} for {operand!r}: one for 32 along the inner dimension")
    return np.asarray(values * np.repeat(factors, 32, axis=axis), np.float32)
