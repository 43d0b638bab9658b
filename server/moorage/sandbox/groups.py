"""The cells of one policy, and what waits for them. Used by `pool` alone."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from moorage.core.words import Refusal
from moorage.sandbox.channel import Cell
from moorage.sandbox.contract import PolicyCode
from moorage.sandbox.work import Work

HOG_OVERRUNS: Final = 2
"""After so many overruns in a row a policy's fresh cells run at idle priority from the start, until
one of them answers: a rule that never does would otherwise burn its neighbours' time anew with
every cell."""
GroupKey = tuple[str, str, str]
"""URI, digest, isolation key."""


@dataclass(eq=False)
class Group:
    """The cells of one policy version (and isolation key), and what waits for them."""

    key: GroupKey
    code: PolicyCode
    single_use: bool
    aside: bool = False
    cells: list[Cell] = field(default_factory=list[Cell])
    backlog: deque[Work] = field(default_factory=deque[Work])
    spawning: int = 0
    fault: Refusal | None = None
    fault_until: float = 0.0
    overruns: int = 0
    """Evaluations stopped at their deadline since the last one that answered."""

    @property
    def hogs(self) -> bool:
        """Whether its cells have done nothing lately but burn all the time they get."""
        return self.overruns >= HOG_OVERRUNS

    def choose(self) -> Cell | None:
        """Return a quick cell with room, preferably the first and one that was not demoted."""
        demoted = None
        for cell in self.cells:
            if cell.accepts and not cell.slow:
                if not cell.demoted:
                    return cell
                demoted = demoted or cell
        return demoted

    @property
    def idle_cell(self) -> Cell | None:
        """The first cell, if it has nothing to do and nothing against it, and nothing waits."""
        if self.backlog or not self.cells:
            return None
        cell = self.cells[0]
        busy = cell.sent or cell.retired or cell.demoted or not cell.alive
        return None if busy else cell
