"""The catalogue: every known mistake by name.

1. A name stands for one fault, here and as the backend ``fault:NAME``.
2. The order is that in which an explanation prefers one of two faults that explain an output equally well: gross and
   simple ones first.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.faults.kinds import addresses, calls, heads, scales, softmax, splits, tables, tails
from harness.faults.record import Fault

FAULTS: Mapping[str, Fault] = {
    fault.name: fault for module in (calls, scales, softmax, tails, tables, heads, addresses, splits) for fault in module.FAULTS
}
