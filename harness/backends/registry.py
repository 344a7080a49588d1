"""The names of all backends.

1. An entry is data: where the backend lives and what it is. Its module, and with it triton or aiter, is imported when the
   backend is made.
2. ``name@LABEL`` is one of several versions of a backend; ``family:rest`` is a member of a family that its module lists;
   ``name!mistake`` is a backend with a mistake made on purpose, where its module knows some.
3. Unknown and not installed are different errors; the first names what is near, the second says how to install.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from harness.backends.protocol import Backend, NotInstalled, UnknownBackend
from harness.region import globs_meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A backend, or a family of backends, that can be made by name."""

    #: Module with ``make(name, label) -> Backend``; for a family also ``names() -> list[str]``.
    module: str
    #: What it is, one line.
    about: str
    #: Whether the gate runs it when no backend is named and it can run here.
    default: bool = False
    #: Whether the name continues with ``:rest``.
    family: bool = False
    #: Whether the name may continue with ``!mistake``.
    mistakes: bool = False


ENTRIES: Mapping[str, Entry] = {
    "torch-sdpa": Entry(
        module="harness.backends.torch_sdpa",
        about="torch's scaled_dot_product_attention over gathered rows",
        default=True,
    ),
    "triton-splitkv": Entry(
        module="harness.backends.triton_splitkv",
        about="the embedded paged split-KV Triton kernel; on a CPU through Triton's interpreter, mended",
        default=True,
        mistakes=True,
    ),
    "gluon-splitkv": Entry(
        module="harness.backends.gluon_splitkv",
        about="our own small CDNA4 Gluon kernel: natively on gfx950, on a CPU by emulation",
    ),
    "python": Entry(
        module="harness.backends.external",
        about="a backend of your own: python:PACKAGE.MODULE, a module with make(name, label)",
        family=True,
    ),
    "aiter-gluon": Entry(
        module="harness.backends.aiter_gluon",
        about="AITER's Gluon MLA decode, unmodified; on a CPU by emulation",
        default=True,
    ),
    "aiter-asm-np": Entry(
        module="harness.backends.aiter_asm",
        about="AITER's asm MLA decode without metadata, gfx950 and gfx942",
    ),
    "aiter-asm-ps": Entry(
        module="harness.backends.aiter_asm",
        about="AITER's asm MLA decode with persistent metadata, gfx950 and gfx942",
    ),
    "aiter-triton-mla": Entry(
        module="harness.backends.aiter_triton",
        about="AITER's Triton attention.mla; on a CPU through Triton's interpreter, mended",
    ),
    "aiter-triton-decode": Entry(
        module="harness.backends.aiter_triton",
        about="AITER's Triton attention.mla_decode as on ROCm; on a CPU through Triton's interpreter, mended",
    ),
    "aiter-triton-grouped": Entry(
        module="harness.backends.aiter_triton",
        about="AITER's Triton attention.mla_decode as off ROCm; on a CPU through Triton's interpreter, mended",
    ),
    "aiter-triton-rope": Entry(
        module="harness.backends.aiter_triton",
        about="AITER's Triton mla_decode_rope, SGLang's kernel; on a CPU through Triton's interpreter, mended",
    ),
    "route": Entry(
        module="harness.routes.backend",
        about="how an engine calls kernels: route:NAME, or route:NAME+BACKEND to let a backend stand in for them",
        family=True,
    ),
    "model": Entry(
        module="harness.faults.backend",
        about="the correct model that faults are planted in, in one of its variants",
        family=True,
    ),
    "fault": Entry(
        module="harness.faults.backend",
        about="a known mistake: a wrong kernel on purpose; fault:NAME@VARIANT plants it in a variant of the model",
        family=True,
    ),
}


def names() -> list[str]:
    """List the names that can be asked for; a family stands as ``family:…``."""
    return [f"{name}:…" if entry.family else name for name, entry in ENTRIES.items()]


def is_name(pattern: str) -> bool:
    """Tell whether a name, or a pattern in which ``*`` stands for any text, can be that of a backend or of its versions."""
    shapes = []
    for name, entry in ENTRIES.items():
        shapes += [f"{name}:*"] if entry.family else [name, f"{name}@*", *([f"{name}!*"] if entry.mistakes else [])]
    return any(globs_meet(pattern, shape) for shape in shapes)


def entry_of(name: str) -> Entry:
    """Find the entry behind a name.

    Raises:
        UnknownBackend: if there is none; the message names what is near.
    """
    stem, bang, _ = name.partition("@")[0].partition("!")
    family, colon, _ = stem.partition(":")
    entry = ENTRIES.get(family)
    if entry is None or entry.family != bool(colon) or (bang and not entry.mistakes):
        near = get_close_matches(stem, ENTRIES, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names())}"
        raise UnknownBackend(f"no backend is called {name!r}: {hint}")
    return entry


def make(name: str) -> Backend:
    """Make a backend by name.

    Raises:
        UnknownBackend: if no backend has the name.
        NotInstalled: if it cannot run here; the message says what is missing and how to get it.
    """
    entry = entry_of(name)
    stem, _, label = name.partition("@")
    try:
        module = importlib.import_module(entry.module)
        backend = module.make(stem, label or None)
    except (NotInstalled, UnknownBackend, ValueError):
        raise
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("harness", "references", "cases"):
            raise
        raise NotInstalled(f"{name} needs the package {error.name!r}, which is not installed here") from error
    except Exception as error:
        # A library that does not load, a driver that is not there, a module that is half written.
        raise NotInstalled(f"{name} cannot be made here: {type(error).__name__}: {error}{_place(error)}") from error
    if not isinstance(backend, Backend):
        raise UnknownBackend(f"{name} cannot be made: {entry.module} made {backend!r}, which is no backend")
    return backend


def _place(error: Exception) -> str:
    """Say where an error comes from: the last line of Python."""
    if isinstance(error, SyntaxError):  # says it itself
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def defaults() -> dict[str, Backend | NotInstalled]:
    """Make every backend that the gate runs by default; one that cannot run here gives its reason instead."""
    made: dict[str, Backend | NotInstalled] = {}
    for name, entry in ENTRIES.items():
        if entry.default:
            try:
                made[name] = make(name)
            except NotInstalled as reason:
                made[name] = reason
    return made
