"""Lists the libraries that a policy can import. The server never installs a library for a policy.

`sandbox.cell.preload` makes the listed modules ready in every cell;
`catalog.documents.requirements` refuses a policy that requires other libraries.
"""

from typing import Final

REQUIREMENTS: Final = "requirements.txt"

IMPORTABLE: Final = (
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
"""Modules that a policy can import, besides the other files of its own archive."""
