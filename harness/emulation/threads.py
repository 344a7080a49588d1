"""One thread for numpy's matrix products while kernels run.

1. A program's matrices are too small for several threads: waiting for each other costs more than the product, many times
   more where other processes run too.
2. With one thread the order of additions is the same in every run, whatever the machine: runs are compared bit for bit.
3. The number of threads is put back. A BLAS that is not OpenBLAS is left alone.

Source: OpenBLAS, ``openblas_get_num_threads`` and ``openblas_set_num_threads``; numpy's wheels prefix and suffix the names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_NAMES = ("scipy_openblas_{}64_", "openblas_{}64_", "scipy_openblas_{}", "openblas_{}")


@cache
def _blas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Find how to ask for and to set the number of threads of the OpenBLAS that is loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    for path in sorted({line.split()[-1] for line in maps.splitlines() if "openblas" in line}):
        library = ctypes.CDLL(path)
        for name in _NAMES:
            if hasattr(library, name.format("set_num_threads")):
                return getattr(library, name.format("get_num_threads")), getattr(library, name.format("set_num_threads"))
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Let matrix products use one thread within the block."""
    found = _blas()
    if found is None:
        yield
        return
    ask, put = found
    before = ask()
    put(1)
    try:
        yield
    finally:
        put(before)
