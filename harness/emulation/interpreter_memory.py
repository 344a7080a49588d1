"""Memory of an interpreted kernel, in which every address belongs to one allocation or to none.

1. A kernel sees made-up addresses: each allocation owns a span far larger than itself and lies in the middle of it,
   so that no wrong offset of less than 8 TiB lands in another allocation.
2. An active lane outside its allocation is a `MemoryFault` that names the access, the allocation and the kernel's line.
3. A masked lane is never read or written, wherever it points; a masked load gives the kernel's `other`.
4. Tensors over one storage share its allocation, so that slices of a fused tensor stay neighbours.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: each allocation owns 2**44 addresses: 16 TiB, more than any pool, and 2**20 of them fit in 64 bits
_SPAN_BITS = 44
_MIDDLE = 1 << (_SPAN_BITS - 1)
_HERE = os.path.dirname(os.path.abspath(__file__))


class KernelFault(Exception):
    """A kernel did what no device defines; the message ends with the kernel's source line."""


class MemoryFault(KernelFault):
    """An active lane addressed memory outside the allocation it started from."""


class IntegerFault(KernelFault):
    """A signed integer sum, difference or product left its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One storage that the kernel was given."""

    #: names of the arguments that point into it
    names: list[str]
    #: first made-up address
    start: int
    #: size in bytes
    size: int
    #: first address on the host
    host: int
    #: what keeps the host memory alive
    owner: object
    #: the bytes as flat arrays by item size
    views: dict[int, NDArray[np.generic]] = field(default_factory=dict)

    def view(self, dtype: np.dtype[Any]) -> NDArray[np.generic]:
        """Return the whole items of `dtype` from the first byte on, writable."""
        flat = self.views.get(dtype.itemsize)
        if flat is None:
            count = self.size // dtype.itemsize
            raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(self.host)
            flat = np.frombuffer(memoryview(raw), dtype=np.dtype(f"u{dtype.itemsize}"))
            self.views[dtype.itemsize] = flat
        return flat.view(dtype)


class Memory:
    """The allocations of one launch."""

    def __init__(self) -> None:
        """Begin with no allocation."""
        self._allocations: list[Allocation] = []
        self._by_storage: dict[int, Allocation] = {}
        #: the program that runs, for messages
        self.program: tuple[int, ...] = ()

    def address(self, tensor: torch.Tensor, name: str) -> int:
        """Return the made-up address of the tensor's first element, whose storage becomes an allocation.

        Raises ValueError for a tensor that is not on the CPU.
        """
        if tensor.device.type != "cpu":
            raise ValueError(
                f"argument {name} is on {tensor.device}; the interpreter reads CPU tensors only: "
                "move it to the CPU or launch the kernel natively"
            )
        storage = tensor.untyped_storage()
        known = self._by_storage.get(storage.data_ptr()) if storage.nbytes() else None
        if known is None:
            start = (len(self._allocations) << _SPAN_BITS) + _MIDDLE
            known = Allocation(names=[], start=start, size=storage.nbytes(), host=storage.data_ptr(), owner=storage)
            self._allocations.append(known)
            self._by_storage[storage.data_ptr()] = known
        if name not in known.names:
            known.names.append(name)
        return known.start + int(tensor.storage_offset()) * tensor.element_size()

    def load(
        self, addresses: NDArray[np.uint64], mask: NDArray[np.bool_], other: NDArray[np.generic] | None, dtype: np.dtype[Any]
    ) -> NDArray[np.generic]:
        """Return the items at the active addresses, and `other` (or zero) where masked.

        Raises MemoryFault where an active lane lies outside every allocation.
        """
        everywhere = bool(mask.all())
        if not everywhere and not mask.any():
            return np.zeros(addresses.shape, dtype) if other is None else np.broadcast_to(other, addresses.shape)
        placed = self._place(addresses, mask, everywhere, dtype, "load")
        if placed is None:
            found = np.zeros(addresses.shape, dtype)
            for lane in np.argwhere(mask):
                key = tuple(lane)
                one = addresses[key].reshape(1)
                found[key] = self.load(one, np.ones(1, bool), None, dtype)[0]
        else:
            allocation, index = placed
            found = allocation.view(dtype).take(index, mode="clip")
        if everywhere:
            return found
        return np.where(mask, found, dtype.type(0) if other is None else other)

    def store(self, addresses: NDArray[np.uint64], values: NDArray[np.generic], mask: NDArray[np.bool_]) -> None:
        """Write the active lanes; of two lanes at one address the later wins.

        Raises MemoryFault where an active lane lies outside every allocation.
        """
        values = np.broadcast_to(values, addresses.shape)
        everywhere = bool(mask.all())
        if not everywhere:
            mask = np.broadcast_to(mask, addresses.shape)
            if not mask.any():
                return
        placed = self._place(addresses, mask, everywhere, values.dtype, "store")
        if placed is None:
            for lane in np.argwhere(np.broadcast_to(mask, addresses.shape)):
                key = tuple(lane)
                self.store(addresses[key].reshape(1), values[key].reshape(1), np.ones(1, bool))
            return
        allocation, index = placed
        flat = allocation.view(values.dtype)
        if everywhere:
            flat[index] = values
        else:
            flat[index[mask]] = values[mask]

    def host(self, addresses: NDArray[np.uint64], mask: NDArray[np.bool_], itemsize: int) -> NDArray[np.uint64]:
        """Return addresses of the host for the active lanes, for operations the interpreter does in C.

        Raises MemoryFault where an active lane lies outside every allocation or two allocations are mixed.
        """
        placed = self._place(addresses, mask, bool(mask.all()), np.dtype(f"u{itemsize}"), "atomic access")
        if placed is None:
            raise MemoryFault(self._say("atomic access of lanes in more than one allocation"))
        allocation, index = placed
        return (index * itemsize + allocation.host).astype(np.uint64)

    def _place(
        self, addresses: NDArray[np.uint64], mask: NDArray[np.bool_], everywhere: bool, dtype: np.dtype[Any], verb: str
    ) -> tuple[Allocation, NDArray[np.int64]] | None:
        # The whole tile is looked at first: where even its masked lanes are inside, no lane needs looking at.
        low, high = int(addresses.min()), int(addresses.max())
        allocation = self._holder(low)
        itemsize = dtype.itemsize
        if allocation is None or low < allocation.start or high + itemsize > allocation.start + allocation.size:
            active = addresses if everywhere else addresses[np.broadcast_to(mask, addresses.shape)]
            low, high = int(active.min()), int(active.max())
            allocation = self._holder(low)
            if allocation is not None and self._holder(high) not in (allocation, None):
                return None
            if allocation is None or low < allocation.start or high + itemsize > allocation.start + allocation.size:
                self._fault(addresses, mask, allocation, itemsize, verb)
                raise AssertionError("unreachable")
        offset = (addresses - np.uint64(allocation.start)).view(np.int64)
        if itemsize == 1:
            return allocation, offset
        shift = itemsize.bit_length() - 1
        index = offset >> shift
        if low % itemsize or ((index << shift) != offset)[mask if not everywhere else ...].any():
            raise MemoryFault(
                self._say(
                    f"{verb} of {itemsize} bytes at an address that is no multiple of {itemsize}, in {self._name(allocation)}"
                )
            )
        return allocation, index

    def _holder(self, address: int) -> Allocation | None:
        number = address >> _SPAN_BITS
        return self._allocations[number] if number < len(self._allocations) else None

    def _fault(
        self, addresses: NDArray[np.uint64], mask: NDArray[np.bool_], allocation: Allocation | None, itemsize: int, verb: str
    ) -> None:
        mask = np.broadcast_to(mask, addresses.shape)
        if allocation is None:
            lane = tuple(int(i) for i in np.argwhere(mask)[0])
            raise MemoryFault(
                self._say(
                    f"{verb} of {itemsize} bytes through {int(addresses[lane]):#x}, which comes "
                    f"from no argument of the launch (lane {lane})"
                )
            )
        offset = (addresses - np.uint64(allocation.start)).view(np.int64)
        outside = mask & ((offset < 0) | (offset + itemsize > allocation.size))
        lane = tuple(int(i) for i in np.argwhere(outside)[0])
        raise MemoryFault(
            self._say(
                f"{verb} of {itemsize} bytes at byte {int(offset[lane])} of "
                f"{self._name(allocation)} (lane {lane}, {int(outside.sum())} lanes outside)"
            )
        )

    def _name(self, allocation: Allocation) -> str:
        return f"{'/'.join(allocation.names)}, which has {allocation.size} bytes"

    def _say(self, what: str) -> str:
        return f"{what}; program {self.program}; {kernel_line()}"


def kernel_line() -> str:
    """Return the innermost source line that belongs to a kernel, as `file:line: text`."""
    frame = sys._getframe(1)
    while frame is not None:
        found = describe_line(frame.f_code.co_filename, frame.f_lineno)
        if found is not None:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return "the kernel's line is unknown"


def describe_line(path: str, line: int) -> str | None:
    """Return `file:line: text`, or None for a file of Triton's, numpy's or ours that only carries a kernel out."""
    if path.startswith(("<", *_carriers())):
        return None
    return f"{path}:{line}: {linecache.getline(path, line).strip()}"


def _carriers() -> tuple[str, ...]:
    packages = [sys.modules[name].__file__ for name in ("triton", "numpy") if name in sys.modules]
    return (_HERE + os.sep, *(os.path.dirname(path) + os.sep for path in packages if path))
