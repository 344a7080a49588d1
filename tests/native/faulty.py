"""Backends that go wrong on a GPU: ``python:tests.native.faulty:NAME``; those of ``tests.faulty`` run there too.

Each is right, by the oracle, until it does its one wrong thing.
"""

# A kernel's parameters have Triton's types or none, and its decorator has no Python type.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from harness.backends.protocol import Capabilities, Output
from harness.case import Case
from harness.inputs import Inputs
from tests.faulty import FAULTS as FAULTS_ANYWHERE

#: Addresses that no allocation has: beside null, and far out. One alone may lie in a range that a driver keeps mapped: a
#: store to 2^40 went through on an H200.
NOWHERE = (16, 1 << 40, 1 << 46)


@triton.jit
def store_at(addresses):
    """Store one word at each of the addresses that lie in memory."""
    tl.store(tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def wait_for(flag):
    """Spin until somebody raises a flag, which nobody does."""
    value = tl.load(flag, volatile=True)
    while value == 0:
        value = tl.load(flag, volatile=True)


def _illegal_access(inputs: Inputs) -> Output:
    output = FAULTS_ANYWHERE["right"](inputs)
    store_at[(len(NOWHERE),)](torch.tensor(NOWHERE, dtype=torch.int64, device=inputs.device))
    return output


def _spin(inputs: Inputs) -> Output:
    output = FAULTS_ANYWHERE["right"](inputs)
    wait_for[(1,)](torch.zeros(1, dtype=torch.int32, device=inputs.device))
    return output


def _eat_device_memory(inputs: Inputs) -> Output:
    taken = []
    while True:
        taken.append(torch.zeros(1 << 30, dtype=torch.uint8, device=inputs.device))


FAULTS: dict[str, Callable[[Inputs], Output]] = {
    **FAULTS_ANYWHERE,
    "illegal-access": _illegal_access,
    "spin": _spin,
    "eat-device-memory": _eat_device_memory,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """A backend with one fault."""

    #: Its registry name.
    name: str
    capabilities: Capabilities = Capabilities()

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Accept every case."""
        return None

    def run(self, inputs: Inputs) -> Output:
        """Answer by the oracle, but for the fault."""
        return FAULTS[self.name.rpartition(":")[2]](inputs)


def make(name: str, label: str | None = None) -> Faulty:
    """Make a faulty backend by name."""
    return Faulty(name=name)
