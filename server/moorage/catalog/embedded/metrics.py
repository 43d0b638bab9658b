"""Metrics documents in the catalog's file, used if no external service is configured.

Newer metrics replace stored ones, so stored metrics need not survive a power cut.
"""

from moorage.catalog.documents.encoding import snapshot
from moorage.catalog.documents.metrics import read_metrics_document
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.embedded.records import (
    DocumentEntry,
    aggregate,
    answer_documents,
    change_document,
    entry_of,
    remove,
    write,
)
from moorage.catalog.embedded.store import Database, DocumentStore
from moorage.catalog.filters import parse_filter
from moorage.catalog.values import Document
from moorage.records.json_values import JsonValue

_Stored = tuple[DocumentEntry, Document, bool]
"""The entry for the memory, the document, and whether the cluster had no metrics before."""


class EmbeddedMetrics:
    """The metrics documents in the catalog's file; implements `protocol.registry.Metrics`.

    Args:
        store: The catalog's file.
        memory: Serves reads; gets each document once the document is in the file.
    """

    def __init__(self, store: DocumentStore, memory: Memory) -> None:
        self._store = store
        self._memory = memory

    async def put(self, document: Document) -> tuple[Document, bool]:
        def work(database: Database) -> _Stored:
            encoded, given = snapshot(document)
            cluster_id, read = read_metrics_document(given)
            created = not database.has("metrics", cluster_id)
            return write(database, "metrics", cluster_id, encoded, read), read, created

        return (await self._store.run(work, self._publish, durable=False))[1:]

    async def get(self, cluster_id: str) -> Document:
        return entry_of(self._memory.metrics, cluster_id, "metrics").document

    async def update(self, cluster_id: str, change: Document) -> tuple[Document, bool]:
        def work(database: Database) -> _Stored:
            created = not database.has("metrics", cluster_id)
            encoded, given, _ = change_document(
                database, "metrics", cluster_id, change, "clusterId", upsert=True
            )
            known_id, read = read_metrics_document(given)
            return write(database, "metrics", known_id, encoded, read), read, created

        return (await self._store.run(work, self._publish, durable=False))[1:]

    def _publish(self, result: _Stored) -> None:
        self._memory.keep_metrics(result[0])

    async def delete(self, cluster_id: str) -> Document:
        memory = self._memory
        return await remove(self._store, "metrics", cluster_id, memory.metrics, memory.drop_metrics)

    async def query(self, query: Document | None = None) -> list[Document]:
        entries = self._memory.metrics
        found = await self._memory.index.metrics(parse_filter(query))
        return answer_documents([entries[name] for name in found if name in entries])

    async def aggregate(self, stages: JsonValue) -> list[Document]:
        entries = self._memory.metrics
        taken = [entries[name].document for name in sorted(entries)]
        return await self._memory.index.run(lambda: aggregate(stages, taken))
