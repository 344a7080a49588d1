"""Operations element by element: choices, extremes, elementary functions.

1. Elementary functions are computed in fp64 and rounded once: hardware's last bit is not modelled, see the README.
2. maximum and minimum return the other operand where one is NaN, as Triton's do unless told otherwise.

Source: ``triton.language.core``, ``math`` and ``standard`` of Triton 3.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.emulation.arithmetic import operands, rounded
from harness.emulation.findings import fail
from harness.emulation.formats import BF16, BOOL, FP16, FP32, FP64, INT32, UINT32, Array
from harness.emulation.memory import Pointer
from harness.emulation.promotion import convert
from harness.emulation.tensor import Tensor, tensor


def where(condition: Any, x: Any, y: Any) -> Any:
    """Choose element by element."""
    flag = tensor(condition)
    chosen = flag.cast(BOOL) if flag.kind is not BOOL else flag
    if isinstance(x, Pointer) or isinstance(y, Pointer):
        if not (isinstance(x, Pointer) and isinstance(y, Pointer) and x.memory is y.memory):
            fail("unmodelled", "a choice between pointers into different allocations")
        return Pointer(x.memory, where(chosen, x.offset, y.offset), x.layout)
    a, b = operands(x, y)
    layout = chosen.layout or a.layout or b.layout
    if not (chosen.shape or a.shape or b.shape):
        return Tensor(a.kind, a.value if chosen.value else b.value, None, layout)
    span = None
    if not a.kind.is_float and a.kind is not BOOL:
        (low, high), (lower, higher) = a.bounds(), b.bounds()
        span = (min(low, lower), max(high, higher))
    one, two = (np.asarray(item.value, a.kind.register) for item in (a, b))
    return Tensor(a.kind, np.where(chosen.value, one, two), span, layout)


def _extreme(x: Any, y: Any, propagate_nan: Any, float_pair: tuple[Any, Any], integer: Any, pick: Any) -> Tensor:
    a, b = operands(x, y)
    layout = a.layout or b.layout
    if a.kind.is_float:
        choose = float_pair[1] if "ALL" in str(propagate_nan) else float_pair[0]
        return Tensor(a.kind, choose(a.value, b.value), None, layout)
    if not a.shape and not b.shape:
        return Tensor(a.kind, pick(a.value, b.value), None, layout)
    (low, high), (lower, higher) = a.bounds(), b.bounds()
    return Tensor(a.kind, integer(a.value, b.value), (pick(low, lower), pick(high, higher)), layout)


def maximum(x: Any, y: Any, propagate_nan: Any = None) -> Tensor:
    """Take the greater, element by element."""
    return _extreme(x, y, propagate_nan, (np.fmax, np.maximum), np.maximum, max)


def minimum(x: Any, y: Any, propagate_nan: Any = None) -> Tensor:
    """Take the lesser, element by element."""
    return _extreme(x, y, propagate_nan, (np.fmin, np.minimum), np.minimum, min)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = None) -> Tensor:
    """Limit to a range; a NaN becomes the lower limit unless it is to be propagated."""
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def cast(input: Any, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Any:
    """Convert to another type."""
    if isinstance(input, Pointer):
        return input.to(dtype)
    return tensor(input).to(dtype, fp_downcast_rounding, bitcast)


def cdiv(x: Any, div: Any) -> Any:
    """Divide, rounding up, as Triton's own function does."""
    return (x + (div - 1)) // div


#: 1 / ln 2, a constant of the kernel's own fp32.
_LOG2E = 1.4426950408889634


def _elementary(function: Callable[[Array], Array], name: str, narrow: bool = False) -> Callable[..., Tensor]:
    def apply(x: Any, *_: Any, **__: Any) -> Tensor:
        source = tensor(x)
        kind = source.kind
        if kind not in (FP32, FP64) and not (narrow and kind in (BF16, FP16)):
            fail("type-error", f"{name} of {kind}: Triton takes fp32 and fp64")
        value = function(np.asarray(source.value, np.float64))
        if kind is FP64:
            return Tensor(kind, value if source.shape else np.float64(value), None, source.layout)
        return rounded(kind, value.astype(np.float32) if source.shape else np.float32(value), source.layout)

    apply.__name__ = name
    return apply


exp2 = _elementary(np.exp2, "exp2")
_exp = _elementary(np.exp, "exp")
log2 = _elementary(np.log2, "log2")
log = _elementary(np.log, "log")
sqrt = _elementary(np.sqrt, "sqrt")
sqrt_rn = _elementary(np.sqrt, "sqrt_rn")
rsqrt = _elementary(lambda x: 1 / np.sqrt(x), "rsqrt")
sin = _elementary(np.sin, "sin")
cos = _elementary(np.cos, "cos")
floor = _elementary(np.floor, "floor", narrow=True)
ceil = _elementary(np.ceil, "ceil", narrow=True)
sigmoid = _elementary(lambda x: 1 / (1 + np.exp(-x)), "sigmoid")


def exp(x: Any, *rest: Any, **named: Any) -> Tensor:
    """Raise e to it: of fp32, as the AMD backend does, two to its product with 1 / ln 2, which is rounded."""
    source = tensor(x)
    return exp2(source * _LOG2E) if source.kind is FP32 else _exp(source, *rest, **named)


def absolute(x: Any) -> Tensor:
    """Take the size of each element."""
    source = tensor(x)
    if not source.kind.is_float and source.bounds()[0] == source.kind.lowest and source.kind.family == "int":
        fail("int-overflow", f"the absolute value of {source.kind.lowest} leaves {source.kind}", source.kind.lowest)
    value = abs(source.value) if not source.shape else np.abs(source.value)
    return Tensor(source.kind, value, None, source.layout)


def fma(x: Any, y: Any, z: Any) -> Tensor:
    """Multiply and add with one rounding."""
    a, b = operands(x, y)
    a, c = operands(a, z)
    b = b.cast(a.kind)
    if a.kind is not FP32:
        fail("unmodelled", f"fma of {a.kind}")
    wide = (np.asarray(item.value, np.longdouble) for item in (a, b, c))
    one, two, three = wide
    value = (one * two + three).astype(np.float32)
    return Tensor(FP32, value if value.ndim else value[()], None, a.layout)


def fdiv(x: Any, y: Any, *_: Any, **__: Any) -> Any:
    """Divide floats."""
    return tensor(x) / y


def umulhi(x: Any, y: Any) -> Tensor:
    """Take the high half of an unsigned product of 32-bit integers."""
    a, b = operands(x, y)
    if a.kind not in (INT32, UINT32):
        fail("unmodelled", f"umulhi of {a.kind}")
    one, two = (np.asarray(convert(item.value, a.kind, UINT32), np.uint64) for item in (a, b))
    high = ((one * two) >> np.uint64(32)).astype(np.int64)
    return Tensor(a.kind, convert(high if high.ndim else int(high), UINT32, a.kind), None, a.layout)
