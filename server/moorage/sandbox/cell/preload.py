"""What a policy can import: loaded once in the zygote, shared by every cell.

A cell cannot open a file, so nothing can be imported later. `SUPPORT` are modules that the
importable ones load only when they are first used, which would be too late.
"""

import importlib
import sys
from typing import Final

from moorage.policy.requirements import IMPORTABLE

SUPPORT: Final = (
    "_strptime", "encodings.ascii", "encodings.cp1252", "encodings.hex_codec", "encodings.idna",
    "encodings.latin_1", "encodings.unicode_escape", "encodings.utf_16", "encodings.utf_8",
    "encodings.utf_8_sig", "faulthandler", "json.tool", "linecache", "logging.handlers", "mmap",
    "numpy._core._dtype_ctypes", "numpy._core._methods", "numpy.exceptions", "numpy.fft",
    "numpy.lib.stride_tricks", "numpy.matrixlib", "numpy.polynomial", "opcode", "stringprep",
)  # fmt: skip


def preload() -> list[str]:
    """Import all of it and return the names of `IMPORTABLE` that this machine does not have."""
    missing: list[str] = []
    for name in (*IMPORTABLE, *SUPPORT):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return [name for name in missing if name in IMPORTABLE]


def importable(name: str) -> bool:
    """Return whether a policy that writes `import name` gets something."""
    return name in sys.modules
