"""Follows a catalog that another process writes: loads each changed record."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.blocks import EmbeddedBlocks
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.embedded.records import READERS
from moorage.catalog.embedded.store import Database, DocumentStore, Kind
from moorage.storage.base import RecordStore

_PARTS: Final[dict[Kind, str]] = {
    "cluster": "clusters",
    "metrics": "metrics",
    "policy": "policies",
    "block_metrics": "block_metrics",
}
"""The part of the catalog that has a kind of record, for parts that may mirror a service."""


class Marks(NamedTuple):
    """The state of a catalog at one moment: a mark and the records' checksums, by kind."""

    kinds: dict[str, object]
    checksums: dict[Kind, dict[str, int]]


class _Change(NamedTuple):
    kind: Kind
    entries: list[Any]
    gone: list[str]


def marks_of(database: Database, elsewhere: AbstractSet[str] = frozenset()) -> Marks:
    """Return the current marks, without the parts that mirror an external service."""
    followed = [kind for kind in READERS if _PARTS.get(kind) not in elsewhere]
    return Marks(database.marks(), {kind: database.checksums(kind) for kind in followed})


@dataclass(slots=True)
class FollowedRecords:
    """Loads the records that changed in a followed catalog.

    Args:
        marks: The marks of the loaded records; kinds without checksums are not followed.
    """

    _store: DocumentStore
    _memory: Memory
    _aliases: Aliases
    _blocks: EmbeddedBlocks
    _marks: Marks

    @property
    def has_all(self) -> bool:
        """Whether all kinds of records are followed; False: a part mirrors an external service."""
        return self._marks.checksums.keys() == READERS.keys()

    async def refresh(self) -> None:
        """Load the records that changed since the last call.

        Raises:
            ServiceError: `unavailable`: the catalog cannot be read now.
        """
        await self._store.run(self._changes, self._take_over)

    async def lead(self, records: RecordStore) -> None:
        """Apply the other process's last changes; from then on, this process writes the records.

        Raises:
            ServiceError: `unavailable`: the records cannot be opened.
        """
        await self._store.go_on_with(records)
        await self.refresh()
        self._store.count_owners()

    def _changes(self, database: Database) -> tuple[Marks, list[_Change]]:
        kinds, checksums = database.marks(), dict(self._marks.checksums)
        changes: list[_Change] = []
        for kind, read in READERS.items():
            if kind not in checksums or kinds.get(kind) == self._marks.kinds.get(kind):
                continue
            before, now = checksums[kind], database.checksums(kind)
            rows = (
                database.get(kind, name)
                for name, checksum in now.items()
                if before.get(name) != checksum
            )
            entries = [read(row) for row in rows if row is not None]
            changes.append(_Change(kind, entries, [name for name in before if name not in now]))
            checksums[kind] = now
        return Marks(kinds, checksums), changes

    def _take_over(self, found: tuple[Marks, list[_Change]]) -> None:
        self._marks, changes = found
        memory = self._memory
        for kind, entries, gone in changes:
            match kind:
                case "cluster":
                    for entry, live, cluster in entries:
                        memory.keep_cluster(entry, cluster, live=live)
                    _each(memory.drop_cluster, gone)
                case "metrics":
                    _each(memory.keep_metrics, entries)
                    _each(memory.drop_metrics, gone)
                case "policy":
                    _each(memory.keep_policy, entries)
                    _each(memory.drop_policy, gone)
                case "alias":
                    self._aliases.take_over(entries, gone)
                case "block" | "block_metrics":
                    self._blocks.take_over(kind, entries, gone)
                case _:  # Not in memory: read when needed.
                    raise AssertionError(kind)


def _each(do: Callable[[Any], None], values: list[Any]) -> None:
    for value in values:
        do(value)
