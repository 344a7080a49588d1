"""The README does what it says.

1. Every command block is run as it stands, line by line. Only nox is told to stay in this environment, and what a whole
   gate or the whole of these tests would take is asked in small.
2. The verdict table has the columns that a run prints and a row for every default backend and regime.
3. The failure panel is that of the guide, which tests/test_guide.py holds to a run.

Source: README.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.plan import make_plan
from harness.regimes import load

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCK.findall(README) if language == "sh" for line in text.splitlines()]

#: What stands in for nox: it stays in this environment, and asks in small what would take minutes.
NOX = """#!{python}
import subprocess, sys
small = {{"gate": ["--backend", "torch-sdpa", "cases/test_pinned.py", "-k", "ragged"],
         "tests": ["tests/test_case.py", "-n", "0", "-q"]}}
arguments = sys.argv[1:]
session = arguments[arguments.index("-s") + 1]
if session in small and "--" not in arguments:
    arguments += ["--", *small[session]]
sys.exit(subprocess.call([sys.executable, "-m", "nox", "--no-venv", *arguments]))
"""


def run(command: str, shims: Path) -> str:
    """Run a line of the README in a shell and return what it printed."""
    nox, python = shims / "nox", shims / "python"
    nox.write_text(NOX.format(python=sys.executable), encoding="utf-8")
    nox.chmod(0o755)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{shims}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_works(command: str, tmp_path: Path) -> None:
    printed = run(command, tmp_path)
    if "nox -s gate" in command:
        (heads,) = [line for line in printed.splitlines() if line.startswith("backend ")]
        assert heads.split() == table()[0].split(), "the README's table has other columns than a run prints"


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"invalid choice"):
        run("nox -s mla-gate -- sow v1:H=12:end", tmp_path)


def table() -> list[str]:
    """Give the lines of the README's verdict table."""
    text, _ = texts()
    return text.splitlines()


def texts() -> list[str]:
    """Give what the README says was printed: the table and the panel."""
    return [text for language, text in BLOCK.findall(README) if language == "text"]


def test_the_failure_panel_is_that_of_the_guide() -> None:
    guide = (ROOT / "docs" / "my-kernel-failed.md").read_text(encoding="utf-8")
    _, panel = texts()
    assert [text for language, text in BLOCK.findall(guide) if language == "text"] == [panel]


def test_the_picture_is_there_and_small() -> None:
    path = ROOT / "docs" / "report.png"
    assert f"(docs/{path.name})" in README and path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 300_000


def test_the_table_has_a_row_for_every_default_backend_and_regime() -> None:
    told = {tuple(line.split()[:2]) for line in table()[2:] if re.search(r"  PASS(, \d+ not run)?$", line)}
    plan = make_plan(load(), device="cpu")
    assert {(pair.backend.name, pair.regime.name) for pair in plan.pairs} == {row for row in told if row[1] != "(contract)"}


def test_the_table_shows_a_run_that_passed() -> None:
    assert re.fullmatch(r"mla-gate: PASS, \d+ cases executed", table()[-1])


def test_every_block_is_run_or_checked() -> None:
    assert {language for language, _ in BLOCK.findall(README)} == {"sh", "text"}


def test_the_readme_fits_on_a_screen() -> None:
    # What was printed is looked at, not read.
    assert README.count("\n") - sum(text.count("\n") for text in texts()) <= 50
