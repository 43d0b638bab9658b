"""Modules that are imported when they are first used: half of the time of `import` is theirs.

The clients' modules name `asyncio`, `ssl` and the like so, for programs that import a client and
seldom use it. Type checkers see the real modules. Python 3.15 has a keyword for it (PEP 810).
"""

from importlib import import_module
from typing import Any

__all__ = ["LazyModule"]


class LazyModule:
    """Stands for a module. What is used of it once is as quick as there from then on.

    Args:
        name: Of the module.

    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = self.__dict__[attribute] = getattr(import_module(self._name), attribute)
        return found
