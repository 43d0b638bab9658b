"""Finds functions of the core by name, and replaces them by mutants for a while."""

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import moorage
from mutated.edits import DoesNotApply, Edit, Function

PARTS = ("core", "policy", "model.py", "records/leases.py")
"""Parts of the package that the simulation runs."""


@contextmanager
def play_mutant(name: str, edit: Edit) -> Iterator[None]:
    """Replace a function by its mutant in this process, for all modules that imported it.

    Args:
        name: The end of the function's dotted name, long enough to be unique.
        edit: The change.

    Raises:
        DoesNotApply: There is no such function, or the edit does not match exactly one place.
    """
    (module, qualified), function = find(name)
    edit.once(function, f"{module}.{qualified}")
    live = _live(module, qualified)
    before = live.__code__
    live.__code__ = _compile(function, qualified, before.co_filename)
    try:
        yield
    finally:
        live.__code__ = before


def find(name: str) -> tuple[tuple[str, str], Function]:
    """Return the module of a function, its name in that module, and a copy of its syntax tree.

    Raises:
        DoesNotApply: There is no such function, or there are several.
    """
    found = [each for each in _functions() if f".{'.'.join(each)}".endswith(f".{name}")]
    if len(found) != 1:
        where = ", ".join(map(".".join, found)) or "none"
        raise DoesNotApply(f"expected one function whose name ends in {name}; found: {where}")
    return found[0], deepcopy(_functions()[found[0]])


@cache
def _functions() -> dict[tuple[str, str], Function]:
    root = Path(inspect.getfile(moorage)).parent
    files = [file for part in PARTS for file in (root / part, *root.glob(f"{part}/**/*.py"))]
    return {
        (".".join(("moorage", *file.relative_to(root).with_suffix("").parts)), name): function
        for file in files
        if file.is_file()
        for name, function in _definitions(ast.parse(file.read_text()), "")
    }


def _definitions(node: ast.AST, within: str) -> Iterator[tuple[str, Function]]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef):
            yield from _definitions(each, f"{within}{each.name}.")
        elif isinstance(each, Function):
            yield f"{within}{each.name}", each


def _compile(function: Function, qualified: str, file: str) -> CodeType:
    """Return the code of a changed function, with the original line numbers."""
    node: ast.stmt = function
    for name in reversed(qualified.split(".")[:-1]):
        (around,) = ast.parse(f"class {name}: pass").body
        assert isinstance(around, ast.ClassDef)
        around.body = [node]
        node = around
    todo = [compile(ast.Module([node], []), file, "exec", dont_inherit=True)]
    for code in todo:
        if code.co_qualname == qualified:
            break
        todo += [const for const in code.co_consts if isinstance(const, CodeType)]
    return code


def _live(module: str, qualified: str) -> FunctionType:
    found: Any = import_module(module)
    for name in qualified.split("."):
        found = vars(found)[name]
    for wrapper in ("fget", "func", "__func__"):  # property, cached_property, classmethod
        found = getattr(found, wrapper, found)
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType), f"{module}.{qualified} is not a function"
    return function
