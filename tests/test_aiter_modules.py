"""Versions of AITER stand side by side, leave nothing behind, and say what keeps them from being used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")

from harness.backends.aiter_modules import AiterModules, SourceChanged
from harness.backends.aiter_source import parse_source
from harness.backends.protocol import NotInstalled
from tests.aiter_checkout import make_checkout


def modules_of(root: Path, files: dict[str, str]) -> AiterModules:
    """Make a checkout and prepare its modules."""
    return AiterModules(parse_source(str(make_checkout(root, files))), answered=True)


def test_two_versions_keep_their_own_modules(tmp_path: Path) -> None:
    one, two = (
        modules_of(
            tmp_path / name,
            {"aiter/ops/k.py": "import aiter.ops.x\nWHO = aiter.ops.x.WHO", "aiter/ops/x.py": f"WHO = '{name}'"},
        )
        for name in ("one", "two")
    )
    assert (one.load("aiter.ops.k").WHO, two.load("aiter.ops.k").WHO) == ("one", "two")
    assert one.load("aiter.ops.k").WHO == "one"


def test_a_lazy_import_finds_its_own_version(tmp_path: Path) -> None:
    text = "def who():\n    from aiter.ops import x\n    return x.WHO"
    one, two = (
        modules_of(tmp_path / name, {"aiter/ops/k.py": text, "aiter/ops/x.py": f"WHO = '{name}'"}) for name in ("one", "two")
    )
    functions = one.load("aiter.ops.k").who, two.load("aiter.ops.k").who
    with one.entered():
        assert functions[0]() == "one"
    with two.entered():
        assert functions[1]() == "two"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    from triton.runtime import driver

    text = """
        import os, sys
        os.environ["AITER_LEFT"] = "1"
        sys.meta_path.insert(0, type("Finder", (), {"find_spec": staticmethod(lambda *a: None)})())
    """
    before = dict(os.environ), list(sys.meta_path), sys.path[:], driver._active, sys.dont_write_bytecode
    modules_of(tmp_path, {"aiter/ops/k.py": text}).load("aiter.ops.k")
    assert (dict(os.environ), list(sys.meta_path), sys.path[:], driver._active, sys.dont_write_bytecode) == before
    assert not [name for name in sys.modules if name.split(".")[0] == "aiter"]
    assert not list(tmp_path.rglob("__pycache__"))


def test_what_stood_in_the_process_before_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type(sys)("aiter")
    monkeypatch.setitem(sys.modules, "aiter", mine)
    modules_of(tmp_path, {"aiter/ops/k.py": ""}).load("aiter.ops.k")
    assert sys.modules["aiter"] is mine


def test_the_architecture_is_answered_inside_only(tmp_path: Path) -> None:
    text = "import triton\nARCH = triton.runtime.driver.active.get_current_target().arch"
    assert modules_of(tmp_path, {"aiter/ops/k.py": text}).load("aiter.ops.k").ARCH == "gfx950"


def test_the_chip_is_answered_however_it_is_asked(tmp_path: Path) -> None:
    import torch

    text = """
        import torch
        from aiter.jit.utils.chip_info import get_cu_num
        UNITS = get_cu_num(), torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    """
    before = torch.cuda.current_device, torch.cuda.get_device_properties
    files = {"aiter/ops/k.py": text, "aiter/jit/utils/other.py": ""}
    assert modules_of(tmp_path, files).load("aiter.ops.k").UNITS == (256, 256)
    assert (torch.cuda.current_device, torch.cuda.get_device_properties) == before


def test_a_version_without_the_triton_only_switch_does_not_run_its_package(tmp_path: Path) -> None:
    files = {"aiter/__init__.py": "raise RuntimeError('ROCm version file not found')", "aiter/ops/k.py": "X = 1"}
    assert modules_of(tmp_path, files).load("aiter.ops.k").X == 1


def test_a_missing_kernel_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"has no aiter\.ops\.k: .*k\.py does not exist"):
        modules_of(tmp_path, {}).load("aiter.ops.k")


@pytest.mark.parametrize(
    "text",
    ["raise RuntimeError('aiter gluon kernels require triton>=9.0.0')", "from triton.language import no_such_name"],
)
def test_a_kernel_that_needs_another_triton_says_so(tmp_path: Path, text: str) -> None:
    with pytest.raises(NotInstalled, match=r"needs another Triton than the installed 3\."):
        modules_of(tmp_path, {"aiter/ops/k.py": text}).load("aiter.ops.k")


def test_another_fault_of_a_module_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match=r"aiter\.ops\.k cannot be imported \(ZeroDivisionError: division by zero\)"):
        modules_of(tmp_path, {"aiter/ops/k.py": "1 / 0"}).load("aiter.ops.k")


def test_a_failed_module_leaves_the_others_usable(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, {"aiter/ops/bad.py": "1 / 0", "aiter/ops/good.py": "X = 1"})
    with pytest.raises(NotInstalled):
        modules.load("aiter.ops.bad")
    assert modules.load("aiter.ops.good").X == 1


def test_a_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, {"aiter/ops/k.py": "X = 1"})
    modules.load("aiter.ops.k")
    modules.check_unchanged()
    (tmp_path / "aiter/ops/k.py").write_text("X = 22")
    with pytest.raises(SourceChanged, match=r"changed on disk during the run: .*k\.py"):
        modules.check_unchanged()


def test_a_file_that_vanishes_is_a_change(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, {"aiter/ops/k.py": "X = 1"})
    modules.load("aiter.ops.k")
    (tmp_path / "aiter/ops/k.py").unlink()
    with pytest.raises(SourceChanged, match=r"k\.py"):
        modules.check_unchanged()


def test_a_file_that_is_only_touched_is_unchanged(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, {"aiter/ops/k.py": "X = 1"})
    modules.load("aiter.ops.k")
    os.utime(tmp_path / "aiter/ops/k.py", ns=(1, 1))
    modules.check_unchanged()
