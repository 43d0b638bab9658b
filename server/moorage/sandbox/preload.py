"""What a rule can import: loaded once in the zygote, shared by every cell.

A cell cannot open a file, so nothing can be imported later. `AVAILABLE` is what the error for
any other name lists; `SUPPORT` are modules that the available ones load only when they are first
used, which would be too late.
"""

import importlib
import sys
from typing import Final

AVAILABLE: Final = (
    "abc", "array", "ast", "base64", "binascii", "bisect", "calendar", "cmath", "collections",
    "collections.abc", "colorsys", "contextlib", "contextvars", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "enum", "errno", "fnmatch", "fractions", "functools", "gc",
    "graphlib", "hashlib", "heapq", "hmac", "html", "inspect", "io", "ipaddress", "itertools",
    "json", "keyword", "logging", "math", "moorage.model", "moorage.policy", "msgspec",
    "msgspec.json", "msgspec.msgpack", "numbers", "numpy", "numpy.linalg", "numpy.ma",
    "numpy.random", "numpy.typing", "operator", "os", "os.path", "pathlib", "pickle", "platform",
    "pprint", "queue", "random", "re", "secrets", "shlex", "statistics", "string", "struct",
    "sys", "textwrap", "threading", "time", "timeit", "tokenize", "traceback", "types", "typing",
    "typing_extensions", "unicodedata", "urllib.parse", "uuid", "warnings", "weakref", "zlib",
)  # fmt: skip
"""Importable by a rule, besides the other files of its own archive."""

SUPPORT: Final = (
    "_strptime", "encodings.ascii", "encodings.cp1252", "encodings.hex_codec", "encodings.idna",
    "encodings.latin_1", "encodings.unicode_escape", "encodings.utf_16", "encodings.utf_8",
    "encodings.utf_8_sig", "faulthandler", "json.tool", "linecache", "logging.handlers", "mmap",
    "numpy._core._dtype_ctypes", "numpy._core._methods", "numpy.exceptions", "numpy.fft",
    "numpy.lib.stride_tricks", "numpy.matrixlib", "numpy.polynomial", "opcode", "stringprep",
)  # fmt: skip


def preload() -> list[str]:
    """Import all of it and return the names of `AVAILABLE` that this machine does not have."""
    missing: list[str] = []
    for name in (*AVAILABLE, *SUPPORT):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return [name for name in missing if name in AVAILABLE]


def importable(name: str) -> bool:
    """Return whether a rule that writes `import name` gets something."""
    return name in sys.modules
