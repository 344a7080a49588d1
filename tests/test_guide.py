"""The guide "my kernel failed the gate" does what it says: its panel is printed, its commands end as it tells.

1. Every line of a command block is run as it stands, one after the other; only nox is told to stay in this environment.
2. The panel is what the first command prints, but for where the failure was first seen, which an earlier run may know, and
   for what an explanation had no time to try.

Source: docs/my-kernel-failed.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.verdict import FAULTS, KINDS

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "my-kernel-failed.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCK.findall(GUIDE) if language == "sh" for line in text.splitlines()]
(PANEL,) = [text for language, text in BLOCK.findall(GUIDE) if language == "text"]
#: How each command ends: the kernel fails, fails again, passes, passes; the report is that of a run that failed.
STATUS = (1, 1, 0, 0, 1)

#: What stands in for nox: it stays in this environment.
NOX = '#!/bin/sh\nexec {python} -m nox --no-venv "$@"\n'


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    shims = tmp_path_factory.mktemp("shims")
    (shims / "nox").write_text(NOX.format(python=sys.executable), encoding="utf-8")
    (shims / "nox").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("GITHUB_STEP_SUMMARY", "TRITON_INTERPRET")}
    environment |= {"PATH": f"{shims}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = []
    for command in COMMANDS:
        asked = ["bash", "-ec", command]
        done.append(subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False))
    return done


def test_each_command_ends_as_the_guide_says(printed: list[subprocess.CompletedProcess[str]]) -> None:
    ends = [one.returncode for one in printed]
    assert tuple(ends) == STATUS, "\n".join(one.stdout + one.stderr for one in printed)
    for name in ("report.html", "run.html", "run.md", "run.xml"):
        assert (ROOT / ".mla-gate" / name).stat().st_size > 1000


def test_the_panel_is_what_the_first_command_prints(printed: list[subprocess.CompletedProcess[str]]) -> None:
    text = printed[0].stdout
    found = text[text.index("FAIL mismatch") : text.index("= mla-gate =")].splitlines()
    steady = [line for line in found if not re.match("  first seen as |         *[0-9]+ more were not tried|=", line)]
    expected = PANEL.splitlines()
    if len(steady) != len(found) and any("not tried" in line for line in found):  # a busy machine names fewer mistakes
        assert set(steady) <= set(expected) and any(line.startswith("  what:") for line in steady)
    else:
        assert steady == expected


def test_the_guide_tells_every_verdict_that_wants_doing_something_about() -> None:
    told = set(re.findall(r"`([a-zA-Z -]+)`", GUIDE))
    words = {word for text in told for word in text.replace("FAIL ", "").split(", ")}
    assert set(FAULTS) <= words
    assert set(KINDS) - {"PASS", "UNSUPPORTED", "FAIL"} <= words
