"""Ahead-of-time compilation for gfx950: what the table says, and what it fails on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import compile as compilation
from harness.assembly import Resources, read_resources
from harness.backends.gfx950 import LDS_BYTES
from harness.case import Case

pytest.importorskip("triton", reason="compiling needs triton, which is not installed here")

from harness.backends.launches import Compiled, recorded

ROOT = Path(__file__).parent.parent

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


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Compile the kernels of the tests in a process of its own: here Triton's interpreter may be switched on."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_launch_is_compiled_for_gfx950_without_a_gpu(compiled: dict[str, Any]) -> None:
    assert compiled["errors"][0] is None and compiled["vgpr"] > 0 and not compiled["ran"]


def test_hints_are_those_of_the_call(compiled: dict[str, Any]) -> None:
    assert compiled["divisible"][:2] == [["source", "target", "stride"], ["target", "stride"]]
    assert compiled["within_2gib"] == ["source", "target"]


def test_hints_that_are_not_needed_are_not_said_to_be(compiled: dict[str, Any]) -> None:
    assert compiled["needs"] == []


def test_a_compile_error_names_the_kernels_line(compiled: dict[str, Any]) -> None:
    lines = (ROOT / "tests" / "compile_kernels.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if "no_such" in line)
    assert f"compile_kernels.py:{number}: " in compiled["errors"][2]


def test_launching_is_itself_again_afterwards() -> None:
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    with pytest.raises(RuntimeError, match="stop"), recorded():
        raise RuntimeError("stop")
    assert JITFunction.run is before
