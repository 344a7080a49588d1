"""Triton's CPU interpreter, mended: a context in which interpreted kernels compute what a device would.

1. Outside the context the interpreter is as Triton ships it: every mend is undone on the way out, errors included.
2. Arithmetic is that of the named formats: bf16 and fp8 operands are their values, never their codes; dots accumulate
   in fp32; narrowing rounds to nearest even (`interpreter_floats`).
3. Memory is that of the launch's arguments (`interpreter_memory`): reading or writing elsewhere is a `MemoryFault`.
4. A signed sum, difference or product that leaves its type is an `IntegerFault`.
5. A float argument is a typed fp32 scalar, as on a device, and not a weak Python number.
6. The mends know the interpreter of one Triton release and refuse another.

Only this package's own modules know that the interpreter exists; a kernel that runs natively needs none of this.

Source: `triton/runtime/interpreter.py` of the release named below; each fault and its mend is pinned by a test.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np

from harness.emulation.interpreter_memory import KernelFault, Memory, describe_line

#: the release whose interpreter the mends were written against and are tested on
TRITON_RELEASE = "3.9"
#: what a masked lane of a load without `other` holds
UNDEFINED = ("zero", "poison")
_ABSENT = object()
_active = False


def why_not() -> str | None:
    """Say why the interpreter cannot be mended here, or None."""
    import triton

    if not triton.__version__.startswith(TRITON_RELEASE + "."):
        return (
            f"the interpreter's mends are written for Triton {TRITON_RELEASE}, and this is Triton {triton.__version__}: "
            f"install {TRITON_RELEASE}, or run on a GPU"
        )
    return None


@contextmanager
def mended(*, undefined: str = "zero", reverse: bool = False) -> Iterator[None]:
    """Mend the interpreter within the context.

    Args:
        undefined: what masked lanes of a load hold where the kernel names no `other`; one of UNDEFINED. Devices give
            zero as a rule and promise nothing.
        reverse: run the programs of a grid last to first, to show a result that depends on their order.

    Raises:
        RuntimeError: if Triton is of another release, or the context is entered twice.
        KernelFault: from a launch, if the kernel leaves its memory or its integers.
    """
    global _active
    if undefined not in UNDEFINED:
        raise ValueError(f"undefined must be one of {', '.join(UNDEFINED)}, not {undefined!r}")
    if _active:
        raise RuntimeError("the interpreter is mended already: enter the context once, around all launches")
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    # Triton imports this at the first launch, and it must find the language as it is.
    import triton.experimental.gluon  # noqa: F401

    scope = _Scope()
    _active = True
    try:
        _mend(scope, undefined, reverse)
        yield
    finally:
        scope.restore()
        _active = False


def interpreted(kernel: Any) -> Any:
    """Return the kernel for the interpreter, also where Triton was imported without it."""
    from triton.runtime.interpreter import InterpretedFunction

    return kernel if isinstance(kernel, InterpretedFunction) else InterpretedFunction(kernel.fn)


def _method(function: Any) -> Any:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


class _Scope:
    """Attributes that were changed, and what they were."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._changes.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._changes:
            owner, name, value = self._changes.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _mend(scope: _Scope, undefined: str, reverse: bool) -> None:
    import triton.runtime.interpreter as source

    from harness.emulation.interpreter_mends import builder_mends, module_mends, reduction_mends
    from harness.emulation.interpreter_types import shared_types

    for owner, name, value in shared_types():
        scope.set(owner, name, value)
    launch = _Launch(scope, source, reverse)
    for name, method in builder_mends(source, launch, poison=undefined == "poison").items():
        scope.set(source.InterpreterBuilder, name, method)
    for name, method in reduction_mends(source).items():
        scope.set(source.ReduceOps, name, method)
    for name, function in module_mends(source, launch).items():
        scope.set(source, name, function)
    # Triton's own overflow check does three times the arithmetic and reports nothing outside debug mode.
    scope.set(source.interpreter_builder, "options", source.InterpreterOptions(sanitize_overflow=False))
    scope.set(source.GridExecutor, "__call__", lambda self, *args, **kwargs: launch.run(self, args, kwargs))
    scope.set(source.InterpretedFunction, "__call__", lambda self, *args, **kwargs: launch.call(self, args, kwargs))
    launch.patch_language()


class _Launch:
    """What one launch needs: the language patched once, the memory of the arguments, the order of programs."""

    def __init__(self, scope: _Scope, source: Any, reverse: bool) -> None:
        self._scope = scope
        self._source = source
        self._reverse = reverse
        self._prepared: set[int] = set()
        self._shipped = source._implicit_cvt
        #: memory of the launch that runs; empty between launches
        self.memory = Memory()

    def patch_language(self) -> None:
        """Give triton.language its interpreted meaning for the whole context: Triton does it at every call."""
        import triton.language as language
        from triton.runtime.jit import JITFunction

        for owner, name, value in _language_patches():
            self._scope.set(owner, name, value)
        for module in (language, language.standard, language.random):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):  # Triton was imported without its interpreter
                    self._scope.set(module, name, interpreted(value))
        for name, value in list(vars(language.tensor).items()):
            if isinstance(value, JITFunction):
                self._scope.set(language.tensor, name, _method(interpreted(value)))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a device function from a kernel."""
        self._prepare(function.fn)
        return function.rewrite()(*args, **kwargs)

    def _prepare(self, fn: Any) -> None:
        from triton.runtime.jit import JITFunction

        if id(fn.__globals__) not in self._prepared:
            self._prepared.add(id(fn.__globals__))
            module = sys.modules.get(fn.__module__)
            if module is not None and vars(module) is fn.__globals__:
                for name, value in list(fn.__globals__.items()):
                    if type(value) is JITFunction:
                        self._scope.set(module, name, interpreted(value))

    def run(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a kernel over its grid.

        Raises:
            KernelFault: if it leaves its memory or its integers.
            InterpreterError: for any other error, with the kernel's line.
        """
        source, builder = self._source, self._source.interpreter_builder
        function = executor.fn
        signature = inspect.getfullargspec(function)
        kwargs = {name: value for name, value in kwargs.items() if name in signature.args + signature.kwonlyargs}
        for hook in executor.pre_run_hooks:
            hook(*args, **kwargs)
        self._prepare(function)
        self.memory = Memory()
        try:
            bound = inspect.getcallargs(function, *args, **kwargs)
            values = {
                name: value if name in executor.constexprs else self.argument(value, name) for name, value in bound.items()
            }
            grid = executor.grid(values) if callable(executor.grid) else executor.grid
            grid = (*grid, 1, 1, 1)[:3]
            builder.set_grid_dim(*grid)
            programs = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
            with np.errstate(all="ignore"):  # a device does not warn of infinities, and kernels use them
                for program in reversed(programs) if self._reverse else programs:
                    self.memory.program = program
                    builder.set_grid_idx(*program)
                    function(**values)
        except (KernelFault, source.InterpreterError):
            raise
        except Exception as error:
            raise source.InterpreterError(f"{error!r}; program {self.memory.program}; {_line_of(error)}") from error
        finally:
            self.memory = Memory()

    def argument(self, value: Any, name: str) -> Any:
        """Return a launch argument as the kernel sees it: tensors as made-up addresses, floats as fp32 scalars."""
        source = self._source
        language, handle = source.tl, source.TensorHandle
        if isinstance(value, float):
            return language.tensor(handle(np.array([value], np.float32), language.float32), language.float32)
        if hasattr(value, "data_ptr"):
            kind = language.str_to_ty(source.triton.runtime.jit.mangle_type(value), None)
            tensor = source._unwrap_tensor(value)
            return language.tensor(handle(np.array([self.memory.address(tensor, name)], np.uint64), kind), kind)
        if isinstance(value, tuple):
            return source._tuple_create(value, (self.argument(item, f"{name}[{i}]") for i, item in enumerate(value)))
        return self._shipped(value)


_PATCHES: list[tuple[Any, str, Any]] = []


def _language_patches() -> list[tuple[Any, str, Any]]:
    """List what Triton changes in triton.language for a launch; found once, as finding it takes milliseconds."""
    if not _PATCHES:
        import triton.language as language
        import triton.runtime.interpreter as source

        # Triton changes the modules that a kernel's globals hold.
        kernel = FunctionType((lambda: None).__code__, {"tl": language, "core": language.core})
        scope = source._patch_lang(kernel)
        found = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
        scope.restore()
        _PATCHES.extend({(id(owner), name): (owner, name, value) for owner, name, value in found}.values())
    return _PATCHES


def _line_of(error: BaseException) -> str:
    trace, line = error.__traceback__, None
    while trace is not None:
        line = describe_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno) or line
        trace = trace.tb_next
    return line or "the kernel's line is unknown"
