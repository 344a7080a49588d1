"""The documents keep their word: links lead somewhere, and what they say was printed is printed.

1. A relative link names a file of the repository, and a heading or anchor in it.
2. A Python block is run; the text block after it is what it prints, but for the last digit of a share.

Source: the documents themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

#: [words](target) outside code.
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

#: A fenced block: its language and its text.
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """List what a link may point at: each heading as it is turned into an anchor, and each explicit anchor."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def broken(document: Path, text: str) -> list[str]:
    """List the relative links of a document that lead nowhere."""
    found = []
    for target in LINK.findall(BLOCK.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            found.append(target)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert broken(document, document.read_text(encoding="utf-8")) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[1](CHANGELOG.md) [2](gone.md) [3](#changelog) [4](#no) [5](docs/glossary.md#route) [6](docs/why.md#no)"
    assert broken(ROOT / "CHANGELOG.md", text) == ["gone.md", "#no", "docs/why.md#no"]
    assert anchors("# A b: `c`, d") == {"a-b-c-d"}


def test_the_blindness_of_a_fixed_tolerance_is_as_printed() -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "why.md").read_text(encoding="utf-8"))
    (code,) = [text for language, text in blocks if language == "python"]
    (printed,) = [text for language, text in blocks if language == "text"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert re.sub(r"\d+%", "%", done.stdout) == re.sub(r"\d+%", "%", printed)
    for actual, expected in zip(re.findall(r"(\d+)%", done.stdout), re.findall(r"(\d+)%", printed), strict=True):
        assert abs(int(actual) - int(expected)) <= 1
