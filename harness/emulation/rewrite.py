"""A kernel's syntax tree, with what Python and Triton mean differently spelled out.

1. Global names are resolved once, by the table of names. One without a meaning stops the kernel where it is used, not
   before: Triton does not look at a branch that a constant rules out either.
2. ``range`` gives int32 tensors; ``and``, ``or`` and ``not`` of tensors are element-wise; a constant that a loop or a
   run-time branch changes becomes a tensor.
3. A statement that Triton refuses is refused. Every node keeps the line of what it stands for.

Source: ``triton.compiler.code_generator`` of Triton 3.9.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from types import ModuleType
from typing import Any

from harness.emulation import control
from harness.emulation.names import BUILTINS, meaning

_ALLOWED = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.While, ast.Return, ast.Pass, ast.Assert,
    ast.Break, ast.Continue,
)  # fmt: skip
_MISSING = object()


class Rewriter(ast.NodeTransformer):
    """Rewrites one function definition."""

    def __init__(
        self,
        definition: ast.FunctionDef,
        target: dict[str, Any],
        scope: dict[str, Any],
        others: Callable[[Any], Any],
        remember: bool,
    ) -> None:
        self.definition = definition
        self.target = target
        self.scope = scope
        self.others = others
        arguments = definition.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.local = {argument.arg for argument in named} | _assigned(definition.body)
        if arguments.vararg:
            self.local.add(arguments.vararg.arg)
        self.static: set[str] = {a.arg for a in named if _is_constexpr(a.annotation)}
        self.bound: dict[int, str] = {}
        self.places = 0
        #: Inside loops and helper functions the same place may mean another constant the next time.
        self.loops = 0 if remember else 1

    def rewrite(self) -> None:
        """Rewrite the definition in place."""
        self.static |= {
            node.target.id
            for node in ast.walk(self.definition)
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "constexpr" in ast.dump(node.annotation)
        }
        self.definition.decorator_list = []
        self.definition.returns = None
        for argument in ast.walk(self.definition.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        count = len(self.definition.args.defaults)
        self.definition.args.defaults = [ast.Constant(None) for _ in range(count)]
        self.definition.args.kw_defaults = [
            None if item is None else ast.Constant(None) for item in self.definition.args.kw_defaults
        ]
        body = self.definition.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1:
            body = body[1:]
        self.definition.body = self._block(body)

    # Statements

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            if not isinstance(statement, _ALLOWED):
                what = type(statement).__name__
                out.append(_at(statement, self._stop(f"the statement {what}", "Triton has no such statement in a kernel")))
                continue
            made = self.visit(statement)
            out.extend(made if isinstance(made, list) else [made])
        return out or [ast.Pass()]

    def _stop(self, name: str, why: str) -> ast.stmt:
        return ast.Expr(_refuse(name, why))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        value = self.visit(node.value)
        if not isinstance(node.target, ast.Name) or not _is_constexpr(node.annotation):
            return ast.copy_location(ast.Assign([self.visit(node.target)], value), node)
        if self.loops:
            return ast.copy_location(ast.Assign([node.target], _call("__constant", value)), node)
        self.places += 1
        key = ast.Constant(self.places)
        memo = ast.Subscript(ast.Name("__memo", ast.Load()), key, ast.Load())
        known = ast.Compare(key, [ast.In()], [ast.Name("__memo", ast.Load())])
        kept = ast.Subscript(ast.Name("__memo", ast.Load()), key, ast.Store())
        first = ast.Assign([node.target, kept], _call("__constant", value))
        return _at(node, ast.If(known, [ast.Assign([node.target], memo)], [first]))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if not isinstance(node.target, ast.Name):
            return _at(node, self._stop("assignment to " + ast.unparse(node.target), "only names can be assigned"))
        load = ast.Name(node.target.id, ast.Load())
        value = ast.BinOp(load, node.op, self.visit(node.value))
        return _at(node, ast.Assign([ast.Name(node.target.id, ast.Store())], value))

    def visit_If(self, node: ast.If) -> Any:
        test = self.visit(node.test)
        changed = sorted((_assigned(node.body) | _assigned(node.orelse)) - self.static)
        flag = f"__test{node.lineno}_{node.col_offset}"
        keep = ast.Assign([ast.Name(flag, ast.Store())], test)
        branch = ast.If(
            _call("__true", ast.Name(flag, ast.Load())),
            self._block(node.body),
            self._block(node.orelse) if node.orelse else [],
        )
        carried = self._carry(changed)
        after: list[ast.stmt] = []
        if carried:
            after = [ast.If(_call("__is_tensor", ast.Name(flag, ast.Load())), carried, [])]
        return [_at(node, item) for item in (keep, branch, *after)]

    def visit_For(self, node: ast.For) -> Any:
        if not isinstance(node.target, ast.Name) or node.orelse or not isinstance(node.iter, ast.Call):
            return _at(node, self._stop("this for loop", "a loop is over range or static_range, into one name, without else"))
        iterator = self._iterator(node.iter)
        if iterator is None:
            return _at(node, self._stop(ast.unparse(node.iter.func), "a loop is over range or static_range"))
        unrolled = iterator == "__static_range"
        call = ast.Call(
            ast.Name(iterator, ast.Load()),
            [self.visit(item) for item in node.iter.args],
            [ast.keyword(item.arg, self.visit(item.value)) for item in node.iter.keywords],
        )
        self.loops += 1
        body = self._block(node.body)
        self.loops -= 1
        carried = [] if unrolled else self._carry(sorted(_assigned(node.body) - self.static - {node.target.id}))
        return [_at(node, item) for item in (*carried, ast.For(node.target, call, body, []))]

    def _iterator(self, call: ast.Call) -> str | None:
        found = self._resolve(call.func)
        if found is builtins.range:
            return "__range"
        name = getattr(found, "__name__", "")
        if getattr(found, "__module__", "").startswith("triton."):
            return {"range": "__range", "static_range": "__static_range"}.get(name)
        return None

    def visit_While(self, node: ast.While) -> Any:
        if node.orelse:
            return _at(node, self._stop("while … else", "Triton has no such statement in a kernel"))
        carried = self._carry(sorted(_assigned(node.body) - self.static))
        self.loops += 1
        body = self._block(node.body)
        self.loops -= 1
        return [_at(node, item) for item in (*carried, ast.While(_call("__true", self.visit(node.test)), body, []))]

    def visit_Assert(self, node: ast.Assert) -> Any:
        message = self.visit(node.msg) if node.msg else ast.Constant("")
        return _at(node, ast.Expr(_call("__assert", self.visit(node.test), message)))

    def _carry(self, names: list[str]) -> list[ast.stmt]:
        """Make tensors of constants that a loop or a run-time branch changes; unbound names are left alone."""
        out: list[ast.stmt] = []
        for name in names:
            value = _call("__carry", ast.Name(name, ast.Load()))
            store = ast.Assign([ast.Name(name, ast.Store())], value)
            out.append(ast.Try([store], [ast.ExceptHandler(ast.Name("__NameError", ast.Load()), None, [ast.Pass()])], [], []))
        return out

    # Expressions

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        name = "__and" if isinstance(node.op, ast.And) else "__or"
        values = [self.visit(item) for item in node.values]
        made = values[-1]
        for value in reversed(values[:-1]):
            made = _call(name, value, ast.Lambda(_no_arguments(), made))
        return _at(node, made)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return _at(node, _call("__not", operand))
        return _at(node, ast.UnaryOp(node.op, operand))

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        made = ast.IfExp(_call("__true", self.visit(node.test)), self.visit(node.body), self.visit(node.orelse))
        return _at(node, made)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) > 1:
            return _at(node, _refuse(ast.unparse(node), "Triton has no chained comparison"))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Store) or node.id in self.local:
            return node
        return self._bind(node, self._resolve(node), node.id)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id not in self.local:
            return self._bind(node, self._resolve(node), ast.unparse(node))
        if node.attr == "value" and isinstance(node.ctx, ast.Load):
            return _at(node, _call("__value", self.visit(node.value)))
        return self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return _at(node, _refuse("lambda", "Triton has no such expression in a kernel"))

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.Await, ast.Yield, ast.YieldFrom)):
            return _at(node, _refuse(type(node).__name__, "Triton has no such expression"))
        return super().generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        names = {item.id for generator in node.generators for item in ast.walk(generator.target) if isinstance(item, ast.Name)}
        added = names - self.local
        self.local |= added
        made = self.generic_visit(node)
        self.local -= added
        return made

    def _resolve(self, node: ast.AST) -> Any:
        """Find the object that a global name or an attribute of one stands for."""
        if isinstance(node, ast.Name):
            return _MISSING if node.id in self.local else self.scope.get(node.id, BUILTINS.get(node.id, _MISSING))
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return _MISSING if owner is _MISSING else getattr(owner, node.attr, _MISSING)
        return _MISSING

    def _bind(self, node: ast.expr, value: Any, name: str) -> Any:
        if value is _MISSING:
            return _at(node, _refuse(name, "there is no such name"))
        if isinstance(value, ModuleType):
            return _at(node, _refuse(name, "a module is no value"))
        if name in BUILTINS and value is BUILTINS[name]:
            known, found = True, control.PYTHON.get(name, value)
        else:
            known, found = meaning(value, self.others)
        if not known:
            what = getattr(value, "__module__", None) or type(value).__name__
            return _at(node, _refuse(name, f"{what} is not in the table of names"))
        if found is None or isinstance(found, (bool, int, float, str)):
            return _at(node, ast.Constant(found))
        key = self.bound.get(id(found))
        if key is None:
            key = self.bound[id(found)] = f"__known{len(self.bound)}_{name.rpartition('.')[2]}"
            self.target[key] = found
        return _at(node, ast.Name(key, ast.Load()))


def _assigned(statements: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _refuse(name: str, why: str) -> ast.expr:
    return _call("__refuse", ast.Constant(name), ast.Constant(why))


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and "constexpr" in ast.dump(annotation)


def _no_arguments() -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _at(place: ast.AST, made: Any) -> Any:
    """Give what was made the place of what it stands for, without touching parts that have their own."""
    for node in ast.walk(made):
        if isinstance(node, (ast.expr, ast.stmt, ast.ExceptHandler, ast.keyword, ast.arg)) and not hasattr(node, "lineno"):
            ast.copy_location(node, place)
    return made
