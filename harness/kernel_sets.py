"""Few sets of the fields that a backend compiles kernels for, so that a search on a GPU does not compile for every case.

1. Every value of every such field stands in some set, as far as there are sets; the plainest ones together in the first.
2. The seed alone chooses which values meet.

Source: measured on an H200, another case takes milliseconds and another kernel seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from harness.axes import Axis


def kernel_sets(axes: Sequence[Axis], compiled: frozenset[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Make sets of values of fields, the plainest first.

    Args:
        axes: what may be drawn, weighted by repetition.
        compiled: the fields; an axis that has one of them is in with all of its own.
        count: sets.
        seed: chooses which values meet.
    """
    draw = random.Random(seed)
    sets: list[dict[str, Any]] = [{} for _ in range(count)]
    for axis in axes:
        if not compiled.intersection(axis.fields):
            continue
        # Each value once as far as there are sets, the rest by its weight.
        strange = [value for value in dict.fromkeys(axis.values) if value != axis.values[0]]
        draw.shuffle(strange)
        rest = strange[: count - 1]
        rest += [draw.choice(axis.values) for _ in range(count - 1 - len(rest))]
        draw.shuffle(rest)
        for made, value in zip(sets, (axis.values[0], *rest), strict=True):
            made.update(zip(axis.fields, value, strict=True))
    return sets
