"""Imports point one way: references, the core, finding, telling, cases.

1. A module may import from its own layer and from those below, never from above.
2. Along the core's spine, case to judge, the order is strict.
3. The truth imports numpy, torch and itself; the oracle nothing that decodes.

Source: the map in README.md; an oracle that shares arithmetic with the accused is no oracle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Layers from the bottom: a module belongs to the first that has its name or one of its packages.
LAYERS: dict[str, tuple[str, ...]] = {
    "truth": ("references",),
    "emulation": ("harness.emulation",),
    "core": (
        "harness.case", "harness.memory", "harness.cache", "harness.draws", "harness.content", "harness.inputs",
        "harness.backends",
        "harness.environment", "harness.region", "harness.rounded_query", "harness.regimes", "harness.extremes",
        "harness.weights", "harness.measure",
        "harness.models", "harness.verdict", "harness.actual", "harness.findings", "harness.scoring",
        "harness.judge", "harness.run",
        "harness.assembly", "harness.compilations", "harness.axes", "harness.tokens",
    ),
    "telling": (
        "harness.report", "harness.plugin", "harness.plugin_options", "harness.cli", "harness.cli_case", "harness.cli_ledger",
        "harness.cli_routes", "harness.cli_shapes", "harness.gate", "harness.merge", "harness.compare", "harness.shards",
        "harness.demo",
    ),
    "cases": ("cases",),
    "finding": ("harness",),
}  # fmt: skip
#: What each layer may import.
BELOW: dict[str, frozenset[str]] = {
    "truth": frozenset({"truth"}),
    "emulation": frozenset({"emulation"}),
    "core": frozenset({"truth", "emulation", "core"}),
    "finding": frozenset({"truth", "emulation", "core", "finding"}),
    "telling": frozenset({"truth", "emulation", "core", "finding", "telling"}),
    "cases": frozenset({"truth", "emulation", "core", "finding", "telling", "cases"}),
}
#: The core's spine; each may import those before it.
SPINE = ("harness.case", "harness.cache", "harness.inputs", "harness.backends.protocol", "harness.judge", "harness.run")
#: What the truth may import from elsewhere besides the standard library.
OUTSIDE = frozenset({"numpy", "torch"})


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def modules() -> list[str]:
    return sorted(module_name(path) for top in ("references", "harness", "cases") for path in (ROOT / top).rglob("*.py"))


def source(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py").read_text("utf-8")


def imported(text: str) -> Iterator[str]:
    """Yield what a module's text imports; ``from a import b`` yields both a and a.b, for b may be a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute here"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(module: str) -> str | None:
    for name, members in LAYERS.items():
        if any(module == member or module.startswith(member + ".") for member in members):
            return name
    return None


def upward(module: str, text: str) -> list[str]:
    """List what a module imports from above its layer or, on the spine, from further along it."""
    allowed = BELOW[layer(module) or ""]
    known = {name for name in imported(text) if layer(name)}
    found = {name for name in known if layer(name) not in allowed}
    if module in SPINE:
        found |= known & set(SPINE[SPINE.index(module) + 1 :])
    return sorted(found)


def foreign(text: str) -> list[str]:
    """List what a module of the truth imports that is neither the truth's, nor numpy, nor torch, nor the language's."""
    tops = {name.partition(".")[0] for name in imported(text)}
    return sorted(tops - OUTSIDE - {"references"} - sys.stdlib_module_names)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_nothing_from_above(module: str) -> None:
    assert not upward(module, source(module))


@pytest.mark.parametrize("module", [module for module in modules() if layer(module) == "truth"])
def test_the_truth_imports_only_numpy_torch_and_itself(module: str) -> None:
    assert not foreign(source(module))


def test_the_oracle_shares_no_arithmetic_with_the_reference() -> None:
    ours = {name for name in imported(source("references.oracle")) if name.startswith("references.")}
    assert ours <= {"references.problem", "references.problem.Answer", "references.problem.Problem"}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("references.decode", "from harness.case import Case"),
        ("harness.cache", "from harness.inputs import Inputs"),
        ("harness.judge", "from harness import shrink"),
        ("harness.repro", "import harness.plugin"),
        ("harness.report.terminal", "from cases.pins import PINS"),
        ("harness.emulation.tensor", "from references.formats import decode"),
    ],
)
def test_an_import_from_above_is_found(module: str, text: str) -> None:
    assert upward(module, text)


def test_a_foreign_import_is_found() -> None:
    assert foreign("import ml_dtypes\nfrom triton import language") == ["ml_dtypes", "triton"]
    assert not foreign("import math\nimport torch\nfrom references.formats import decode")
