"""What Python's own words mean in a kernel: loops, branches, and, or, not, and constants that become tensors.

1. A constant stays a Python number until a loop or a run-time branch may change it; then it is a tensor of Triton's type.
2. A loop over ``range`` counts in int32 tensors (int64 where a bound is), one over ``static_range`` in constants.
3. ``and`` and ``or`` of constants short-circuit; of tensors both sides are computed.

Source: ``triton.compiler.code_generator`` of Triton 3.9 (``visit_For``, ``visit_BoolOp``, ``_find_carries``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from harness.emulation import elements
from harness.emulation.findings import fail
from harness.emulation.formats import BOOL, INT32, Kind
from harness.emulation.promotion import promote
from harness.emulation.tensor import Tensor, tensor


def true(value: Any) -> bool:
    """Decide a branch."""
    return bool(value)


def is_tensor(value: Any) -> bool:
    """Tell a run-time value from a constant."""
    return isinstance(value, Tensor)


def carry(value: Any) -> Any:
    """Make a tensor of a constant that may change at run time."""
    if isinstance(value, (bool, int, float)):
        return tensor(value)
    return value


def constant(value: Any) -> Any:
    """Take a value that is annotated as constexpr."""
    if isinstance(value, Tensor):
        fail("type-error", f"{value!r} is known at run time only: it cannot be a constexpr")
    return value


def both(value: Any, rest: Callable[[], Any]) -> Any:
    """Mean ``and``."""
    if not isinstance(value, Tensor):
        return rest() if value else value
    other = rest()
    if not value.shape and not isinstance(other, Tensor):
        return value.cast(BOOL) & bool(other)
    return value.cast(BOOL) & (other.cast(BOOL) if isinstance(other, Tensor) else bool(other))


def either(value: Any, rest: Callable[[], Any]) -> Any:
    """Mean ``or``."""
    if not isinstance(value, Tensor):
        return value if value else rest()
    other = rest()
    return value.cast(BOOL) | (other.cast(BOOL) if isinstance(other, Tensor) else bool(other))


def negated(value: Any) -> Any:
    """Mean ``not``."""
    return ~value.cast(BOOL) if isinstance(value, Tensor) else not value


def counting(*bounds: Any, **hints: Any) -> Iterator[Tensor]:
    """Mean ``range``; hints to the compiler are ignored."""
    first, last, step = _bounds(bounds)
    kind: Kind = INT32
    for bound in (first, last, step):
        kind = promote(kind, tensor(bound).kind)
    if kind.is_float:
        fail("type-error", "a loop needs integer bounds")
    stride = int(step)
    if stride == 0 or (stride < 0 and isinstance(step, Tensor)):
        fail("type-error", f"a loop needs a positive step, not {stride}", stride)
    for value in range(int(first), int(last), stride):
        yield Tensor(kind, value)


def unrolled(*bounds: Any, **hints: Any) -> Iterator[int]:
    """Mean ``static_range``."""
    first, last, step = _bounds(bounds)
    if any(isinstance(bound, Tensor) for bound in (first, last, step)):
        fail("type-error", "static_range needs constants")
    return iter(range(first, last, step))


def _bounds(bounds: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    if len(bounds) == 1:
        return 0, bounds[0], 1
    return bounds[0], bounds[1], bounds[2] if len(bounds) > 2 else 1


def asserted(condition: Any, message: Any) -> None:
    """Mean ``assert``."""
    if not (np.all(condition.value) if isinstance(condition, Tensor) else condition):
        fail("assertion", f"assert does not hold{': ' + str(message) if message else ''}")


def smallest(*values: Any) -> Any:
    """Mean Python's ``min``."""
    if not any(isinstance(value, Tensor) for value in values):
        return min(*values)
    made = values[0]
    for value in values[1:]:
        made = elements.minimum(made, value)
    return made


def greatest(*values: Any) -> Any:
    """Mean Python's ``max``."""
    if not any(isinstance(value, Tensor) for value in values):
        return max(*values)
    made = values[0]
    for value in values[1:]:
        made = elements.maximum(made, value)
    return made


def value_of(constant: Any) -> Any:
    """Mean ``.value`` of a constant, which is itself here."""
    if isinstance(constant, Tensor):
        fail("type-error", f"{constant!r} is known at run time only: it has no .value")
    return constant if constant is None or isinstance(constant, (bool, int, float, str)) else constant.value


def refuse(name: str, why: str) -> Any:
    """Stop the kernel at a name or a statement without a meaning."""
    fail("unknown-operation", f"{name}: {why}", name)


#: Python's names that mean something else in a kernel.
PYTHON: dict[str, Any] = {"min": smallest, "max": greatest}
#: What rewritten source refers to.
BINDINGS: dict[str, Any] = {
    "__true": true, "__is_tensor": is_tensor, "__carry": carry, "__constant": constant, "__and": both, "__or": either,
    "__not": negated, "__range": counting, "__static_range": unrolled, "__assert": asserted,
    "__refuse": refuse, "__value": value_of, "__NameError": NameError,
}  # fmt: skip
