"""Executor documents: names by which other servers request evaluations of policies here.

Only the id of an executor has a meaning; other fields are stored unchanged. The executor
`DEFAULT_EXECUTOR` always exists.
"""

import re
from typing import Final

import msgspec

from moorage.catalog.documents.encoding import decode, snapshot
from moorage.catalog.documents.updates import apply_change
from moorage.catalog.embedded.records import owner_of
from moorage.catalog.embedded.store import Database, DocumentStore, StoredRow
from moorage.catalog.filters import compile_filter
from moorage.catalog.values import Document
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject

DEFAULT_EXECUTOR: Final = "moorage"
"""Id of the executor that every server has."""
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_ID_EXPECTED: Final = "1 to 253 letters, digits and _ . -, other than `query`"


class Executors:
    """The executors in the catalog's file."""

    def __init__(self, store: DocumentStore) -> None:
        self._store = store

    async def create(self, document: Document, owner: str = "") -> Document:
        """Store a tenant's new executor, by its `executor_id` (or `id`); return it as stored.

        Raises:
            ServiceError: `bad_message`, `already_exists`, `too_large`.
        """
        name = document.get("executor_id", document.get("id"))
        if not isinstance(name, str) or not _ID.fullmatch(name) or name == "query":
            raise ServiceError.wrong_field("executor_id", _ID_EXPECTED)

        def work(database: Database) -> Document:
            if name == DEFAULT_EXECUTOR or database.has("executor", name):
                reason = f"executor_id: the executor {name} exists; change it with PUT"
                raise ServiceError(Code.ALREADY_EXISTS, reason, field="executor_id")
            encoded, given = snapshot({**document, "executor_id": name})
            database.put("executor", StoredRow(name, encoded, owner.encode()))
            return given

        return await self._store.run(work)

    async def get(self, name: str) -> Document:
        """Return an executor document, or raise `not_found`."""
        return await self._store.run(lambda database: _find(database, name))

    async def owner(self, name: str) -> str:
        """Return the owner of an executor; "" if the executor or its owner is unknown."""
        return await self._store.run(lambda database: _owner(database, name))

    async def update(self, name: str, change: Document) -> Document:
        """Change an executor document like `DocumentCollection.update`; return the new one."""

        def work(database: Database) -> Document:
            changed = apply_change(_find(database, name), change)
            if name == DEFAULT_EXECUTOR or changed.setdefault("executor_id", name) != name:
                raise ServiceError.wrong_field(
                    "executor_id", f"{name}, unchanged: an id cannot be changed"
                )
            encoded, given = snapshot(changed)
            database.put("executor", StoredRow(name, encoded, _owner(database, name).encode()))
            return given

        return await self._store.run(work)

    async def delete(self, name: str) -> Document:
        """Delete an executor document and return it, or raise `not_found`."""

        def work(database: Database) -> Document:
            removed = _find(database, name)
            if name == DEFAULT_EXECUTOR:
                raise ServiceError(Code.UNSUPPORTED, f"the executor {name} is this server itself")
            database.remove("executor", name)
            return removed

        return await self._store.run(work)

    async def query(self, query: Document | None = None) -> list[Document]:
        """Return the executor documents that match a Mongo-style filter, by id; None: all."""
        matches = compile_filter(query or {})

        def work(database: Database) -> list[Document]:
            known = [_default(), *(decode(row.document) for row in database.rows("executor"))]
            return [each for each in known if matches(each)]

        return await self._store.run(work)


def _find(database: Database, name: str) -> Document:
    if name == DEFAULT_EXECUTOR:
        return _default()
    row = database.get("executor", name)
    if row is None:
        raise ServiceError(Code.NOT_FOUND, f"no executor {name[:300]!r}", field="executor_id")
    document: Document = msgspec.json.decode(row.document)
    return document


def _owner(database: Database, name: str) -> str:
    row = database.get("executor", name)
    return "" if row is None else owner_of(row)


def _default() -> JsonObject:
    return {"executor_id": DEFAULT_EXECUTOR, "description": "the sandbox of this server"}
