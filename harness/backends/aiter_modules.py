"""AITER's Python modules, loaded from one source beside other versions of themselves.

Rules kept here:

1. Every version has its own ``aiter`` package. Its modules stand in ``sys.modules`` only while it is entered; what
   stood there before comes back, and so do the import hooks, the environment and Triton's driver.
2. The package is loaded through AITER's Triton-only import; a version older than that switch is loaded without
   running ``aiter/__init__.py``. Nothing is compiled, nothing of ROCm is asked.
3. The architecture is answered as gfx950 only when the caller emulates or compiles for it; otherwise Triton answers.
4. Every file that was read is fingerprinted. A file that changes afterwards is an error that names it, because
   the kernel in memory and the source on disk would no longer be the same thing.
5. No byte code is written into the source.

Source: AITER's ``AITER_TRITON_ONLY`` switch (since 0.1.16) and its ``arch_info`` and ``chip_info`` modules.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.aiter_source import AiterSource
from harness.backends.gfx950 import ARCHITECTURE, COMPUTE_UNITS, gfx950_answered
from harness.backends.protocol import NotInstalled

#: One version at a time may stand in ``sys.modules``.
_turn = threading.RLock()


class SourceChanged(RuntimeError):
    """A file of AITER is no longer what was loaded from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fingerprint:
    """What a file was when it was read."""

    #: Modification time (ns) and size (bytes); equal ones are trusted.
    stamp: tuple[int, int]
    #: SHA-256 of the content; decides when the stamp differs.
    digest: str

    @classmethod
    def of(cls, path: Path) -> _Fingerprint:
        """Take a file's fingerprint."""
        status = path.stat()
        return cls(stamp=(status.st_mtime_ns, status.st_size), digest=hashlib.sha256(path.read_bytes()).hexdigest())


def _ours(name: str) -> bool:
    return name == "aiter" or name.startswith("aiter.")


class AiterModules:
    """The modules of one AITER version for one way of running them."""

    def __init__(self, source: AiterSource, *, answered: bool) -> None:
        """Prepare to load a source; ``answered`` says that the architecture is answered as gfx950."""
        self.source = source
        self.answered = answered
        self._inside = False
        self._modules: dict[str, types.ModuleType] = {}
        self._finders: list[Any] = []
        self._fingerprints: dict[Path, _Fingerprint] = {}

    def path_of(self, name: str) -> Path:
        """Name the file that holds a module, whether it exists or not."""
        return self.source.root.joinpath(*name.split(".")).with_suffix(".py")

    def has(self, name: str) -> bool:
        """Say whether the source holds a module."""
        return self.path_of(name).is_file()

    def load(self, name: str) -> types.ModuleType:
        """Import one module of this version.

        Raises: NotInstalled, when the source lacks it, when the installed Triton is too old for it, or when it
        cannot be imported for another reason.
        """
        if name in self._modules:
            return self._modules[name]
        if not self.has(name):
            raise NotInstalled(
                f"AITER {self.source.label} at {self.source.root} has no {name}: {self.path_of(name)} does not exist. "
                f"This version lacks the kernel; name a newer one."
            )
        with self.entered():
            try:
                module = importlib.import_module(name)
            except Exception as error:
                raise NotInstalled(self._why_not_imported(name, error)) from error
            self._fingerprint_loaded()
        return module

    def _why_not_imported(self, name: str, error: Exception) -> str:
        import triton

        words = f"{type(error).__name__}: {error}"
        head = f"AITER {self.source.label} at {self.source.root}: {name} cannot be imported"
        missing = getattr(error, "name", None) or ""
        if missing.startswith("triton") or "triton" in str(error).lower():
            return f"{head}: it needs another Triton than the installed {triton.__version__} ({words}). Upgrade Triton."
        return f"{head} ({words})."

    def _fingerprint_loaded(self) -> None:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if _ours(name) and file and Path(file) not in self._fingerprints and Path(file).is_file():
                self._fingerprints[Path(file)] = _Fingerprint.of(Path(file))

    def loaded(self) -> tuple[types.ModuleType, ...]:
        """Give the modules of this version that are loaded, inside or outside its context."""
        if self._inside:
            return tuple(module for name, module in sys.modules.items() if _ours(name))
        return tuple(self._modules.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that were read so far."""
        return tuple(self._fingerprints)

    def check_unchanged(self) -> None:
        """Compare the files that were read with what is on disk now.

        Raises: SourceChanged, naming the file that differs.
        """
        for path, before in self._fingerprints.items():
            try:
                status = path.stat()
                same = (status.st_mtime_ns, status.st_size) == before.stamp or _Fingerprint.of(path).digest == before.digest
            except OSError:
                same = False
            if not same:
                raise SourceChanged(
                    f"AITER {self.source.label} changed on disk during the run: {path}. "
                    f"What was loaded is not what is there now; start the run again."
                )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this version the ``aiter`` of the process until the block ends."""
        with _turn:
            if self._inside:
                yield
                return
            self._inside = True
            before = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
            finders, environment, writes = list(sys.meta_path), dict(os.environ), sys.dont_write_bytecode
            sys.modules.update(self._modules)
            sys.meta_path[:0] = self._finders
            sys.dont_write_bytecode = True
            os.environ["AITER_TRITON_ONLY"] = "1"
            # Whoever emulates or interprets replaces the kernels himself, and needs them as a compiler would get them.
            os.environ.pop("TRITON_INTERPRET", None)
            os.environ.setdefault("AITER_LOG_LEVEL", "WARNING")
            try:
                if self.answered:
                    with gfx950_answered():
                        self._enter_package()
                        yield
                else:
                    self._enter_package()
                    yield
            finally:
                self._inside = False
                self._modules = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
                self._finders = [finder for finder in sys.meta_path if finder not in finders]
                sys.modules.update(before)
                sys.meta_path[:] = finders
                sys.dont_write_bytecode = writes
                _restore_environment(environment)

    def _enter_package(self) -> None:
        if "aiter" in sys.modules:
            return
        init = self.source.package / "__init__.py"
        spec = importlib.util.spec_from_file_location("aiter", init, submodule_search_locations=[str(self.source.package)])
        if spec is None or spec.loader is None:  # a file that exists always has a loader
            raise NotInstalled(f"AITER {self.source.label}: {init} cannot be loaded.")
        package = importlib.util.module_from_spec(spec)
        sys.modules["aiter"] = package
        if self.answered:
            sys.modules["aiter.jit.utils.chip_info"] = _answered_chip()
        if "AITER_TRITON_ONLY" in init.read_text(encoding="utf-8"):
            try:
                spec.loader.exec_module(package)
            except Exception as error:
                del sys.modules["aiter"]
                raise NotInstalled(self._why_not_imported("aiter", error)) from error


def _answered_chip() -> types.ModuleType:
    """Stand in for the module that would ask ``rocminfo``, so that launch sizes are those of the answered chip."""
    chip = types.ModuleType("aiter.jit.utils.chip_info")
    chip.get_cu_num = lambda: COMPUTE_UNITS  # type: ignore[attr-defined]
    chip.get_gfx = lambda: ARCHITECTURE  # type: ignore[attr-defined]
    chip.get_gfx_runtime = lambda: ARCHITECTURE  # type: ignore[attr-defined]
    return chip


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


_loaded: dict[tuple[Path, str, bool], AiterModules] = {}


def modules_of(source: AiterSource, *, answered: bool) -> AiterModules:
    """Give the process's one set of modules for a source and a way of running it."""
    key = (source.root, source.label, answered)
    if key not in _loaded:
        _loaded[key] = AiterModules(source, answered=answered)
    return _loaded[key]
