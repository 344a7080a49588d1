"""The forms of a report as files: HTML, Markdown, JUnit, and the summary of a CI step.

1. A file that cannot be written costs that file, and is said; it never costs a verdict or another file.
"""

from __future__ import annotations

from pathlib import Path

from harness.merge import Merged
from harness.report.html import html
from harness.report.junit import junit
from harness.report.markdown import append_to_summary, markdown
from harness.report.model import make_report


def write_forms(
    merged: Merged,
    *,
    html_file: Path | None = None,
    markdown_file: Path | None = None,
    junit_file: Path | None = None,
    summary: bool = True,
) -> list[str]:
    """Write a report's forms; return a line about each.

    Args:
        merged: the ledgers of a run, or of several.
        html_file: where the HTML goes; None for none.
        markdown_file: where the Markdown goes; None for none.
        junit_file: where JUnit's XML goes; None for none.
        summary: whether the Markdown goes to the summary of the CI step too, where there is one.
    """
    report = make_report(merged)
    said = []
    for path, made in ((html_file, html), (markdown_file, markdown)):
        if path is not None:
            said.append(_write(path, made(report)))
    if junit_file is not None:
        said.append(_write(junit_file, junit(report, merged)))
    trouble = append_to_summary(markdown(report)) if summary else None
    return [*said, trouble] if trouble else said


def _write(path: Path, text: str) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return f"report: {path}"
