"""The context in which launches run on the CPU.

1. Inside it every launch of a Triton or Gluon jit function runs here; outside nothing of it is left. Sessions do not nest.
2. New memory that the launching code takes from torch without a value begins as poison.
3. What a launch writes to is known, with what stood there before, so that a run can be undone.

Source: ``triton.runtime.jit.JITFunction.run``; ``torch.overrides.TorchFunctionMode``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from harness.emulation.alike import Launches
from harness.emulation.findings import fail
from harness.emulation.formats import Array
from harness.emulation.memory import Allocation
from harness.emulation.threads import one_thread
from harness.emulation.undo import Written

#: Targets whose names have a meaning.
TARGETS = ("gfx950",)
COPIES = ("early", "late")
ORDERS = ("forward", "reverse")
#: Byte that poisons new memory: NaN in every float but fnuz, -1 in an integer.
POISON_BYTE = 0xFF

_UNINITIALISED = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted,
    torch.Tensor.new_empty, torch.Tensor.new_empty_strided, torch.Tensor.new,
}  # fmt: skip


class _Poisoning(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED and isinstance(made, torch.Tensor) and made.device.type == "cpu":
            storage = made.untyped_storage()
            if storage.nbytes():
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON_BYTE)
        return made


class Session:
    """What happened in one run."""

    def __init__(self, *, target: str, copies: str, order: str, keep: bool) -> None:
        for name, value, allowed in (("target", target, TARGETS), ("copies", copies, COPIES), ("order", order, ORDERS)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        self.target, self.copies, self.order = target, copies, order
        #: Kernels that ran and their numbers of programs, in order.
        self.launches: list[tuple[str, int]] = []
        #: (file, line of a load, line of an asynchronous copy in flight into what it loads).
        self.overlaps: set[tuple[str, int, int]] = set()
        #: Called with each allocation of a launch; None except for tracing.
        self.tracer: Callable[[Allocation], None] | None = None
        self._keep = keep
        #: What launches wrote to, by (address, elements).
        self.written: dict[tuple[int, int], Written] = {}

    def allocated(self, memory: Allocation) -> None:
        """Take note of an argument."""
        memory.before_write = lambda elements: self._before_write(memory, elements)
        if self.tracer is not None:
            self.tracer(memory)

    def launched(self, kernel: str, programs: int) -> None:
        """Take note of a launch."""
        self.launches.append((kernel, programs))

    def _before_write(self, memory: Allocation, elements: Array) -> None:
        key = (memory.address, memory.size)
        if key not in self.written:
            self.written[key] = Written(memory, self._keep)
        if self.written[key].complete:
            memory.before_write = None
        else:
            self.written[key].before(elements)

    def undo(self) -> None:
        """Put back what stood where launches wrote."""
        for written in self.written.values():
            written.undo()


_running: list[Session] = []


@contextmanager
def emulate(
    *,
    target: str = "gfx950",
    copies: str = "early",
    order: str = "forward",
    keep: bool = False,
    launches: Launches | None = None,
) -> Iterator[Session]:
    """Run every Triton and Gluon launch of the block on the CPU.

    Args:
        target: what the kernels are written for: one of TARGETS.
        copies: when asynchronous copies land: "early" (at issue) or "late" (at the wait that retires their group).
        order: the order of programs, "forward" or "reverse".
        keep: whether to keep what stood where kernels write, for ``undo``.
        launches: where to keep what launches did, so that a second run need not repeat them; None to keep nothing.

    Raises:
        EmulationFault: from the launch, when a kernel does something wrong.
        RuntimeError: if a session runs already.
    """
    if _running:
        raise RuntimeError("emulation runs already; sessions do not nest")
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from harness.emulation.launch import Launcher
    from harness.emulation.names import as_compiled

    session = Session(target=target, copies=copies, order=order, keep=keep)
    launcher = Launcher(
        late=copies == "late",
        reverse=order == "reverse",
        allocated=session.allocated,
        launched=session.launched,
        launches=launches,
    )
    session.overlaps = launcher.copies.overlaps

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        for hook in self.pre_run_hooks:
            hook(*arguments, **named)
        launcher.run(as_compiled(self), grid, arguments, named)

    def tune(self: Any, *arguments: Any, **named: Any) -> Any:
        if len(self.configs) != 1:
            fail("unmodelled", f"{self.fn.__name__} chooses among {len(self.configs)} configurations by timing them")
        config = self.configs[0]
        return self.fn.run(*arguments, **{**named, **config.all_kwargs()})

    places = [(JITFunction, "run", run), (InterpretedFunction, "run", run), (Autotuner, "run", tune)]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in places]
    _running.append(session)
    try:
        for owner, name, made in places:
            setattr(owner, name, made)
        with _Poisoning(), one_thread():
            yield session
    finally:
        for owner, name, kept in before:
            setattr(owner, name, kept)
        _running.pop()


def poison_of(dtype: np.dtype[Any]) -> Array:
    """Give the value that new memory of a type begins with."""
    return np.full(dtype.itemsize, POISON_BYTE, np.uint8).view(dtype)
