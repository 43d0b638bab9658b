"""The history of each policy URI in the catalog's file: who changed it, and when.

The catalog records each change in the same transaction, so no change is missing. The history
outlives the policy, so it also has the policy's removal.
"""

import time
from typing import Final, Literal

import msgspec

from moorage.catalog.embedded.store import Database, StoredRow
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject
from moorage.records.policies import PolicyHistoryEntry

CHANGES_MAX: Final = 1000
"""Maximum stored changes of one URI; beyond it, the second oldest is forgotten, since the first one
tells the policy's origin."""
HISTORIES_MAX: Final = 20_000
"""Most URIs with a history, twice as many as policies. Beyond it, the tenant with most histories of
removed policies loses the history of the policy that it registered first."""
FIELDS_MAX: Final = 32
"""Maximum fields in the record of a change, each cut to `FIELD_CHARS_MAX`; the rest is omitted."""
FIELD_CHARS_MAX: Final = 64


_changes: Final = msgspec.json.Decoder(list[PolicyHistoryEntry]).decode


def note(
    database: Database,
    uri: str,
    who: str,
    what: Literal["registered", "described", "removed"],
    digest: str,
    fields: tuple[str, ...] = (),
) -> None:
    """Add a change to the history of a URI, within the transaction that makes the change."""
    row = database.get("history", uri)
    changes = _changes(row.document) if row else []
    named = tuple(each[:FIELD_CHARS_MAX] for each in fields[:FIELDS_MAX])
    changes.append(PolicyHistoryEntry(time.time(), who, what, digest, named))
    if len(changes) > CHANGES_MAX:
        del changes[1]  # The first change tells the origin.
    database.put("history", StoredRow(uri, msgspec.json.encode(changes)))
    if row is None and database.count("history") > HISTORIES_MAX:
        database.forget_history()


def history_of(database: Database, uri: str) -> list[JsonObject]:
    """Return the changes of a URI, the first one first.

    Raises:
        ServiceError: `unknown_policy`: the URI never had a policy.
    """
    row = database.get("history", uri)
    if row is None:
        raise ServiceError(
            Code.UNKNOWN_POLICY,
            f"no policy {uri[:300]!r} was ever registered; GET /policy lists those that are",
            field="policy_rule_uri",
        )
    changes: list[JsonObject] = msgspec.to_builtins(_changes(row.document))
    return changes
