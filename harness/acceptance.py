"""Whether a case may be asked of a backend in a regime.

1. It lies in the regime, and the backend accepts it on the device.
2. It is not known to fail: a search would find the same failure again and nothing behind it.

Source: ``cases/known_failures.toml`` for what is known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.backends.protocol import Backend, accepts
from harness.case import Case
from harness.known import covering
from harness.regimes import Regime

#: Says whether a case may be asked.
Accepts = Callable[[Case], bool]


def acceptance(regime: Regime, backend: Backend, device: torch.device | str = "cpu") -> Accepts:
    """Make the question whether a case may be asked."""
    device = torch.device(device)
    return lambda case: (
        case in regime.where and accepts(backend, case, device) and not covering(backend.name, case, regime.name)
    )
