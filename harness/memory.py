"""Hostile memory: buffers between guard bands, poisoned before a run and checked after it.

1. Every buffer a kernel is given lies between two guard bands. Their bytes are NaN in every float format, and an absurd
   index in every integer one.
2. Outputs begin as a NaN that no arithmetic produces and no conversion writes, so "not written" differs from "wrote NaN".
3. Inputs are compared bit for bit with a copy made before the run. Of a large pool only the live pages and their neighbours
   are compared: a copy of the rest would take as much again.
4. On the host large pools are mapped lazily: a row that nobody touches takes no memory. A GPU has no such memory; there a
   process takes no more than its share, and what it lacks is said before anything is run.
5. What torch allocates uninitialised while a backend runs is NaN, or the largest integer: a workspace read before it is
   written shows. Memory that a backend takes from elsewhere (its own allocator, a compiler's scratch) this does not reach.
6. A run that touched nothing it does not own is found to be so in two reductions, whatever the number of buffers: each
   answer read back from a GPU waits for it.

Source: the catalogue of field faults in ``docs/why.md``; the guard bands follow FlashMLA's and tokenspeed's tests.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from references.formats import as_integers

#: Bytes of each guard band: more than one vector access of a wave (64 lanes x 16 bytes).
GUARD_BYTES = 4096
#: Fills guards: all bits set is a NaN in bf16, fp16, fp32, e4m3fn and e5m2, and -1 in an integer.
GUARD_BYTE = 0xFF
#: Integers that outputs begin as, by bytes of an element. Kernels write 0x7FC0, 0x7FFF, 0xFFC0 or, as torch's vectorised
#: conversion to bf16 does, 0xFFFF for a NaN: the payload here is none of theirs, in bf16, fp16 and fp32 alike. One byte has no
#: NaN to spare.
UNWRITTEN: Mapping[int, int] = MappingProxyType({1: GUARD_BYTE, 2: 0xFFA5 - (1 << 16), 4: 0xFFA5FFA5 - (1 << 32)})
#: Above this many bytes a pool is compared by rows, not as a whole, and on the host mapped lazily.
LAZY_BYTES = 64 << 20
#: mmap(2)'s flag on Linux; Python names it from 3.13 on.
_MAP_NORESERVE = 0x4000
#: Share of each GPU's memory that this process may take, by index; all of it where none is set.
_SHARES: dict[int, float] = {}


class NotEnoughMemory(MemoryError):
    """A case needs more memory than the device has free; it was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that the kernel did to memory it does not own."""

    #: "guard-touched" or "input-changed".
    fault: str
    #: The buffer, by its role in the call.
    buffer: str
    #: What was found.
    message: str


@dataclass(frozen=False, slots=True, kw_only=True)
class _Buffer:
    name: str
    whole: Tensor  # uint8, guards included
    size: int
    dtype: torch.dtype
    #: Whether the kernel may write to it.
    output: bool
    #: Bytes of a row, and the rows to compare, int64; None where all of it is compared.
    rows: tuple[int, Tensor] | None = None

    @property
    def payload(self) -> Tensor:
        return self.whole[GUARD_BYTES : GUARD_BYTES + self.size]

    @property
    def bands(self) -> tuple[Tensor, Tensor]:
        return self.whole[:GUARD_BYTES], self.whole[GUARD_BYTES + self.size :]

    def watched(self) -> Tensor:
        """Gather the bytes to compare, uint8 [n]."""
        if self.rows is None:
            return self.payload
        width, rows = self.rows
        return self.payload.view(-1, width).index_select(0, rows).view(-1)


def empty(values: Tensor) -> Tensor:
    """Make an output as it is before a run, in place."""
    as_integers(values).fill_(UNWRITTEN[values.element_size()])
    return values


def unwritten(values: Tensor) -> Tensor:
    """Find elements that are as outputs begin."""
    return as_integers(values.contiguous()) == UNWRITTEN[values.element_size()]


def limit_device_memory(device: torch.device | str, share: float) -> None:
    """Let this process take no more than a share of a GPU's memory."""
    index = torch.device(device).index or 0
    torch.cuda.set_per_process_memory_fraction(share, index)
    _SHARES[index] = share


def total_bytes(device: torch.device) -> int:
    """Tell how many bytes a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _meminfo("MemTotal")


def free_bytes(device: torch.device) -> int:
    """Tell how many bytes may still be taken on a device."""
    if device.type == "cuda":
        index = device.index or 0
        free, total = torch.cuda.mem_get_info(index)
        taken = torch.cuda.memory_allocated(index)
        # What torch keeps for itself and does not use it gives back when memory runs short.
        return int(min(free + torch.cuda.memory_reserved(index) - taken, _SHARES.get(index, 1.0) * total - taken))
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    raise OSError(f"no {name} in /proc/meminfo")


@contextmanager
def filled() -> Iterator[None]:
    """Fill what torch allocates uninitialised in this block."""
    switch: Any = torch.utils.deterministic
    before, filling = torch.get_deterministic_debug_mode(), switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        # torch fills only while it is asked for deterministic algorithms, and says of each operation that has none.
        warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports all of torch's compiler first
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            switch.fill_uninitialized_memory = filling
            torch.set_deterministic_debug_mode(before)


class Arena:
    """The buffers of one run on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffers: dict[str, _Buffer] = {}
        self._copy: Tensor | None = None

    def allocate(self, name: str, count: int, dtype: torch.dtype, *, output: bool = False) -> Tensor:
        """Allocate a guarded buffer.

        Args:
            name: role of the buffer in the call, for reports.
            count: elements.
            dtype: their type.
            output: whether the kernel may write to it; an output begins unwritten: all NaN.

        Returns:
            [count] of dtype; zeros where lazily mapped, else uninitialised unless it is an output.

        Raises:
            NotEnoughMemory: if the device has less free.
        """
        size = count * dtype.itemsize
        total = size + 2 * GUARD_BYTES
        lazy = self.device.type == "cpu" and total > LAZY_BYTES and not output
        if not lazy and total > free_bytes(self.device):
            raise NotEnoughMemory(f"not run: {name} needs {total / 2**30:.1f} GiB on {self.device}")
        if lazy:
            whole = _map(name, total)
        else:
            whole = torch.empty(total, dtype=torch.uint8, device=self.device)
        buffer = self._buffers[name] = _Buffer(name=name, whole=whole, size=size, dtype=dtype, output=output)
        for band in buffer.bands:
            band.fill_(GUARD_BYTE)
        values = buffer.payload.view(dtype)
        return empty(values) if output else values

    def watch_rows(self, name: str, width: int, rows: Tensor) -> None:
        """Compare only some rows of a buffer: the rest of it is not in memory, or is too much to copy.

        Args:
            name: the buffer.
            width: bytes of a row; the buffer is a whole number of them.
            rows: which, int64 [n].
        """
        self._buffers[name].rows = (width, rows.to(self.device))

    def take(self, other: Arena) -> None:
        """Overwrite every input with another arena's of the same name, in place, and make the outputs unwritten again.

        An input that is longer here keeps what lies past the other's end; both are then sealed anew.

        Raises:
            ValueError: if one is shorter here.
        """
        for name, buffer in self._buffers.items():
            if buffer.output:
                empty(buffer.payload.view(buffer.dtype))
                continue
            given = other._buffers[name]
            if given.size > buffer.size:
                raise ValueError(f"{name} has {given.size} bytes, and only {buffer.size} have room")
            buffer.payload[: given.size].copy_(given.payload)
            if given.rows is not None or buffer.rows is not None:
                buffer.rows = given.rows
        self.seal()

    def seal(self) -> None:
        """Copy what a run must leave as it is."""
        watched = [buffer.watched() for buffer in self._buffers.values() if not buffer.output]
        self._copy = torch.cat(watched) if watched else None

    def violations(self) -> list[Violation]:
        """Find what the run touched and does not own: guard bands, and inputs since ``seal``."""
        buffers = list(self._buffers.values())
        found = []
        bands = torch.cat([band for buffer in buffers for band in buffer.bands])
        if bool((bands != GUARD_BYTE).any()):
            for buffer in buffers:
                found += _touched_guards(buffer)
        inputs = [buffer for buffer in buffers if not buffer.output]
        now = [buffer.watched() for buffer in inputs]
        if self._copy is None or torch.equal(torch.cat(now), self._copy):
            return found
        copies = torch.split(self._copy, [len(part) for part in now])
        for buffer, part, copy in zip(inputs, now, copies, strict=True):
            found += _changed(buffer, part, copy)
        return found


def _map(name: str, size: int) -> Tensor:
    """Map zeros that take memory only where they are touched; uint8 [size]."""
    # Shared, so that a limit on a process's own data (the worker's) does not count what is never touched; without
    # reservation, so that the kernel does not refuse what is larger than the machine.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    except OSError as refused:
        raise NotEnoughMemory(f"not run: {name} needs {size / 2**30:.1f} GiB of addresses: {refused.strerror}") from refused


def _touched_guards(buffer: _Buffer) -> list[Violation]:
    found = []
    for before, band in zip((True, False), buffer.bands, strict=True):
        touched = torch.nonzero(band != GUARD_BYTE)
        if not len(touched):
            continue
        first, last = int(touched[0]), int(touched[-1])
        where = f"{first} to {last} bytes past its end"
        if before:
            where = f"{GUARD_BYTES - last} to {GUARD_BYTES - first} bytes before its start"
        found.append(Violation(fault="guard-touched", buffer=buffer.name, message=f"{buffer.name}: written {where}"))
    return found


def _changed(buffer: _Buffer, now: Tensor, copy: Tensor) -> list[Violation]:
    changed = torch.nonzero(now != copy)
    if not len(changed):
        return []
    first = int(changed[0])
    if buffer.rows is not None:
        width, rows = buffer.rows
        first = int(rows[first // width]) * width + first % width
    message = f"{buffer.name}: {len(changed)} bytes changed, the first at byte {first}"
    return [Violation(fault="input-changed", buffer=buffer.name, message=message)]
