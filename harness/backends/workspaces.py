"""Memory that a wrapper takes without a value, filled with poison.

Rules kept here:

1. Inside the context every tensor that torch would leave uninitialised begins as NaN (floats) or -1 (integers), so that a
   kernel that reads what it has not written gives itself away on any device.
2. The context changes no other function of torch, and nothing outlasts it.

Source: ``torch.overrides.TorchFunctionMode``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: A byte that makes NaN of every float but the fnuz formats, and -1 of every signed integer.
POISON_BYTE = 0xFF

_UNINITIALISED = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
)


class _Poisoning(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED and isinstance(made, torch.Tensor) and made.device.type != "meta":
            storage = made.untyped_storage()
            if storage.nbytes():
                cover = torch.tensor([], dtype=torch.uint8, device=made.device)
                cover.set_(storage).fill_(POISON_BYTE)
        return made


def poisoned_workspaces() -> AbstractContextManager[Any]:
    """Fill what torch leaves uninitialised, within a ``with`` block."""
    return _Poisoning()
