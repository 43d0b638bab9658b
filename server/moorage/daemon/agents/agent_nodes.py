"""Writes the nodes of machines with agents into the documents of their clusters.

The time of a write grows with the size of the whole document. So the next write makes all changes
that arrived during this one: a rack that loses or regains its power takes a few writes.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moorage.backends.agents.backend import Place
from moorage.catalog.documents.clusters import is_live
from moorage.model import Code
from moorage.protocol.cluster_documents import nodes_of
from moorage.protocol.faults import ServiceError
from moorage.protocol.registry import ClusterDocuments
from moorage.records.json_values import JsonObject
from moorage.records.rights import SERVER_ITSELF

Change = Callable[[JsonObject | None], JsonObject | None]
"""Takes a node, or None if it does not exist; returns the new node, or None to change nothing."""


class _Waiting(NamedTuple):
    place: Place
    change: Change
    outcome: asyncio.Future[ServiceError | None]


class AgentNodes:
    """Reads and changes nodes in the documents of their clusters.

    Args:
        clusters: Documents of the registry.
    """

    def __init__(self, clusters: ClusterDocuments) -> None:
        self._clusters = clusters
        self._waiting: dict[_Waiting, None] = {}
        self._writing = asyncio.Lock()

    async def get(self, place: Place) -> JsonObject | None:
        """Wait for a write under way; return a registered node, or None if it is not registered."""
        async with self._writing:
            return (await self._registered(place[0])).get(place[1])

    async def _registered(self, cluster: str) -> dict[str, JsonObject]:
        document = await self._document(cluster)
        return {str(each.get("id")): each for each in nodes_of(document or {})}

    async def _document(self, cluster: str) -> JsonObject | None:
        try:
            return await self._clusters.get(cluster)
        except ServiceError as error:
            if error.code != Code.NOT_FOUND:
                raise
            return None

    async def open(self, cluster: str) -> str:
        """Let a cluster take part in placement, even if its document excludes it.

        Returns:
            The fields that excluded it; empty: none did.
        """
        async with self._writing:
            document = await self._document(cluster) or {}
            shut = {} if is_live(document) else {"status": document["status"]}
            if why := document.get("unavailable"):
                shut["unavailable"] = why
            if shut:
                await self._clusters.update(cluster, {"status": "live", "unavailable": ""})
            return ", ".join(f"{name}: {value}" for name, value in shut.items())

    async def put_own(self, document: JsonObject, place: Place) -> None:
        """Put the only node of a document into its cluster; create the cluster if it is missing."""
        (node,) = nodes_of(document)
        if await self._document(place[0]) is None:
            await self._clusters.create(document, SERVER_ITSELF)
        else:
            await self.put(place, node)

    async def put(self, place: Place, node: JsonObject) -> None:
        """Put a node into its cluster, or replace it; see `change`."""
        await self.change(place, lambda _: node)

    async def change(self, place: Place, change: Change) -> None:
        """Change a node. No other change comes between the read and the write.

        Raises:
            ServiceError: The registry refuses the change.
        """
        mine = _Waiting(place, change, asyncio.get_running_loop().create_future())
        self._waiting[mine] = None
        try:
            async with self._writing:
                if not mine.outcome.done():
                    await self._change_all(place[0])
        finally:
            del self._waiting[mine]
        if (error := mine.outcome.result()) is not None:
            raise error

    async def _change_all(self, cluster: str) -> None:
        """Make all waiting changes of a cluster; one by one if they are refused together."""
        batch = [e for e in self._waiting if e.place[0] == cluster and not e.outcome.done()]
        refusal = await self._refusal(cluster, batch)
        for each in batch:
            alone = await self._refusal(cluster, [each]) if refusal and batch[1:] else refusal
            if not each.outcome.done():
                each.outcome.set_result(alone)

    async def _refusal(self, cluster: str, batch: Sequence[_Waiting]) -> ServiceError | None:
        try:
            await self._write(cluster, batch)
        except ServiceError as error:
            return error
        return None

    async def _write(self, cluster: str, batch: Sequence[_Waiting]) -> None:
        before = await self._registered(cluster)
        after = {**before}
        for (_, name), change, _ in batch:
            if (node := change(after.get(name))) is not None:
                after[name] = {**node, "id": name}
        changed = [node for name, node in after.items() if before.get(name) != node]
        if not changed:
            return
        document = {
            "id": cluster,
            "status": "live",
            "nodes": {"count": len(changed), "nodeData": changed},
            "tags": ["agents"],
            "clusterMetadata": {"name": cluster, "description": "Machines with agents"},
            "config": {"publicHostname": "localhost"},
        }
        await self._clusters.add_nodes(cluster, document, SERVER_ITSELF)

    async def take_out(self, place: Place) -> None:
        """Remove a node from its cluster, if the cluster has it."""
        async with self._writing:
            if place[1] in await self._registered(place[0]):
                await self._clusters.remove_nodes(place[0], (place[1],))
