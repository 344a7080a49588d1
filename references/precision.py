"""Full-precision matrix products, whatever the process has allowed.

1. Inside ``full_precision`` fp32 products use neither TF32 nor bf16 pieces, no reduction runs below fp32 and autocast is off.
2. Inside ``narrow_operands`` a CPU may multiply fp32 tensors whose values are bf16 ones as such. That is twice as fast and
   loses nothing: such products are exact in fp32, and the processor's dot products add them up in fp32, each sum rounded to
   nearest. Subnormal operands count as zero. A GPU's matrix units cut off instead of rounding, so they are not used.
3. What was set before is set again afterwards, also when an error leaves the block.

Source: torch's notes on numerical accuracy. torch 2.9 replaced ``allow_tf32`` by ``fp32_precision`` and refuses to read the
one after the other was written, so the newer name is used wherever it exists. VDPBF16PS and TDPBF16PS in Intel's manual for
what a processor does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

#: What full precision is called under each name of a setting.
_FULL: tuple[tuple[str, Any], ...] = (
    ("allow_bf16_reduced_precision_reduction", False),
    ("allow_fp16_reduced_precision_reduction", False),
    ("allow_fp16_accumulation", False),
)


def settings() -> list[tuple[Any, str, Any]]:
    """List every setting that can lower the precision of a product: its owner, its name and its full-precision value."""
    matmul, mkldnn = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    found: list[tuple[Any, str, Any]] = [(matmul, name, value) for name, value in _FULL if hasattr(matmul, name)]
    if hasattr(matmul, "fp32_precision"):
        owners = [matmul] + ([mkldnn] if hasattr(mkldnn, "fp32_precision") else [])
        return found + [(owner, "fp32_precision", "ieee") for owner in owners]
    return [*found, (matmul, "allow_tf32", False)]


@contextmanager
def full_precision() -> Iterator[None]:
    """Run a block with every product and reduction in the precision of its operands."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings()]
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            for owner, name, value in settings():
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


@contextmanager
def narrow_operands() -> Iterator[None]:
    """Run a block whose fp32 products have operands that bf16 holds, none of them subnormal where that matters."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if not (hasattr(matmul, "fp32_precision") and multiplies_bf16()):
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def multiplies_bf16() -> bool:
    """Tell whether the processor has bf16 dot products of its own; a library's imitation would be slower."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))
