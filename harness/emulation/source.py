"""A kernel's source, made to run on the CPU.

1. The kernel's own source runs, statement by statement, on its own file and line numbers; nothing of it is edited.
2. What it may refer to is what the table of names gives it, and what ``control`` gives Python's own words.

Source: ``triton.runtime.jit.JITFunction`` of Triton 3.9, which holds the source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType
from typing import Any

from harness.emulation import control
from harness.emulation.findings import MARK
from harness.emulation.names import plain
from harness.emulation.rewrite import Rewriter


class Kernel:
    """A jit function and the Python function that stands for it."""

    def __init__(self, jit: Any, others: Callable[[Any], Any], remember: bool) -> None:
        self.jit = jit
        self.name: str = jit.fn.__name__
        self.file: str = jit.fn.__code__.co_filename
        tree = _parse(jit)
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        self.globals: dict[str, Any] = {MARK: self.name, "__builtins__": {}, **control.BINDINGS}
        #: Values of constexpr assignments of the launch at hand, by place.
        self.memo: dict[int, Any] = {}
        self.globals["__memo"] = self.memo
        Rewriter(definition, self.globals, _scope(jit.fn), others, remember).rewrite()
        ast.fix_missing_locations(tree)
        exec(compile(tree, self.file, "exec"), self.globals)
        made = self.globals[definition.name]
        assert isinstance(made, FunctionType)
        made.__defaults__ = None if jit.fn.__defaults__ is None else tuple(plain(item, others) for item in jit.fn.__defaults__)
        made.__kwdefaults__ = {name: plain(item, others) for name, item in (jit.fn.__kwdefaults__ or {}).items()}
        self.function = made


def _parse(jit: Any) -> ast.Module:
    source = getattr(jit, "src", None) or jit._src
    tree = ast.parse(str(source))
    first = getattr(jit, "def_file_line_number", None)
    if first is None:
        first = jit.starting_line_number + next(i for i, text in enumerate(jit.raw_src) if text.strip().startswith("def "))
    ast.increment_lineno(tree, int(first) - 1)
    return tree


def _scope(function: FunctionType) -> dict[str, Any]:
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:
            continue
    return scope
