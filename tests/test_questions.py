"""A question that cannot be asked is answered in one line, before anything runs.

1. The answer names what was asked and what there is; it carries no traceback.
2. The exit status is pytest's for a wrong use, 4.

Source: harness/plugin.py plans before anything is collected.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
INSTALLED = any(point.value == "harness.plugin" for point in entry_points(group="pytest11"))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (["--backend", "torch-sdap"], "no backend is called 'torch-sdap': did you mean torch-sdpa?"),
        (["--regime", "nowhere"], "no regime is called 'nowhere'"),
        (["--regimes-file", "missing.toml"], "missing.toml: cannot be read"),
        pytest.param(
            ["--device", "cuda"],
            "sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it can be asked for"),
        ),
    ],
)
def test_the_answer_is_one_line_and_status_4(question: list[str], answer: str) -> None:
    plugin = [] if INSTALLED else ["-p", "harness.plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "cases", *question],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert [line for line in said.splitlines() if answer in line and line.startswith("ERROR: ")], said
    assert "Traceback" not in said
    assert "_pytest" not in said
