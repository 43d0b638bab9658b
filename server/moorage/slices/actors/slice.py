"""The actor of one slice: it finds the hosts, reserves them, and runs an actor on each."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from uuid import uuid4

from moorage.slices.actors.host import DeviceHostActor, HostPlacement
from moorage.slices.actors.pool import ResourcePoolManager
from moorage.slices.cluster import SLICE_LABEL, RayNode, alive_nodes, draining, hosts_group_name
from moorage.slices.devices import METADATA_SECONDS_MAX, is_reclaimed
from moorage.slices.errors import HostUnhealthyError, SliceDegraded, SlicesError, SliceTimeoutError
from moorage.slices.lazy_ray import RemoteClass, ray
from moorage.slices.ray_values import RayValue, UserFunction
from moorage.slices.records import ActorPoolMember, DegradedSlice, HostInfo, SliceInfo
from moorage.slices.settings import SliceSettings
from moorage.slices.shapes import CHIPS_ASSUMED, GpuSlices, Shape, TpuSlices
from moorage.slices.waiting import Deadline, kill, outcomes

CALLS_MAX: Final = 16
"""Maximum calls of a slice that run at a time: enough for health checks beside long calls."""
WORKER_LABEL: Final = "ray.io/tpu-worker-id"
_LOOKUP_SECONDS_MAX: Final = 20.0
_PAUSE_SECONDS: Final = 0.5

logger: Final = logging.getLogger("ray")


class Slice(ResourcePoolManager[HostInfo]):
    """Reserves the hosts of a slice and runs tasks on them; `SliceActor` is its actor.

    Args:
        shape: The shape of the slice; None: a TPU slice.
        group: The placement group in which the slice's actor runs; for GPUs, the group has all
            hosts.
        settings: Time limits; None: from the environment.
        environment: Variables for all tasks; the caller of a task may override them.
    """

    def __init__(
        self,
        shape: Shape | None = None,
        group: RayValue = None,
        settings: SliceSettings | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(settings)
        self._environment = dict(environment or {})
        self._shape = shape or TpuSlices("")
        self._group = group
        self._failed = False
        self._info: SliceInfo | None = None
        self._unusable: SlicesError | None = None
        self._hosts: list[tuple[RayNode, HostPlacement]] = []
        self._host_placement_group: RayValue = None
        self._changing = threading.RLock()
        try:
            self._info = self._find()
            if self._is_reclaimed():
                name = self._info.slice_name
                self._unusable = HostUnhealthyError(f"slice {name} is being preempted")
                self._failed = True
        except SliceDegraded as error:
            self._unusable = error
            self._failed = True
        except Exception:
            logger.exception("A slice actor cannot determine its slice")
            self._failed = True

    def healthy(self) -> bool:
        """Return whether all hosts exist, and none of them failed or is being preempted.

        An actor that died on a live node does not make the slice unhealthy: it is replaced before
        the next task.
        """
        alive = alive_nodes()
        if self._failed or not self._is_whole(alive) or self._is_reclaimed():
            return False
        checks = [member.actor.healthy.remote() for member in self.get_all_pool_members()]
        answers = outcomes(checks, self._settings.health_check_seconds_max / 2)
        return False not in answers

    def _is_whole(self, alive: Mapping[str, RayNode]) -> bool:
        """Return whether all nodes of the slice are alive."""
        if self._hosts:
            return all(node.node_id in alive for node, _ in self._hosts)
        if isinstance(self._shape, GpuSlices):  # GPU hosts are reserved from the start.
            table = ray.util.placement_group_table(self._group)
            return bool(table["state"] == "CREATED")
        info = self.get_info()
        there = sum(node.resources.get(info.slice_name, 0) for node in alive.values())
        return there >= info.num_hosts or not there

    def _is_reclaimed(self) -> bool:
        """Return whether the cloud reclaims the first host, or Ray drains a host."""
        nodes = {node.node_id for node, _ in self._hosts}
        if any(map(draining, {*nodes, ray.get_runtime_context().get_node_id()})):
            return True
        asked = ThreadPoolExecutor(1).submit(is_reclaimed)
        with contextlib.suppress(TimeoutError):  # As for a host, no answer means no.
            return asked.result(2 * METADATA_SECONDS_MAX)
        return False

    def is_being_preempted(self) -> bool:
        """Return whether the cloud reclaims a host of this slice."""
        if self._is_reclaimed():
            return True
        members = self.get_all_pool_members()
        checks = [member.actor.is_being_preempted.remote() for member in members]
        return True in outcomes(checks, self._settings.health_check_seconds_max / 2)

    def get_info(self) -> SliceInfo:
        """Return the name, shape and address of this slice.

        Raises:
            SlicesError: The name of the slice is unknown.
            SliceDegraded: The slice has lost hosts.
            HostUnhealthyError: The slice was being preempted when this actor started.
        """
        if self._unusable is not None:
            raise self._unusable
        if self._info is None:
            raise SlicesError("Slice info not initialized")
        return self._info

    def get_actor_pool_name(self) -> str:
        """Return this pool's name for messages."""
        return f"SliceActor({self._info.slice_name if self._info else 'uninitialized'})"

    def get_actor_name_from_actor_info(self, actor_info: HostInfo) -> str:
        """Return a host's name for messages."""
        return f"{actor_info.slice_name}-host-{actor_info.host_id}"

    def prepare_hosts(self, seconds: float | None = None) -> SliceInfo:
        """Reserve all hosts of this slice, each on a different node, and return the slice's info.

        Args:
            seconds: Maximum seconds for the reservation; None: `slice_start_seconds_max`.

        Raises:
            SliceTimeoutError: The hosts are not free in time; no host stays reserved.
        """
        seconds = self._settings.slice_start_seconds_max if seconds is None else seconds
        info = self.get_info()
        with self._changing:
            if not self._hosts:
                group, resources = self._reserve(info, seconds)
                self._learn_hosts(info, group, resources)
        return self.get_info()

    def ensure_host_pool(
        self, desired_hosts: int | None = None, seconds: float | None = None
    ) -> list[RayValue]:
        """Start an actor on each host, wait until all are healthy, and return their handles.

        The handles are in the order of the hosts.

        Args:
            desired_hosts: Number of hosts; None: all hosts.
            seconds: Maximum seconds for the reservation; None: `slice_start_seconds_max`.

        Raises:
            HostUnhealthyError: A host has no healthy actor after `host_health_seconds_max`.
        """
        with self._changing:
            info = self.prepare_hosts(seconds)
            wanted = info.num_hosts if desired_hosts is None else desired_hosts
            self._scale_actor_pool(min(wanted, len(self._hosts)))
            return self.get_all_actors_in_pool()

    def run_remote_fn(
        self,
        remote_fn: UserFunction,
        runtime_env: Mapping[str, RayValue] | None = None,
        env: Mapping[str, RayValue] | None = None,
        f_args: tuple[RayValue, ...] = (),
        f_kwargs: Mapping[str, RayValue] | None = None,
    ) -> list[RayValue]:
        """Run a function on each host, and return a reference per host, in order of the hosts."""
        return [
            host.run_remote_fn.remote(
                remote_fn, f_args=f_args, f_kwargs=f_kwargs, runtime_env=runtime_env, env=env
            )
            for host in self.ensure_host_pool()
        ]

    def shutdown(self) -> None:
        """Shut down all hosts of the slice, free their reservation, and refuse further tasks."""
        self._failed = True
        self.drain_actor_pool()
        if self._host_placement_group is not None:
            ray.util.remove_placement_group(self._host_placement_group)
            self._host_placement_group = None

    def create_actor(self) -> RayValue:
        """Start an actor on the first host without one, and return its handle."""
        self.prepare_hosts()
        return self._start_host(self._hosts_without_actor(len(self._hosts))[0])

    def _hosts_without_actor(self, wanted: int) -> list[int]:
        manned = {member.actor_info.host_id for member in self._actor_pool}
        return [host_id for host_id in range(wanted) if host_id not in manned]

    def _start_host(self, host_id: int) -> RayValue:
        node, place = self._hosts[host_id]
        name = self.get_info().slice_name
        within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = DeviceHostActor.options(
            name=f"{name}-host-{host_id}-{uuid4().hex[:8]}",
            scheduling_strategy=within(place.group, place.bundle),
        )
        devices = int(place.resources.get("TPU", 0) or place.resources.get("GPU", 0))
        logger.info("%s: starts host %s on %s", self.get_actor_pool_name(), host_id, node.ip)
        return options.remote(host_id, name, devices, placement=place, settings=self._settings)

    def _add_members_to_actor_pool(self, desired_num_actors: int) -> None:
        """Start an actor on each host without one, and wait until all are healthy."""
        deadline = Deadline(self._settings.host_health_seconds_max)
        missing = self._hosts_without_actor(desired_num_actors)
        why: object = "did not start"
        while missing:
            actors = {host_id: self._start_host(host_id) for host_id in missing}
            infos = [actor.get_info.remote() for actor in actors.values()]
            for (host_id, actor), answer in zip(
                actors.items(), outcomes(infos, deadline.left), strict=True
            ):
                if isinstance(answer, HostInfo) and answer.healthy:
                    self._actor_pool.append(ActorPoolMember(actor, answer))
                    continue
                kill(actor)
                why = answer
                logger.warning("%s: host %s: %s", self.get_actor_pool_name(), host_id, answer)
                time.sleep(_PAUSE_SECONDS)  # A host that is being preempted answers at once.
            self._actor_pool.sort(key=lambda member: member.actor_info.host_id)
            missing = self._hosts_without_actor(desired_num_actors)
            if missing and not deadline.left:
                raise HostUnhealthyError(
                    f"host {missing[0]} of slice {self.get_info().slice_name} is not healthy after"
                    f" {deadline.seconds:g} s (EFORMER_HOST_HEALTH_WAIT_S): {why}"
                )

    def _find(self) -> SliceInfo:
        """Return the info of this actor's slice; its hosts are not reserved yet."""
        here = alive_nodes()[ray.get_runtime_context().get_node_id()]
        if isinstance(self._shape, GpuSlices):
            name = here.labels.get(self._shape.label, "") or f"gpu-{here.node_id[:8]}"
            gpus = int(self._shape.gpus_per_host)
            return SliceInfo(name, self._shape.hosts, here.ip, gpus)
        name = here.labels.get(SLICE_LABEL) or _tpu_value("get_current_pod_name")
        if not name:
            raise SlicesError(
                f"node {here.node_id} has no label {SLICE_LABEL}, and Ray knows no TPU pod there"
            )
        chips = int(here.resources.get("TPU", 0))
        there = [node.ip for node in alive_nodes().values() if node.resources.get(name, 0)]
        expected = _tpu_value("get_current_pod_worker_count") or self._shape.hosts_expected(chips)
        hosts = int(expected or len(there) or 1)
        if 0 < len(there) < hosts:
            found = DegradedSlice(name, hosts, tuple(there))
            if not self._settings.moderate:
                raise SliceDegraded(str(found), [found])
            logger.warning("%s", found)
            hosts, chips = len(there), chips or CHIPS_ASSUMED
        chips = chips if self._shape.chips_per_host is None else self._shape.chips_per_host
        return SliceInfo(name, hosts, here.ip, chips)

    def _reserve(self, info: SliceInfo, seconds: float) -> tuple[RayValue, dict[str, float]]:
        """Return the placement group of all hosts, and the resources of one task per host."""
        if isinstance(self._shape, GpuSlices):
            return self._group, {"GPU": self._shape.gpus_per_host, **self._shape.host_resources}
        resources = dict(self._shape.host_resources)
        if info.num_accelerators_per_host:
            resources["TPU"] = info.num_accelerators_per_host
        bundles = [{info.slice_name: 1, **resources}] * info.num_hosts
        name = hosts_group_name(self._group) if self._group is not None else ""
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", name=name)
        if not group.wait(math.ceil(seconds)):
            ray.util.remove_placement_group(group)
            raise SliceTimeoutError(
                f"slice {info.slice_name}: Ray has not reserved {info.num_hosts} hosts with"
                f" {bundles[0]} within {seconds:g} s"
            )
        self._host_placement_group = group
        return group, resources

    def _learn_hosts(self, info: SliceInfo, group: RayValue, resources: dict[str, float]) -> None:
        """Store the hosts of a placement group, sorted by the worker number in their labels."""
        nodes = alive_nodes()
        placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
        first = ray.get_runtime_context().get_node_id()
        hosts = [
            (nodes[node_id], HostPlacement(group, bundle, resources, self._environment))
            for bundle, node_id in placed.items()
        ]
        self._hosts = sorted(hosts, key=lambda host: _order(host[0], first, host[1].bundle))
        self._info = SliceInfo(
            info.slice_name,
            info.num_hosts,
            self._hosts[0][0].ip,
            info.num_accelerators_per_host,
            node_ids=[node.node_id for node, _ in self._hosts],
            host_infos=[
                {
                    "ip": node.ip,
                    "node_id": node.node_id,
                    "pod_name": info.slice_name,
                    "num_devices": info.num_accelerators_per_host,
                    "num_hosts": info.num_hosts,
                }
                for node, _ in self._hosts
            ],
        )


SliceActor: Final = RemoteClass(Slice, num_cpus=0, max_concurrency=CALLS_MAX)


def _order(node: RayNode, first: str, bundle: int) -> tuple[float, bool, int]:
    worker = node.labels.get(WORKER_LABEL, "")
    return (int(worker) if worker.isdigit() else math.inf, node.node_id != first, bundle)


def _tpu_value(name: str) -> RayValue:
    """Return a value from Ray's TPU library about this machine; it may call a metadata server."""
    from ray.util import tpu  # noqa: PLC0415  # An extra.

    asking = ThreadPoolExecutor(1)
    with contextlib.suppress(Exception):  # Without a TPU, the library raises errors of many types.
        return asking.submit(getattr(tpu, name)).result(_LOOKUP_SECONDS_MAX)
    return None
