"""Global memory of a launch: allocations and pointers into them.

1. A pointer belongs to one allocation: the elements of the tensor that was passed, from its first to its last. A lane that
   is not masked and lies outside stops the kernel; a masked lane touches nothing.
2. Nothing is copied or scanned whole: a pool of which three pages are touched costs three pages.
3. A pointer offset is counted in elements and is 64 bits wide, as Triton's is.

Source: ``triton.language.semantic`` of Triton 3.9 (``add``, ``load``, ``store``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, BY_NAME, INT64, Array, Kind
from harness.emulation.tensor import Shape, Tensor, Type

#: torch's types, by Triton's names.
_TORCH_KINDS = {
    torch.bool: "int1", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.uint8: "uint8", torch.uint16: "uint16", torch.uint32: "uint32", torch.uint64: "uint64",
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2: "fp8e5",
    torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
#: Integers as wide as an element, by its bytes.
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerKind:
    """The type of a pointer."""

    #: What it points to.
    element_ty: Kind

    @property
    def scalar(self) -> PointerKind:
        """Itself."""
        return self

    def is_ptr(self) -> bool:
        """Whether it is a pointer."""
        return True


class Allocation:
    """The elements that one tensor argument gives a kernel access to."""

    __slots__ = ("address", "before_write", "codes", "kind", "name", "size", "tensor", "watch")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in _TORCH_KINDS:
            fail("launch-error", f"argument {name} has the type {tensor.dtype}, which Triton does not know")
        if tensor.device.type != "cpu":
            fail("launch-error", f"argument {name} lies on {tensor.device}; emulation needs tensors on the CPU")
        self.name = name
        self.tensor = tensor
        self.kind = BY_NAME[_TORCH_KINDS[tensor.dtype]]
        self.size = (
            0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        flat = tensor.detach().as_strided((self.size,), (1,))
        self.codes: Array = flat.view(CARRIERS[tensor.element_size()]).numpy().view(self.kind.storage)
        self.address = tensor.data_ptr()
        #: Called with the elements before each write, for as long as it is set.
        self.before_write: Callable[[Array], None] | None = None
        #: Called with (allocation, elements, whether it is a write) for each access; tracing only.
        self.watch: Callable[[Allocation, Array, bool], None] | None = None


class Pointer:
    """One pointer, or a tensor of pointers, into an allocation: element offsets in int64."""

    __slots__ = ("layout", "memory", "offset")

    def __init__(self, memory: Allocation, offset: Tensor, layout: object = None) -> None:
        self.memory = memory
        self.offset = offset
        self.layout = layout

    def __repr__(self) -> str:
        return f"pointer<{self.memory.kind}>{list(self.shape)} into {self.memory.name}"

    @property
    def shape(self) -> Shape:
        """Its size in each dimension."""
        return self.offset.shape

    @property
    def dtype(self) -> PointerKind:
        """The pointer type."""
        return PointerKind(element_ty=self.memory.kind)

    @property
    def type(self) -> Type:
        """Its type."""
        return Type(PointerKind(element_ty=self.memory.kind), self.shape, self.layout)

    def __add__(self, other: Any) -> Pointer:
        return self._moved(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self._moved(other, -1)

    def _moved(self, other: Any, sign: int) -> Pointer:
        if type(other) is Tensor and type(other.value) is int and type(self.offset.value) is int:
            return Pointer(self.memory, Tensor(INT64, self.offset.value + sign * other.value), self.layout)
        if isinstance(other, Tensor):
            if other.kind.is_float or other.kind is BOOL:
                fail("type-error", f"a pointer plus {other!r}")
            step: Any = other.cast(INT64)
        elif isinstance(other, int):
            step = other
        else:
            fail("type-error", f"a pointer plus {other!r}")
        layout = self.layout if self.layout is not None else getattr(other, "layout", None)
        return Pointer(self.memory, self.offset + step if sign > 0 else self.offset - step, layout)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offset[key], getattr(self.layout, "parent", None))

    def to(self, kind: Any, bitcast: bool = False) -> Pointer:
        """Refuse a cast, unless to what it is."""
        if getattr(kind, "element_ty", None) is self.memory.kind:
            return self
        fail("unmodelled", f"a cast of {self!r} to {kind!r}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail("unknown-operation", f"a pointer's .{name} has no meaning here")
