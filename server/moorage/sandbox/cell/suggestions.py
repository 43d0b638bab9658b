"""Suggestions for a policy's author: Python's own, else a similar name of Moorage.

`cell.policy` adds a suggestion to the message of an exception.
"""

import errno
import re
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import chain, islice
from types import FrameType
from typing import Any, Final

from moorage.model import Demand
from moorage.sandbox.cell.cluster_data import LazyDict

_SUGGESTION: Final = re.compile(r"(?:\. )?((?:Did you|Or did you) [^\n]{1,200}\?)$", re.MULTILINE)
_FROM: Final = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_NEARLY: Final = 0.7
"""Least similarity at which a name counts as misspelt."""
_DICTS_MAX: Final = 100
"""Maximum dicts that are searched: in the variables of a function, and directly in those dicts."""
_KEYS_MAX: Final = 200
_KEYS_SHOWN_MAX: Final = 8
_NO_FILES: Final = (
    ". A cell has no files: put the content into the policy's source, its settings or its "
    "parameters, or pass it in `inputs` of the request"
)
_OF_A_DEMAND: Final = frozenset(Demand.__struct_fields__)
_NO_DEMAND: Final = (
    ". A request may have no resources: then `read_demand` returns None, and `decline(None)` "
    "answers the request"
)
_NO_OTHERS: Final = ". A cell has no network, no threads and no other processes"


def suggestion(error: BaseException, message: str, root: str) -> str:
    """Return what to write instead, such as `. Did you mean: …?`, or an empty text.

    Args:
        error: The exception of the policy.
        message: The message of the error.
        root: The folder in which the files of the policy seem to lie.
    """
    if type(error) is KeyError:
        name, known, lazy = _keys(error, root)
        shown = ", ".join(map(repr, lazy[:_KEYS_SHOWN_MAX]))
        return _suggest(name, known) or (f". There are: {shown}" if shown else "")
    if isinstance(error, PermissionError) and error.errno == errno.EPERM:  # See `syscalls`.
        return _NO_FILES if error.filename is not None else _NO_OTHERS
    if message == "can't start new thread":
        return _NO_OTHERS
    if isinstance(error, AttributeError) and error.obj is None and error.name in _OF_A_DEMAND:
        return _NO_DEMAND
    if not message or not isinstance(error, AttributeError | ImportError | NameError):
        return ""
    shown = "".join(
        traceback.TracebackException(
            type(error), error, error.__traceback__, limit=-1, lookup_lines=False
        ).format_exception_only()
    )
    if found := _SUGGESTION.match(shown.partition(message)[2]):
        return f". {found[1]}"
    if "Did you mean" in message or "did you mean" in message:
        return ""
    if sys.version_info >= (3, 12) and not isinstance(error, ImportError):
        return ""
    return _earlier(error, message)


def near(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to another; "" if none is similar."""
    return next(iter(get_close_matches(name[:100], known, 1, _NEARLY)), "")


def _suggest(name: str, known: Iterable[str]) -> str:
    meant = near(name, known) if name else ""
    return f". Did you mean: {meant!r}?" if meant else ""


def _earlier(error: BaseException, message: str) -> str:
    """Return a suggestion as Python 3.12 makes it; older versions make none for caught errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, NameError) and frames and error.name:
        mine = frames[-1].f_locals
        if hasattr(mine.get("self"), error.name):
            return f". Did you mean: 'self.{error.name}'?"
        if meant := _suggest(error.name, [*mine, *frames[-1].f_globals, *frames[-1].f_builtins]):
            return meant
        known = error.name in sys.stdlib_module_names
        return f". Did you forget to import {error.name!r}?" if known else ""
    if isinstance(error, AttributeError) and error.name:
        return _suggest(error.name, _public(error.obj))
    found = _FROM.search(message) if isinstance(error, ImportError) else None
    return _suggest(found[1], _public(sys.modules.get(found[2]))) if found else ""


def _public(thing: object) -> list[str]:
    return [each for each in dir(thing) if not each.startswith("_")]


def _keys(error: KeyError, root: str) -> tuple[str, list[str], list[str]]:
    """Return a missing key, the similar keys, and all keys of the lazy dict that lacks it.

    The search covers dicts in the variables of the function.
    """
    key = error.args[0] if len(error.args) == 1 else None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lazy: list[str] = []
    while frames and frames[-1].f_code.co_filename == LazyDict.__missing__.__code__.co_filename:
        lazy = _names(frames.pop().f_locals.get("self"))
    if not isinstance(key, str) or not frames:
        return "", [], []
    if not frames[-1].f_code.co_filename.startswith(root):  # A library missed one of its own keys.
        return "", [], []
    known = [each for keys in _dicts(frames[-1]) if key not in keys for each in keys]
    return key, [*lazy, *known], lazy


def _dicts(frame: FrameType) -> Iterable[list[str]]:
    found: list[dict[Any, Any]] = []
    for value in islice(frame.f_locals.values(), _DICTS_MAX):
        if type(value) is dict:
            found.append(value)
            found += [each for each in islice(value.values(), _KEYS_MAX) if type(each) is dict]
    yield from map(_names, found[:_DICTS_MAX])


def _names(of: Any) -> list[str]:
    extras = of.extras if isinstance(of, LazyDict) else ()
    return [each for each in islice(chain(of, extras), _KEYS_MAX) if isinstance(each, str)]
