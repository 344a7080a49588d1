"""A real headless browser, for the tests of pages.

1. It is Debian's Chromium, found on the PATH or named by CHROMIUM; nothing is downloaded for it.
2. Where it is missing its tests are skipped and say so; where MLA_GATE_BROWSER=required, as in CI, they fail instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: Switches that keep it to itself: no GPU, no updates, no traffic of its own.
SWITCHES = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


def missing() -> str | None:
    """Say what is missing for a browser, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError as error:
        return f"no browser test: {error}: pip install playwright"
    return None if program() else "no browser test: no chromium on the PATH: apt-get install chromium"


def program() -> str | None:
    """Find the browser."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def need() -> None:
    """Skip the test where there is no browser, or fail it where there must be one."""
    reason = missing()
    if reason and os.environ.get("MLA_GATE_BROWSER") == "required":
        pytest.fail(f"{reason} (MLA_GATE_BROWSER=required)", pytrace=False)
    if reason:
        pytest.skip(reason)


@contextmanager
def browser() -> Iterator[Any]:
    """Start the browser, with a new and empty profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Chromium refuses to run as root inside its sandbox; the pages are our own.
        started = driver.chromium.launch(executable_path=program(), args=list(SWITCHES), chromium_sandbox=False)
        try:
            yield started
        finally:
            started.close()
