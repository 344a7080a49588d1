"""Ahead-of-time compilation for gfx950: what the table says, and what it fails on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import compile as compilation
from harness.assembly import Resources, read_resources
from harness.backends.gfx950 import LDS_BYTES
from harness.case import Case

pytest.importorskip("triton", reason="compiling needs triton, which is not installed here")

from harness.backends.launches import Compiled, Launch, compile_launch, needed_hints, recorded
from tests import compile_kernels

ASSEMBLY = """
; codeLenInByte = 1234
  - .agpr_count:     6
    .private_segment_fixed_size: 16
    .sgpr_count:     70
    .sgpr_spill_count: 2
    .vgpr_count:     262
    .vgpr_spill_count: 1
"""
FEW = Resources(vgpr=10, agpr=0, sgpr=10, vgpr_spills=0, sgpr_spills=0, scratch=0, lds=1024, code=100)


def row(resources: Resources | None = FEW, *, backend: str = "b@new", error: str | None = None) -> compilation.Row:
    """Make a row of a table."""
    compiled = Compiled(kernel="k", resources=resources, error=error, divisible=(), within_2gib=(), seconds=0.0)
    return compilation.Row(backend=backend, case="v1:H=1:N=1:end", compiled=compiled)


def changed(**numbers: int) -> Resources:
    """Make resources that differ from few."""
    return Resources(**{**FEW.as_numbers(), **numbers})


def baseline_of(*rows: compilation.Row) -> dict[str, dict[str, object]]:
    """Store rows as an earlier table."""
    return {one.key: one.as_json() for one in rows}


def test_resources_are_read_from_the_compilers_metadata() -> None:
    found = read_resources(ASSEMBLY, lds=4096)
    assert found == Resources(vgpr=262, agpr=6, sgpr=70, vgpr_spills=1, sgpr_spills=2, scratch=16, lds=4096, code=1234)
    assert found.spills == 3


def test_a_number_that_is_not_stated_is_an_error() -> None:
    with pytest.raises(ValueError, match="states no agpr"):
        read_resources(ASSEMBLY.replace(".agpr_count", ".other"), lds=0)


def test_a_sound_table_has_no_faults() -> None:
    assert compilation.find_faults([row()], baseline_of(row(backend="b@old"))) == []


@pytest.mark.parametrize("number", ["vgpr_spills", "sgpr_spills", "scratch"])
def test_new_spills_are_faults(number: str) -> None:
    faults = compilation.find_faults([row(changed(**{number: 4}))], baseline_of(row(backend="b@old")))
    assert len(faults) == 1 and faults[0].startswith("new spills: b v1:H=1:N=1:end k")


def test_old_spills_are_not_new() -> None:
    spilling = row(changed(vgpr_spills=4))
    assert compilation.find_faults([spilling], baseline_of(spilling)) == []
    assert compilation.find_faults([spilling], {}) == []


def test_too_much_lds_is_a_fault_without_a_baseline() -> None:
    assert compilation.find_faults([row(changed(lds=LDS_BYTES + 1))], {})[0].startswith("LDS: ")
    assert compilation.find_faults([row(changed(lds=LDS_BYTES))], {}) == []


def test_a_compile_error_is_a_fault_with_the_compilers_words() -> None:
    assert compilation.find_faults([row(None, error="k.py:7: no")], {}) == ["does not compile: b v1:H=1:N=1:end k: k.py:7: no"]


def test_a_table_is_read_back_as_a_baseline(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"rows": [row().as_json()]}))
    assert compilation.read_baseline(path)[row().key]["resources"] == FEW.as_numbers()


def test_another_file_is_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a table of compiled kernels"):
        compilation.read_baseline(path)


def test_the_shipped_variants_are_cases(tmp_path: Path) -> None:
    cases = compilation.read_variants(compilation.VARIANTS, "aiter-gluon@x")
    assert len(cases) > 30 and all(isinstance(case, Case) for case in cases)
    with pytest.raises(ValueError, match="names no variant of 'nobody'"):
        compilation.read_variants(compilation.VARIANTS, "nobody")


def launched(kernel: object, offset: int = 0, size: int = 64) -> Launch:
    """Record one launch of a kernel of the tests."""
    import torch

    data = torch.zeros(4096)
    with recorded() as launches:
        kernel[(1,)](data[offset:], data, 64, SIZE=size)  # type: ignore[index]
    assert len(launches) == 1 and float(data.sum()) == 0, "recorded, not run"
    return launches[0]


def test_a_launch_is_compiled_for_gfx950_without_a_gpu() -> None:
    compiled = compile_launch(launched(compile_kernels.copy))
    assert compiled.error is None and compiled.resources is not None and compiled.resources.vgpr > 0
    assert compiled.divisible == ("source", "target", "stride") and compiled.within_2gib == ("source", "target")


def test_hints_are_those_of_the_call() -> None:
    assert "source" not in compile_launch(launched(compile_kernels.copy, offset=1)).divisible


def test_hints_that_are_not_needed_are_not_said_to_be() -> None:
    launch = launched(compile_kernels.copy)
    assert needed_hints(launch, compile_launch(launch)) == ()


def test_a_compile_error_names_the_kernels_line() -> None:
    compiled = compile_launch(launched(compile_kernels.wrong))
    lines = Path(compile_kernels.__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if "no_such" in line)
    assert compiled.resources is None and f"compile_kernels.py:{number}: " in str(compiled.error)


def test_launching_is_itself_again_afterwards() -> None:
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    with pytest.raises(RuntimeError, match="stop"), recorded():
        raise RuntimeError("stop")
    assert JITFunction.run is before
