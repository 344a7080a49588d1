"""The table of names: which object of Triton and Gluon means what.

1. Objects are found by identity, so ``gl.load``, an alias and a re-export are one.
2. An object of Triton that is not in the table has no meaning: using it stops the kernel and names it.
3. A name that this Triton lacks is left out; no version is asked for.

Source: Triton 3.9; names that 3.6 to 3.8 spell the same way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from harness.emulation import cdna4, operations
from harness.emulation.formats import BY_NAME, Kind

_SHARED: Mapping[str, Any] = {
    "program_id": operations.program_id, "num_programs": operations.num_programs,
    "arange": operations.arange, "full": operations.full, "zeros": operations.zeros,
    "full_like": operations.full_like, "zeros_like": operations.zeros_like, "to_tensor": operations.to_tensor,
    "where": operations.where, "maximum": operations.maximum, "minimum": operations.minimum, "clamp": operations.clamp,
    "cast": operations.cast, "cdiv": operations.cdiv,
    "exp": operations.exp, "exp2": operations.exp2, "log": operations.log, "log2": operations.log2,
    "sqrt": operations.sqrt, "sqrt_rn": operations.sqrt_rn, "rsqrt": operations.rsqrt, "sin": operations.sin,
    "cos": operations.cos, "floor": operations.floor, "ceil": operations.ceil, "abs": operations.absolute,
    "fma": operations.fma, "fdiv": operations.fdiv, "div_rn": operations.fdiv, "umulhi": operations.umulhi,
    "sigmoid": operations.sigmoid,
    "expand_dims": operations.expand_dims, "reshape": operations.reshape, "permute": operations.permute,
    "trans": operations.trans, "ravel": operations.ravel, "broadcast_to": operations.broadcast_to,
    "broadcast": operations.broadcast_pair, "join": operations.join, "split": operations.split,
    "gather": operations.gather,
    "max": operations.reduce_max, "min": operations.reduce_min, "sum": operations.reduce_sum,
    "argmax": operations.argmax, "argmin": operations.argmin, "xor_sum": operations.xor_sum,
    "reduce_or": operations.reduce_or, "cumsum": operations.cumsum,
    "load": operations.load, "store": operations.store, "atomic_add": operations.atomic_add,
    "atomic_max": operations.atomic_max, "atomic_min": operations.atomic_min, "atomic_xchg": operations.atomic_xchg,
    "static_assert": operations.static_assert, "device_assert": operations.device_assert, "assume": operations.assume,
    "static_print": operations.nothing, "device_print": operations.device_print,
    "multiple_of": operations.same, "max_contiguous": operations.same, "max_constancy": operations.same,
    "debug_barrier": operations.nothing, "barrier": operations.nothing, "thread_barrier": operations.nothing,
    "dot": operations.dot,
}  # fmt: skip
_GLUON: Mapping[str, Any] = {
    "convert_layout": operations.convert_layout, "set_auto_layout": operations.convert_layout,
    "allocate_shared_memory": operations.allocate_shared_memory, "num_warps": operations.num_warps,
    "dot_fma": operations.dot_fma,
}  # fmt: skip
_CDNA: Mapping[str, Any] = {
    "buffer_load": cdna4.buffer_load, "buffer_store": cdna4.buffer_store, "mfma": cdna4.mfma,
    "mfma_scaled": cdna4.mfma_scaled,
}  # fmt: skip
_ASYNC: Mapping[str, Any] = {
    "buffer_load_to_shared": cdna4.buffer_load_to_shared, "global_load_to_shared": cdna4.global_load_to_shared,
    "commit_group": cdna4.commit_group, "async_wait": cdna4.wait_group, "wait_group": cdna4.wait_group,
    "load_shared_relaxed": cdna4.load_shared_relaxed,
}  # fmt: skip
_GL = "triton.experimental.gluon.language"
_MODULES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "triton.language": (_SHARED,),
    "triton.language.math": (_SHARED,),
    "triton.language.core": (_SHARED,),
    _GL: (_SHARED, _GLUON),
    f"{_GL}.amd.cdna3": (_CDNA,),
    f"{_GL}.amd.cdna4": (_CDNA,),
    f"{_GL}.amd.cdna4.async_copy": (_ASYNC,),
    f"{_GL}.amd.hint": ({"sched_barrier": operations.nothing},),
}
#: Python's own names that Triton lets a kernel use, and what they mean there.
BUILTINS: Mapping[str, Any] = {
    "range": range, "float": float, "int": int, "bool": bool, "len": len, "min": min, "max": max, "abs": operations.absolute,
    "print": operations.device_print, "isinstance": isinstance, "hasattr": hasattr, "getattr": getattr,
    "True": True, "False": False, "None": None, "tuple": tuple, "list": list,
}  # fmt: skip


@cache
def table() -> tuple[dict[int, Any], tuple[Any, ...]]:
    """Build the table: meaning by the id of Triton's object, and the objects, which keeps their ids theirs."""
    meanings: dict[int, Any] = {}
    kept: list[Any] = []
    for path, groups in _MODULES.items():
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        for group in groups:
            for name, meaning in group.items():
                found = getattr(module, name, None)
                if found is not None and id(found) not in meanings:
                    meanings[id(found)] = meaning
                    kept.append(found)
    return meanings, tuple(kept)


@cache
def layouts() -> tuple[type, ...]:
    """List Gluon's layout classes: they are built as they are, and only carried."""
    from triton.experimental.gluon.language import _layouts

    bases: tuple[type, ...] = (_layouts.DistributedLayout, _layouts.SharedLayout)
    return bases


_SLICES: dict[tuple[int, int], tuple[object, object]] = {}


def slice_layout(dim: Any, parent: object) -> object:
    """Make a slice layout; the same one for the same parent."""
    from triton.experimental.gluon.language import SliceLayout

    key = (int(dim), id(parent))
    known = _SLICES.get(key)
    if known is None or known[0] is not parent:
        known = _SLICES[key] = (parent, SliceLayout(int(dim), parent))
    return known[1]


def kind_of(value: Any) -> Kind | None:
    """Find the kind of a Triton type, or None."""
    from triton.language import dtype

    if isinstance(value, dtype) and value.name in BY_NAME:
        return BY_NAME[value.name]
    return None


def meaning(value: Any, jit: Callable[[Any], Any]) -> tuple[bool, Any]:
    """Find what a global of a kernel means.

    Args:
        value: the object.
        jit: makes a callable of another jit function.

    Returns:
        Whether it has a meaning, and the meaning.
    """
    from triton.language import constexpr
    from triton.runtime.jit import JITFunction

    meanings, _ = table()
    known = meanings.get(id(value))
    if known is not None:
        return True, known
    if isinstance(value, constexpr):
        return True, value.value
    kind = kind_of(value)
    if kind is not None:
        return True, kind
    if isinstance(value, JITFunction):
        if value.fn.__module__.startswith("triton."):
            return False, None
        return True, jit(value)
    if type(value).__name__ == "ConstexprFunction":
        return True, value.fn
    if isinstance(value, type):
        from triton.experimental.gluon.language import SliceLayout

        if value is SliceLayout:
            return True, slice_layout
        return issubclass(value, layouts()), value
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return True, value
    if getattr(value, "__name__", "") == "with_identity_for":
        return True, value
    return False, None
