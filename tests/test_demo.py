"""The demonstration comes out as it is told, in under a minute of processor time, and says so where it does not."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import demo
from harness.backends import registry
from harness.backends.protocol import NotInstalled
from harness.cli import CASES
from harness.ledger import read_all
from harness.plan import PlanError
from harness.regimes import load

CASE = "v1:H=1:S=1:N=129:end"


def test_a_newcomer_sees_a_broken_kernel_found_shrunk_explained_and_replayed(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "PYTHONPATH": str(CASES.parent), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "harness.cli", "demo", "--device", "cpu", "--folder", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=300, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    told = done.stdout
    titles = ["0. Break", "1. Find", "2. Shrink", "3. Explain", "4. Replay", "Next"]
    assert re.findall(r"^(\d\. \w+|Next)$", told, re.MULTILINE) == titles
    found, shrunk, explained, replayed = (told.partition(one)[2].partition(two)[0] for one, two in pairwise(titles[1:]))
    assert re.search(r"Case \d+ came out wrong:\n\n +v1:.*:end\n", found)
    assert CASE in shrunk and "It passes with lengths 128 instead of 129. What the two cases differ in" in shrunk
    first = re.findall(r"what: .*", explained)[0]
    assert "splits are averaged (merge-without-lse): reproduces it within rounding" in first
    assert re.search(rf"replay {CASE} --backend 'triton-splitkv!merge-without-lse' --device cpu\n +FAIL mismatch\n", replayed)
    assert re.search(rf"replay {CASE} --backend triton-splitkv --device cpu\n +PASS\n", replayed)
    (folder,) = (tmp_path / "demo").iterdir()
    assert {path.suffix for path in (folder / "repros").iterdir()} == {".json", ".py"}
    assert "splits are averaged" in (folder / "report.html").read_text()
    assert all(ledger.complete for ledger in read_all([folder]))
    spent = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    assert spent < 60


def test_a_demonstration_that_does_not_come_out_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "KERNEL", ("torch-sdpa", "torch-sdpa", "sdpa-fp32"))
    monkeypatch.setattr(demo, "EXAMPLES", 2)
    assert demo.demo(SimpleNamespace(folder=tmp_path, device="cpu")) == 1
    assert "nothing was found in 2 cases, and something should have been" in capsys.readouterr().out


def test_what_cannot_be_planned_is_said_before_the_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match="nosuch"):
        demo.demo(SimpleNamespace(device="nosuch", folder=tmp_path))
    assert capsys.readouterr().out == ""


def test_without_triton_the_model_makes_the_same_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> object:
        raise NotInstalled(name)

    monkeypatch.setattr(registry, "make", make)
    broken, right, regime = demo._choose()
    monkeypatch.undo()
    covered = load().named(regime)
    assert all(covered.covers(registry.make(name).name) for name in (broken, right))
