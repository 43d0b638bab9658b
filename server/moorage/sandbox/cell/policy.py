"""Loads a policy inside a cell: compiles, imports, finds the class, constructs it.

Everything here runs behind the wall, because compiling alone can crash or exhaust a process.
Sources live in memory; a policy imports its sibling files through `_Siblings`, what `preload` lists
through `sys.modules`, and nothing else.
"""

import importlib.util
import inspect
import linecache
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, Final

import msgspec

from moorage.policy.requirements import IMPORTABLE
from moorage.sandbox.cell.preload import importable
from moorage.sandbox.wire.frames import Fault
from moorage.sandbox.wire.limits import FINDINGS_MAX, INSTANCES_MAX, MESSAGE_CHARACTERS_MAX

ROOT: Final = "/policy/"
"""Where the files of an archive seem to lie; no such directory exists."""
ENTRY: Final = "function.py"
CLASS: Final = "AIOSv1PolicyRule"
_METHODS: Final = (
    ("__init__", 3, "rule_id, settings, parameters"),
    ("eval", 3, "parameters, input_data, context"),
    ("management", 2, "action, data"),
)
_SUSPENDING: Final = (
    inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_GENERATOR
    | inspect.CO_ASYNC_GENERATOR
)
"""What calling such a function returns is no answer but something that would have to be run."""
_CLASS_LINE: Final = re.compile(r"class\s+(\w+)")
_CLASSES_SHOWN_MAX: Final = 5
_decode: Final = msgspec.msgpack.decode


class _Siblings(MetaPathFinder, InspectLoader):
    """Imports the other files of the archive from memory, and refuses the rest readably."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a sibling.

        Raises:
            ModuleNotFoundError: It is none, and nothing else can be imported in here.

        """
        del path, target
        base = fullname.replace(".", "/")
        for name, package in ((f"{base}.py", False), (f"{base}/__init__.py", True)):
            if name in self._files:
                return self._spec(fullname, ROOT + name, package=package)
        if any(name.startswith(f"{base}/") for name in self._files):
            return self._spec(fullname, None, package=True)
        raise ModuleNotFoundError(
            f"{fullname!r} cannot be imported by a policy: there is no network and no file system "
            f"in a cell. Available are the archive's own files and: {', '.join(IMPORTABLE)}",
            name=fullname,
        )

    def _spec(self, fullname: str, origin: str | None, *, package: bool) -> ModuleSpec:
        spec = ModuleSpec(fullname, self, origin=origin, is_package=package)
        spec.has_location = origin is not None
        if package:
            spec.submodule_search_locations = [ROOT + fullname.replace(".", "/")]
        return spec

    def get_source(self, fullname: str) -> str:
        """Return the text of a sibling; empty for a package without `__init__.py`."""
        spec = self.find_spec(fullname)
        if spec is None or spec.origin is None:
            return ""
        return importlib.util.decode_source(self._files[spec.origin.removeprefix(ROOT)])

    def get_code(self, fullname: str) -> CodeType:
        """Compile a sibling."""
        spec = self.find_spec(fullname)
        origin = ROOT + fullname if spec is None or spec.origin is None else spec.origin
        return compile(self.get_source(fullname), origin, "exec", dont_inherit=True)


class Policy:
    """One loaded policy version.

    Args:
        uri: Given to the policy as `rule_id`.
        files: Archive-relative path to content.
        settings: Default settings.
        parameters: Default parameters.
        clients: What is added to every settings dict.

    Attributes:
        faults: Why it cannot be used; empty when it can.

    """

    def __init__(
        self,
        uri: str,
        files: Mapping[str, bytes],
        settings: bytes,
        parameters: bytes,
        clients: Mapping[str, Any],
    ) -> None:
        self._uri = uri
        self._files = {name.removeprefix("code/"): content for name, content in files.items()}
        self._settings = settings
        self._parameters = parameters
        self._clients = clients
        self._class: Any = None
        self._instances: OrderedDict[bytes, tuple[Any, bytes]] = OrderedDict()
        self.faults: list[Fault] = []

    @property
    def management(self) -> bool:
        """Whether the class has a `management` method."""
        try:
            return callable(getattr(self._class, "management", None))
        except BaseException:  # noqa: BLE001  # A metaclass of the policy may raise anything.
            return False

    def load(self, *, construct: bool) -> None:
        """Import the entry and find the class; what is wrong goes to `faults`.

        Args:
            construct: Also look at the whole archive and construct the policy with its defaults.

        """
        for name, content in self._files.items():
            if name.endswith(".py"):
                lines = content.decode("utf-8", "replace").splitlines(keepends=True)
                linecache.cache[ROOT + name] = (len(content), None, lines, ROOT + name)
        sys.meta_path[:] = [_Siblings(self._files)]
        if ENTRY not in self._files:
            self._fault(f"the archive has no {ENTRY}; expected one with a class {CLASS}")
            return
        if construct:
            self._inspect_archive()
            if self.faults:
                return
        try:
            # A module name of its own, so that no sibling or library is shadowed.
            module = importlib.import_module("function")
            self._class = getattr(module, CLASS, None)
            self._inspect_class()
            if construct and not self.faults:
                self.instance(b"")
        except BaseException as error:  # noqa: BLE001  # Whatever a policy raises is its fault.
            self._blame(error)

    def instance(self, overrides: bytes) -> tuple[Any, dict[str, Any]]:
        """Return the warm policy for these overrides, and fresh merged parameters.

        Args:
            overrides: msgpack of `[settings, parameters]` of the caller; empty for none.

        """
        found = self._instances.get(overrides)
        if found is None:
            settings, parameters = _decode(self._settings), _decode(self._parameters)
            packed = self._parameters
            if overrides:
                own_settings, own_parameters = _decode(overrides)
                settings |= own_settings
                parameters |= own_parameters
                packed = msgspec.msgpack.encode(parameters)
            settings |= self._clients
            found = (self._class(self._uri, settings, parameters), packed)
            self._instances[overrides] = found
            if len(self._instances) > INSTANCES_MAX:
                self._instances.popitem(last=False)
        elif len(self._instances) > 1:
            self._instances.move_to_end(overrides)
        return found[0], _decode(found[1])

    def _inspect_archive(self) -> None:
        for name, content in self._files.items():
            if name.endswith(".py"):
                try:
                    compile(content, ROOT + name, "exec", dont_inherit=True)
                except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                    self._blame(error, name)
                module = name.removesuffix(".py").replace("/", ".")
                if "/" not in name and name != ENTRY and importable(module):
                    self._fault(f"a library is called {module!r} too; rename this file", name)

    def _inspect_class(self) -> None:
        if not inspect.isclass(self._class):
            name = name_of(self._class)
            found = _classes() if self._class is None else f"; it has a {name} of that name"
            self._fault(f"there is no class {CLASS}{found}", ENTRY)
            return
        for name, count, names in _METHODS:
            method = getattr(self._class, name, None)
            if method is None or (name == "__init__" and method is object.__init__):
                if name != "management":
                    self._fault(f"{CLASS} has no {name}(self, {names})", ENTRY)
                continue
            code = getattr(method, "__code__", None)
            line = code.co_firstlineno if code else 0
            try:
                inspect.signature(method).bind(*range(count + 1))
            except (TypeError, ValueError):
                self._fault(f"{name} cannot be called as {name}(self, {names})", ENTRY, line)
                continue
            if code and code.co_flags & _SUSPENDING:
                self._fault(
                    f"{name} must return its answer: write it without async and yield", ENTRY, line
                )

    def _fault(self, message: str, file: str = "", line: int = 0) -> None:
        if len(self.faults) < FINDINGS_MAX:
            self.faults.append(Fault(message, file, line, 0, _line_of(file, line)))

    def _blame(self, error: BaseException, file: str = "") -> None:
        """Note an exception as a finding, at the place in the policy where it came from."""
        if isinstance(error, SyntaxError) and str(error.filename or "").startswith(ROOT):
            file, line = str(error.filename).removeprefix(ROOT), error.lineno or 0
            column = error.offset or 0
            text = _line_of(file, line)
            if text and 0 < column <= len(text) + 1:  # A long line is shown from its start only.
                before = re.sub(r"[^\t]", " ", text[: column - 1])  # A tab is as wide as a tab.
                text = f"{text}\n{before}^"
            message = f"{type(error).__name__}: {error.msg}"[:MESSAGE_CHARACTERS_MAX]
        else:
            message, where, line = describe(error)
            if isinstance(error, ImportError):  # Where libraries lie on the server is nobody's.
                message = re.sub(r" \((?:/[^)]*|unknown location)\)?$", "", message)
            message = f"{name_of(error)}: {message}" if message else name_of(error)
            file, column = where or file, 0
            text = _line_of(file, line)
        if len(self.faults) < FINDINGS_MAX:
            self.faults.append(Fault(message, file, line, column, text))


def _classes() -> str:
    """Return the classes that the entry has instead, in words."""
    lines = linecache.getlines(ROOT + ENTRY)
    names = [found[1] for line in lines if (found := _CLASS_LINE.match(line))]
    return f"; it has {', '.join(names[:_CLASSES_SHOWN_MAX])}"[:200] if names else ""


def _line_of(file: str, line: int) -> str:
    return linecache.getline(ROOT + file, line).rstrip("\n")[:200] if line else ""


def name_of(value: object) -> str:
    """Return the name of a value's class, whatever the class did to it."""
    try:
        return str.__str__(type(value).__name__)[:100]
    except BaseException:  # noqa: BLE001  # A metaclass of the policy may raise anything.
        return "BaseException" if issubclass(type(value), BaseException) else "object"


def describe(error: BaseException) -> tuple[str, str, int]:
    """Return an exception's message, and file and line within the policy where it was raised."""
    try:
        message = str.__str__(str(error))[:MESSAGE_CHARACTERS_MAX]
        message = message.encode("utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001  # __str__ of the policy may raise anything.
        message = "(its message could not be read)"
    try:
        frames = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename.startswith(ROOT)
        ]
        file, line = frames[-1]
        return message, str(file).removeprefix(ROOT)[:200], int(line)
    except BaseException:  # noqa: BLE001  # No frame of the policy, or one that was tampered with.
        return message, "", 0
