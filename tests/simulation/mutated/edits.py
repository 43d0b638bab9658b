"""Edits of one function through its syntax tree; each mutant is made by one.

An edit finds code by a pattern: Python in which `_` stands for any expression, a capital
letter for one expression that the new code may use, and a last `...` for all further arguments,
elements or statements. So it names no local variable, and neither layout nor comments matter.
"""

import ast
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

ANYTHING = "_"
MORE = "..."
Bound = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class DoesNotApply(AssertionError):  # noqa: N818  # It names what happened.
    """A function has no place, or several places, that an edit matches."""


class Edit:
    """A change to the code of one function; each subclass defines the matching places."""

    def apply(self, function: Function) -> int:
        """Change all matching places; return their number."""
        raise NotImplementedError

    def once(self, function: Function, name: str) -> None:
        """Change the one matching place.

        Raises:
            DoesNotApply: No place matches, or more than one.
        """
        many = self.apply(function)
        if many != 1:
            raise DoesNotApply(f"{self} matches {many} places in {name}; expected exactly one")
        ast.fix_missing_locations(function)


@dataclass(frozen=True)
class Replace(Edit):
    """Replace an expression, or a sequence of statements, by new code."""

    old: str
    new: str

    def apply(self, function: Function) -> int:
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr):
            assert isinstance(new[0], ast.Expr), f"{self}: an expression becomes an expression"
            return _Expressions(old[0].value, new[0].value).count(function)
        return _Statements(old, lambda _, bound: _fill_list(new, bound)).count(function)


@dataclass(frozen=True)
class Drop(Edit):
    """Remove a statement."""

    old: str

    def apply(self, function: Function) -> int:
        return _Statements(ast.parse(self.old).body, lambda *_: [ast.Pass()]).count(function)


@dataclass(frozen=True)
class After(Edit):
    """Insert code after a statement."""

    old: str
    more: str

    def apply(self, function: Function) -> int:
        more = ast.parse(self.more).body
        return _Statements(
            ast.parse(self.old).body, lambda found, bound: [*found, *_fill_list(more, bound)]
        ).count(function)


@dataclass(frozen=True)
class Always(Edit):
    """Replace a condition by True."""

    test: str

    def apply(self, function: Function) -> int:
        return _decide(function, self.test, verdict=True)


@dataclass(frozen=True)
class Never(Edit):
    """Replace a condition by False."""

    test: str

    def apply(self, function: Function) -> int:
        return _decide(function, self.test, verdict=False)


@dataclass(frozen=True)
class Body(Edit):
    """Replace the body of a function; the new code may use its parameters."""

    new: str

    def apply(self, function: Function) -> int:
        function.body = ast.parse(self.new).body
        return 1


def _decide(function: Function, pattern: str, *, verdict: bool) -> int:
    test = ast.parse(pattern, mode="eval").body
    found = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.If | ast.IfExp | ast.While) and _match(test, node.test, {})
    ]
    for node in found:
        node.test = ast.Constant(verdict)
    return len(found)


class _Expressions(ast.NodeTransformer):
    """Replaces the expressions that match a pattern."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new, self._found = old, new, 0

    def count(self, function: Function) -> int:
        self.generic_visit(function)
        return self._found

    def visit(self, node: ast.AST) -> ast.AST:
        bound: Bound = {}
        if isinstance(node, ast.expr) and _match(self._old, node, bound):
            self._found += 1
            return _fill(self._new, bound)
        return self.generic_visit(node)


class _Statements:
    """Replaces the sequences of statements that match a pattern."""

    def __init__(
        self, old: list[ast.stmt], make: Callable[[list[ast.stmt], Bound], list[ast.stmt]]
    ) -> None:
        self._old, self._make = old, make

    def count(self, function: Function) -> int:
        many, size = 0, len(self._old)
        for node in list(ast.walk(function)):
            for block in ("body", "orelse", "finalbody"):
                rows = getattr(node, block, None)
                if not isinstance(rows, list):
                    continue
                for at in range(len(rows) - size, -1, -1):
                    found, bound = rows[at : at + size], Bound()
                    if all(_match(a, b, bound) for a, b in zip(self._old, found, strict=True)):
                        rows[at : at + size] = self._make(found, bound)
                        many += 1
        return many


def _is_more(pattern: Any) -> bool:
    value = pattern.value if isinstance(pattern, ast.Expr) else pattern
    return isinstance(value, ast.Constant) and value.value is ...


def _hole(pattern: Any) -> str:
    """Return the name of a placeholder in a pattern; "" if the expression is not a placeholder."""
    name = pattern.id if isinstance(pattern, ast.Name) else ""
    return name if name == ANYTHING or (len(name) == 1 and name.isupper()) else ""


def _match(pattern: Any, node: Any, bound: Bound) -> bool:
    """Return whether code matches; `bound` gets the code for each placeholder of the pattern."""
    if name := _hole(pattern):
        if name == ANYTHING or name not in bound:
            bound[name] = node
            return isinstance(node, ast.expr)
        return _same(bound[name], node)
    if isinstance(pattern, list):
        return isinstance(node, list) and _match_list(pattern, node, bound)
    if not isinstance(pattern, ast.AST):
        return bool(type(pattern) is type(node) and pattern == node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and any(map(_is_more, pattern.args)):
        return _match_call(pattern, node, bound)
    fields = [name for name in pattern._fields if name not in {"ctx", "type_comment"}]
    return all(_match(getattr(pattern, name), getattr(node, name), bound) for name in fields)


def _match_list(patterns: Sequence[Any], nodes: Sequence[Any], bound: Bound) -> bool:
    if patterns and _is_more(patterns[-1]):
        patterns = patterns[:-1]
        bound[MORE] = nodes[len(patterns) :]
        nodes = nodes[: len(patterns)]
    return len(patterns) == len(nodes) and all(
        _match(a, b, bound) for a, b in zip(patterns, nodes, strict=True)
    )


def _match_call(pattern: ast.Call, node: ast.Call, bound: Bound) -> bool:
    """Match a call whose pattern has a `...`, which stands for any further arguments."""
    values = {each.arg: each.value for each in node.keywords}
    named = {each.arg: each.value for each in pattern.keywords}
    bound["keywords"] = [each for each in node.keywords if each.arg not in named]
    return (
        _match(pattern.func, node.func, bound)
        and _match_list(pattern.args, node.args, bound)
        and all(key in values and _match(named[key], values[key], bound) for key in named)
    )


def _same(one: ast.AST, other: ast.AST) -> bool:
    """Return whether two expressions are equal, also if only one of them is assigned to."""
    return ast.unparse(one) == ast.unparse(other)


def _fill(pattern: Any, bound: Bound) -> Any:
    """Return new code in which the placeholders are replaced by the matched code."""
    if name := _hole(pattern):
        node = deepcopy(bound[name])
        if hasattr(node, "ctx"):
            node.ctx = pattern.ctx
        return node
    if isinstance(pattern, list):
        return _fill_list(pattern, bound)
    if not isinstance(pattern, ast.AST):
        return pattern
    parts = {name: _fill(getattr(pattern, name), bound) for name in pattern._fields}
    if isinstance(pattern, ast.Call) and any(map(_is_more, pattern.args)):
        parts["keywords"] = [*bound["keywords"], *parts["keywords"]]
    return type(pattern)(**parts)


def _fill_list(patterns: Sequence[Any], bound: Bound) -> list[Any]:
    filled: list[Any] = []
    for pattern in patterns:
        filled += bound[MORE] if _is_more(pattern) else [_fill(pattern, bound)]
    return filled
