"""Follows a cluster for a registry: reports its free capacity, or why that is unknown.

The daemon and `moorage fleet import kubernetes` use this module to update a registry. A cluster
counts as stale if its API server does not answer, or if a watch has been broken for a while.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.documents import free_capacity_document, whole_document
from moorage.backends.kubernetes.errors import KubernetesError
from moorage.backends.kubernetes.inventory import ClusterInventory
from moorage.protocol.registry import Document

LOOK_SECONDS: Final = 2.0
"""Seconds between two checks that the API server answers; changes arrive at once."""
ANSWER_SECONDS_MAX: Final = 5.0
"""Longest wait for the API server's version; a slower API server counts as unreachable."""
STALE_SECONDS: Final = 10.0
"""After an interruption of this length, the objects that a watch has read count as outdated."""
SHARE_MAX: Final = 0.05
"""Largest share of time that a follower spends on documents; large clusters get fewer reports."""
NODES_AT_ONCE: Final = 200
"""Maximum node documents made in one step, before other tasks of the event loop run."""
PAUSE_SECONDS: Final = 0.1
PAUSE_SECONDS_MAX: Final = 30.0

Leased = Mapping[str, Collection[str]]
"""The ids of devices that leases hold, by node."""


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A cluster to follow, and how to log in to it.

    Args:
        cluster_id: The id of its document.
        context: As in `ClusterConnection.open`.
        kubeconfig: The kubeconfig file; None: the usual one.
    """

    cluster_id: str
    context: str = ""
    kubeconfig: Path | None = None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The state of a cluster at one moment.

    Args:
        document: Document of the free capacity, for a registry; None: unchanged.
        machines: Documents of its nodes, by id; None: never read.
        stale: The reason why the documents may be outdated; empty: they are current.
    """

    document: Document | None = None
    machines: Mapping[str, Document] | None = None
    stale: str = ""


class ClusterFollower:
    """Follows one cluster and yields its states.

    Args:
        server: The value of the label `records.SERVER_LABEL` of our own pods and claims.
        leased: Returns the ids of the cluster's devices that leases hold, by node.
    """

    def __init__(
        self, source: ClusterSource, server: str = "", leased: Callable[[], Leased] = dict
    ) -> None:
        self._source = source
        self._server = server
        self._leased = leased
        self._no_answer = ""
        self._last: Document | None = None
        self._remade = -1
        self._machines: Mapping[str, Document] | None = None

    async def views(self) -> AsyncIterator[ClusterView]:
        """Yield the state of the cluster at each change and every `LOOK_SECONDS`, without end.

        The time that the caller spends on a view counts as work on documents; see `SHARE_MAX`.
        """
        source = self._source
        while True:
            try:
                async with (
                    await ClusterConnection.open(source.kubeconfig, source.context) as connection,
                    ClusterInventory(connection, source.cluster_id, self._server) as inventory,
                ):
                    async for view in self._follow(connection, inventory):
                        yield view
            except KubernetesError as error:  # The login failed.
                yield ClusterView(None, self._machines, str(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def _follow(
        self, connection: ClusterConnection, inventory: ClusterInventory
    ) -> AsyncIterator[ClusterView]:
        self._no_answer = ""
        self._remade = -1
        asking = asyncio.create_task(self._keep_asking(connection))
        began, seen = time.monotonic(), -1
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        seen = await inventory.wait_for_change(seen)
                started = time.monotonic()
                listed = inventory.is_listed
                stale = self._no_answer or _why_outdated(inventory, started - began)
                if listed or stale:
                    yield await self._view(inventory if listed else None, stale)
                cost = time.monotonic() - started
                await asyncio.sleep(
                    min(max(PAUSE_SECONDS, cost * (1 / SHARE_MAX - 1)), PAUSE_SECONDS_MAX)
                )
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _view(self, inventory: ClusterInventory | None, stale: str) -> ClusterView:
        if inventory is None:
            return ClusterView(None, self._machines, stale)
        inventory.lease(self._leased())
        while inventory.refresh(NODES_AT_ONCE):  # noqa: ASYNC110  # Each turn does work.
            await asyncio.sleep(0)
        if inventory.remade == self._remade:  # E.g. only our own pods changed.
            return ClusterView(None, self._machines, stale)
        self._remade = inventory.remade
        self._machines = inventory.machines()
        # Making documents for thousands of nodes takes long, and would block the event loop.
        document = await asyncio.to_thread(self._changed_document, [*self._machines.values()])
        return ClusterView(document, self._machines, stale)

    def _changed_document(self, machines: list[Document]) -> Document | None:
        """Return the cluster document for these nodes; None if the document has not changed."""
        document = free_capacity_document(whole_document(self._source.cluster_id, machines))
        if document == self._last:
            return None
        self._last = document
        return document

    async def _keep_asking(self, connection: ClusterConnection) -> NoReturn:
        """Check periodically that the API server answers, since a watch may hang unnoticed."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    await connection.read("/version")
                self._no_answer = ""
            except KubernetesError as error:
                self._no_answer = str(error)
            except TimeoutError:
                self._no_answer = f"its API server did not answer in {ANSWER_SECONDS_MAX:g} s"
            await asyncio.sleep(LOOK_SECONDS)


def _why_outdated(inventory: ClusterInventory, seconds: float) -> str:
    """Return the reason why the inventory may be outdated; empty if the inventory is current."""
    health = inventory.health()
    broken = "; ".join(
        f"{each.kind}: {each.error}"
        for each in health
        if each.error and min(each.silent_seconds, seconds) > STALE_SECONDS
    )
    if broken or inventory.is_listed or seconds < STALE_SECONDS:
        return broken
    return f"{', '.join(each.kind for each in health if not each.lists)} not read yet"
