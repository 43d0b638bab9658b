"""Copies block metrics from the external service at `GLOBAL_BLOCK_METRICS_URL`.

`catalog.opening` makes a mirror if the configuration names such a service. If a search
needs blocks and the copy is too old, one request to the service reads the metrics of all blocks,
for all waiting searches: there are fewer blocks than nodes. The server still stores the block
documents itself.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from moorage.catalog.allowances import SPENT, Allowance
from moorage.catalog.documents.encoding import pack
from moorage.catalog.embedded.blocks import EmbeddedBlocks
from moorage.catalog.embedded.records import DocumentEntry
from moorage.catalog.filters import parse_filter
from moorage.catalog.limits import BLOCKS_MAX
from moorage.catalog.mirrored.batches import Batches
from moorage.catalog.mirrored.envelopes import check_depth, document_of, documents_of, leave_out
from moorage.catalog.mirrored.http import Service, ServiceReply, ServiceRequest, WrongAnswer
from moorage.catalog.mirrored.parts import Refused, refuse_change_at
from moorage.catalog.values import BlockKind, Document
from moorage.model import ClusterId, Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonValue

_NO_POST: Final = frozenset({405, 501})
_NEVER: Final = float("-inf")


class BlockMetricsMirror:
    """An in-memory copy of all block metrics of an external service.

    Args:
        service: The external service.
        checked: Returns the block id in a metrics document; refuses an invalid document.
        keep: Replaces all stored metrics by these documents.
        fresh_seconds: Maximal age of metrics; older ones are read again, and never used.
    """

    def __init__(
        self,
        service: Service,
        checked: Callable[[Document], ClusterId],
        keep: Callable[[dict[str, DocumentEntry]], None],
        *,
        fresh_seconds: float,
    ) -> None:
        self.service = service
        self._checked = checked
        self._keep = keep
        self._fresh_seconds = fresh_seconds
        self._reading = Batches(self._read)
        self._read_at = _NEVER
        self._left_out: dict[str, str] = {}

    async def close(self) -> None:
        """Cancel running requests and close the connections."""
        await self._reading.close()
        await self.service.close()

    async def fetch(self, allowance: Allowance) -> list[str]:
        """Read the metrics if the copy is too old; if that fails, empty the copy.

        Returns:
            Warnings: why there are no metrics, or which documents are missing.
        """
        if not self._fresh():
            if not allowance.spend():
                return [self._none(SPENT)]
            try:
                await self._reading.join(())
            except ServiceError as error:
                return [self._none(error.reason)]
        if not self._left_out:
            return []
        name, what = next(iter(self._left_out.items()))
        count = len(self._left_out)
        return [
            f"{count} documents of block metrics cannot be used and count as none ({name}: {what})."
        ]

    async def require(self) -> None:
        """Read the metrics if they are not fresh, or raise `unavailable`."""
        if not self._fresh():
            await self._reading.join(())

    def _fresh(self) -> bool:
        return asyncio.get_running_loop().time() - self._read_at <= self._fresh_seconds

    def _none(self, why: str) -> str:
        self._read_at = _NEVER
        self._keep({})
        return f"Block metrics could not be read and are null. {why}"

    async def _read(self, keys: frozenset[str]) -> None:
        del keys  # Each request lists all.
        began = asyncio.get_running_loop().time()
        found = await self.service.ask(
            ServiceRequest("POST", "/block/query", b"{}"), self._read_entries
        )
        if found is None:
            found = await self.service.ask(
                ServiceRequest("GET", "/block/query"), self._read_entries
            )
        if found is None:
            raise ServiceError(
                Code.UNAVAILABLE,
                f"The {self.service.name} at {self.service.url} takes neither POST nor GET at"
                " /block/query.",
                details={"service": self.service.name, "url": self.service.url},
            )
        entries, self._left_out = found
        self._read_at = began
        self._keep(entries)

    def _read_entries(
        self, reply: ServiceReply
    ) -> tuple[dict[str, DocumentEntry], dict[str, str]] | None:
        if reply.status in _NO_POST:
            return None
        entries: dict[str, DocumentEntry] = {}
        left_out: dict[str, str] = {}
        for number, raw in enumerate(documents_of(reply)):
            document: JsonValue = None
            try:
                document = document_of(bytes(raw))
                check_depth(document)
                block_id = self._checked(document)
                packed = pack(document)
            except (ServiceError, WrongAnswer) as error:
                leave_out(left_out, document, "blockId", number, str(error))
                continue
            if block_id in entries:
                leave_out(left_out, document, "blockId", number, "it is listed twice")
            elif len(entries) >= BLOCKS_MAX:
                what = f"at most {BLOCKS_MAX} blocks are held"
                leave_out(left_out, document, "blockId", number, what)
            else:
                entries[block_id] = DocumentEntry(block_id, document, packed, len(bytes(raw)))
        return entries, left_out


class MirroredBlocks:
    """Blocks with metrics from an external service; implements `catalog.ports.Blocks`.

    Args:
        stored: The blocks, and the metrics that the mirror has read.
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
        parse_filter(query)  # Refuse an invalid query before a request to the service.
        if kind == "block_metrics":
            await self._mirror.require()
        return await self._embedded.query(kind, query)
