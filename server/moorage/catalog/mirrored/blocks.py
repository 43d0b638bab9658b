"""Block documents of this server, with block metrics from an external service.

The block documents lie here all the same; only their metrics are read from the service.
"""

from moorage.catalog.embedded.blocks import EmbeddedBlocks
from moorage.catalog.filters import parse_filter
from moorage.catalog.mirrored.block_metrics import BlockMetricsMirror
from moorage.catalog.mirrored.parts import Refused, refuse_change_at
from moorage.catalog.values import BlockKind, Document
from moorage.records.json_values import JsonValue


class MirroredBlocks:
    """Implements `catalog.ports.Blocks` with metrics from an external service.

    Args:
        stored: The blocks, and what the mirror read.
    """

    def __init__(self, embedded: EmbeddedBlocks, mirror: BlockMetricsMirror) -> None:
        self._embedded = embedded
        self._mirror = mirror
        self._refuse: Refused = refuse_change_at(mirror.service, "block metrics")
        self.put_metrics = self._refuse
        self.fetch = mirror.fetch
        self.create = embedded.create
        self.matching = embedded.matching
        self.alike = embedded.alike
        self.owner = embedded.owner
        self.documents = embedded.documents

    async def get(self, kind: BlockKind, block_id: str) -> Document:
        if kind == "block_metrics":
            await self._mirror.require()
        return await self._embedded.get(kind, block_id)

    async def update(
        self, kind: BlockKind, block_id: str, change: Document
    ) -> tuple[Document, bool]:
        if kind == "block_metrics":
            await self._refuse()
        return await self._embedded.update(kind, block_id, change)

    async def delete(self, kind: BlockKind, block_id: str) -> Document:
        if kind == "block_metrics":
            await self._refuse()
        return await self._embedded.delete(kind, block_id)

    async def aggregate_metrics(self, stages: JsonValue) -> list[Document]:
        await self._mirror.require()
        return await self._embedded.aggregate_metrics(stages)

    async def query(self, kind: BlockKind, query: Document | None) -> list[Document]:
        parse_filter(query)  # What it refuses asks no service.
        if kind == "block_metrics":
            await self._mirror.require()
        return await self._embedded.query(kind, query)
