"""Production shapes on every backend whose contract they lie in, as far as they fit the device and the profile."""

from __future__ import annotations

import pytest

from cases.served import shapes
from harness.backends.protocol import Backend
from harness.gate import Gate
from harness.shapes import ShapeRow

#: Failing shapes of a row that are explained; of more, the names are given.
EXPLAINED = 2


def test_backend_agrees_on_the_production_shapes(mla_gate: Gate, backend: Backend, row: ShapeRow) -> None:
    said, names = [], []
    for shape in shapes(mla_gate, row, backend):
        result = mla_gate.ask(shape.case, backend, "shapes")
        if result.verdict.kind in ("FAIL", "ERROR") and not mla_gate.excuses(result):
            names.append(shape.name)
            if len(said) < EXPLAINED:
                said.append(f"{shape.name}\n{mla_gate.failed(result, backend)}")
    if said:
        head = f"{row.name}: {row.why}\n{row.source}\nfailing: {', '.join(names)}"
        pytest.fail("\n\n".join([head, *said]), pytrace=False)
