"""What a rule can import, and what its `requirements.txt` wants beyond that.

Nothing is ever installed for a rule. `sandbox.preload` has what is listed here ready in every cell;
`catalog.policies` refuses a policy that wants more.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["IMPORTABLE", "LINES_MAX", "REQUIREMENTS", "Unmet", "unmet"]

REQUIREMENTS: Final = "requirements.txt"
LINES_MAX: Final = 1000
"""Lines of `requirements.txt` that are read."""

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
"""Importable by a rule, besides the other files of its own archive."""

_NAMES: Final = frozenset(module.partition(".")[0] for module in IMPORTABLE)
# A name, and what may follow it (PEP 508) but `@`: what lies at a URL is not what a rule would get.
_LINE: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:[\[<>=!~;(].*)?")


@dataclass(frozen=True, slots=True)
class Unmet:
    """A line of `requirements.txt` that names something a rule does not get.

    Args:
        line: From 1.
        text: What stands there, without its comment.

    """

    line: int
    text: str


def unmet(files: Mapping[str, bytes]) -> Iterator[Unmet]:
    """Yield the lines of a rule's `requirements.txt`, if it has one, that are not met.

    Versions are not compared: a rule that needs another one finds out when a cell loads it. Lines
    beyond `LINES_MAX` are not read.

    Args:
        files: All files of the rule, by path; what lies beside `function.py` is importable too.

    """
    own = {path.split("/", 1)[0].removesuffix(".py").lower() for path in files}
    lines = files.get(REQUIREMENTS, b"").decode("utf-8-sig", "replace").splitlines()
    for number, line in enumerate(lines[:LINES_MAX], 1):
        text = line.partition("#")[0].strip()
        found = _LINE.fullmatch(text)
        name = found[1].lower().replace("-", "_") if found else ""
        if text and name not in _NAMES and name not in own:
            yield Unmet(number, text)
