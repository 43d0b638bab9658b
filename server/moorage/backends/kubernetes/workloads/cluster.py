"""Follows, makes and deletes this server's workloads in one cluster.

All calls run in the backend's one event loop. Objects are found by their labels, so a restarted
daemon finds the objects of an earlier daemon. A start or a stop sends a change to the API server,
then waits until the watch shows it.
"""

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from moorage.backends.base import BackendError
from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.errors import (
    ConfigurationError,
    KubernetesError,
    NoAnswerError,
    RefusedError,
)
from moorage.backends.kubernetes.inventory import RESOURCE_API, SLICES
from moorage.backends.kubernetes.records import SERVER_LABEL, SliceRecord
from moorage.backends.kubernetes.watching import Kind, ObjectWatcher
from moorage.backends.kubernetes.workloads import manifests
from moorage.backends.kubernetes.workloads.manifests import StartObjects
from moorage.backends.kubernetes.workloads.states import (
    ClaimState,
    NodeTrouble,
    PodState,
    WorkloadView,
    claim_state,
    node_trouble,
    pod_state,
    view,
)
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonMapping, JsonValue

LIST_SECONDS_MAX: Final = 15.0
"""Longest wait for the first list of a cluster's objects, in calls that need it."""
RETRY_SECONDS: Final = (0.2, 0.5, 1.0, 2.0)
"""Pauses in seconds before retries of an unanswered change; the last one repeats."""
END_SECONDS_MAX: Final = 20.0
"""Seconds for which a deletion is repeated while the API server does not answer."""
_UNAUTHORIZED: Final = 401
"""HTTP status of an expired login; such calls are repeated, with a new login."""
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_FORBIDDEN: Final = 403
_TOO_MANY: Final = 429
_TROUBLE_FROM: Final = 500
_UNWATCHED: Final = ("/services/", "/podgroups/")
"""Paths of objects that are not watched: they run nothing, and vanish with their pod."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _News:
    """Signals changes of a workload's objects, with the time of the last change."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    heard_at: float = field(default_factory=time.monotonic)


class ClusterWorkloads:
    """Follows, makes and deletes this server's workloads in one cluster.

    Args:
        cluster_id: The cluster's id in the inventory.
        server: Value of `SERVER_LABEL` on this server's objects.
        changed: Called with the name of each workload that has a changed object.
    """

    def __init__(
        self,
        cluster_id: str,
        connection: ClusterConnection,
        server: str,
        changed: Callable[[str], None],
    ) -> None:
        self.cluster_id = cluster_id
        self.connection = connection
        self.server = server
        self._changed = changed
        ours = f"{SERVER_LABEL}={server}"
        claims = f"{RESOURCE_API}/resourceclaims"
        self._pods = ObjectWatcher(
            connection, Kind("pods", "/api/v1/pods", pod_state, labels=ours), self._note_pod
        )
        self._claims = ObjectWatcher(
            connection, Kind("resourceclaims", claims, claim_state, labels=ours), self._note_claim
        )
        self._nodes = ObjectWatcher(
            connection, Kind("nodes", "/api/v1/nodes", node_trouble), self._note_node
        )
        self._slices = ObjectWatcher(connection, SLICES, self._note_slice)
        self._watchers = (self._pods, self._claims, self._nodes, self._slices)
        self._pods_of = defaultdict[str, dict[str, PodState]](dict)
        self._claims_of = defaultdict[str, dict[str, ClaimState]](dict)
        self._on_node = defaultdict[str, set[str]](set)
        self._published = defaultdict[str, dict[str, SliceRecord]](dict)
        self._objects = defaultdict[str, set[str]](set)
        self._news = defaultdict[str, _News](_News)
        self._tasks = [asyncio.create_task(each.run()) for each in self._watchers]

    async def close(self) -> None:
        """Stop following the cluster's objects."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connection.close()

    # State ---------------------------------------------------------------------------------------

    async def listed(self, seconds: float | None = LIST_SECONDS_MAX) -> None:
        """Wait until all objects of the cluster were read for the first time.

        Raises:
            BackendError: The list did not arrive in time; the message says why.
        """
        try:
            async with asyncio.timeout(seconds):
                for each in self._watchers:
                    await each.listed.wait()
        except TimeoutError:
            raise BackendError(self.trouble() or "it did not answer in time") from None

    def trouble(self) -> str:
        """Return why the cluster cannot be read now; empty: no trouble."""
        said = next((str(each.error) for each in self._watchers if each.error), "")
        return f"the Kubernetes cluster {self.cluster_id} cannot be read: {said}" if said else ""

    def workloads(self) -> set[str]:
        """Return the names of all workloads that have a pod or a claim."""
        return {name for known in (self._pods_of, self._claims_of) for name in known if known[name]}

    def has(self, workload: str) -> bool:
        """Return whether a workload has a pod, a claim or another object."""
        return any(known.get(workload) for known in (self._pods_of, self._claims_of, self._objects))

    def pods(self, workload: str) -> list[PodState]:
        """Return the pods of a workload, in the order of their names."""
        return [pod for _, pod in sorted(self._pods_of.get(workload, {}).items())]

    def claims(self, workload: str) -> list[ClaimState]:
        """Return the claims of a workload, in the order of their names."""
        return [claim for _, claim in sorted(self._claims_of.get(workload, {}).items())]

    def view(self, workload: str) -> WorkloadView | None:
        """Return the joint state of a workload's pods; None if it has no pods."""
        listed = self._nodes.listed.is_set() and self._nodes.error is None
        return view(workload, self.pods(workload), self._nodes.records, listed)

    def published(self, node: str) -> dict[str, Document]:
        """Return the devices that DRA drivers publish for a node, by device id."""
        slices = self._published.get(node, {}).values()
        newest: dict[tuple[str, str], int] = {}
        for each in slices:
            pool = (each.driver, each.pool)
            newest[pool] = max(newest.get(pool, 0), each.generation)
        return {
            str(device["id"]): device
            for each in slices
            if each.generation == newest[each.driver, each.pool]
            for device in each.devices
        }

    def missing(self, workload: str, nodes: Collection[str]) -> str:
        """Return a message about missing objects that a workload's pods need; "" if none."""
        pods = self.pods(workload)
        if not pods:
            return "no pod was created: see `kubectl describe job`"
        if lost := [each for each in nodes if f"/{each}" not in self._nodes.records]:
            return f"there is no node {', '.join(lost)}"
        needed = [f"{pod.namespace}/{each}" for pod in pods for each in pod.claims]
        if lost := [each for each in needed if each not in self._claims.records]:
            return f"another client deleted its claim {', '.join(lost)}"
        return ""

    async def news(self, workload: str, seconds: float) -> None:
        """Wait until an object of a workload changes, or until `seconds` have passed."""
        event = self._news[workload].event
        event.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    def silence(self, workload: str) -> float:
        """Return the seconds since the objects of a workload last changed."""
        return time.monotonic() - self._news[workload].heard_at

    # Changes -------------------------------------------------------------------------------------

    async def make(
        self, workload: str, objects: StartObjects, there: bool, trouble: list[str]
    ) -> None:
        """Create the objects of a start; objects that exist stay unchanged.

        Args:
            workload: Name of the workload.
            objects: The objects to create.
            there: Whether all pods exist, so that only objects owned by them may be missing.
            trouble: Collects the errors of calls that are repeated.

        Raises:
            BackendError: The API server refused an object.
        """
        first = None
        if not there:
            claims = manifests.CLAIMS.format(objects.namespace)
            made = [(claims, each) for each in objects.claims]
            await self._create_all(workload, made, trouble)
            made = [(objects.pods_path, each) for each in objects.pods]
            first, *_ = await self._create_all(workload, made, trouble)
        if objects.owned:
            owner = first or await self._read_first_pod(objects, trouble)
            keys = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
            own = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **keys}
            for _, each in objects.owned:
                each["metadata"]["ownerReferences"] = [own]
            await self._create_all(workload, objects.owned, trouble)

    async def group_api(self, trouble: list[str]) -> str:
        """Return the API version that has PodGroups; empty if the cluster has no PodGroups."""
        known = await self._read(manifests.SCHEDULING, trouble)
        for version in (str(each["groupVersion"]) for each in known.get("versions", ())):
            has = await self._read(f"/apis/{version}", trouble)
            if any(each["name"] == "podgroups" for each in has.get("resources", ())):
                return version
        return ""

    async def _read(self, path: str, trouble: list[str]) -> Document:
        """Return the object at a path; {} if it does not exist or cannot be read."""
        try:
            said: Document = await self._patiently(
                lambda: self.connection.call("GET", path), trouble
            )
        except RefusedError:
            return {}
        return said

    async def _read_first_pod(self, objects: StartObjects, trouble: list[str]) -> JsonValue:
        """Return the first pod of a start, if an earlier call has created it."""
        path = f"{objects.pods_path}/{objects.pods[0]['metadata']['name']}"
        try:
            return await self._patiently(lambda: self.connection.call("GET", path), trouble)
        except RefusedError as error:
            raise BackendError(f"the first pod was deleted during the start: {error}") from error

    async def _create_all(
        self, workload: str, objects: Collection[tuple[str, Document]], trouble: list[str]
    ) -> list[JsonValue]:
        made = (self._create(workload, path, thing, trouble) for path, thing in objects)
        answers = await asyncio.gather(*made, return_exceptions=True)
        for each in answers:
            if isinstance(each, BaseException):
                raise each
        return answers

    async def _create(
        self, workload: str, path: str, thing: Document, trouble: list[str]
    ) -> JsonValue:
        """Create an object and return it; None if it exists already."""
        its, name = self._objects[workload], f"{path}/{thing['metadata']['name']}"
        known = name in its
        its.add(name)
        try:
            return await self._patiently(lambda: self.connection.call("POST", path, thing), trouble)
        except RefusedError as error:
            if error.status == _CONFLICT and error.reason == "AlreadyExists":
                return None
            if not known:  # A refused object needs no deletion.
                its.discard(name)
            raise BackendError(self._refusal(thing, error)) from error

    def _refusal(self, thing: Document, error: RefusedError) -> str:
        """Return a message about a refusal of the API server, with advice."""
        kind, space = thing["kind"], thing["metadata"]["namespace"]
        where = f"namespace {space} of cluster {self.cluster_id}"
        if error.status == _FORBIDDEN and "exceeded quota" in error.message:
            advice = "end workloads there, or raise the namespace's ResourceQuota"
            return f"{where} has no quota left ({error.message}): {advice}"
        if error.status == _NOT_FOUND and "namespace" in error.message:
            advice = "create it, or set kubernetes_namespace to another one"
            return f"there is no {where}: {advice}"
        if error.status == _FORBIDDEN and "cannot create resource" in error.message:
            advice = f"grant create, get, list, watch and delete of {kind.lower()}s there"
            return f"this server may not create a {kind} in {where} ({error.message}): {advice}"
        return f"cluster {self.cluster_id} refused a {kind}: {error.message}"

    async def _patiently(self, call: Callable[[], Awaitable[_T]], trouble: list[str]) -> _T:
        """Await a call; repeat it while the API server does not answer."""
        pauses = iter(RETRY_SECONDS)
        pause = RETRY_SECONDS[-1]
        while True:
            try:
                return await call()
            except (NoAnswerError, ConfigurationError) as error:
                trouble.append(str(error))
            except RefusedError as error:
                if error.status not in {_UNAUTHORIZED, _TOO_MANY} and error.status < _TROUBLE_FROM:
                    raise
                trouble.append(str(error))
            pause = next(pauses, pause)
            await asyncio.sleep(pause)

    async def end(self, workload: str, stop_seconds_max: float | None) -> bool:
        """Delete all objects of a workload; its pods get their grace period.

        Args:
            workload: Name of the workload.
            stop_seconds_max: Limit of the pods' grace periods; None: no limit.

        Returns:
            Whether the workload had any object.

        Raises:
            BackendError: The API server did not accept the deletion.
        """
        paths = set(self._paths(workload))
        if not paths:
            return False
        self._objects[workload] |= _watched_paths(paths)
        trouble: list[str] = []
        bodies: dict[str, Document] = {
            # With the policy `Foreground`, a deleted Job makes no new pod, and goes only after its
            # pods.
            path: {"propagationPolicy": "Foreground" if "/jobs/" in path else "Background"}
            for path in paths
        }
        for pod in self.pods(workload):
            if stop_seconds_max is not None and pod.stop_seconds > stop_seconds_max:
                # 0 would delete the pod's object while the pod may still run.
                grace = {"gracePeriodSeconds": max(1, math.ceil(stop_seconds_max))}
                bodies[f"{manifests.PODS.format(pod.namespace)}/{pod.name}"] |= grace
        try:
            async with asyncio.timeout(END_SECONDS_MAX):
                await asyncio.gather(
                    *(self._delete(workload, each, body, trouble) for each, body in bodies.items())
                )
        except (RefusedError, TimeoutError) as error:
            raise BackendError(
                f"the Kubernetes cluster {self.cluster_id} did not delete {workload}:"
                f" {str(error) or trouble[-1:]}"
            ) from error
        return True

    def _paths(self, workload: str) -> Iterator[str]:
        """Yield the API paths of a workload's objects: watched ones, and those just made."""
        yield from self._objects.get(workload, ())
        for pod in self.pods(workload):
            yield f"{manifests.PODS.format(pod.namespace)}/{pod.name}"
            if pod.job:
                yield f"{manifests.JOBS.format(pod.namespace)}/{pod.job}"
            if pod.endpoint:
                yield f"{manifests.SERVICES.format(pod.namespace)}/{pod.start}"
        for claim in self.claims(workload):
            yield f"{manifests.CLAIMS.format(claim.namespace)}/{claim.name}"

    async def _delete(self, workload: str, path: str, body: Document, trouble: list[str]) -> None:
        try:
            await self._patiently(lambda: self.connection.call("DELETE", path, body), trouble)
        except RefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            self._forget_object(workload, path)
            return
        if not _watched_paths([path]):
            self._forget_object(workload, path)

    def leftovers(self, workload: str) -> list[str]:
        """Return the API paths of objects that are left of a deleted workload.

        Objects that the watch still shows count, since the next start would take them for its own.
        """
        return sorted(_watched_paths(self._paths(workload)))

    async def look_for(self, workload: str) -> None:
        """Check at the API server which objects of a deleted workload still exist."""
        for path in self.leftovers(workload):
            try:
                await self.connection.call("GET", path)
            except RefusedError as error:
                if error.status == _NOT_FOUND:
                    self._forget_object(workload, path)
            except KubernetesError:
                return

    async def jobs(self, namespace: str) -> set[str]:
        """Return the names of workloads that are Jobs, also of Jobs that have no pod yet.

        Raises:
            BackendError: The API server does not answer, or refuses.
        """
        path, ours = manifests.JOBS.format(namespace), f"{SERVER_LABEL}={self.server}"
        try:
            found = await self.connection.call("GET", path, labelSelector=ours)
        except KubernetesError as error:
            raise BackendError(
                f"cluster {self.cluster_id} does not list its Jobs: {error}"
            ) from error
        names = set[str]()
        for each in found["items"]:
            meta: JsonMapping = each["metadata"]
            name = str(meta.get("annotations", {}).get(manifests.WORKLOAD, ""))
            self._objects[name].add(f"{manifests.JOBS.format(namespace)}/{meta['name']}")
            names.add(name)
        return names - {""}

    # Events of watches ---------------------------------------------------------------------------

    def _wake_waiter(self, workload: str) -> None:
        if workload in self._news:
            self._news[workload].heard_at = time.monotonic()
            self._news[workload].event.set()
        self._changed(workload)

    def _forget_object(self, workload: str, path: str) -> None:
        unseen = self._objects.get(workload)
        if unseen is not None:
            unseen.discard(path)
            if not unseen:
                del self._objects[workload]
        if workload in self._news:
            self._news[workload].event.set()

    def forget(self, workload: str) -> None:
        """Forget a deleted workload."""
        self._news.pop(workload, None)

    def _note_pod(self, key: str, old: PodState | None, new: PodState | None) -> None:
        for record in filter(None, (old, new)):
            pods = self._pods_of[record.workload]
            if record is old:
                pods.pop(key, None)
                self._on_node[record.node].discard(record.workload)
            else:
                pods[key] = record
                if record.node:
                    self._on_node[record.node].add(record.workload)
        seen = new or old
        if seen is None:
            return
        if new is None:
            self._forget_object(
                seen.workload, f"{manifests.PODS.format(seen.namespace)}/{seen.name}"
            )
            if not self._pods_of[seen.workload]:
                del self._pods_of[seen.workload]
        self._wake_waiter(seen.workload)

    def _note_claim(self, key: str, old: ClaimState | None, new: ClaimState | None) -> None:
        seen = new or old
        if seen is None:
            return
        claims = self._claims_of[seen.workload]
        if new is not None:
            claims[key] = new
        else:
            claims.pop(key, None)
            self._forget_object(
                seen.workload, f"{manifests.CLAIMS.format(seen.namespace)}/{seen.name}"
            )
            if not claims:
                del self._claims_of[seen.workload]
        self._wake_waiter(seen.workload)

    def _note_node(self, key: str, old: NodeTrouble | None, new: NodeTrouble | None) -> None:
        del old, new
        for workload in tuple(self._on_node.get(key.removeprefix("/"), ())):
            self._wake_waiter(workload)

    def _note_slice(self, key: str, old: SliceRecord | None, new: SliceRecord | None) -> None:
        if old is not None:
            self._published[old.node].pop(key, None)
        if new is not None:
            self._published[new.node][key] = new


def _watched_paths(paths: Iterable[str]) -> set[str]:
    return {path for path in paths if not any(each in path for each in _UNWATCHED)}
