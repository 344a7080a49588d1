"""Types and shapes of interpreted tensors, made once and shared: most of an interpreted kernel's time goes into making them.

1. Nothing here changes a value: a shared shape, name or size is equal to the one that Triton makes anew each time.
2. What is shared is never written to; Triton's own code does not.

Source: `block_type`, `tensor` and `broadcast_impl_value` of `triton/language`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]

#: element type's name and sizes: shape, elements, name
_types: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
#: name of a scalar type: numpy's type that holds its codes
_numpy_types: dict[str, Any] = {}
#: id of a shape: the shape, elements and sizes as a tensor states them
_shapes: dict[int, tuple[Any, Any, tuple[Any, ...]]] = {}


def shared_types() -> list[tuple[Any, str, Method]]:
    """List what to replace: owner, attribute, replacement."""
    import numpy as np
    import triton.language.core as core
    import triton.runtime.interpreter as source
    from triton.language.semantic import TritonSemantic

    make_type, make_tensor, broadcast = core.block_type.__init__, core.tensor.__init__, TritonSemantic.broadcast_impl_value
    numpy_type = source._get_np_dtype

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in values))
        known = _types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            # one shape object for all element types, so that equal shapes are the same object
            first = next((found[0] for other, found in _types.items() if other[1:] == key[1:]), self.shape)
            self.shape = first
            _types[key] = (first, self.numel, self.name)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            make_tensor(self, handle, type)
            return
        known = _shapes.get(id(type.shape))
        if known is None:
            make_tensor(self, handle, type)
            # the shape stays referred to, so that no other object takes over its id
            _shapes[id(type.shape)] = (type.shape, self.numel, self.shape)
        else:
            self.handle = handle
            self.type = type
            self.dtype = type.element_ty
            _, self.numel, self.shape = known

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return left, right
        return broadcast(self, left, right)

    def get_np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        known = _numpy_types.get(name)
        if known is None:
            known = _numpy_types[name] = numpy_type(kind)
        return known

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        return source.TensorHandle(np.broadcast_to(value.data.reshape(-1)[:1], kind.shape.values), value.dtype.scalar)

    return [
        (source, "_get_np_dtype", get_np_dtype),
        (source.InterpreterBuilder, "create_splat", create_splat),
        (core.block_type, "__init__", type_init),
        (core.tensor, "__init__", tensor_init),
        (TritonSemantic, "broadcast_impl_value", broadcast_impl_value),
    ]
