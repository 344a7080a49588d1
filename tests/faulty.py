"""Backends that go wrong the way kernels do: they crash, hang, scribble, forget and waver.

Each is right, by the oracle, until it does its one wrong thing; ``python:tests.faulty:NAME`` makes it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from harness.backends.protocol import Capabilities, Output
from harness.case import Case
from harness.inputs import Inputs
from references.oracle import oracle


def _answer(inputs: Inputs) -> Output:
    answer = oracle(inputs.problem())
    inputs.out.copy_(answer.out)
    if inputs.lse is not None:
        inputs.lse.copy_(answer.lse)
    return Output(out=inputs.out, lse=inputs.lse)


def _right(inputs: Inputs) -> Output:
    return _answer(inputs)


def _slow_to_make(inputs: Inputs) -> Output:
    """Answer rightly; ``make`` is what takes long."""
    return _answer(inputs)


def _segfault(inputs: Inputs) -> Output:
    print("about to read address 8", file=__import__("sys").stderr)
    os.kill(os.getpid(), signal.SIGSEGV)
    return _answer(inputs)


def _wrong_then_fatal(inputs: Inputs) -> Output:
    if os.environ.get("MLA_GATE_TEST_SAFE") != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGSEGV)
    output = _answer(inputs)
    output.out.neg_()
    return output


def _abort(inputs: Inputs) -> Output:
    os.abort()


def _exit(inputs: Inputs) -> Output:
    os._exit(3)


def _hang(inputs: Inputs) -> Output:
    while True:
        time.sleep(0.01)


def _deaf_hang(inputs: Inputs) -> Output:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    while True:
        time.sleep(0.01)


def _eat_memory(inputs: Inputs) -> Output:
    taken = []
    while True:  # numpy's, which nothing fills: the limit falls without the memory
        taken.append(np.empty(1 << 30, np.uint8))


def _write_past(inputs: Inputs) -> Output:
    output = _answer(inputs)
    past = inputs.out.as_strided((4,), (1,), inputs.out.storage_offset() + inputs.out.numel())
    past.zero_()
    return output


def _write_cache(inputs: Inputs) -> Output:
    output = _answer(inputs)
    inputs.cache.view(torch.uint8)[0, 0, 0] ^= 1
    return output


def _leave_a_row(inputs: Inputs) -> Output:
    kept = inputs.out[-1, -1, -1].clone()
    output = _answer(inputs)
    inputs.out[-1, -1, -1].view(torch.int16).copy_(kept.view(torch.int16))
    return output


_STALE: dict[tuple[int, ...], torch.Tensor] = {}


def _stale(inputs: Inputs) -> Output:
    """Answer from the buffer of the call before, when there was one of the same shape."""
    output = _answer(inputs)
    shape = tuple(output.out.shape)
    before = _STALE.get(shape)
    _STALE[shape] = output.out.clone()
    return output if before is None else Output(out=before, lse=output.lse)


def _read_workspace(inputs: Inputs) -> Output:
    output = _answer(inputs)
    workspace = torch.empty(output.out.shape, dtype=torch.float64, device=output.out.device)
    total = output.out + workspace
    inputs.out.copy_(total)
    return output


_CALLS = [0]


def _waver(inputs: Inputs) -> Output:
    """One time in twenty the last head is off."""
    _CALLS[0] += 1
    output = _answer(inputs)
    if _CALLS[0] % 20 == 0:
        inputs.out[:, :, -1] *= 1.5
    return output


def _position(inputs: Inputs) -> Output:
    output = _answer(inputs)
    if inputs.case.batch > 1:
        inputs.out[1] *= 1.01
    return output


def _nudge_second(inputs: Inputs) -> Output:
    """Another rounding for the second request: inside every budget, and not the same bits."""
    output = _answer(inputs)
    if inputs.case.batch > 1:
        bits = inputs.out[1, 0, 0, :4].view(torch.int16)
        bits ^= 1
    return output


def _toggle(inputs: Inputs) -> Output:
    """Every other call rounds one element the other way."""
    _CALLS[0] += 1
    output = _answer(inputs)
    if _CALLS[0] % 3 == 0:
        bits = inputs.out[0, 0, 0, :1].view(torch.int16)
        bits ^= 1
    return output


_KEPT: dict[tuple[int, ...], torch.Tensor] = {}


def _reuse(inputs: Inputs) -> Output:
    """Answer in a buffer of its own that the next call of the same shape overwrites."""
    output = _answer(inputs)
    kept = _KEPT.setdefault(tuple(output.out.shape), torch.empty_like(output.out))
    return Output(out=kept.copy_(output.out), lse=output.lse)


def _noisy_empty(inputs: Inputs) -> Output:
    """Rows that see no token hold whatever the call before left."""
    _CALLS[0] += 1
    output = _answer(inputs)
    newest = inputs.lengths[:, None] - inputs.case.query_tokens + torch.arange(inputs.case.query_tokens)
    inputs.out[newest < 0] = float(_CALLS[0])
    if inputs.lse is not None:
        inputs.lse[newest < 0] = float(_CALLS[0])
    return output


def _raise(inputs: Inputs) -> Output:
    raise KeyError(inputs.case.heads)


FAULTS: dict[str, Callable[[Inputs], Output]] = {
    function.__name__.strip("_").replace("_", "-"): function
    for function in (
        _right, _slow_to_make, _segfault, _wrong_then_fatal, _abort, _exit,
        _hang, _deaf_hang, _eat_memory, _write_past, _write_cache, _leave_a_row, _stale,
        _read_workspace, _waver, _position, _nudge_second, _toggle, _reuse, _noisy_empty, _raise,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """A backend with one fault."""

    #: Its registry name.
    name: str
    #: What it claims.
    capabilities: Capabilities

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Accept every case."""
        return None

    def run(self, inputs: Inputs) -> Output:
        """Answer by the oracle, but for the fault."""
        return FAULTS[self.name.rpartition(":")[2]](inputs)


def make(name: str, label: str | None = None) -> Faulty:
    """Make a faulty backend by name."""
    devices = frozenset({"cpu"})
    if name.endswith(":slow-to-make"):
        time.sleep(2.0)
    if name.endswith(":noisy-empty"):
        return Faulty(name=name, capabilities=Capabilities(devices=devices, empty_rows="undefined"))
    return Faulty(name=name, capabilities=Capabilities(devices=devices))
