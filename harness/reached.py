"""Which lines of a kernel a run executes: a mutant of any other line is the kernel itself there.

1. Lines count by statement: what one of its lines executes, all of them do. Of a compound statement that is its head.
2. Only frames of the kernel's own file are traced; whatever runs in other files keeps its speed.

Source: Python's trace hook; the emulator and Triton's interpreter keep the lines of a kernel's source.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


def statements(source: str) -> Mapping[int, frozenset[int]]:
    """Map each line to the lines of the innermost statement that it belongs to."""
    found: dict[int, frozenset[int]] = {}
    # Outer statements come before inner ones, which then take their lines away.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            stop = min(part.lineno for part in body) - 1 if body else node.end_lineno or node.lineno
            lines = frozenset(range(node.lineno, max(stop, node.lineno) + 1))
            found |= dict.fromkeys(lines, lines)
    return found


@contextmanager
def reached(path: Path) -> Iterator[set[int]]:
    """Collect the lines of a file that are executed meanwhile; a copy of it under the same name is meant, too."""
    lines: set[int] = set()
    name = f"/{path.name}"

    def inside(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        lines.add(frame.f_lineno)
        return inside

    def enter(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return inside if frame.f_code.co_filename.endswith(name) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield lines
    finally:
        sys.settrace(before)
