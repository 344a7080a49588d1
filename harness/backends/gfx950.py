"""The target gfx950 (MI350, MI355X), answered to Triton where there is no such device.

Rules kept here:

1. The answer stands inside a context only; the driver that stood before comes back.
2. The answering driver knows the target and nothing else. It launches nothing.

Source: AMD CDNA 4 (wavefront of 64 lanes, 160 KiB of LDS a work group); MI355X (256 compute units).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: The name that Triton and LLVM give it.
ARCHITECTURE = "gfx950"
#: Compute units of the chip; kernels size their launches by them.
COMPUTE_UNITS = 256
#: Lanes of a wavefront.
LANES = 64
#: LDS that a work group may use, bytes.
LDS_BYTES = 160 * 1024


class _AnsweredDriver:
    """A Triton driver that knows the target and nothing else."""

    def get_current_target(self) -> Any:
        """Answer gfx950."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", ARCHITECTURE, LANES)

    def get_current_device(self) -> int:
        """Answer the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Answer the default stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Answer the device whose tensors stand in for the real one's."""
        import torch

        return torch.device("cpu")


@contextmanager
def gfx950_answered() -> Iterator[None]:
    """Let Triton answer gfx950 when it is asked for the current target, and restore its driver."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_AnsweredDriver())
    try:
        yield
    finally:
        driver._active = before
