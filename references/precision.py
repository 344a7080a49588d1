"""Full-precision matrix products, whatever the process has allowed.

1. Inside ``full_precision`` fp32 products use neither TF32 nor bf16 pieces, no reduction runs below fp32 and autocast is off.
2. What was set before is set again afterwards, also when an error leaves the block.

Source: torch's notes on numerical accuracy. torch 2.9 replaced ``allow_tf32`` by ``fp32_precision`` and refuses to read the
one after the other was written, so the newer name is used wherever it exists.
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
