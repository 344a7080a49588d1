"""A count of the kernels that Triton compiles.

1. What Triton finds in its folder on disk is loaded, not compiled, and does not count.
2. Counting costs nothing where no Triton is imported, and what listened before keeps listening.

Source: Triton's ``knobs.compilation.listener``, which 3.4 and later call after each compilation and each find on disk.
"""

from __future__ import annotations

import sys
from typing import Any

_counted = [0]
_listening = [False]


def compiled() -> int:
    """Tell how many kernels this process has compiled since counting began, which the first call makes it do."""
    if not _listening[0] and "triton" in sys.modules:
        _listening[0] = _listen(sys.modules["triton"])
    return _counted[0]


def _listen(triton: Any) -> bool:
    knobs: Any = getattr(getattr(triton, "knobs", None), "compilation", None)
    if not hasattr(knobs, "listener"):
        return False
    before = knobs.listener

    def heard(*, cache_hit: bool, **rest: Any) -> None:
        _counted[0] += not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **rest)

    knobs.listener = heard
    return True
