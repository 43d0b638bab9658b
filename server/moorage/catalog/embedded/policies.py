"""Policies in the catalog's file, used if no external policy store is configured."""

import asyncio

from moorage.catalog.documents.encoding import decode, snapshot
from moorage.catalog.documents.policies import (
    complete_policy_document,
    differing_fields,
    make_prepared,
    record_from,
)
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.documents.updates import apply_change
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.history import history_of, note
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.embedded.records import (
    PolicyEntry,
    answer_documents,
    entry_of,
    read_files,
    refuse_differences,
    remove,
    unknown_id_error,
    write_policy,
)
from moorage.catalog.embedded.store import Database, DocumentStore
from moorage.catalog.filters import compile_filter
from moorage.catalog.values import Document, PolicyRecord, PreparedPolicy
from moorage.model import PolicyRef


async def prepare_policy(sources: CodeSources, document: Document) -> PreparedPolicy:
    """Read a PolicyRule document and fetch its code; see `Policies.prepare`."""
    complete = complete_policy_document(document)
    code: str = document["code"]  # May include credentials.
    fetched = await sources.fetch(code)
    # Unpacking and parsing take a while, and do not need the store.
    return await asyncio.to_thread(lambda: make_prepared(complete, sources.files(code, fetched)))


class EmbeddedPolicies:
    """The policies in the catalog's file; implements `catalog.ports.Policies`.

    Args:
        store: The open file.
        memory: The store that gets durable policies and serves reads.
        aliases: Names that may stand for a URI.
        sources: The allowed sources of policies' code.
    """

    def __init__(
        self, store: DocumentStore, memory: Memory, aliases: Aliases, sources: CodeSources
    ) -> None:
        self._store = store
        self._memory = memory
        self._aliases = aliases
        self._sources = sources

    async def prepare(self, document: Document) -> PreparedPolicy:
        return await prepare_policy(self._sources, document)

    async def register(self, prepared: PreparedPolicy, who: str = "") -> PolicyRecord:
        record = prepared.record
        uri = record.ref.uri

        def work(database: Database) -> PolicyEntry | None:
            row = database.get("policy", uri)
            if row is not None:
                refuse_differences(
                    uri, differing_fields(decode(row.document), record.document, policy_only=False)
                )
                return None
            note(database, uri, who, "registered", record.ref.digest)
            return write_policy(database, record)

        def publish(entry: PolicyEntry | None) -> None:
            if entry is not None:
                self._memory.keep_policy(entry)

        entry = await self._store.run(work, publish)
        return entry.record if entry else entry_of(self._memory.policies, uri, "policy").record

    async def get(self, uri: str) -> Document:
        return entry_of(self._memory.policies, self._aliases.meaning(uri), "policy").document

    async def update(self, uri: str, change: Document, who: str = "") -> Document:
        def work(database: Database) -> PolicyEntry:
            row = database.get("policy", uri)
            if row is None:
                raise unknown_id_error("policy", uri, database.ids("policy"))
            old = decode(row.document)
            unchanged = {"code": old["code"], "policy_rule_uri": uri, "digest": old["digest"]}
            _, given = snapshot({**unchanged, **apply_change(old, change)})
            new = complete_policy_document(given)
            differing = differing_fields(old, new, policy_only=True)
            differing += [name for name in ("code", "policy_rule_uri") if new[name] != old[name]]
            refuse_differences(uri, differing)
            ref = PolicyRef(uri, old["digest"])
            fields = differing_fields(old, new, policy_only=False)
            note(database, uri, who, "described", ref.digest, tuple(fields))
            return write_policy(database, record_from(ref, read_files(row, old), new))

        return (await self._store.run(work, self._memory.keep_policy)).document

    async def delete(self, uri: str, who: str = "") -> Document:
        policies = self._memory.policies

        def remove_and_note(database: Database) -> None:
            note(database, uri, who, "removed", policies[uri].record.ref.digest)

        return await remove(
            self._store, "policy", uri, policies, self._memory.drop_policy, remove_and_note
        )

    async def history(self, uri: str) -> list[Document]:
        return await self._store.run(lambda database: history_of(database, uri))

    async def query(self, query: Document | None = None) -> list[Document]:
        matches = compile_filter(query)
        taken = list(self._memory.policies.values())  # A copy: the thread must not see changes.

        def work() -> list[PolicyEntry]:
            return sorted((p for p in taken if matches(p.document)), key=lambda entry: entry.id)

        return answer_documents(await self._memory.index.run(work))
