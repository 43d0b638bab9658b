"""Imports modules at their first use, for programs that seldom use them.

The clients' modules import `asyncio`, `ssl` and others in this way; the server's modules do the
same with `httpx` and `pydantic`. Type checkers see the real modules. Python 3.15 has a keyword for
lazy imports (PEP 810).
"""

from importlib import import_module
from typing import Any


class LazyModule:
    """A stand-in for a module: imports the module at the first use, and caches used attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = self.__dict__[attribute] = getattr(import_module(self._name), attribute)
        return found
