"""A launch: arguments as Triton binds them, and the programs of the grid, one after another.

1. An integer argument of 1 is a constant, as Triton specialises it; another is int32 if it fits, else int64. A float is
   fp32, whatever Python holds. A tensor is a pointer to its first element.
2. Programs run to their end one by one, with axis 0 fastest, or in exactly the opposite order.
3. Whatever Python raises inside a kernel becomes a finding with the kernel's line.

Source: ``triton.runtime.jit`` of Triton 3.9 (``create_function_from_signature``, ``specialize_impl``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import torch

from harness.emulation.alike import Launches
from harness.emulation.findings import EmulationFault, Where, fail, finding, site_of
from harness.emulation.formats import BOOL, BY_NAME, FP32, INT32, INT64, UINT64
from harness.emulation.memory import Allocation, Pointer
from harness.emulation.names import forget, meaning, plain
from harness.emulation.program import now
from harness.emulation.promotion import constant
from harness.emulation.shared import Copies
from harness.emulation.source import Kernel
from harness.emulation.tensor import Tensor

_ANNOTATED = {
    "i1": "int1", "u1": "int1", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16",
    "u32": "uint32", "u64": "uint64", "fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "f32": "fp32", "fp64": "fp64",
}  # fmt: skip
_KERNELS: dict[tuple[int, bool], tuple[Any, Any, Kernel]] = {}


def kernel_of(jit: Any, called: bool = False) -> Kernel:
    """Rewrite a jit function's source, once as a kernel and once as a function that a kernel calls."""
    source = getattr(jit, "src", None)
    known = _KERNELS.get((id(jit), called))
    if known is not None and known[0] is jit and known[1] is source:
        return known[2]
    made = Kernel(jit, _Other, remember=not called)
    _KERNELS[id(jit), called] = (jit, source, made)
    return made


class _Other:
    """Another jit function that a kernel calls; its source is rewritten when it is first called."""

    __slots__ = ("_function", "_jit")

    def __init__(self, jit: Any) -> None:
        self._jit = jit
        self._function: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._function is None:
            self._function = kernel_of(self._jit, called=True).function
        return self._function(*arguments, **named)


@cache
def _options() -> frozenset[str]:
    """List the launch options that Triton's AMD backend knows."""
    from triton.backends.amd.compiler import HIPOptions

    return frozenset(field.name for field in fields(HIPOptions)) | {"debug", "warmup", "num_stages", "num_warps"}


class Launcher:
    """Runs launches for a session."""

    def __init__(
        self,
        *,
        late: bool,
        reverse: bool,
        allocated: Callable[[Allocation], None],
        launched: Callable[[str, int], None],
        launches: Launches | None = None,
    ) -> None:
        self.copies = Copies(late)
        self.reverse = reverse
        self._allocated = allocated
        self._launched = launched
        #: What is kept of launches so that a second run need not repeat them; None to keep nothing.
        self._launches = launches

    def run(self, jit: Any, grid: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Run every program of a launch."""
        kernel = kernel_of(jit)
        Where.kernel, Where.program = kernel.name, None
        values, bound, options = self._bind(jit, kernel.name, arguments, named)
        now.warps = int(options.get("num_warps", 4))
        shape = grid(bound) if callable(grid) else grid
        first, second, third = (*(int(item) for item in shape), 1, 1, 1)[:3]
        self._launched(kernel.name, first * second * third)
        if self._launches is not None and self._launches.spares(jit, values, (first, second, third)):
            return
        self._run_programs(kernel, values, (first, second, third))
        if self._launches is not None:
            self._launches.end()

    def _run_programs(self, kernel: Kernel, values: list[Any], grid: tuple[int, int, int]) -> None:
        function, copies = kernel.function, self.copies
        kernel.memo.clear()
        forget()
        total = grid[0] * grid[1] * grid[2]
        numbers = range(total - 1, -1, -1) if self.reverse else range(total)
        now.grid = grid
        now.begin(copies)
        try:
            with np.errstate(all="ignore"):
                for number in numbers:
                    rest, first = divmod(number, grid[0])
                    third, second = divmod(rest, grid[1])
                    now.ids = Where.program = (first, second, third)
                    function(*values)
                    now.end()
        except EmulationFault:
            raise
        except Exception as error:
            message = f"{type(error).__name__} inside the kernel: {error}"
            raise EmulationFault(finding("kernel-error", message, error, site_of(error.__traceback__))) from error
        finally:
            now.end()
            now.begin(None)
            Where.program = None

    def _bind(
        self, jit: Any, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        parameters = jit.params
        names = [item.name for item in parameters]
        if len(arguments) > len(names):
            fail("launch-error", f"{name} takes {len(names)} arguments, {len(arguments)} were given")
        bound = dict(zip(names, arguments, strict=False))
        options = {}
        for key, value in named.items():
            if key in bound:
                fail("launch-error", f"{name} was given {key} twice")
            if key in names:
                bound[key] = value
            elif key in _options():
                options[key] = value
            else:
                fail("launch-error", f"{name} has no argument and Triton no launch option {key}")
        values = []
        for item in parameters:
            if item.name not in bound:
                if not item.has_default:
                    fail("launch-error", f"{name} was not given {item.name}")
                bound[item.name] = item.default
            values.append(self._argument(item, bound[item.name]))
        return values, {key: bound[key] for key in names}, options

    def _argument(self, parameter: Any, value: Any) -> Any:
        if parameter.is_constexpr:
            return plain(value, _Other)
        if isinstance(value, torch.Tensor):
            memory = Allocation(parameter.name, value)
            self._allocated(memory)
            return Pointer(memory, Tensor(INT64, 0))
        if value is None:
            return None
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(parameter, item) for item in value)
        annotated = _ANNOTATED.get(str(parameter.annotation_type or ""))
        if annotated is not None:
            kind = BY_NAME[annotated]
            return Tensor(kind, constant(value, kind))
        return _number(parameter, value)


def _number(parameter: Any, value: Any) -> Any:
    if isinstance(value, bool):
        return Tensor(BOOL, value)
    if isinstance(value, (int, np.integer)):
        number = int(value)
        if number == 1 and not parameter.do_not_specialize:
            return 1
        for kind in (INT32, INT64, UINT64):
            if kind.lowest <= number <= kind.highest:
                return Tensor(kind, number)
        fail("launch-error", f"argument {parameter.name} is {number}, which no integer type holds", number)
    if isinstance(value, float):
        return Tensor(FP32, np.float32(value))
    known, made = meaning(value, _Other)
    if not known:
        fail("launch-error", f"argument {parameter.name} is a {type(value).__name__}, which Triton does not take")
    return made
