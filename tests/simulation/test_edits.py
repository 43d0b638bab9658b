"""Tests of the edits of which mutants are made: their match, and the changed function."""

import ast

import pytest
from mutated.edits import After, Always, Body, DoesNotApply, Drop, Edit, Function, Never, Replace


def function(body: str) -> Function:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    (made,) = ast.parse(f"def f(a, b):\n{lines}").body
    assert isinstance(made, ast.FunctionDef)
    return made


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        (Replace("X < _", "X < 0"), "return a.b < g(b)", "return a.b < 0"),
        (Replace("X != X", "X"), "return [a != b, a != a]", "return [a != b, a]"),
        (Replace("g(..., c=_)", "g(...)"), "return g(a, c=1, d=2)", "return g(a, d=2)"),
        (Replace("g(X, ...)", "h(X)"), "g(a, b, c=1)\ng()", "h(a)\ng()"),
        (Replace("(X, ...)", "(...,)"), "return (a, b, 1)", "return (b, 1)"),
        (Replace("X = g()\nX = Y", "X = g(Y)"), "a = b\na = g()\na = b", "a = b\na = g(b)"),
        (Replace("for X in Y:\n ...", "X = Y\n..."), "for c in a:\n c()\n b()", "c = a\nc()\nb()"),
        (Replace("X[0], _ = Y", "X[0] = Y"), "a[0], b = g()", "a[0] = g()"),
        (Drop("_.g(...)"), "a.g()\nb.h()", "pass\nb.h()"),
        (Drop("yield _"), "if a:\n    yield b", "if a:\n    pass"),
        (After("g(X)", "h(X, a)"), "g(b)\nreturn 1", "g(b)\nh(b, a)\nreturn 1"),
        (Always("not _"), "if not a:\n    return b", "if True:\n    return b"),
        (Never("_ is None"), "return a if b is None else b", "return a if False else b"),
        (Body("return a"), "b += 1\nreturn b", "return a"),
    ],
)  # fmt: skip  # One case a line.
def test_an_edit_of_a_mutant_changes_a_function(edit: Edit, before: str, after: str) -> None:
    changed = function(before)
    edit.once(changed, "f")
    assert ast.unparse(changed) == ast.unparse(function(after))
    compile(ast.Module([changed], []), "f", "exec")


@pytest.mark.parametrize(
    ("edit", "body", "many"),
    [
        (Replace("_ < _", "True"), "return a < b or b < a", 2),
        (Replace("_ < _", "True"), "return a > b", 0),
        (Replace("g(_)", "1"), "return g(a, b)", 0),
        (Replace("g(..., c=_)", "1"), "return g(a, d=2)", 0),
        (Drop("g()"), "g()\nif a:\n    g()", 2),
        (Never("_"), "return a", 0),
    ],
)
def test_an_edit_of_a_mutant_must_match_exactly_one_place(edit: Edit, body: str, many: int) -> None:
    with pytest.raises(DoesNotApply, match=f"matches {many} places in core.f; expected"):
        edit.once(function(body), "core.f")
