"""One portable launch: what it is given, what numpy says of it, and how two of its outputs may differ.

1. A case without ``ulps`` must agree bit for bit wherever it runs; the others within so many units in the last place.
2. A GPU may make one operation of a product and a sum (``fused``); the emulator rounds after each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

COUNT = 256
#: Units in the last place of fp32 in one of a format's own.
_UNITS = {torch.float32: 1, torch.float16: 1 << 13, torch.bfloat16: 1 << 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch."""

    #: Its name.
    name: str
    #: The kernel.
    kernel: object
    #: Makes the inputs.
    inputs: Callable[[], list[torch.Tensor]]
    #: Shape and type of the output.
    out: tuple[tuple[int, ...], torch.dtype]
    #: Constants of the launch.
    constants: dict[str, object]
    #: Arguments after the output.
    rest: tuple[int, ...] = ()
    #: What numpy says: inputs as arrays in, output values out. None where only other machines are a twin.
    twin: Callable[..., np.ndarray] | None = None
    #: Allowed difference, units in the last place of the output; 0 for bit equality.
    ulps: int = 0
    #: The same natively, where a target may make one operation of a product and a sum.
    fused: int = 0
    #: The grid.
    grid: tuple[int, ...] = (1,)
    #: Whether it needs lanes of the target as a constant.
    lanes: bool = False


def random(dtype: torch.dtype, count: int = COUNT, low: float = -100, high: float = 100, seed: int = 0) -> torch.Tensor:
    generator = np.random.Generator(np.random.Philox(seed))
    values = generator.uniform(low, high, count)
    return torch.from_numpy(values).to(dtype)


def hard(seed: int = 0) -> torch.Tensor:
    """Make fp32 values with zeros, infinities, NaN, ties of bf16 and subnormals among them."""
    bits = np.random.Generator(np.random.Philox(seed)).integers(0, 2**32, COUNT, dtype=np.uint64).astype(np.uint32)
    bits[:40] = (bits[:40] & 0xFFFF0000) | 0x8000
    values = bits.view(np.float32)
    values[40:48] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.0]
    return torch.from_numpy(values.copy())


def launch(
    case: Case, device: str = "cpu", lanes: int = 64, wrap: Callable[[object], object] = lambda kernel: kernel
) -> torch.Tensor:
    """Run a case wherever launches go."""
    inputs = [tensor.to(device) for tensor in case.inputs()]
    shape, dtype = case.out
    out = torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
    constants = {**case.constants, **({"LANES": lanes} if case.lanes else {})}
    wrap(case.kernel)[case.grid](*inputs, out, *case.rest, **constants)
    return out.cpu()


def difference(actual: torch.Tensor, expected: torch.Tensor, ulps: int) -> str | None:
    """Say how two outputs differ, or None; a NaN equals a NaN whatever its payload."""
    if actual.is_floating_point():
        if ulps:
            one, two = actual.double(), expected.double()
            unit = torch.from_numpy(np.spacing(np.abs(expected.float().numpy()))).double() * _UNITS[expected.dtype]
            wrong = (one - two).abs() > ulps * unit
            wrong &= ~(one == two) & ~(one.isnan() & two.isnan())
        else:
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
            wrong = actual.view(bits) != expected.view(bits)
            wrong &= ~(actual.float().isnan() & expected.float().isnan())
    else:
        wrong = actual != expected
    if not wrong.any():
        return None
    place = tuple(int(item) for item in torch.nonzero(wrong)[0])
    return f"{int(wrong.sum())} elements differ; at {place} {actual[place].item()} and {expected[place].item()}"
