"""Cluster documents in the catalog's file, used if no external registry is configured.

Documents are checked, completed and written in the store's thread. The file has the documents as
given; fields that the server adds are computed again at each load, so they are never outdated.
"""

from collections.abc import Collection

from moorage.catalog.documents.clusters import CheckedCluster, check_names, read_cluster_document
from moorage.catalog.documents.encoding import decode, snapshot
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.embedded.records import (
    DocumentEntry,
    answer_documents,
    change_document,
    entry_of,
    owner_of,
    remove,
    unknown_id_error,
    write,
)
from moorage.catalog.embedded.store import Database, DocumentStore
from moorage.catalog.filters import parse_filter
from moorage.catalog.machines import Machines
from moorage.catalog.values import Document
from moorage.model import Code
from moorage.protocol.cluster_documents import merge_documents, without
from moorage.protocol.faults import ServiceError


class EmbeddedClusters:
    """The cluster documents in the catalog's file; implements `protocol.registry.ClusterDocuments`.

    Args:
        store: The open file.
        memory: The store that gets durable documents and serves reads.
        machines: The machines of the clusters in the file.
    """

    def __init__(self, store: DocumentStore, memory: Memory, machines: Machines) -> None:
        self._store = store
        self._memory = memory
        self._machines = machines

    async def create(self, document: Document, owner: str = "") -> Document:
        def work(database: Database) -> tuple[DocumentEntry, CheckedCluster]:
            encoded, given = snapshot(document)
            read = self._machines.read(database, given)
            if database.has("cluster", read.id):
                raise ServiceError(
                    Code.ALREADY_EXISTS,
                    f"id: the cluster {read.id} exists; change it with PUT /clusters/{read.id}",
                    field="id",
                    expected="an id that no cluster has",
                )
            return write(database, "cluster", read.id, encoded, read.document, owner), read

        return (await self._store.run(work, self._publish))[0].document

    async def get(self, cluster_id: str) -> Document:
        return entry_of(self._memory.clusters, cluster_id, "cluster").document

    async def update(self, cluster_id: str, change: Document) -> Document:
        def work(database: Database) -> tuple[DocumentEntry, CheckedCluster]:
            encoded, given, owner = change_document(database, "cluster", cluster_id, change, "id")
            read = self._machines.read(database, given)
            return write(database, "cluster", read.id, encoded, read.document, owner), read

        return (await self._store.run(work, self._publish))[0].document

    async def add_nodes(
        self, cluster_id: str, document: Document, owner: str = ""
    ) -> tuple[Document, bool]:
        known = {self._memory.owner(cluster_id), owner}

        def work(database: Database) -> tuple[DocumentEntry, CheckedCluster, bool]:
            added = read_cluster_document({"id": cluster_id, **document})
            if added.id != cluster_id:
                raise ServiceError.wrong_field("id", f"{cluster_id}, or none")
            check_names(added.cluster)
            row = database.get("cluster", cluster_id)
            own = owner if row is None else owner_of(row)
            if own not in known:
                reason = f"the cluster {cluster_id} was just registered by another tenant"
                raise ServiceError(Code.CONFLICT, reason, field="id")
            whole = {"id": cluster_id, **document}
            encoded, given = snapshot(
                whole if row is None else merge_documents(decode(row.document), whole)
            )
            read = self._machines.read(database, given)
            entry = write(database, "cluster", read.id, encoded, read.document, own)
            return entry, read, row is None

        def publish(result: tuple[DocumentEntry, CheckedCluster, bool]) -> None:
            self._publish(result[:2])

        entry, _, new = await self._store.run(work, publish)
        return entry.document, new

    async def remove_nodes(self, cluster_id: str, names: Collection[str]) -> Document:
        def work(database: Database) -> tuple[DocumentEntry, CheckedCluster]:
            row = database.get("cluster", cluster_id)
            if row is None:
                raise unknown_id_error("cluster", cluster_id, database.ids("cluster"))
            encoded, given = snapshot(without(decode(row.document), names))
            read = self._machines.read(database, given)
            return write(database, "cluster", read.id, encoded, read.document, owner_of(row)), read

        return (await self._store.run(work, self._publish))[0].document

    async def delete(self, cluster_id: str) -> Document:
        memory = self._memory
        return await remove(
            self._store, "cluster", cluster_id, memory.clusters, memory.drop_cluster
        )

    async def query(self, query: Document) -> list[Document]:
        entries = self._memory.clusters
        found = await self._memory.index.clusters(parse_filter(query))
        return answer_documents([entries[name] for name in found if name in entries])

    def _publish(self, result: tuple[DocumentEntry, CheckedCluster]) -> None:
        entry, read = result
        self._memory.keep_cluster(entry, read.cluster, live=read.live)
