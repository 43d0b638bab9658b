"""The modules that the zygote imports once for all cells.

A cell cannot open a file, so nothing can be imported later. `SUPPORT` are modules that importable
modules load only at their first use, which would be too late.
"""

import importlib
import sys
from typing import Final

from moorage.policy.requirements import IMPORTABLE

SUPPORT: Final = (
    "_md5", "_pylong", "_sha1", "_sha2", "_sha256", "_sha3", "_sha512", "_strptime", "_suggestions",
    "_tokenize", "encodings.ascii", "encodings.base64_codec", "encodings.charmap",
    "encodings.cp1252", "encodings.cp437", "encodings.hex_codec", "encodings.idna",
    "encodings.iso8859_1", "encodings.iso8859_15", "encodings.latin_1", "encodings.punycode",
    "encodings.quopri_codec", "encodings.raw_unicode_escape", "encodings.rot_13",
    "encodings.unicode_escape", "encodings.utf_16", "encodings.utf_16_be", "encodings.utf_16_le",
    "encodings.utf_32", "encodings.utf_32_be", "encodings.utf_32_le", "encodings.utf_7",
    "encodings.utf_8", "encodings.utf_8_sig", "encodings.zlib_codec", "faulthandler", "json.tool",
    "linecache", "logging.handlers", "mmap", "numpy._core._dtype_ctypes", "numpy._core._methods",
    "numpy.char", "numpy.exceptions", "numpy.fft", "numpy.lib.stride_tricks", "numpy.ma.mrecords",
    "numpy.matrixlib", "numpy.polynomial", "numpy.rec", "numpy.strings", "opcode", "stringprep",
    "tomllib",
)  # fmt: skip
"""Modules that are preloaded for others; some versions of Python lack some of them."""


def preload() -> list[str]:
    """Import all preloaded modules; return the `IMPORTABLE` names that this machine lacks."""
    missing: list[str] = []
    for name in (*IMPORTABLE, *SUPPORT):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return [name for name in missing if name in IMPORTABLE]


def importable(name: str) -> bool:
    """Return whether `import name` succeeds in a policy."""
    return name in sys.modules
