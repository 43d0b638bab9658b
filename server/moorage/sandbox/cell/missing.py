"""Inert modules, which take the place of missing libraries.

Existing policies import libraries that they never use, or use only with a network. So the import
succeeds, and a use of the library raises an error with the reason. The following are not uses:
subclassing, decorating, annotating, and catching exceptions; nor calls while the policy is loaded
or constructed, since their results may never be needed.

`cell.imports` finds these modules; `cell.policy` marks the loading of a policy with `loading`.
"""

import importlib
import sys
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Final, NoReturn

WHY: Final = (
    "is not available to policies: nothing is installed for them, and a cell has no network and no"
    " file system"
)
_ERRORS: Final = ("Error", "Exception", "Timeout", "Warning", "Expired", "error", "timeout")
"""Endings of names that stand for exception classes."""
_ERROR_MODULES: Final = frozenset({"exceptions", "errors", "error", "exc"})
"""Modules with these names contain only exceptions."""
_state: Final = {"loading": False}
_errors: Final[dict[str, type["MissingLibraryError"]]] = {}


class _ErrorMeta(ABCMeta):
    def __getattr__(cls, name: str) -> object:
        """Return the class itself: an attribute `error` may be a module with exceptions."""
        if name.startswith("_"):
            raise AttributeError(name)
        return cls


class MissingLibraryError(ModuleNotFoundError, metaclass=_ErrorMeta):
    """A policy uses a missing library; each library has its own subclass.

    All exceptions of the library are this one class, so `except requests.HTTPError` catches the
    error of `requests.get`.
    """

    def __init__(self, *args: object, **kwargs: Any) -> None:
        super().__init__(*args, name=kwargs.get("name"))

    def __getattr__(self, name: str) -> None:
        """Return None, as `error.response` without a response."""
        if name.startswith("_"):
            raise AttributeError(name)


def errors_of(library: str) -> type[MissingLibraryError]:
    """Return the one class that stands for all exceptions of a missing library."""
    if library not in _errors:

        class Error(MissingLibraryError):
            pass

        Error.__name__ = Error.__qualname__ = MissingLibraryError.__name__
        _errors[library] = Error
    return _errors[library]


class _Inert(ABCMeta):
    """The class of all names in an inert module, whether classes or functions in the library."""

    _path: str
    _module: str
    _error: type[MissingLibraryError]

    def __getattr__(cls, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return _find(cls, name, cls._path, cls._module, cls._error)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if not is_inert(cls):  # A class of the policy that inherits from an inert class.
            return super().__call__(*args, **kwargs)
        if not _state["loading"]:
            raise cls._error(f"{cls._path}: {cls._module!r} {WHY}", name=cls._module)
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | type):
            return args[0]  # A decorator returns its function.
        return _inert(f"{cls._path}()", cls._module, cls._error)

    def __getitem__(cls, _key: object) -> object:  # As in annotations.
        return cls

    def __repr__(cls) -> str:
        return f"<{cls._path}: not available to policies>" if is_inert(cls) else type.__repr__(cls)

    @property
    def register(cls) -> Any:  # Libraries have methods of this name.
        return cls.__getattr__("register")


def _used(cls: Any, *_: object) -> NoReturn:
    raise cls._error(f"{cls._path}: {cls._module!r} {WHY}", name=cls._module)


for _use in (
    "add", "aenter", "aexit", "aiter", "await", "contains", "enter", "exit", "float", "floordiv",
    "ge", "gt", "index", "int", "invert", "iter", "le", "len", "lt", "matmul", "mod", "mul", "neg",
    "next", "pow", "radd", "rmul", "rsub", "rtruediv", "setitem", "sub", "truediv", "xor",
):  # fmt: skip
    setattr(_Inert, f"__{_use}__", _used)


class _Base(Exception):  # noqa: N818  # Of all inert classes: a policy may catch any of them.
    """Base of all inert classes: lets a policy make instances of its own subclasses.

    The base allows instances only while the policy is loaded or constructed. Later, the base raises
    the error that the library is missing.
    """

    def __init__(self, *args: object, **kwargs: Any) -> None:
        del kwargs
        super().__init__(*args)
        if not _state["loading"]:
            _used(type(self))

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(type(self), name)


def _inert(path: str, module: str, error: type[MissingLibraryError]) -> object:
    name = path.rpartition(".")[2].removesuffix("()")
    return _Inert(name, (_Base,), {"_path": path, "_module": module, "_error": error, "_own": 1})


def _find(
    owner: object, name: str, path: str, module: str, error: type[MissingLibraryError]
) -> object:
    """Return an attribute, and store it, so that it is the same each time."""
    raised = name.endswith(_ERRORS) or path.rpartition(".")[2] in _ERROR_MODULES
    if name == "APIError":  # The clients' error may be meant: their class catches both.
        value: object = MissingLibraryError
    else:
        value = error if raised else _inert(f"{path}.{name}", module, error)
    setattr(owner, name, value)
    return value


def is_inert(value: object) -> bool:
    """Return whether a value comes from an inert module and is not a class of the policy."""
    return issubclass(type(value), _Inert) and "_own" in vars(value)


@contextmanager
def loading() -> Iterator[None]:
    """Mark all calls in this block as part of the loading or construction of a policy."""
    before, _state["loading"] = _state["loading"], True
    try:
        yield
    finally:
        _state["loading"] = before


class _Module(ModuleType):
    """An inert module, which takes the place of a missing library."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"{name!r} {WHY}.")
        self.__path__: list[str] = []  # Submodules are inert, too.

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} {WHY}")
        parts = self.__name__.split(".")
        names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        # `urllib.parse` exists and `urllib.request` does not: name the longer path.
        missing = next(each for each in names if isinstance(sys.modules.get(each, self), _Module))
        return _find(self, name, self.__name__, missing, errors_of(parts[0]))


class InertLoader(Loader):
    """Makes inert modules for the import of missing libraries."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the inert module of a spec."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Repeat the known side effects of an import of the real library."""
        if module.__name__ == "urllib.request":
            importlib.import_module("urllib.error")
