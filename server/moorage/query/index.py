"""An index of documents: finds those that meet a condition without reading each document.

The catalog has one index for each kind of document. An index has a column for each path of the
queries. It makes a column when a query first needs it, and updates it before its next use. If there
are too many columns, the index drops the least recently used ones.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, assert_never

import numpy as np

from moorage.query.columns import Column, Mask
from moorage.query.conditions import (
    AllOf,
    Among,
    AnyOf,
    Condition,
    Exists,
    Leaf,
    Matches,
    Not,
    Ordered,
    Source,
)
from moorage.query.evaluate import predicate
from moorage.query.limits import CELLS_MAX, COLUMNS_MAX
from moorage.query.paths import Reader, reader
from moorage.records.json_values import JsonMapping

ROWS_AT_FIRST: Final = 64
SCAN_MAX: Final = 32
"""Maximum number of documents that are checked one by one, if there is no column yet."""


@dataclass(slots=True)
class _ColumnEntry:
    """A column, and the rows that changed since it was last used."""

    column: Column
    read: Reader
    stale: set[int] = field(default_factory=set[int])


class DocumentIndex:
    """An index of documents by id.

    The index belongs to one thread. Documents are stored, not copied: the caller must not change
    them afterwards.

    Args:
        columns_max: The largest number of columns in memory.
        cells_max: The largest number of values in all columns, 12 bytes each; the last used column
            is never dropped.
    """

    def __init__(self, columns_max: int = COLUMNS_MAX, cells_max: int = CELLS_MAX) -> None:
        self._columns_max = columns_max
        self._cells_max = cells_max
        self._columns: OrderedDict[Source, _ColumnEntry] = OrderedDict()
        self._rows: dict[str, int] = {}
        self._ids: list[str] = [""] * ROWS_AT_FIRST
        self._documents: list[JsonMapping | None] = [None] * ROWS_AT_FIRST
        self._free = list(range(ROWS_AT_FIRST - 1, -1, -1))
        self._live: Mask = np.zeros(ROWS_AT_FIRST, np.bool_)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._rows

    def __iter__(self) -> Iterator[str]:
        """Yield the ids, in no order."""
        return iter(self._rows)

    def get(self, document_id: str) -> JsonMapping | None:
        """Return a document, or None."""
        row = self._rows.get(document_id)
        return None if row is None else self._documents[row]

    def put(self, document_id: str, document: JsonMapping) -> None:
        """Add a document, or replace the document with the same id."""
        row = self._rows.get(document_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[document_id] = self._free.pop()
            self._ids[row] = document_id
            self._live[row] = True
        self._documents[row] = document
        self._outdate(row)

    def remove(self, document_id: str) -> bool:
        """Remove a document; return whether there was one."""
        row = self._rows.pop(document_id, None)
        if row is None:
            return False
        self._ids[row], self._documents[row] = "", None
        self._live[row] = False
        self._free.append(row)
        self._outdate(row)
        return True

    def matching(self, condition: Condition) -> list[str]:
        """Return the ids of the documents that meet a condition, sorted.

        Raises:
            QueryError: `too_large`, where a `$regex` would have to read too much.
        """
        found = np.flatnonzero(self._mask(condition, self._live)).tolist()
        return sorted(self._ids[row] for row in found)

    def column(self, source: Source) -> Column:
        """Return the updated column of a path or aggregate; it is valid until the next call."""
        entry = self._columns.get(source)
        if entry is None:
            entry = _ColumnEntry(Column(len(self._live)), reader(source), set(self._rows.values()))
            self._columns[source] = entry
        self._columns.move_to_end(source)
        if entry.stale:
            rows = list(entry.stale)
            documents = (self._documents[row] for row in rows)
            entry.column.set(rows, ([] if each is None else entry.read(each) for each in documents))
            entry.stale.clear()
            self._drop_columns()
        return entry.column

    def rows(self) -> Mapping[str, int]:
        """Return the row number of each document, which is the same in every column."""
        return self._rows

    def _grow(self) -> None:
        before, size = len(self._live), 2 * len(self._live)
        self._ids += [""] * before
        self._documents += [None] * before
        self._free = list(range(size - 1, before - 1, -1))
        self._live = np.concatenate([self._live, np.zeros(before, np.bool_)])
        for entry in self._columns.values():
            entry.column.grow(size)

    def _outdate(self, row: int) -> None:
        for entry in self._columns.values():
            entry.stale.add(row)

    def _drop_columns(self) -> None:
        """Drop the least recently used columns while all columns are too many or too large."""
        size = sum(entry.column.size for entry in self._columns.values())
        while len(self._columns) > 1 and (
            len(self._columns) > self._columns_max or size > self._cells_max
        ):
            _, dropped = self._columns.popitem(last=False)
            size -= dropped.column.size

    # Which rows --------------------------------------------------------------------------------

    def _mask(self, condition: Condition, within: Mask) -> Mask:
        """Return the rows of `within` that meet a condition."""
        match condition:
            case AllOf(parts):
                # Evaluate the fastest parts first: they leave fewer rows for the other parts.
                for part in sorted(parts, key=self._cost):
                    within = self._mask(part, within)
                    if not within.any():
                        break
                return within
            case AnyOf(parts):
                mask, rest = np.zeros(len(within), np.bool_), within
                for part in sorted(parts, key=self._cost):
                    mask |= self._mask(part, rest)
                    rest = within & ~mask
                    if not rest.any():
                        break
                return mask
            case Not(part):
                return within & ~self._mask(part, within)
            case Among() | Ordered() | Matches() | Exists():
                return self._leaf(condition, within)
            case _:
                assert_never(condition)

    def _cost(self, condition: Condition) -> int:
        match condition:
            case AllOf(parts) | AnyOf(parts):
                return max(map(self._cost, parts), default=0)
            case Not(part):
                return self._cost(part)
            case Matches(of=source, pattern=pattern):
                return 1 + 2 * (source not in self._columns) + pattern.costly
            case Among(of=source) | Ordered(of=source) | Exists(of=source):
                return 2 * (source not in self._columns)
            case _:
                assert_never(condition)

    def _leaf(self, leaf: Leaf, within: Mask) -> Mask:
        if self._cost(leaf) and np.count_nonzero(within) <= SCAN_MAX:
            return self._evaluate_rows(leaf, within)
        column = self.column(leaf.of)
        mask = column.mask(leaf) & within
        unsure = column.unsure(leaf)
        if unsure is not None and (unsure := unsure & within).any():
            mask = (mask & ~unsure) | self._evaluate_rows(leaf, unsure)
        return mask

    def _evaluate_rows(self, leaf: Leaf, within: Mask) -> Mask:
        """Return the rows of `within` that meet a condition, by evaluating their documents."""
        mask, test = np.zeros(len(within), np.bool_), predicate(leaf)
        for row in np.flatnonzero(within).tolist():
            mask[row] = test(self._documents[row])
        return mask
