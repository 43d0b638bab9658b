"""Things with numbers, and a row of each in columns: what `core.queue.ranking` computes with."""

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=Hashable)


class Table(Generic[T]):
    """Numbered things, each with a row in some columns; a number is given again when it is free."""

    def __init__(self, **columns: Any) -> None:
        self.columns = {name: np.zeros(16, kind) for name, kind in columns.items()}
        self.numbers: dict[T, int] = {}
        self.users: dict[T, int] = {}
        self._unused: list[int] = []
        self.rows = 0

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return a column, as long as there are rows."""
        return self.columns[name][: self.rows]

    def add(self, item: T, **values: Any) -> int:
        """Return the number of a thing that has one user more; `values` where it is new."""
        number = self.numbers.get(item)
        self.users[item] = self.users.get(item, 0) + 1
        if number is not None:
            return number
        number = self._unused.pop() if self._unused else self.rows
        self.rows = max(self.rows, number + 1)
        for name, column in self.columns.items():
            if number >= len(column):
                self.columns[name] = np.concatenate([column, np.zeros_like(column)])
            self.columns[name][number] = values[name]
        self.numbers[item] = number
        return number

    def drop(self, thing: T) -> bool:
        """Note that a thing has one user less; return whether that was the last one."""
        self.users[thing] -= 1
        if self.users[thing]:
            return False
        del self.users[thing]
        self._unused.append(self.numbers.pop(thing))
        return True
