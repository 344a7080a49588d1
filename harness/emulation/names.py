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

from harness.emulation import access, cdna4, creation, elements, reductions, shapes
from harness.emulation.formats import BY_NAME, Kind

_SHARED: Mapping[str, Any] = {
    "program_id": creation.program_id, "num_programs": creation.num_programs,
    "arange": creation.arange, "full": creation.full, "zeros": creation.zeros,
    "full_like": creation.full_like, "zeros_like": creation.zeros_like, "to_tensor": creation.to_tensor,
    "where": elements.where, "maximum": elements.maximum, "minimum": elements.minimum, "clamp": elements.clamp,
    "cast": elements.cast, "cdiv": elements.cdiv,
    "exp": elements.exp, "exp2": elements.exp2, "log": elements.log, "log2": elements.log2,
    "sqrt": elements.sqrt, "sqrt_rn": elements.sqrt_rn, "rsqrt": elements.rsqrt, "sin": elements.sin,
    "cos": elements.cos, "floor": elements.floor, "ceil": elements.ceil, "abs": elements.absolute,
    "fma": elements.fma, "fdiv": elements.fdiv, "div_rn": elements.fdiv, "umulhi": elements.umulhi,
    "sigmoid": elements.sigmoid,
    "expand_dims": shapes.expand_dims, "reshape": shapes.reshape, "permute": shapes.permute,
    "trans": shapes.trans, "ravel": shapes.ravel, "broadcast_to": shapes.broadcast_to,
    "broadcast": shapes.broadcast_pair, "join": shapes.join, "split": shapes.split,
    "gather": shapes.gather,
    "max": reductions.reduce_max, "min": reductions.reduce_min, "sum": reductions.reduce_sum,
    "argmax": reductions.argmax, "argmin": reductions.argmin, "xor_sum": reductions.xor_sum,
    "reduce_or": reductions.reduce_or, "cumsum": reductions.cumsum,
    "load": access.load, "store": access.store, "atomic_add": access.atomic_add,
    "atomic_max": access.atomic_max, "atomic_min": access.atomic_min, "atomic_xchg": access.atomic_xchg,
    "static_assert": creation.static_assert, "device_assert": creation.device_assert, "assume": creation.assume,
    "static_print": creation.nothing, "device_print": creation.device_print,
    "multiple_of": creation.same, "max_contiguous": creation.same, "max_constancy": creation.same,
    "debug_barrier": creation.nothing, "barrier": creation.nothing, "thread_barrier": creation.nothing,
    "dot": reductions.dot,
}  # fmt: skip
_GLUON: Mapping[str, Any] = {
    "convert_layout": shapes.convert_layout, "set_auto_layout": shapes.convert_layout,
    "allocate_shared_memory": access.allocate_shared_memory, "num_warps": creation.num_warps,
    "dot_fma": reductions.dot_fma,
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
    f"{_GL}.amd.hint": ({"sched_barrier": creation.nothing},),
}
#: Python's own names that Triton lets a kernel use, and what they mean there.
BUILTINS: Mapping[str, Any] = {
    "range": range, "float": float, "int": int, "bool": bool, "len": len, "min": min, "max": max, "abs": elements.absolute,
    "print": creation.device_print, "isinstance": isinstance, "hasattr": hasattr, "getattr": getattr,
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


def forget() -> None:
    """Forget the slice layouts of earlier launches: their parents are made anew in each."""
    _SLICES.clear()


def kind_of(value: Any) -> Kind | None:
    """Find the kind of a Triton type, or None."""
    from triton.language import dtype

    if isinstance(value, dtype) and value.name in BY_NAME:
        return BY_NAME[value.name]
    return None


@cache
def _compiled(function: Any) -> Any:
    from triton.runtime.jit import JITFunction

    return JITFunction(function)


def as_compiled(value: Any) -> Any:
    """Take a kernel as a compiler would get it, though Triton was imported for its interpreter; all else as it is."""
    from triton.runtime.interpreter import InterpretedFunction

    return _compiled(value.fn) if isinstance(value, InterpretedFunction) else value


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
    value = as_compiled(value)
    if isinstance(value, constexpr):
        return True, value.value
    if value is constexpr:
        return True, creation.same
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


def plain(value: Any, jit: Callable[[Any], Any]) -> Any:
    """Take the value of a constexpr: types become kinds, jit functions callables."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(plain(item, jit) for item in value)
    known, made = meaning(value, jit)
    return made if known else value
