"""The stored `context` of policies: packed bytes per version and tenant.

`daemon.policies.context_keeper` writes changed contexts periodically. A policy's work is not a
transaction, so changes of the last second may be lost with the process.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from moorage.catalog.embedded.store import Database, DocumentStore, StoredRow
from moorage.core.state.tenant_loads import fits
from moorage.model import Code
from moorage.protocol.faults import ServiceError

CONTEXTS_MAX: Final = 8192
"""Maximum contexts in the file; beyond it, only tenants with few contexts may add some. A context
that is not in the file is lost at a restart.
"""

ContextKey = tuple[str, str]
"""Policy version (URI and digest) and tenant."""
ContextEntry = tuple[ContextKey, int, bytes]
"""The key of a context, its version number for clients (0: unknown), and its packed bytes."""


class KeptContexts:
    """The contexts in the catalog's file."""

    def __init__(self, store: DocumentStore) -> None:
        self._store = store

    async def load(self) -> list[ContextEntry]:
        """Return all contexts.

        Raises:
            ServiceError: `unavailable`.
        """

        def work(database: Database) -> list[ContextEntry]:
            return [
                (_key_of(row.id), int(row.document or 0), row.files)
                for row in database.rows("context")
            ]

        return await self._store.run(work)

    async def save(self, changes: Iterable[ContextEntry], *, durable: bool = False) -> None:
        """Store contexts; delete a context whose bytes are empty.

        Raises:
            ServiceError: `unavailable`, `busy`; then no change was stored.
        """
        taken = list(changes)

        def work(database: Database) -> None:
            held = Counter(_key_of(name)[1] for name in database.ids("context"))
            for key, version, packed in taken:
                name, tenant = msgspec.json.encode(key).decode(), key[1]
                is_new = not database.has("context", name)
                if not packed:
                    held[tenant] -= database.remove("context", name)
                elif not is_new or fits(held.total() + 1, held[tenant] + 1, CONTEXTS_MAX):
                    held[tenant] += is_new
                    database.put("context", StoredRow(name, b"%d" % version, packed))
                elif durable:
                    raise ServiceError(Code.BUSY, f"{CONTEXTS_MAX} contexts are stored already")

        # Need not be durable: later evaluations rebuild a context.
        await self._store.run(work, durable=durable)


def _key_of(name: str) -> ContextKey:
    version, tenant = msgspec.json.decode(name, type=tuple[str, str])
    return version, tenant
