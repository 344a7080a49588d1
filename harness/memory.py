"""Hostile memory: buffers between guard bands, poisoned before a run and checked after it.

1. Every buffer a kernel is given lies between two guard bands. Their bytes are NaN in every float format, and an absurd
   index in every integer one.
2. Outputs begin as a NaN that no arithmetic produces, so "not written" differs from "wrote NaN".
3. Inputs are compared bit for bit with a copy made before the run. Of a pool too large to copy only the rows that lie in
   memory are compared; the rest was never touched by us, and reading it costs nothing.
4. Large pools are mapped lazily: a row that nobody touches takes no memory.

Source: the catalogue of field faults in ``docs/why.md``; the guard bands follow FlashMLA's and tokenspeed's tests.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Bytes of each guard band: more than one vector access of a wave (64 lanes x 16 bytes).
GUARD_BYTES = 4096
#: Fills guards and outputs: all bits set is a NaN in bf16, fp16, fp32, e4m3fn and e5m2, and -1 in an integer.
GUARD_BYTE = 0xFF
#: Above this many bytes on the host a buffer is mapped lazily and compared by rows, not as a whole.
LAZY_BYTES = 64 << 20
#: mmap(2)'s flag on Linux; Python names it from 3.13 on.
_MAP_NORESERVE = 0x4000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    name: str
    whole: Tensor  # uint8, guards included
    start: int
    size: int
    #: Byte offsets (start, size) of the parts to compare; None for an output.
    watched: list[tuple[int, int]] | None
    copies: list[Tensor] = field(default_factory=list)


def free_bytes(device: torch.device) -> int:
    """Tell how many bytes may still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise OSError("no MemAvailable in /proc/meminfo")


class Arena:
    """The buffers of one run on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._buffers: list[_Buffer] = []

    def allocate(self, name: str, count: int, dtype: torch.dtype, *, output: bool = False) -> Tensor:
        """Allocate a guarded buffer.

        Args:
            name: role of the buffer in the call, for reports.
            count: elements.
            dtype: their type.
            output: whether the kernel may write to it; an output begins all NaN.

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
        whole[:GUARD_BYTES] = GUARD_BYTE
        whole[GUARD_BYTES + size :] = GUARD_BYTE
        payload = whole[GUARD_BYTES : GUARD_BYTES + size]
        if output:
            payload.fill_(GUARD_BYTE)
        watched = None if output else [(0, size)]
        self._buffers.append(_Buffer(name=name, whole=whole, start=GUARD_BYTES, size=size, watched=watched))
        return payload.view(dtype)

    def watch_only(self, name: str, parts: Sequence[tuple[int, int]]) -> None:
        """Compare only these (byte offset, size) parts of a buffer: the rest of it is not in memory."""
        buffer = next(buffer for buffer in self._buffers if buffer.name == name)
        assert buffer.watched is not None, f"{name} is an output"
        buffer.watched[:] = parts

    def seal(self) -> None:
        """Copy what a run must leave as it is."""
        for buffer in self._buffers:
            if buffer.watched is not None:
                buffer.copies[:] = [_part(buffer, part).clone() for part in buffer.watched]

    def violations(self) -> list[Violation]:
        """Find what the run touched and does not own: guard bands, and inputs since ``seal``."""
        found = []
        for buffer in self._buffers:
            found += _touched_guards(buffer) + _changed_parts(buffer)
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


def _part(buffer: _Buffer, part: tuple[int, int]) -> Tensor:
    return buffer.whole[buffer.start + part[0] : buffer.start + part[0] + part[1]]


def _touched_guards(buffer: _Buffer) -> list[Violation]:
    end = buffer.start + buffer.size
    found = []
    for before, band in ((True, buffer.whole[: buffer.start]), (False, buffer.whole[end:])):
        touched = torch.nonzero(band != GUARD_BYTE)
        if not len(touched):
            continue
        first, last = int(touched[0]), int(touched[-1])
        where = f"{first} to {last} bytes past its end"
        if before:
            where = f"{buffer.start - last} to {buffer.start - first} bytes before its start"
        found.append(Violation(fault="guard-touched", buffer=buffer.name, message=f"{buffer.name}: written {where}"))
    return found


def _changed_parts(buffer: _Buffer) -> list[Violation]:
    found = []
    for part, copy in zip(buffer.watched or (), buffer.copies, strict=True):
        now = _part(buffer, part)
        if not torch.equal(now, copy):
            changed = torch.nonzero(now != copy)
            first = part[0] + int(changed[0])
            message = f"{buffer.name}: {len(changed)} bytes changed, the first at byte {first}"
            found.append(Violation(fault="input-changed", buffer=buffer.name, message=message))
    return found
