"""What holds for the harness's own tests: a warning is an error, and a CI step's summary is not theirs to write.

Here and not in pyproject.toml: that would hold for the gate too, and there a warning of some other plugin that a container
brings must not end a run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Here and not in a fixture: some of them start processes, and some when they are collected.
os.environ.pop("GITHUB_STEP_SUMMARY", None)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn warnings of the tests in this folder into errors; a mark of the test's own comes after and wins."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)
