"""Blocks and their metrics: the documents that filters with `matchType` `block` search.

Every catalog has an `EmbeddedBlocks` on its own store. Blocks run in clusters; this module only has
their documents. Source: docs/reference/allocation-server.md, "Filters", "Aggregation" and
"Services".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from moorage.catalog.allowances import Allowance
from moorage.catalog.documents.encoding import cluster_id_of, snapshot
from moorage.catalog.embedded.records import (
    DocumentEntry,
    aggregate,
    answer_documents,
    change_document,
    entry_of,
    remove,
    with_metrics,
    write,
)
from moorage.catalog.embedded.store import Database, DocumentStore
from moorage.catalog.filters import parse_filter
from moorage.catalog.search import DocumentSearch
from moorage.catalog.values import BlockKind, Document
from moorage.model import ClusterId, Code
from moorage.protocol.block_documents import bare_block
from moorage.protocol.faults import ServiceError
from moorage.query import Filter
from moorage.records.json_values import JsonMapping, JsonValue

ID_FIELDS: Final[Mapping[BlockKind, str]] = {"block": "id", "block_metrics": "blockId"}
"""The field with the block's id, by kind of document."""


class EmbeddedBlocks:
    """The documents of blocks in the catalog's file; implements `catalog.ports.Blocks`."""

    def __init__(self, store: DocumentStore) -> None:
        self._store = store
        self._entries: dict[BlockKind, dict[str, DocumentEntry]] = {
            "block": {},
            "block_metrics": {},
        }
        blocks, metrics = self._entries.values()
        self._search = DocumentSearch(blocks, metrics, "blockMetrics", "blockId")

    def take_over(
        self, kind: BlockKind, entries: Sequence[DocumentEntry], gone: Sequence[str] = ()
    ) -> None:
        """Apply added, changed and removed records of the store."""
        for name in gone:
            del self._entries[kind][name]
        self._entries[kind].update((entry.id, entry) for entry in entries)
        for name in (*gone, *(entry.id for entry in entries)):
            self._search.note_change(name)

    def keep_metrics(self, found: dict[str, DocumentEntry]) -> None:
        """Replace the metrics of all blocks."""
        metrics = self._entries["block_metrics"]
        changed = metrics.keys() | found.keys()
        metrics.clear()
        metrics.update(found)
        for block_id in changed:
            self._search.note_change(block_id)

    def close(self) -> None:
        """Wait for the end of running jobs."""
        self._search.close()

    async def fetch(self, allowance: Allowance) -> list[str]:
        del allowance
        return []

    async def create(self, document: Document, owner: str = "") -> Document:
        def work(database: Database) -> DocumentEntry:
            encoded, given = snapshot(bare_block(document))
            block_id = check_block("block", given)
            if database.has("block", block_id):
                raise ServiceError(
                    Code.ALREADY_EXISTS,
                    f"id: the block {block_id} exists; change it with PUT /blocks/{block_id}",
                    field="id",
                    expected="an id that no block has",
                )
            return write(database, "block", block_id, encoded, given, owner)

        return (await self._store.run(work, self._publisher("block"))).document

    async def put_metrics(self, document: Document) -> tuple[Document, bool]:
        created = False

        def work(database: Database) -> DocumentEntry:
            nonlocal created
            encoded, given = snapshot(document)
            block_id = check_block("block_metrics", given)
            created = not database.has("block_metrics", block_id)
            return write(database, "block_metrics", block_id, encoded, given)

        # Newer metrics replace these, so these need not survive a power cut.
        publish = self._publisher("block_metrics")
        entry = await self._store.run(work, publish, durable=False)
        return entry.document, created

    async def get(self, kind: BlockKind, block_id: str) -> Document:
        return entry_of(self._entries[kind], block_id, kind).document

    async def update(
        self, kind: BlockKind, block_id: str, change: Document
    ) -> tuple[Document, bool]:
        created = False

        def work(database: Database) -> DocumentEntry:
            nonlocal created
            upsert = kind == "block_metrics"
            created = not database.has(kind, block_id)
            encoded, given, owner = change_document(
                database, kind, block_id, change, ID_FIELDS[kind], upsert=upsert
            )
            return write(database, kind, check_block(kind, given), encoded, given, owner)

        return (await self._store.run(work, self._publisher(kind))).document, created

    async def delete(self, kind: BlockKind, block_id: str) -> Document:
        def drop(name: str) -> None:
            del self._entries[kind][name]
            self._search.note_change(name)

        return await remove(self._store, kind, block_id, self._entries[kind], drop)

    async def query(self, kind: BlockKind, query: Document | None) -> list[Document]:
        condition = parse_filter(query)
        search = self._search.clusters if kind == "block" else self._search.metrics
        entries = self._entries[kind]
        return answer_documents(
            [entries[name] for name in await search(condition) if name in entries]
        )

    async def aggregate_metrics(self, stages: JsonValue) -> list[Document]:
        entries = self._entries["block_metrics"]
        taken = [entries[name].document for name in sorted(entries)]
        return await self._search.run(lambda: aggregate(stages, taken))

    async def matching(self, wanted: Filter) -> list[str]:
        return [str(name) for name in await self._search.matching(wanted)]

    async def alike(
        self, like: str | JsonMapping, weights: Mapping[str, float] | None
    ) -> list[str]:
        return [str(name) for name in await self._search.alike(like, weights)]

    def owner(self, kind: BlockKind, block_id: str) -> str | None:
        entries = self._entries
        entry = entries["block"].get(block_id) or entries[kind].get(block_id)
        return None if entry is None else entry.owner

    def documents(self, block_ids: Sequence[str]) -> list[Document]:
        blocks, metrics = self._entries["block"], self._entries["block_metrics"]
        return with_metrics([blocks[name] for name in block_ids if name in blocks], metrics)

    def _publisher(self, kind: BlockKind) -> Callable[[DocumentEntry], None]:
        def publish(entry: DocumentEntry) -> None:
            self._entries[kind][entry.id] = entry
            self._search.note_change(entry.id)

        return publish


def check_block(kind: BlockKind, given: Document) -> ClusterId:
    """Return the id of a document's block; refuse an invalid document."""
    block_id = cluster_id_of(given.get(ID_FIELDS[kind]), ID_FIELDS[kind])
    if kind == "block":
        cluster = given.get("cluster")
        if cluster is not None and not isinstance(cluster, dict):
            raise ServiceError.wrong_field("cluster", "an object with the id of its cluster")
    elif not isinstance(given.get("instances", []), list):
        raise ServiceError.wrong_field("instances", "a list of the metrics of its instances")
    return block_id
