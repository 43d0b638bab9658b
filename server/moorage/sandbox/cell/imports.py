"""Imports of a policy beyond preloaded modules: its archive's files, and inert modules.

The cell reads the archive's files from memory, not from a disk. If a library is missing, an import
with an alternative fails, so that the policy uses the alternative. Any other import gives a module
that raises an error when it is used.
`cell.policy` installs the finder and asks it for warnings.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, ModuleType
from typing import Final, TypeGuard

from moorage.policy.requirements import IMPORTABLE, REQUIREMENTS
from moorage.sandbox.cell.missing import WHY, InertLoader
from moorage.sandbox.cell.preload import importable
from moorage.sandbox.cell.suggestions import near
from moorage.sandbox.wire.frames import ENTRY

ROOT: Final = "/policy/"
"""Where the files of an archive seem to lie; no such directory exists."""
_CATCHING: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_IMPORTING: Final = frozenset(
    {
        *("importlib", "importlib._bootstrap", "importlib._bootstrap_external", "importlib.util"),
        *("_frozen_importlib", "_frozen_importlib_external", __name__, InertLoader.__module__),
    }
)
"""Modules whose stack frames lie between an import statement and `PolicyImports.find_spec`."""
_NEARLY: Final = 0.75
"""Least similarity at which a module counts as a misspelt file of the archive."""
_OURS: Final = frozenset({"moorage", "moorage_policies"})
_MODULES_LEFT_OUT: Final = (
    *("concurrent.", "email.", "html.parser", "http.", "importlib.metadata", "importlib.resources"),
    *("logging.config", "multiprocessing.", "unittest.mock", "urllib.", "wsgiref.", "xml."),
)
"""Submodules that cells lack, of importable packages; other unknown names there are misspelt."""
_WANTED: Final = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)", re.MULTILINE)


class PolicyImports(MetaPathFinder, InspectLoader):
    """Imports the other files of the archive from memory.

    Args:
        files: Files of the archive, by path.
        entry: The author's name for `function.py`.
    """

    def __init__(self, files: Mapping[str, bytes], entry: str) -> None:
        self._files = files
        self._entry = entry
        self._shown = {display_name(name, entry): content for name, content in files.items()}
        self._inert = InertLoader()
        self._guards = cache(self._guards_of)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a file of the archive, or of an inert module.

        Raises:
            ModuleNotFoundError: The module is neither such a file nor an inert module.
        """
        del path, target
        found = self._sibling(fullname)
        if found is not None:
            return found
        importer = _importer()
        why = self._refusal(fullname)
        if importer and not why and not self._is_guarded(importer):
            return ModuleSpec(fullname, self._inert, is_package=True)
        raise ModuleNotFoundError(
            f"{fullname!r} cannot be imported by a policy: "
            + (why or "a cell has no network and no file system")
            + f". Available are the archive's own files and: {', '.join(IMPORTABLE)}",
            name=fullname,
        )

    def warnings(self) -> Iterator[str]:
        """Yield warnings about imports of missing libraries, one for each library."""
        warned = set[str]()
        for file, content in self._shown.items():
            if not file.endswith(".py"):
                continue
            for node, guarded in _imports(content):
                for name in _names(node):
                    library = name.partition(".")[0]
                    known = library in warned or importable(name) or self._sibling(name)
                    if known or self._refusal(name):
                        continue
                    warned.add(library)
                    then = (
                        "the code uses its alternative to the import"
                        if guarded
                        else ("the import succeeds, but code that uses it fails")
                    )
                    yield f"{file} line {node.lineno}: {name!r} {WHY}; {then}"

    def _sibling(self, fullname: str) -> ModuleSpec | None:
        base = fullname.replace(".", "/")
        for name, package in ((f"{base}.py", False), (f"{base}/__init__.py", True)):
            if name in self._files:
                origin = ROOT + display_name(name, self._entry)
                return self._spec(fullname, origin, package=package)
        if any(name.startswith(f"{base}/") for name in self._files):
            return self._spec(fullname, None, package=True)
        return None

    def _spec(self, fullname: str, origin: str | None, *, package: bool) -> ModuleSpec:
        spec = ModuleSpec(fullname, self, origin=origin, is_package=package)
        spec.has_location = origin is not None
        if package:
            spec.submodule_search_locations = [ROOT + fullname.replace(".", "/")]
        return spec

    def _refusal(self, fullname: str) -> str:
        """Return why a missing name cannot be a library; else ""."""
        library, _, inner = fullname.partition(".")
        if inner and (self._sibling(library) or _is_real(library)):
            there = fullname.startswith(_MODULES_LEFT_OUT)
            meant = near(fullname, [name for name in sys.modules if name.startswith(f"{library}.")])
            hint = f"; did you mean {meant!r}?" if meant else ""
            return "" if there else f"{library!r} has no such name{hint}"
        if library in sys.stdlib_module_names:
            return ""
        wanted = _WANTED.findall(self._files.get(REQUIREMENTS, b"").decode("utf-8", "replace"))
        if library.lower() in {name.lower().replace("-", "_") for name in wanted}:
            return ""
        own = {name.partition("/")[0].removesuffix(".py") for name in self._files}
        meant = next(iter(get_close_matches(library, own | _OURS, 1, _NEARLY)), "")
        return f"did you mean {meant!r}?" if meant else ""

    def _is_guarded(self, importer: FrameType) -> bool:
        """Return whether the policy has an alternative for this import."""
        guards = self._guards(importer.f_code.co_filename.removeprefix(ROOT))
        return any(first <= importer.f_lineno <= last for first, last in guards)

    def _guards_of(self, file: str) -> list[tuple[int, int]]:
        found = _imports(self._shown.get(file, b""))
        return [(node.lineno, node.end_lineno or 0) for node, guarded in found if guarded]

    def get_source(self, fullname: str) -> str:
        """Return the text of a file of the archive; empty for a package without `__init__.py`."""
        spec = self._sibling(fullname)
        if spec is None or spec.origin is None:
            return ""
        return importlib.util.decode_source(self._shown[spec.origin.removeprefix(ROOT)])

    def get_code(self, fullname: str) -> CodeType:
        """Compile a file of the archive."""
        spec = self._sibling(fullname)
        origin = ROOT + fullname if spec is None or spec.origin is None else spec.origin
        return compile(self.get_source(fullname), origin, "exec", dont_inherit=True)


def display_name(name: str, entry: str) -> str:
    """Return the name of a file for messages; the entry file has the author's name for it."""
    return entry if name == ENTRY else name


def _importer() -> FrameType | None:
    """Return the line of the policy that runs the current import.

    The result is None if a library imports, as Python's own libraries do at their first use: then a
    missing module must raise an error.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  # Only frames show it.
    while frame is not None:
        file, name = frame.f_globals.get("__file__"), frame.f_globals.get("__name__")
        if isinstance(file, str) and name not in _IMPORTING:  # Code that `exec` runs has no file.
            return frame if file.startswith(ROOT) else None
        frame = frame.f_back
    return None


def _is_real(library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and not isinstance(getattr(module, "__loader__", None), InertLoader)


def _imports(content: bytes) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports of a file, and whether the file catches their exceptions."""
    try:
        pending: list[tuple[ast.AST, bool]] = [(ast.parse(content), False)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # Loading the file reports the error.
    while pending:
        node, guarded = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, guarded
        inside = set[ast.AST]()
        if (isinstance(node, ast.Try) and any(_catches(each.type) for each in node.handlers)) or (
            isinstance(node, ast.With) and any(_suppresses(each) for each in node.items)
        ):
            inside = set(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            guarded = False  # The import runs later.
        children = node.orelse if _is_for_editors(node) else ast.iter_child_nodes(node)
        pending += [(each, guarded or each in inside) for each in reversed([*children])]


def _is_for_editors(node: ast.AST) -> TypeGuard[ast.If]:
    """Return whether the body of an `if` is only for type checkers, so that it never runs."""
    return isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"


def _names(node: ast.Import | ast.ImportFrom) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [node.module] if node.module and not node.level else []


def _suppresses(item: ast.withitem) -> bool:
    call = item.context_expr
    return (
        isinstance(call, ast.Call)
        and _name(call.func) == "suppress"
        and any(_catches(each) for each in call.args)
    )


def _catches(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches(each) for each in kind.elts)
    return kind is None or _name(kind) in _CATCHING


def _name(expression: ast.expr) -> str:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""
