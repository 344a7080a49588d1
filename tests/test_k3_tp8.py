"""docs/k3-tp8.md is what it says it prints.

1. A block of commands is run line by line, as a shell would: a command, ``| head -1``, ``|| echo "exit status $?"``. The text
   block after it is what they print. Every block of the document is run, or counted as not run with the reason.
2. Commands are run in this process; one line is run in a shell too, and prints the same.

Source: docs/k3-tp8.md.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.backends.aiter_gluon import AiterGluon
from harness.backends.aiter_source import SOURCE_VARIABLE, named_sources
from harness.cli import main
from harness.routes.contracts import GLUON_RELEASES

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r'(?P<command>mla-gate .*?)(?P<head> \| head -1)?(?P<status> \|\| echo "exit status \$\?")?')
TEXT = (ROOT / "docs" / "k3-tp8.md").read_text(encoding="utf-8")
#: The heading of the part that needs a checkout of AITER.
CHECKOUT = "\n## With a checkout of AITER\n"


def pairs(text: str) -> list[tuple[str, str, str]]:
    """List the blocks that print something: language, code, and the text block after it."""
    blocks = BLOCK.findall(text)
    assert [language == "text" for language, _ in blocks] == [False, True] * (len(blocks) // 2), "code, then what it prints"
    return [(*code, printed[1]) for code, printed in zip(blocks[::2], blocks[1::2], strict=True)]


def printed(language: str, code: str) -> str:
    """Run a block and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if language == "python":
            exec(compile(code, "docs/k3-tp8.md", "exec"), {})
        for line in code.splitlines() if language == "sh" else ():
            out.write(_run(line))
    return out.getvalue()


def _run(line: str) -> str:
    found = LINE.fullmatch(line)
    assert found, f"not a line that is understood: {line}"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(shlex.split(found["command"])[1:])
    text = out.getvalue()
    if found["head"]:
        text = "".join(text.splitlines(keepends=True)[:1])
    return f"{text}exit status {status}\n" if status and found["status"] else text


@pytest.fixture(autouse=True)
def _same_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where no GPU is seen the command lets Triton be imported for its interpreter; this process may have imported it already.
    monkeypatch.setattr("harness.cli._sees_gpu", lambda: True)


BEFORE, _, AFTER = TEXT.partition(CHECKOUT)


@pytest.mark.parametrize(("language", "code", "expected"), pairs(BEFORE))
def test_a_block_prints_what_stands_under_it(language: str, code: str, expected: str) -> None:
    assert printed(language, code) == expected


@pytest.mark.skipif(not os.environ.get(SOURCE_VARIABLE), reason=f"needs a checkout of AITER: name one in {SOURCE_VARIABLE}")
@pytest.mark.parametrize(("language", "code", "expected"), pairs(AFTER))
def test_a_block_that_needs_a_checkout_prints_what_stands_under_it(language: str, code: str, expected: str) -> None:
    pytest.importorskip("triton", reason="AITER's modules import triton, which is not installed here")
    contract = AiterGluon("aiter-gluon", named_sources()[0]).contract
    if contract != GLUON_RELEASES["0.1.20"]:
        pytest.skip(f"the document speaks of AITER from 0.1.20 on; {named_sources()[0].root} has another contract")
    assert printed(language, code) == expected


def test_the_story_is_told_to_its_end() -> None:
    everything = "".join(expected for _, _, expected in pairs(BEFORE))
    for said in ("refusal ", "assertion ", "wrong ", "KeyError ", "changed ", "FAIL refused", "FAIL crash", "FAIL mismatch"):
        assert said in everything, said
    last = pairs(BEFORE.partition("\n## After #51011")[2])[0][2]
    assert last.count("PASS: route:vllm-51011") == 4 and "FAIL" not in last and "exit status" not in last


def test_the_lines_mean_what_a_shell_makes_of_them(tmp_path: Path) -> None:
    command = tmp_path / "mla-gate"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m harness.cli "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    language, code, expected = pairs(BEFORE)[0]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (language, done.stdout) == ("sh", expected), done.stderr


def test_a_block_that_prints_otherwise_is_noticed() -> None:
    language, code, expected = pairs(BEFORE)[0]
    assert printed(language, code.replace("--heads 12", "--heads 8")) != expected
    with pytest.raises(AssertionError, match="not a line that is understood"):
        printed("sh", "rm -r /tmp/x")
