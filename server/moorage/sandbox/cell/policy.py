"""Loads a policy inside a cell: compiles and imports its files, finds and constructs its class.

Everything here runs in the jail, because compiling alone can crash or exhaust a process.
Sources live in memory; a policy imports what `preload` lists through `sys.modules`, and all else
through `imports`. A policy may be registered even if its constructor needs values of a request.
"""

import contextlib
import importlib
import inspect
import linecache
import re
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any, Final

import msgspec

from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.sandbox.cell.imports import ROOT, PolicyImports, display_name
from moorage.sandbox.cell.missing import is_inert, loading
from moorage.sandbox.cell.preload import importable
from moorage.sandbox.cell.suggestions import suggestion
from moorage.sandbox.wire.frames import ENTRY, CodeFinding
from moorage.sandbox.wire.limits import (
    CALLS_SHOWN_MAX,
    FINDINGS_MAX,
    INSTANCES_MAX,
    MESSAGE_CHARACTERS_MAX,
)

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
"""Flags of functions whose call returns a coroutine or generator, not an answer."""
_CLASS_LINE: Final = re.compile(r"class\s+(\w+)")
_CLASSES_SHOWN_MAX: Final = 5
_KEYS_SHOWN_MAX: Final = 5
_PRIVATE_PLACE: Final = re.compile(r" \((?:/[^)]*|unknown location)\)?$")
"""Matches the path of a library on this machine in the message of an ImportError."""
_NO_VALUE: Final = object()
_NAMES: Final = ("rule_id", "settings", "parameters")
_decode: Final = msgspec.msgpack.decode
Snapshot = dict[str, tuple[Any, JsonObject]]
"""`settings` and `parameters` of an instance: the object itself, and a copy of its values."""


class _Watched(JsonObject):
    """A dict that records the dotted paths of keys that were read but are missing."""

    def __init__(self, given: JsonMapping, path: str, missed: dict[str, None]) -> None:
        super().__init__(
            (key, _Watched(each, f"{path}.{key}", missed) if isinstance(each, dict) else each)
            for key, each in given.items()
        )
        self._path, self._missed = path, missed

    def __missing__(self, key: str) -> JsonValue:
        self._missed[f"{self._path}.{key}"] = None
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        if not found:
            self._missed[f"{self._path}.{key}"] = None
        return found

    def get(self, key: str, default: JsonValue = None) -> JsonValue:
        return self[key] if key in self else default  # noqa: SIM401  # This is that `get`.


_KEPT: Final = ("settings", "parameters")


class Policy:
    """One loaded policy version.

    Args:
        uri: The URI of the policy, which gets it as `rule_id`.
        files: The content of each file, by its path in the archive.
        entry: File with the policy class, usually `function.py`.
        clients: The clients that are added to every settings dict.

    Attributes:
        faults: Why the policy cannot be used; empty: it can be used.
        warnings: Why some requests may fail, if the policy was checked.
    """

    def __init__(
        self,
        uri: str,
        files: Mapping[str, bytes],
        entry: str,
        settings: bytes,
        parameters: bytes,
        clients: JsonMapping,
    ) -> None:
        self._uri = uri
        self._files = {name.removeprefix("code/"): content for name, content in files.items()}
        self._entry = entry
        self._settings = settings
        self._parameters = parameters
        self._clients = clients
        self._class: Any = None
        self._by_name = False
        """Whether the constructor takes the documented arguments in another order."""
        self._instances: OrderedDict[bytes, tuple[Any, bytes]] = OrderedDict()
        self._given: dict[bytes, tuple[JsonObject, JsonObject]] = {}
        """Settings and parameters of an instance's construction; the instance may change them."""
        self.faults: list[CodeFinding] = []
        self.warnings: list[str] = []

    @property
    def management(self) -> bool:
        """Whether the class has a `management` method."""
        try:
            found = getattr(self._class, "management", None)
            return callable(found) and not is_inert(found)
        except BaseException:  # noqa: BLE001  # A metaclass of the policy may raise anything.
            return False

    def load(self, *, construct: bool) -> None:
        """Import the entry file and find the class; add errors to `faults`.

        Args:
            construct: Whether to check the whole archive, too, and to construct the policy with its
                defaults.
        """
        for name, content in self._files.items():
            if name.endswith(".py"):
                lines = content.decode("utf-8", "replace").splitlines(keepends=True)
                place = ROOT + display_name(name, self._entry)
                linecache.cache[place] = (len(content), None, lines, place)
        imports = PolicyImports(self._files, self._entry)
        sys.meta_path[:] = [imports]
        if ENTRY not in self._files:
            self._fault(f"the archive has no {ENTRY}; expected one with a class {CLASS}")
            return
        if construct:
            self._inspect_archive()
            if self.faults:
                return
            self.warnings += islice(imports.warnings(), FINDINGS_MAX)
        try:
            # A unique module name, so that no sibling or library is shadowed.
            with loading():
                module = importlib.import_module("function")
            self._class = getattr(module, CLASS, None)
            self._inspect_class()
        except BaseException as error:  # noqa: BLE001  # Whatever a policy raises is its fault.
            self._blame(error)
        if construct and not self.faults:
            self._try_constructor()

    def _try_constructor(self) -> None:
        """Construct the policy with its defaults; values of a caller or host may be missing."""
        try:
            self.instance(b"")
        except BaseException as error:  # noqa: BLE001  # Whatever a policy raises is its fault.
            missed: dict[str, None] = {}
            settings = _Watched(_decode(self._settings) | self._clients, "settings", missed)
            parameters = _Watched(_decode(self._parameters), "parameters", missed)
            with contextlib.suppress(BaseException):  # The call raises the same exception again.
                self._construct(settings, parameters)
            self._blame(error)
            if missed and self.faults:
                why = self.faults.pop()
                names = ", ".join(list(missed)[:_KEYS_SHOWN_MAX])[: MESSAGE_CHARACTERS_MAX // 2]
                self.warnings.append(
                    f"{why.file or self._entry} line {why.line}: without {names} the policy cannot"
                    f" be constructed ({why.message[: MESSAGE_CHARACTERS_MAX // 2]}): a request has"
                    " to supply these values"
                )

    def _construct(self, settings: JsonObject, parameters: JsonObject) -> Any:
        with loading():
            if self._by_name:
                return self._class(rule_id=self._uri, settings=settings, parameters=parameters)
            return self._class(self._uri, settings, parameters)

    def management_arguments(self, action: str, data: JsonValue) -> tuple[JsonValue, ...]:
        """Return the arguments for `management`, by its definition."""
        given = {"action": action, "data": data}
        method = inspect.signature(self._class.management)
        try:
            method.bind(None, action, data)
        except TypeError:
            wanted = [
                each
                for each in list(method.parameters.values())[1:]
                if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
                and (each.default is each.empty or each.name in given)
            ]
            others = {"parameters": _decode(self._parameters), "context": {}, **given}
            values = [others.pop(each.name, _NO_VALUE) for each in wanted]
            rest = iter([given[name] for name in given if name in others])
            return tuple(next(rest, None) if each is _NO_VALUE else each for each in values)
        return action, data

    def instance(self, overrides: bytes) -> tuple[Any, JsonObject]:
        """Return the constructed policy for these overrides, and newly merged parameters.

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
            found = (self._construct(settings, parameters), packed)
            self._instances[overrides] = found
            self._given[overrides] = (settings, parameters)
            if len(self._instances) > INSTANCES_MAX:
                del self._given[self._instances.popitem(last=False)[0]]
        elif len(self._instances) > 1:
            self._instances.move_to_end(overrides)
        return found[0], _decode(found[1])

    def snapshot(self, overrides: bytes) -> Snapshot:
        """Return an instance's settings and parameters, each with a copy of its values.

        A policy stores them as `self.settings` and `self.parameters`, as the documents say, or
        changes the given ones in place.
        """
        policy, given = self._instances[overrides][0], self._given[overrides]
        found: Snapshot = {}
        for name, handed in zip(_KEPT, given, strict=True):
            now = getattr(policy, name, handed)
            values = (now if isinstance(now, dict) else handed).items()
            found[name] = now, {k: _copy(v) for k, v in values if k not in self._clients}
        return found

    def changes(self, overrides: bytes, before: Snapshot) -> dict[str, JsonObject]:
        """Return the settings and parameters that an instance has added or changed.

        Only added and replaced keys are changes; removed keys are not.
        """
        settings, parameters = _decode(self._settings), _decode(self._parameters)
        if overrides:
            own_settings, own_parameters = _decode(overrides)
            settings |= own_settings
            parameters |= own_parameters
        found: dict[str, JsonObject] = {}
        after = self.snapshot(overrides)
        for name, old in zip(_KEPT, (settings, parameters), strict=True):
            had = before[name][1]
            new = {
                key: value
                for key, value in after[name][1].items()
                if (key not in old or old[key] != value) and (key not in had or had[key] != value)
            }
            if new:
                found[name] = new
        return found

    def forget(self, overrides: bytes, before: Snapshot) -> None:
        """Drop the instance with these overrides if its settings or parameters have changed."""
        if self.snapshot(overrides) != before:
            del self._instances[overrides], self._given[overrides]

    def _inspect_archive(self) -> None:
        for name, content in self._files.items():
            shown = display_name(name, self._entry)
            if name.endswith(".py"):
                try:
                    compile(content, ROOT + shown, "exec", dont_inherit=True)
                except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                    self._blame(error, shown)
                module = name.removesuffix(".py").replace("/", ".")
                if "/" not in name and name != ENTRY and importable(module):
                    self._fault(f"a library is called {module!r} too; rename this file", name)

    def _inspect_class(self) -> None:
        if is_inert(self._class):
            self._fault(f"{CLASS} is imported from a missing module ({self._class!r})", self._entry)
            return
        if not inspect.isclass(self._class):
            name = name_of(self._class)
            found = (
                _classes(self._entry) if self._class is None else f"; it has a {name} of that name"
            )
            self._fault(f"there is no class {CLASS}{found}", self._entry)
            return
        for name, count, names in _METHODS:
            method = getattr(self._class, name, None)
            if (
                method is None
                or is_inert(method)
                or (name == "__init__" and method is object.__init__)
            ):
                if name != "management":
                    self._fault(f"{CLASS} has no {name}(self, {names})", self._entry)
                continue
            self._inspect_method(name, method, count, names)

    def _inspect_method(
        self, name: str, method: Callable[..., object], count: int, names: str
    ) -> None:
        code = getattr(method, "__code__", None)
        line = code.co_firstlineno if code else 0
        wrong = ""
        try:
            taken = inspect.signature(method)
            taken.bind(*range(count + 1))
            if name == "__init__":
                order = [each for each in taken.parameters if each in _NAMES]
                self._by_name = len(order) == len(_NAMES) and order != list(_NAMES)
        except (TypeError, ValueError):
            wrong = f"{name} cannot be called as {name}(self, {names})"
        if not wrong and code and code.co_flags & _SUSPENDING:
            wrong = f"{name} must return its answer: write it without async and yield"
        if wrong and name == "management":  # Few callers need it.
            self.warnings.append(
                f"{self._entry} line {line}: {wrong}; {name} gets the parameters that it names"
            )
        elif wrong:
            self._fault(wrong, self._entry, line)

    def _fault(self, message: str, file: str = "", line: int = 0) -> None:
        if len(self.faults) < FINDINGS_MAX:
            self.faults.append(CodeFinding(message, file, line, 0, _line_of(file, line)))

    def _blame(self, error: BaseException, file: str = "") -> None:
        """Record an exception as a finding, with the place in the policy that raised it."""
        if isinstance(error, SyntaxError) and str(error.filename or "").startswith(ROOT):
            file, line = str(error.filename).removeprefix(ROOT), error.lineno or 0
            column = error.offset or 0
            text = _line_of(file, line)
            if text and 0 < column <= len(text) + 1:  # A long line is cut off at its end.
                before = re.sub(r"[^\t]", " ", text[: column - 1])  # Tabs align the caret.
                text = f"{text}\n{before}^"
            message = f"{type(error).__name__}: {error.msg}"[:MESSAGE_CHARACTERS_MAX]
        else:
            message, where, line = describe(error)
            message = f"{name_of(error)}: {message}" if message else name_of(error)
            file, column = where or file, 0
            text = _line_of(file, line)
        if len(self.faults) < FINDINGS_MAX:
            self.faults.append(CodeFinding(message, file, line, column, text))


def _copy(value: JsonValue) -> JsonValue:
    try:
        return deepcopy(value)
    except BaseException:  # noqa: BLE001  # A policy may store anything there, such as a lock.
        return value


def _classes(entry: str) -> str:
    """Return a text with the classes that the entry file has instead of the required class."""
    lines = linecache.getlines(ROOT + entry)
    names = [found[1] for line in lines if (found := _CLASS_LINE.match(line))]
    return f"; it has {', '.join(names[:_CLASSES_SHOWN_MAX])}"[:200] if names else ""


def _line_of(file: str, line: int) -> str:
    return linecache.getline(ROOT + file, line).rstrip("\n")[:200] if line else ""


def name_of(value: object) -> str:
    """Return the name of a value's class, even if the class hides it."""
    try:
        return str.__str__(type(value).__name__)[:100]
    except BaseException:  # noqa: BLE001  # A metaclass of the policy may raise anything.
        return "BaseException" if issubclass(type(value), BaseException) else "object"


def describe(error: BaseException) -> tuple[str, str, int]:
    """Return an exception's message, and the file and line of the policy that raised it."""
    try:
        message = str.__str__(str(error))
        if isinstance(error, ImportError):
            message = _PRIVATE_PLACE.sub("", message)
        message = (message + suggestion(error, str(error), ROOT))[:MESSAGE_CHARACTERS_MAX]
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
    except BaseException:  # noqa: BLE001  # The policy has no frame, or has changed it.
        return message, "", 0


def calls_of(error: BaseException) -> tuple[str, ...]:
    """Return the policy's calls that led to an exception, outermost first, as Python shows them."""
    try:
        frames = [
            (frame.f_code, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename.startswith(ROOT)
        ]
        shown = []
        for code, line in frames[-CALLS_SHOWN_MAX:]:
            file = str(code.co_filename).removeprefix(ROOT)[:200]
            text = f"{file}, line {line}, in {code.co_name[:100]}: {_line_of(file, line).strip()}"
            shown.append(text.encode("utf-8", "replace").decode())
        return tuple(shown)
    except BaseException:  # noqa: BLE001  # As above.
        return ()
