"""The target gfx950 (MI350, MI355X), answered to Triton where there is no such device.

Rules kept here:

1. The answer stands inside a context only; the driver that stood before comes back.
2. The answering driver knows the target and nothing else. It launches nothing.

Source: AMD CDNA 4 (wavefront of 64 lanes, 160 KiB of LDS a work group); MI355X (256 compute units).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
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
    """Let Triton and torch answer gfx950 when they are asked for the current device, and restore both."""
    import torch
    from triton.runtime import driver

    properties = SimpleNamespace(name="MI355X", gcnArchName=ARCHITECTURE, multi_processor_count=COMPUTE_UNITS)
    answers = {"current_device": lambda: 0, "get_device_properties": lambda device=None: properties}
    before, functions = driver._active, {name: getattr(torch.cuda, name) for name in answers}
    driver.set_active(_AnsweredDriver())
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    try:
        yield
    finally:
        driver._active = before
        for name, function in functions.items():
            setattr(torch.cuda, name, function)
