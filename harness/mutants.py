"""Small changes to a kernel's source that a person could have made.

1. A mutant is one edit of one expression or statement inside a kernel (a function with a ``jit`` decorator); everything else of
   the file stays as it is, line for line.
2. Operators are data: a name, what it stands for, and a function from a syntax node to its replacements.
3. Layouts are left alone: they do not change values, and the compiler checks them.

Source: the field faults of ``docs/why.md`` as edits; the rest are the usual operators of mutation testing (R. DeMillo,
R. Lipton, F. Sayward, "Hints on test data selection", 1978).
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

#: Text of a line, its place among the lines of that text, what stood there, what stands there.
Key = tuple[str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One edit."""

    #: A key of OPERATORS.
    operator: str
    #: Kernel that it changes.
    kernel: str
    #: Line of the file, from 1, and the text of that line.
    line: int
    text: str
    #: Which of the lines of this text it is, from 1.
    place: int
    #: What stood there and what stands there now.
    old: str
    new: str
    #: The file with the edit made.
    source: str

    @property
    def key(self) -> Key:
        """What names the mutant while other lines change: the line's text and place, the old and the new expression."""
        return self.text, self.place, self.old, self.new

    def __str__(self) -> str:
        return f"{self.kernel}:{self.line}: {self.old!r} became {self.new or 'nothing'!r} ({self.operator})"


@dataclass(frozen=False, slots=True, kw_only=True)
class Scope:
    """What an operator may look at besides the node."""

    #: Parameters of the kernel.
    parameters: list[str]
    #: Names that comparisons of the kernel have on their right.
    bounds: list[str]
    #: The call that a node is an argument of, by node.
    parents: dict[ast.AST, ast.AST]


#: (node, scope) -> replacements as source text; an empty text deletes a statement.
Operator = Callable[[ast.AST, Scope], Iterator[str]]

_SHIFTED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_TWINS = {"minimum": "maximum", "maximum": "minimum", "max": "min", "min": "max", "exp2": "exp", "exp": "exp2", "log": "log2"}


def _compare(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SHIFTED:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield f"{left} {_SHIFTED[type(node.ops[0])]} {right}"


def _bound(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Name) and len(node.ops) == 1:
        own = node.comparators[0].id
        sign = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}.get(type(node.ops[0]))
        for other in scope.bounds:
            if sign and other != own:
                yield f"{ast.unparse(node.left)} {sign} {other}"


def _constant(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        parent = scope.parents.get(node)
        sizes = isinstance(parent, ast.Call) and ast.unparse(parent.func).endswith(("wait_group", "arange", "zeros", "full"))
        if sizes or isinstance(parent, (ast.List, ast.Slice, ast.Tuple)):
            return
        yield str(node.value + 1)
        if node.value > 0:
            yield str(node.value - 1)
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value not in (0.0, 1.0):
        yield repr(node.value * 0.5)
        yield repr(node.value * 1.01)


def _mask(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Call) and any(word.arg == "mask" for word in node.keywords):
        kept = [word for word in node.keywords if word.arg not in ("mask", "other")]
        yield ast.unparse(ast.Call(func=node.func, args=node.args, keywords=kept))


def _wait(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("wait_group"):
        value = node.args[0]
        if isinstance(value, ast.Constant) and isinstance(value.value, int):
            for count in {value.value + 1, max(0, value.value - 1)} - {value.value}:
                yield f"{ast.unparse(node.func)}({count})"


def _buffer(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "index" and node.args:
        yield f"{ast.unparse(node.func)}(({ast.unparse(node.args[0])} + 1) % 2)"


def _dropped(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Drop one operand of an arithmetic expression, or exchange the two of a difference or quotient."""
    if not isinstance(node, ast.BinOp):
        return
    left, right = ast.unparse(node.left), ast.unparse(node.right)
    yield left
    if not isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        yield right
    if isinstance(node.op, ast.Sub):
        yield f"{right} - ({left})"
        yield f"({left}) + {right}"
    elif isinstance(node.op, ast.Add):
        yield f"({left}) - ({right})"
    elif isinstance(node.op, ast.Div):
        yield f"({left}) * ({right})"


def _infinity(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Call) and ast.unparse(node) == "float('-inf')":
        yield "0.0"
    if isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-float('inf')":
        yield "0.0"


def _promotion(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Drop a conversion to 64 bits, or to another type."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
        yield ast.unparse(node.func.value)


def _axis(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Reduce along the other axis, or ask for another program index."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("sum", "max", "min") and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            yield f"{ast.unparse(node.func)}({ast.unparse(node.args[0])}, {1 - int(str(node.args[1].value))})"


def _stride(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Take a sibling of a stride, a scale or a count: a parameter that shares its first or last word."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in scope.parameters and "_" in node.id:
        first, last = node.id.split("_")[0], node.id.split("_")[-1]
        for other in scope.parameters:
            words = other.split("_")
            if other != node.id and len(words) > 1 and (words[0] == first or words[-1] == last):
                yield other


def _function(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Call the twin of a function."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TWINS:
        call = ast.unparse(node)
        yield call.replace(f".{node.func.attr}(", f".{_TWINS[node.func.attr]}(", 1)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cdiv"):
        yield f"({ast.unparse(node.args[0])}) // ({ast.unparse(node.args[1])})"
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".where"):
        condition, one, other = (ast.unparse(argument) for argument in node.args)
        yield one
        yield f"{ast.unparse(node.func)}({condition}, {other}, {one})"


def _condition(node: ast.AST, scope: Scope) -> Iterator[str]:
    parent = scope.parents.get(node)
    if isinstance(parent, ast.If) and node is parent.test:
        yield f"not ({ast.unparse(node)})"


def _statement(node: ast.AST, scope: Scope) -> Iterator[str]:
    """Leave a statement out."""
    if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(node, ast.Return):
        yield "pass"
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.BinOp)) and len(node.targets) == 1:
        target = ast.unparse(node.targets[0])
        # Only where the name has a value already, or the kernel would not compile.
        if isinstance(node.value, ast.Name) or target in {
            name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)
        }:
            yield "pass"


def _program(node: ast.AST, scope: Scope) -> Iterator[str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("program_id"):
        yield f"{ast.unparse(node.func)}({(int(ast.literal_eval(node.args[0])) + 1) % 3})"


#: Operators by name.
OPERATORS: Mapping[str, Operator] = {
    "comparison shifted": _compare,
    "other bound": _bound,
    "constant altered": _constant,
    "mask dropped": _mask,
    "wait count changed": _wait,
    "other buffer": _buffer,
    "operand dropped or swapped": _dropped,
    "infinity is zero": _infinity,
    "conversion dropped": _promotion,
    "other axis": _axis,
    "sibling exchanged": _stride,
    "twin called": _function,
    "condition turned": _condition,
    "statement left out": _statement,
    "program index changed": _program,
}


def mutants(source: str) -> list[Mutant]:
    """List all mutants of a file's kernels, in source order, each edit once."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    stripped = [line.strip() for line in lines]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()
    found: dict[str, Mutant] = {}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in function.decorator_list):
            scope = _scope(function)
            first, last = starts[function.lineno - 1], starts[function.end_lineno or -1]
            for node in _inside(function):
                begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
                stop = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
                for name, operator in OPERATORS.items():
                    for new in operator(node, scope):
                        old = raw[begin:stop].decode()
                        text = new if name in ("statement left out", "sibling exchanged", "constant altered") else f"({new})"
                        # A call that is a whole statement, or an argument, needs no brackets.
                        body = (raw[first:begin] + text.encode() + raw[stop:last]).decode()
                        if body not in found and _differs(old, new):
                            found[body] = Mutant(
                                operator=name,
                                kernel=function.name,
                                line=node.lineno,  # type: ignore[attr-defined]
                                text=stripped[node.lineno - 1],  # type: ignore[attr-defined]
                                place=stripped[: node.lineno].count(stripped[node.lineno - 1]),  # type: ignore[attr-defined]
                                old=" ".join(old.split()),
                                new=" ".join(new.split()),
                                source=raw[:first].decode() + body + raw[last:].decode(),
                            )
    return sorted(found.values(), key=lambda one: one.line)


def _differs(old: str, new: str) -> bool:
    """Tell whether two pieces of source mean something else, brackets and spaces aside."""
    return ast.dump(ast.parse(textwrap.dedent(old))) != ast.dump(ast.parse(new))


def _scope(function: ast.FunctionDef) -> Scope:
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    bounds = {
        node.comparators[0].id
        for node in ast.walk(function)
        if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Name)
    }
    return Scope(parameters=[argument.arg for argument in function.args.args], bounds=sorted(bounds), parents=parents)


def _inside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Walk the nodes of a kernel's body, layouts, annotations and texts left out."""
    todo: list[ast.AST] = list(reversed(function.body))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.AnnAssign):
            if node.value is None or any(word in ast.unparse(node.value) for word in ("Layout", "[[")):
                continue
            todo.append(node.value)
            continue
        layout = isinstance(node, ast.Call) and "Layout" in ast.unparse(node.func)
        if layout or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if hasattr(node, "lineno"):
            yield node
        todo.extend(reversed(list(ast.iter_child_nodes(node))))
