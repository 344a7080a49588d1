"""The house rules that a machine can check, each with a snippet that it must reject.

1. A rule is a function from a file's path and text to the lines that break it.
2. Every rule has at least one bad snippet, and a good one beside it: a rule that cannot fail is no rule.

Source: CONTRIBUTING.md, "The house style".
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: A rule: the path from the root, the text, and out come the breaches as "line: what is wrong".
Rule = Callable[[str, str], Iterator[str]]

#: Past this many lines a module is two modules.
MODULE_LINES = 300

#: Names that say nothing about what a module is.
EMPTY_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|base)(_|$)")

#: Folders of one machine. A path below them means nothing on another.
MACHINE_PATHS = re.compile(r"(?<![\w.~$}>)/-])/(work|home|root|Users|mnt|scratch)/[\w.]")

#: Where packages come from is the business of the machine's pip, never of this repository.
REGISTRY_HOSTS = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|index[-]url", re.IGNORECASE)

#: Names under which a tolerance hides.
TOLERANCE = re.compile(r"(^|_)(r|a)?tol(erance)?s?($|_)", re.IGNORECASE)

#: Comparisons that bring tolerances of their own.
HIDDEN_TOLERANCE = frozenset({"allclose", "isclose", "assert_close", "assert_allclose", "assert_almost_equal"})

UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X])\b")

#: American spellings of words that are not names in a library.
AMERICAN = re.compile(
    r"\b(behavior|favor|honor|neighbor|center(ed)?|catalog|gray|(un|de|re)?(quanti|normali|organi|recogni|summari|minimi"
    r"|maximi|initiali|seriali|speciali|generali|optimi|emphasi|capitali|randomi|reali|utili|vectori)z(e[sdr]?|ing|ation)|analyz(e[sdr]?|ing))s?\b",
    re.IGNORECASE,
)


def module_is_short(path: str, text: str) -> Iterator[str]:
    lines = text.count("\n")
    if lines > MODULE_LINES:
        yield f"{lines} lines, more than {MODULE_LINES}: two modules"


def module_says_what_it_is(path: str, text: str) -> Iterator[str]:
    if text.strip() and not ast.get_docstring(ast.parse(text)):
        yield "1: no module docstring"


def module_has_a_name(path: str, text: str) -> Iterator[str]:
    for part in Path(path).with_suffix("").parts:
        if EMPTY_NAMES.search(part):
            yield f"the name {part!r} does not say what is inside"


def dataclasses_are_records(path: str, text: str) -> Iterator[str]:
    """Records are frozen; what has a state of its own says ``frozen=False``, so that it is seen to be meant."""
    for node in ast.walk(ast.parse(text)):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(called) not in ("dataclass", "dataclasses.dataclass"):
                continue
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            given = {keyword.arg for keyword in keywords if ast.unparse(keyword.value) == "True"}
            given |= {"frozen"} & {keyword.arg for keyword in keywords}
            for missing in sorted({"frozen", "slots", "kw_only"} - given):
                yield f"{node.lineno}: dataclass {node.name} does not say {missing}=True"


def no_tolerance_in_python(path: str, text: str) -> Iterator[str]:
    def is_number(node: ast.expr | None) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, float | int) and bool(node.value)

    for node in ast.walk(ast.parse(text)):
        named: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.Call):
            named = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in HIDDEN_TOLERANCE:
                yield f"{node.lineno}: {called}() decides with a tolerance of its own"
        elif isinstance(node, ast.Assign):
            named = [(ast.unparse(target), node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            named = [(ast.unparse(node.target), node.value)]
        elif isinstance(node, ast.arguments):
            positional = node.posonlyargs + node.args
            defaults = [None] * (len(positional) - len(node.defaults)) + list(node.defaults)
            named = [(one.arg, default) for one, default in zip(positional, defaults, strict=True)]
            named += [(one.arg, default) for one, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        for name, value in named:
            if TOLERANCE.search(name) and is_number(value):
                yield f"{getattr(value, 'lineno', 0)}: the limit {name} belongs in cases/regimes.toml"


def no_machine_paths(path: str, text: str) -> Iterator[str]:
    yield from matches(MACHINE_PATHS, text, "a path of one machine")


def no_registry_hosts(path: str, text: str) -> Iterator[str]:
    yield from matches(REGISTRY_HOSTS, text, "a package registry")


def nothing_unfinished(path: str, text: str) -> Iterator[str]:
    yield from matches(UNFINISHED, text, "unfinished")


def british_spelling(path: str, text: str) -> Iterator[str]:
    yield from matches(AMERICAN, prose(path, text), "American spelling")


def references_import_only_numpy_and_torch(path: str, text: str) -> Iterator[str]:
    allowed = sys.stdlib_module_names | {"numpy", "torch", "references"}
    yield from (f"{line}: references imports {name}" for line, name in imports(text) if name not in allowed)


def kernels_are_imported_only_by_their_backend(path: str, text: str) -> Iterator[str]:
    if path.startswith(("harness/backends/", "harness/emulation/", "harness/faults/", "harness/routes/")):
        return
    yield from (f"{line}: imports {name}" for line, name in imports(text) if name in ("triton", "aiter"))


def harness_does_not_import_its_cases(path: str, text: str) -> Iterator[str]:
    yield from (f"{line}: imports {name}" for line, name in imports(text) if name in ("cases", "tests"))


def imports(text: str) -> Iterator[tuple[int, str]]:
    """List the top-level packages that a module imports, wherever in the module it does."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.lineno, node.module.partition(".")[0]


def matches(pattern: re.Pattern[str], text: str, what: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        for found in pattern.finditer(line):
            yield f"{number}: {found[0]!r}: {what}"


def prose(path: str, text: str) -> str:
    """Blank out what is not prose: in Python all but comments and docstrings, everywhere what stands in backquotes."""
    if path.endswith(".py"):
        lines = [""] * (text.count("\n") + 2)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0] - 1] = token.string
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (told := ast.get_docstring(node)):
                first = node.body[0].lineno - 1
                for number, line in enumerate(told.splitlines(), start=first):
                    lines[number] = line
        text = "\n".join(lines)
    fenced = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    titles = re.sub(r'(?<!")"[^"\n]+"(?!")', "", fenced)  # a title is spelt as its author spelt it
    return re.sub(r"``?[^`\n]+``?", "", titles)


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """One rule, where it holds, and how it is seen to work."""

    #: The rule itself.
    rule: Rule
    #: Which files it holds for: a pattern on the path from the root.
    where: str
    #: Texts it must reject.
    bad: tuple[str, ...]
    #: A text it must let pass.
    good: str
    #: The path that the texts are said to stand at.
    at: str = "harness/judge.py"


CODE = r"(references|harness)/.*\.py"
PYTHON = r".*\.py"
TEXT = r".*\.(py|md|toml|txt|json|yml|yaml)|\.ci/run|\.gitignore"

HOUSE = (
    House(rule=module_is_short, where=CODE, bad=("x = 1\n" * (MODULE_LINES + 1),), good="x = 1\n" * MODULE_LINES),
    House(rule=module_says_what_it_is, where=PYTHON, bad=("x = 1\n", "# a comment\nx = 1\n"), good='"""A thing."""\n'),
    House(
        rule=dataclasses_are_records,
        where=CODE,
        bad=(
            "@dataclass\nclass A: ...\n",
            "@dataclass(frozen=True, slots=True)\nclass A: ...\n",
            "@dataclasses.dataclass(frozen=True, slots=True, kw_only=False)\nclass A: ...\n",
        ),
        good="@dataclass(frozen=True, slots=True, kw_only=True)\nclass A: ...\n"
        "@dataclass(frozen=False, slots=True, kw_only=True)\nclass State: ...\n",
    ),
    House(
        rule=no_tolerance_in_python,
        where=CODE,
        bad=(
            "check(a, b, rtol=1e-2)\n",
            "ATOL = 0.05\n",
            "row_tolerance: float = 3\n",
            "def check(a, b, tol=1e-3): ...\n",
            "def check(a, *, atol=1e-3): ...\n",
            "torch.allclose(a, b)\n",
            "assert_close(a, b)\n",
        ),
        good="check(a, b, rtol=limits.rtol)\natol = 0\ndef check(a, tol=None): ...\ntotal = 3\n",
    ),
    House(
        rule=no_machine_paths,
        where=TEXT,
        bad=("cd /wor" + "k/mla\n", "open('/hom" + "e/me/x')\n", "`/roo" + "t/.cache`\n"),
        good="docs/work/plan, tests/home/x, ~/work/x, /opt/rocm, https://example.com/home/x\n",
    ),
    House(
        rule=no_registry_hosts,
        where=TEXT,
        bad=("pip install --index-" + "url https://x\n", "see pypi" + ".org\n"),
        good="pip install torch\n",
    ),
    House(rule=nothing_unfinished, where=TEXT, bad=("# TO" + "DO: later\n", "FIX" + "ME\n"), good="# done\n"),
    House(
        rule=british_spelling,
        where=r".*\.(py|md)",
        bad=("# the behavi" + "or\n", '"""Quanti' + 'ze it."""\n', "x = 1  # normali" + "zed\n"),
        good='"""Quantise it with `torch.quantize`."""\nquantize(behavior="x")\nsize = prize  # the size of it\n',
    ),
    House(
        rule=references_import_only_numpy_and_torch,
        where=r"references/.*\.py",
        bad=("import triton\n", "def f():\n    from harness.case import Case\n"),
        good="import math\nimport numpy as np\nfrom torch import Tensor\nfrom references.formats import FORMATS\n",
        at="references/decode.py",
    ),
    House(
        rule=kernels_are_imported_only_by_their_backend,
        where=r"harness/.*\.py",
        bad=("import triton.language as tl\n", "def f():\n    import aiter\n"),
        good="import torch\n",
    ),
    House(
        rule=harness_does_not_import_its_cases,
        where=r"(references|harness)/.*\.py",
        bad=("from cases.shapes import SHAPES\n", "import tests\n"),
        good="from importlib.resources import files\nfiles('cases')\n",
    ),
)


def tracked() -> list[str]:
    """List the repository's files: what git knows and what it would take, else all but the hidden ones."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == 0:
        return [path for path in done.stdout.splitlines() if (ROOT / path).is_file()]
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and "/." not in str(path)]


def breaches(house: House) -> list[str]:
    found = []
    for path in tracked():
        if re.fullmatch(house.where, path):
            text = (ROOT / path).read_text(encoding="utf-8")
            found += [f"{path}:{breach}" for breach in house.rule(path, text)]
    return found


def name(house: House) -> str:
    return house.rule.__name__


@pytest.mark.parametrize("house", HOUSE, ids=name)
def test_the_repository_keeps_the_rule(house: House) -> None:
    found = breaches(house)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("house", HOUSE, ids=name)
def test_the_rule_can_fail(house: House) -> None:
    for bad in house.bad:
        assert list(house.rule(house.at, bad)), f"not rejected: {bad[:80]!r}"
    assert not list(house.rule(house.at, house.good))


@pytest.mark.parametrize("house", HOUSE, ids=name)
def test_the_rule_looks_at_something(house: House) -> None:
    assert any(re.fullmatch(house.where, path) for path in tracked())


@pytest.mark.parametrize("path", ["harness/utils.py", "harness/base.py", "tests/common/x.py", "harness/helpers.py"])
def test_a_name_that_says_nothing_is_rejected(path: str) -> None:
    assert list(module_has_a_name(path, ""))


@pytest.mark.parametrize("path", ["harness/baseline.py", "harness/case.py", "references/database.py"])
def test_a_name_that_says_something_passes(path: str) -> None:
    assert not list(module_has_a_name(path, ""))


def test_the_repositorys_names_say_something() -> None:
    assert not [breach for path in tracked() if path.endswith(".py") for breach in module_has_a_name(path, "")]
