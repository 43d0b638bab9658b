"""Keeps the catalog's document of the Ray cluster of the backend `ray` up to date."""

import asyncio
import contextlib
import time
from typing import Final

import structlog

from moorage.backends.base import BackendError
from moorage.backends.ray.backend import RayBackend
from moorage.backends.ray.inventory import UNREACHABLE, bundles, document
from moorage.backends.registry import Inventory
from moorage.protocol.faults import ServiceError
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonObject
from moorage.records.rights import SERVER_ITSELF

log = structlog.get_logger("moored")

LOOK_SECONDS: Final = 2.0
"""Seconds between two readings of the cluster's capacity and use."""
UNREACHABLE_SECONDS: Final = 10.0
"""Longest seconds without an answer of Ray; after that, the cluster gets no new leases."""
TAG: Final = "ray"
"""The tag of documents that this module writes; documents without it come from clients."""


class RayFollower:
    """Reads the Ray cluster periodically, and writes changes into the catalog.

    Args:
        cluster: Id of the cluster.
        autoscale: Whether to request nodes from Ray's autoscaler.
        inventory: Arguments from the daemon: documents, and the state with the waiting requests.
    """

    def __init__(
        self, cluster: str, autoscale: bool, backend: RayBackend, inventory: Inventory
    ) -> None:
        self._cluster = cluster
        self._autoscale = autoscale
        self._backend = backend
        self._inventory = inventory
        self._finding = ""
        self._failed = asyncio.Event()
        self._answered_at = time.monotonic()
        self._last: Document = {}
        self._seen: JsonObject | None = None
        self._requested: list[dict[str, float]] | None = None  # The last request to Ray is unknown.

    async def run(self) -> None:
        """Read the cluster periodically and after each failure of a workload, until cancelled."""
        loop = asyncio.get_running_loop()

        def hurry() -> None:
            loop.call_soon_threadsafe(self._failed.set)

        self._backend.on_failure = hurry
        while True:
            self._failed.clear()
            finding = await self.look()
            if finding != self._finding:
                self._finding = finding
                finding = finding or f"the Ray cluster {self._cluster} answers"
                log.warning("ray_inventory_changed", finding=finding)
            with contextlib.suppress(TimeoutError):  # Ray sends no events.
                await asyncio.wait_for(self._failed.wait(), LOOK_SECONDS)

    async def look(self) -> str:
        """Read the cluster once, and update its document; return the fault, or ""."""
        answer = asyncio.ensure_future(self._backend.observe())
        left = self._answered_at + UNREACHABLE_SECONDS - time.monotonic()
        try:
            await asyncio.wait([answer], timeout=max(left, 0.0))
            if not answer.done():  # An outage; the answer may still come.
                await self._away()
            self._seen = await answer
        except BackendError as error:
            self._requested = None  # A restarted cluster has no request.
            if time.monotonic() - self._answered_at < UNREACHABLE_SECONDS:
                return str(error)
            return await self._away() or str(error)
        finally:
            answer.cancel()
        self._answered_at = time.monotonic()
        wrong = await self._write(document(self._cluster, self._seen))
        if self._autoscale:
            wrong = await self._request(self._seen) or wrong
        return wrong

    async def _away(self) -> str:
        """Mark the cluster as unreachable in the catalog: its free amounts are unknown now."""
        if self._seen is not None:
            return await self._write(document(self._cluster, self._seen, live=False))
        if not self._inventory.is_live(self._cluster):
            return ""
        known = await self._inventory.documents.get(self._cluster)
        return await self._write(known | {"status": UNREACHABLE})

    async def _write(self, written: Document) -> str:
        clusters, there = self._inventory.documents, self._inventory.known(self._cluster)
        if there and written == self._last:
            return ""
        try:
            if there:
                known = await clusters.get(self._cluster)
                if TAG not in (known.get("tags") or ()):
                    return (
                        f"the cluster {self._cluster} was registered by a client: delete it, or "
                        "set ray_cluster to another name"
                    )
                await clusters.update(self._cluster, written)
            else:
                await clusters.create(written, SERVER_ITSELF)
        except ServiceError as error:
            return f"the document of the cluster {self._cluster} is refused: {error.reason}"
        self._last = written
        return ""

    async def _request(self, seen: JsonObject) -> str:
        """Request capacity for waiting requests from Ray's autoscaler; return the fault, or ""."""
        wanted = bundles(
            [
                waiter.ask.demand
                for waiter in self._inventory.state.waiting.values()
                if waiter.ask.demand is not None
                and waiter.ask.provision is not None
                and waiter.ask.provision.backend == self._backend.name
            ],
            seen,
        )
        if wanted != self._requested:
            self._requested = None  # Unknown until Ray answers.
            try:
                await self._backend.request(wanted)
            except BackendError as error:
                return f"Ray's autoscaler got no request: {error}"
            self._requested = wanted
        return ""
