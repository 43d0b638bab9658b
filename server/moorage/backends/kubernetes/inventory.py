"""Keeps the document of a cluster up to date while the cluster changes.

    async with (
        await ClusterConnection.open(kubeconfig) as connection,
        ClusterInventory(connection, "west", server="moorage-1") as inventory,
    ):
        seen = await inventory.listed()
        while True:
            document = inventory.document()
            seen = await inventory.wait_for_change(seen)

It watches nodes, pods, ResourceSlices and ResourceClaims, and stores a small record of each object
(`records`). A change rebuilds the documents of the affected nodes only.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

import msgspec

from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.documents import complete_devices, machine_document, whole_document
from moorage.backends.kubernetes.errors import KubernetesError
from moorage.backends.kubernetes.objects import ApiPod, ApiResourceClaim, ApiResourceSlice
from moorage.backends.kubernetes.records import (
    ClaimRecord,
    DeviceName,
    NodeRecord,
    PodRecord,
    SliceRecord,
    claim_record,
    node_record,
    pod_record,
    slice_record,
)
from moorage.backends.kubernetes.watching import Kind, ObjectWatcher
from moorage.protocol.registry import Document

RESOURCE_API: Final = "/apis/resource.k8s.io/v1"
"""The API of device claims, since Kubernetes 1.34; older clusters only count devices."""
LIST_SECONDS_MAX: Final = 60.0

_POD: Final = msgspec.json.Decoder(ApiPod)
_SLICE: Final = msgspec.json.Decoder(ApiResourceSlice)
_CLAIM: Final = msgspec.json.Decoder(ApiResourceClaim)

_NODES: Final = Kind("nodes", "/api/v1/nodes", lambda raw: node_record(msgspec.json.decode(raw)))
_PODS: Final = Kind(
    "pods",
    "/api/v1/pods",
    lambda raw: pod_record(_POD.decode(raw)),
    "status.phase!=Succeeded,status.phase!=Failed",
)
SLICES: Final = Kind(
    "resourceslices", f"{RESOURCE_API}/resourceslices", lambda raw: slice_record(_SLICE.decode(raw))
)
_CLAIMS: Final = Kind(
    "resourceclaims", f"{RESOURCE_API}/resourceclaims", lambda raw: claim_record(_CLAIM.decode(raw))
)

_Pool = tuple[str, str]
"""Name of the driver, and name of its device pool."""


@dataclass(frozen=True, slots=True)
class WatchHealth:
    """The state of the watch of one kind of object.

    Args:
        kind: The kind of object, e.g. `pods`.
        error: Why the objects cannot be read now; empty: no error.
        silent_seconds: Seconds since the last message of the API server about this kind.
        lists: Number of complete lists so far.
    """

    kind: str
    error: str
    silent_seconds: float
    lists: int


class ClusterInventory:
    """Follows the capacity of a cluster, and its use by others.

    Args:
        connection: Connection to the cluster; it stays open when the inventory is closed.
        cluster_id: Id of the cluster's document.
        server: Value of the label `records.SERVER_LABEL` on this server's pods and claims; empty:
            this server makes none.

    Attributes:
        version: Grows with each change of an object.
        remade: Grows with each changed document of a node.
    """

    def __init__(self, connection: ClusterConnection, cluster_id: str, server: str = "") -> None:
        self.version = 0
        self.remade = 0
        self._cluster_id = cluster_id
        self._server = server
        self._nodes = ObjectWatcher(connection, _NODES, self._note_node)
        self._pods = ObjectWatcher(connection, _PODS, self._note_pod)
        self._slices = ObjectWatcher(connection, SLICES, self._note_slice)
        self._claims = ObjectWatcher(connection, _CLAIMS, self._note_claim)
        self._watchers: tuple[ObjectWatcher[Any], ...] = (
            self._nodes,
            self._pods,
            self._slices,
            self._claims,
        )
        self._pods_on = defaultdict[str, dict[str, PodRecord]](dict)
        self._slices_of = defaultdict[_Pool, dict[str, SliceRecord]](dict)
        self._nodes_of = defaultdict[_Pool, set[str]](set)
        self._pools_on = defaultdict[str, dict[_Pool, tuple[Document, ...]]](dict)
        self._claimed: dict[DeviceName, ClaimRecord] = {}
        self._machines: dict[str, Document] = {}
        self._stale: set[str] = set()
        self._leased: Mapping[str, Collection[str]] = {}
        self._moved = asyncio.Event()
        self._tasks: list[asyncio.Task[NoReturn]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(each.run()) for each in self._watchers]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listed(self, seconds: float = LIST_SECONDS_MAX) -> int:
        """Wait until the cluster has been read once, and return the inventory's version.

        Raises:
            KubernetesError: The cluster was not read in time; the message says why.
        """
        try:
            async with asyncio.timeout(seconds):
                for each in self._watchers:
                    await each.listed.wait()
        except TimeoutError:
            missing = [each for each in self._watchers if not each.listed.is_set()]
            causes = "; ".join(f"{x.kind.name}: {x.error or 'no answer yet'}" for x in missing)
            raise KubernetesError(f"cannot be read within {seconds:g} s: {causes}") from None
        return self.version

    @property
    def is_listed(self) -> bool:
        """Whether the cluster has been read at least once."""
        return all(each.listed.is_set() for each in self._watchers)

    async def wait_for_change(self, seen: int) -> int:
        """Wait until the inventory's version is not `seen`, and return the new version."""
        while self.version == seen:
            self._moved.clear()
            await self._moved.wait()
        return self.version

    def document(self) -> Document:
        """Return the present document of the cluster; callers must not change it."""
        while self.refresh(len(self._stale)):
            pass
        return whole_document(self._cluster_id, self.machines().values())

    def machines(self) -> dict[str, Document]:
        """Return the documents of the nodes, by id, as of the last `refresh`."""
        return dict(self._machines)

    def lease(self, leased: Mapping[str, Collection[str]]) -> None:
        """Record the devices that leases of this server hold: by node, the device ids.

        Only the kubelet knows which counted devices are in use. So the documents show the use by
        others first on devices without a lease.
        """
        before, self._leased = self._leased, leased
        for name in before.keys() | leased.keys():
            if before.get(name) != leased.get(name):
                self._stale.add(name)

    def refresh(self, most: int) -> bool:
        """Make the documents of up to `most` changed nodes; return whether more are left."""
        for name in list(itertools.islice(self._stale, most)):
            self._stale.discard(name)
            node = self._nodes.records.get(f"/{name}")
            if node is None:
                self.remade += self._machines.pop(name, None) is not None
                continue
            made = machine_document(
                node,
                [device for pool in self._pools_on[name].values() for device in pool],
                self._pods_on[name].values(),
                self._claimed,
                self._server,
                self._leased.get(name, ()),
            )
            if made != self._machines.get(name):
                self._machines[name] = made
                self.remade += 1
        return bool(self._stale)

    def health(self) -> list[WatchHealth]:
        """Return the state of the watch of each kind of object."""
        now = time.monotonic()
        return [
            WatchHealth(each.kind.name, str(each.error or ""), now - each.heard_at, each.lists)
            for each in self._watchers
        ]

    # What changed ------------------------------------------------------------------------------

    def _touch(self, *nodes: str) -> None:
        if not nodes:
            return
        self._stale.update(nodes)
        self.version += 1
        self._moved.set()

    def _note_node(self, key: str, *_: NodeRecord | None) -> None:
        self._touch(key.removeprefix("/"))

    def _note_pod(self, key: str, old: PodRecord | None, new: PodRecord | None) -> None:
        if old is not None:
            del self._pods_on[old.node][key]
            self._touch(old.node)
        if new is not None:
            self._pods_on[new.node][key] = new
            self._touch(new.node)

    def _note_slice(self, key: str, old: SliceRecord | None, new: SliceRecord | None) -> None:
        if old is not None:
            del self._slices_of[old.driver, old.pool][key]
        if new is not None:
            self._slices_of[new.driver, new.pool][key] = new
        for pool in {(each.driver, each.pool) for each in (old, new) if each is not None}:
            slices = self._slices_of[pool]
            devices = complete_devices(slices.values())
            if devices is None and slices:
                continue  # Incomplete: keep the last complete state.
            for node in self._nodes_of.pop(pool, set()):
                self._pools_on[node].pop(pool, None)
                self._touch(node)
            for node, published in (devices or {}).items():
                self._nodes_of[pool].add(node)
                self._pools_on[node][pool] = published
                self._touch(node)

    def _note_claim(self, _: str, old: ClaimRecord | None, new: ClaimRecord | None) -> None:
        if old is not None:
            for device in old.devices:
                if self._claimed.get(device) is old:
                    del self._claimed[device]
        if new is not None:
            self._claimed |= dict.fromkeys(new.devices, new)
        for record in (old, new):
            for driver, pool, _ in record.devices if record is not None else ():
                self._touch(*self._nodes_of.get((driver, pool), ()))
