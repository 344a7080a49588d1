"""Backends that live outside this project, by the module that makes them.

``python:PACKAGE.MODULE`` is the backend that ``make(name, label)`` of an importable module returns;
``python:PACKAGE.MODULE:REST`` hands it the rest, for a module that makes several. The module sees its whole name, and
keeps it as ``backend.name``, with ``@LABEL`` where a version is asked for: one that overlooks the label would be compared
with itself.
"""

from __future__ import annotations

import importlib

from harness.backends.protocol import Backend, NotInstalled, UnknownBackend


def make(name: str, label: str | None = None) -> Backend:
    """Make the backend that a module outside the project offers.

    Raises:
        NotInstalled: if the module cannot be found.
        UnknownBackend: if it offers no ``make``, or if what it makes has another name.
    """
    _, _, rest = name.partition(":")
    path = rest.partition(":")[0]
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and not path.startswith(error.name):
            raise
        raise NotInstalled(
            f"{name} needs the module {path}, which Python does not find: put its folder on PYTHONPATH"
        ) from error
    if not hasattr(module, "make"):
        raise UnknownBackend(f"{path} has no make(name, label) -> Backend, so {name} cannot be made")
    backend: Backend = module.make(name, label)
    wanted = f"{name}@{label}" if label else name
    if isinstance(backend, Backend) and backend.name != wanted:
        fault = f"make({name!r}, {label!r}) of {path} made a backend called {backend.name!r}"
        raise UnknownBackend(f"{fault}: it must be called {wanted!r}, or refuse a version that it does not have")
    return backend
