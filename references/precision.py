"""Full-precision matrix products, whatever the process has allowed.

1. Inside ``full_precision`` fp32 products use neither TF32 nor bf16 pieces, no reduction runs below fp32 and autocast is off.
2. Inside ``onednn_products`` a CPU's fp32 products go to oneDNN, which uses the whole vector width where MKL uses half of it
   (AMD's). torch hands them over only with leave to narrow operands to bf16. So the block is for operands that are bf16 values
   anyway, whose products are exact and whose sums are fp32 ones; and for any where it is seen that nothing is narrowed.
3. What was set before is set again afterwards, also when an error leaves the block.

Source: torch's notes on numerical accuracy. torch 2.9 replaced ``allow_tf32`` by ``fp32_precision`` and refuses to read the
one after the other was written, so the newer name is used wherever it exists. oneDNN's guide on floating-point math modes: bf16
stands in for fp32 on processors with AMX, whose dot products (TDPBF16PS) round each fp32 sum to nearest and take subnormal
operands for zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
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


def prefers_onednn(*, narrow: bool) -> bool:
    """Tell whether oneDNN should make a CPU's fp32 products, their operands being bf16 values (``narrow``) or any."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not (known.get("avx512_f") and hasattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision")):
        return False
    return narrow if known.get("amx_tile") else _narrows_nothing()


@contextmanager
def onednn_products() -> Iterator[None]:
    """Run a block whose fp32 products oneDNN may make, and narrow if it likes to."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@lru_cache(maxsize=1)
def _narrows_nothing() -> bool:
    """See whether oneDNN keeps a bit that bf16 has not, on either side."""
    fine, ones = torch.full((2, 128, 512), 1 + 2.0**-12), torch.ones((2, 512, 512))
    with onednn_products():
        products = torch.bmm(fine, ones), torch.bmm(ones, fine.transpose(1, 2))
    return all(bool((product == 512 * (1 + 2.0**-12)).all()) for product in products)
