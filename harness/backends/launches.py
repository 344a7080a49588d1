"""Launches of Triton and Gluon kernels, recorded instead of run, and compiled for gfx950 without a GPU.

Rules kept here:

1. A backend's own Python is what calls the kernel, so the variant that is compiled is the one that would be launched,
   its argument types, constants and divisibility hints included.
2. Recording replaces the launch inside a context only.
3. A failure keeps the compiler's own words and the line of the kernel they speak of.
4. What the compiler prints is caught, not shown: one failure prints the whole module.

Source: Triton 3.9, ``JITFunction.run`` and its warm-up; ``HIPBackend``.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from harness.assembly import Resources, read_resources
from harness.backends.gfx950 import gfx950_answered

_LOCATED_ERROR = re.compile(r"^(?P<file>[^\s:]+\.py):(?P<line>\d+):\d+: error: (?P<words>.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel as it would have been launched."""

    #: Triton's JITFunction.
    kernel: Any
    #: Positional arguments of the launch.
    arguments: tuple[Any, ...]
    #: Keyword arguments, constants and options among them.
    keywords: Mapping[str, Any]
    #: The grid.
    grid: Any

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of compiling one launch."""

    #: The kernel's name.
    kernel: str
    #: Its resources; None when it did not compile.
    resources: Resources | None
    #: The compiler's words with file and line; None when it compiled.
    error: str | None
    #: Arguments that the compiler was told are multiples of 16, by name.
    divisible: tuple[str, ...]
    #: Pointer arguments that it was told span less than 2 GiB, by name.
    within_2gib: tuple[str, ...]
    #: Time taken; near 0 when Triton's cache had it. Seconds.
    seconds: float


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record every launch of a Triton or Gluon kernel in this block instead of running it."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    original = JITFunction.run

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(kernel=self, arguments=arguments, keywords=keywords, grid=grid))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


@contextmanager
def _fresh_caches(kernel: Any) -> Iterator[None]:
    """Keep what is compiled for an answered target out of the caches of the real device."""
    before = kernel.device_caches
    kernel.device_caches = defaultdict(kernel.create_binder)
    try:
        yield
    finally:
        kernel.device_caches = before


@contextmanager
def _printed() -> Iterator[list[str]]:
    """Catch what native code prints to the process's standard error."""
    caught: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield caught
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            caught.append(file.read().decode(errors="replace"))


def _words_of(error: BaseException, printed: str, launch: Launch) -> str:
    located = _LOCATED_ERROR.search(printed)
    if located is not None:
        return f"{located['file']}:{located['line']}: {located['words']}"
    node = getattr(error, "node", None)
    line = getattr(node, "lineno", None)
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    words = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
    if line is not None:
        # The compiler counts from the line of "def"; decorators stand above it.
        lines, first = inspect.getsourcelines(launch.kernel.fn)
        first += next(index for index, text in enumerate(lines) if text.lstrip().startswith("def "))
        return f"{inspect.getsourcefile(launch.kernel.fn)}:{first + line - 1}: {type(cause).__name__}: {words}"
    return f"{launch.name}: {type(cause).__name__}: {words}"


def compile_launch(launch: Launch) -> Compiled:
    """Compile one recorded launch for gfx950 with the Triton that is installed; no GPU is used."""
    start = time.monotonic()
    error = resources = None
    divisible: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    with _printed() as printed, warnings.catch_warnings():
        # Triton 3.9 announces that 3.10 will fuse differently; the table is of the Triton that is installed.
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        try:
            with gfx950_answered(), _fresh_caches(launch.kernel):
                kernel = launch.kernel.run(*launch.arguments, grid=launch.grid, warmup=True, **launch.keywords)
            resources = read_resources(kernel.asm["amdgcn"], lds=int(kernel.metadata.shared))
            divisible, within = _hints(kernel.src)
        except Exception as caught:  # every way a compiler can fail is a row of the table
            failure: BaseException | None = caught
        else:
            failure = None
    if failure is not None:
        error = _words_of(failure, printed[0], launch)
    return Compiled(
        kernel=launch.name,
        resources=resources,
        error=error,
        divisible=divisible,
        within_2gib=within,
        seconds=time.monotonic() - start,
    )


def _hints(source: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = list(source.signature)
    divisible, within = [], []
    for path, attributes in source.attrs.items():
        for attribute, value in attributes:
            if attribute == "tt.divisibility" and value == 16:
                divisible.append(names[path[0]])
            if attribute == "tt.pointer_range" and value == 32:
                within.append(names[path[0]])
    return tuple(divisible), tuple(within)


def _without_hint(launch: Launch, name: str) -> Launch | None:
    """Make the launch whose argument ``name`` is not a multiple of 16."""
    names = list(launch.kernel.arg_names)
    index = names.index(name)
    if index >= len(launch.arguments):
        return None
    value = launch.arguments[index]
    if isinstance(value, int):
        changed: Any = value + 8
    elif hasattr(value, "data_ptr") and value.numel() > 1:
        changed = value.flatten()[1:]
    else:
        return None
    arguments = (*launch.arguments[:index], changed, *launch.arguments[index + 1 :])
    return replace(launch, arguments=arguments)


def needed_hints(launch: Launch, compiled: Compiled) -> tuple[str, ...]:
    """Name the arguments without whose divisibility by 16 the launch does not compile.

    One compilation an argument: seconds each.
    """
    needed = []
    for name in compiled.divisible:
        changed = _without_hint(launch, name)
        if changed is not None and compile_launch(changed).error is not None:
            needed.append(name)
    return tuple(needed)
