"""Tracks the owner of each record, so that no tenant uses up the catalog's limits for others.

`catalog.embedded.store` is the only caller, in its thread. A failed transaction is undone here,
too.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec

from moorage.catalog.limits import (
    ALIASES_MAX,
    BLOCKS_MAX,
    CLUSTERS_MAX,
    EXECUTORS_MAX,
    POLICIES_MAX,
    STORE_BYTES_MAX,
)
from moorage.core.state.tenant_loads import TENANT_SHARE, fits
from moorage.model import Code
from moorage.protocol.faults import ServiceError

Kind = Literal[
    "cluster",
    "metrics",
    "policy",
    "alias",
    "context",
    "executor",
    "history",
    "block",
    "block_metrics",
]
RECORDS_MAX: Final[Mapping[Kind, int]] = {
    "cluster": CLUSTERS_MAX,
    "metrics": CLUSTERS_MAX,
    "policy": POLICIES_MAX,
    "alias": ALIASES_MAX,
    "executor": EXECUTORS_MAX,
    "block": BLOCKS_MAX,
    "block_metrics": BLOCKS_MAX,
}
BOUNDED_ELSEWHERE: Final = frozenset(("alias", "context", "executor", "history"))
"""Kinds whose bytes do not count, since they have limits of their own."""
_Key = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A record in the form in which the store has it.

    Args:
        id: Id of the record, unique within its kind.
        document: The document as JSON.
        files: Packed files of a policy, or a context; for other kinds the owner.
    """

    id: str
    document: bytes
    files: bytes = b""


class OwnedRecord(NamedTuple):
    """One record: the tenant to whose stored bytes it is added, and its size in bytes."""

    owner: str
    size: int


class _Change(msgspec.Struct):
    """The fields of a policy change that decide its owner."""

    who: str
    what: str


_changes: Final = msgspec.json.Decoder(list[_Change]).decode


class RecordOwners:
    """The owner and the size of every record, by kind and id."""

    def __init__(self) -> None:
        self._records: dict[_Key, OwnedRecord] = {}
        self._counts: Counter[tuple[Kind, str]] = Counter()
        self._bytes: Counter[str] = Counter()
        self._before: list[tuple[_Key, OwnedRecord | None]] = []

    def forget(self) -> None:
        """Forget all records, before they are loaded again."""
        for each in (self._records, self._counts, self._bytes):
            each.clear()

    def begin(self) -> None:
        """Begin a transaction, whose changes `undo` undoes."""
        self._before.clear()

    def undo(self) -> None:
        """Undo the changes of the transaction."""
        for key, before in reversed(self._before):
            self._set(key, before)
        self._before.clear()

    def load(self, kind: Kind, row: StoredRow) -> None:
        """Count a stored record for its owner; a policy's owner is in its history."""
        owner = ""
        if kind == "history":
            changes = reversed(_changes(row.document))
            owner = next((each.who for each in changes if each.what == "registered"), "")
        elif kind == "policy":
            owner = self.owner("history", row.id)
        else:
            owner = row.files.decode(errors="replace")
        if kind in RECORDS_MAX or kind == "history":
            self._set((kind, row.id), OwnedRecord(owner, len(row.document) + len(row.files)))

    def owner(self, kind: Kind, record_id: str) -> str:
        """Return the owner of a record; "" if the record or its owner is unknown."""
        record = self._records.get((kind, record_id))
        return record.owner if record else ""

    def put(
        self,
        kind: Kind,
        record_id: str,
        record: OwnedRecord,
        usage: Callable[[], Mapping[str, tuple[int, int]]],
    ) -> None:
        """Count a stored record, or refuse it if its owner then has too many records or bytes.

        Args:
            kind: Kind of the record.
            record_id: Id of the record.
            record: The record's owner and size.
            usage: `RecordTable.usage`, which already includes the record.

        Raises:
            ServiceError: `too_large`; the caller must undo the transaction.
        """
        most = RECORDS_MAX.get(kind)
        if most is None and kind != "history":
            return
        key, before = (kind, record_id), self._records.get((kind, record_id))
        self._before.append((key, before))
        self._set(key, record)
        if most is None or (before is not None and record.size <= before.size):
            return
        used, owner = usage(), record.owner
        if before is None:
            self._refuse((used[kind][0], self._counts[kind, owner], most), owner, f"{kind} records")
        if kind not in BOUNDED_ELSEWHERE:
            whole = sum(each for name, (_, each) in used.items() if name not in BOUNDED_ELSEWHERE)
            self._refuse((whole, self._bytes[owner], STORE_BYTES_MAX), owner, "bytes of documents")

    def remove(self, kind: Kind, record_id: str) -> None:
        """Record that a record was removed."""
        key = (kind, record_id)
        self._before.append((key, self._records.get(key)))
        self._set(key, None)

    def most_histories(self) -> str:
        """Return the tenant with most histories of removed policies."""
        counts = self._counts
        owners = {owner for kind, owner in counts if kind == "history"}
        return max(owners, key=lambda one: (counts["history", one] - counts["policy", one], one))

    def is_history_of(self, owner: str, uri: str) -> bool:
        """Return whether a tenant owns the history of a URI that has no policy any more."""
        return self.owner("history", uri) == owner and ("policy", uri) not in self._records

    @staticmethod
    def _refuse(amounts: tuple[int, int, int], owner: str, what: str) -> None:
        whole, own, most = amounts
        if fits(whole, own, most):
            return
        whose = f"tenant “{owner}”" if owner else "tenants that are not known"
        raise ServiceError(
            Code.TOO_LARGE,
            f"the catalog would hold {whole} {what}, {own} of them of {whose}; it may hold {most},"
            f" and more only of tenants with at most {most // TENANT_SHARE}: delete some first",
            field="id",
            expected=f"at most {most} {what} in all, or {most // TENANT_SHARE} of one tenant",
            details={"of_all": whole, "of_tenant": own, "most": most},
        )

    def _set(self, key: _Key, record: OwnedRecord | None) -> None:
        kind, counts_bytes = key[0], key[0] not in BOUNDED_ELSEWHERE
        for each, sign in ((self._records.pop(key, None), -1), (record, 1)):
            if each is not None:
                self._counts[kind, each.owner] += sign
                if counts_bytes:
                    self._bytes[each.owner] += sign * each.size
        if record is not None:
            self._records[key] = record
