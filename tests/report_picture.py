"""The picture of a report in the README: ``python -m tests.report_picture docs/report.png`` makes it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness.merge import merge
from harness.report.html import html
from harness.report.model import make_report
from tests import report_run
from tests.browser import browser

#: Width and height, pixels: the verdict table, and the first failure down to its first grid.
SIZE = {"width": 1000, "height": 1600}


def take(path: Path) -> None:
    """Run the failures that the tests of reports run, and take a picture of their report."""
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        page_file = Path(folder) / "report.html"
        page_file.write_text(html(make_report(merge([report_run.run(Path(folder))]))), encoding="utf-8")
        page = chromium.new_context(viewport=SIZE, color_scheme="light").new_page()
        page.goto(page_file.as_uri())
        page.screenshot(path=path)


if __name__ == "__main__":
    take(Path(sys.argv[1]))
