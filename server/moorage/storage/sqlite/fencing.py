"""Reserves fencing numbers in a separate file, so that none repeats even after facts were lost.

Users see a number only after its grant is durable, and `SqliteFacts` reserves numbers before it
commits. So every number that a user ever saw is at most the number in this file.
"""

from pathlib import Path
from typing import Final

from moorage.storage.base import FENCING_BLOCK
from moorage.storage.sqlite.marks import DurableMark, Found, read_mark

LABEL: Final = "fencing"


def fencing_path(ledger: Path) -> Path:
    """Return the path of a ledger's reserved numbers."""
    return ledger.with_suffix(".fencing")


class Fencing:
    """The reserved numbers of an open ledger, for one thread at a time.

    Attributes:
        found: The contents of the file when it was opened.

    Raises:
        OSError: The file cannot be read or written.
    """

    def __init__(self, ledger: Path) -> None:
        path = fencing_path(ledger)
        self.found: Found = read_mark(path, LABEL)
        self._reserved = self._used = self.found.first
        self._mark = DurableMark(path, LABEL, self._reserved, 0, self.found.writes)

    @property
    def floor(self) -> int:
        """The largest number that may be in use; the next number must be larger."""
        return self._used

    def reserve(self, number: int) -> None:
        """Reserve a number and all smaller ones, durably."""
        if number > self._reserved:
            self._reserved = number + FENCING_BLOCK
            self._mark.write_both(self._reserved, 0)
        self._used = max(self._used, number)

    def close(self, *, clean: bool) -> None:
        """Close the file; after a clean end, first free the reserved numbers that are unused."""
        if clean and self._used < self._reserved:
            self._mark.write_both(self._used, 0)
        self._mark.close()
