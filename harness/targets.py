"""Backends whose kernel can be mutated: where its source stands, and how to build the backend from another file.

Source: each backend's own module.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.backends.protocol import Backend

_BACKENDS = Path(__file__).resolve().parent / "backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A backend whose kernel can be mutated."""

    #: File of the kernel.
    path: Callable[[], Path]
    #: Makes the backend from a file that stands in that one's place.
    build: Callable[[Path], Backend]


def _load(path: Path) -> ModuleType:
    """Import a kernel's file under a name of its own."""
    name = f"mutant_{path.stem}_{os.getpid()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _gluon(path: Path) -> Backend:
    from harness.backends.gluon_splitkv import GluonSplitKV

    module = _load(path)
    return GluonSplitKV("gluon-splitkv", module.attend, module.merge, tile=module.TILE, block=module.BLOCK)


def _triton(path: Path) -> Backend:
    from harness.backends.triton_splitkv import SplitKV

    # Both ways of decoding are then in use: fp8 by integers, as on a GPU without the cast, and the others by casts.
    return SplitKV("triton-splitkv", _load(path), integer_decode=True)


def _aiter_path() -> Path:
    from harness.backends.registry import make

    backend: Any = make("aiter-gluon")
    return Path(backend.source.root) / Path(*backend._place.split(".")).with_suffix(".py")


def _aiter(path: Path) -> Backend:
    """Build from a checkout in which only this file is another: everything else of it is linked."""
    from harness.backends.aiter_gluon import AiterGluon
    from harness.backends.aiter_source import find_source, parse_source

    original, root = _aiter_path(), find_source().root
    # Beside a mutant, whose folder goes when the run ends; its process may be killed before it could see to that.
    copy = Path(tempfile.mkdtemp(prefix="mla-gate-checkout-", dir=None if path == original else path.parent))
    place, here = original.relative_to(root), copy
    for part in place.parts:
        there = root / here.relative_to(copy)
        for entry in there.iterdir():
            if entry.name != part and entry.name != "__pycache__":
                (here / entry.name).symlink_to(entry)
        here = here / part
        if part != place.name:
            here.mkdir()
    shutil.copy(path, copy / place)
    return AiterGluon("aiter-gluon", parse_source(f"{copy}=mutant"))


TARGETS: Mapping[str, Target] = {
    "gluon-splitkv": Target(path=lambda: _BACKENDS / "gluon_splitkv_kernel.py", build=_gluon),
    "triton-splitkv": Target(path=lambda: _BACKENDS / "triton_splitkv_kernel.py", build=_triton),
    "aiter-gluon": Target(path=_aiter_path, build=_aiter),
}
