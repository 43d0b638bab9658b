"""The history of each policy URI in the catalog's file: who changed it, and when.

The catalog notes a change in the transaction that makes it, so there is no change
without its note. The history outlives the policy, so it also has the policy's removal.
"""

import time
from typing import Final, Literal

import msgspec
from msgspec import Struct

from moorage.catalog.embedded.store import Database, StoredRow
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject

CHANGES_MAX: Final = 1000
"""Changes of one URI that are remembered; of more, the second oldest is forgotten first."""
HISTORIES_MAX: Final = 20_000
"""URIs with a history: twice as many as policies. Beyond it, a removed policy is forgotten: of the
tenant that removed most, the one that was registered first."""
FIELDS_MAX: Final = 32
"""Fields that a change names, in so many characters each; the change may have more."""
FIELD_CHARS_MAX: Final = 64


class PolicyChange(Struct, frozen=True, omit_defaults=True):
    """One change of a policy.

    Args:
        at: Seconds since the epoch.
        who: The tenant that made it; empty if there are none.
        digest: Of the content that the URI had then.
        fields: Those of the document that differ since, for `described`.
    """

    at: float
    who: str
    what: Literal["registered", "described", "removed"]
    digest: str
    fields: tuple[str, ...] = ()


_changes: Final = msgspec.json.Decoder(list[PolicyChange]).decode


def note(
    database: Database,
    uri: str,
    who: str,
    what: Literal["registered", "described", "removed"],
    digest: str,
    fields: tuple[str, ...] = (),
) -> None:
    """Add a change to the history of a URI, within the transaction that makes it."""
    row = database.get("history", uri)
    changes = _changes(row.document) if row else []
    named = tuple(each[:FIELD_CHARS_MAX] for each in fields[:FIELDS_MAX])
    changes.append(PolicyChange(time.time(), who, what, digest, named))
    if len(changes) > CHANGES_MAX:
        del changes[1]  # The first one says where the policy comes from.
    database.put("history", StoredRow(uri, msgspec.json.encode(changes)))
    if row is None and database.count("history") > HISTORIES_MAX:
        database.forget_history()


def history_of(database: Database, uri: str) -> list[JsonObject]:
    """Return the changes of a URI, the first one first.

    Raises:
        ServiceError: `unknown_policy`: it never had one.
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
