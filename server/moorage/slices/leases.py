"""Takes hosts of slices by leases of a Moorage server: each slice holds one lease on its hosts.

The server grants each GPU once. So workloads of the backend `ray`, and other pools with leases,
never get the same GPUs of the Ray cluster.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue
from moorage.slices.shapes import GpuSlices, Shape

GROUP_PREFIX: Final = "moorage-lease/"
"""Prefix of placement groups' names; the lease id after it tells the server whose group it is."""
NODE_ID_LABEL: Final = "ray.io/node-id"
RACK_LABEL: Final = "rack"
GROUP_SECONDS_MAX: Final = 10
"""Seconds that Ray may take to reserve the resources of a lease."""
_LOOK_SECONDS: Final = 0.2
_MIB: Final = 1 << 20


class LeaseClient(Protocol):
    """The methods of `moorage_client.BlockingClient` that a pool calls."""

    def lease(
        self, policy_rule_uri: str, /, **request: RayValue
    ) -> AbstractContextManager[RayValue]:
        """Hold a lease, and renew it, while a block runs."""


@dataclass(frozen=True, kw_only=True)
class LeasedHosts:
    """Takes the hosts of a pool's slices by leases of a server.

    Args:
        client: A client that is connected to the server; it renews the pool's leases.
        policy: The policy that chooses the nodes.
        cluster: Id of the Ray cluster at the server.
        ttl_seconds: Seconds after which the server frees the GPUs if this program is killed.
        priority: The server serves higher priorities first.
        preemptible: Whether the server may end the lease of a slice for a request of higher
            priority.
    """

    client: LeaseClient
    policy: str
    cluster: str = "ray"
    ttl_seconds: float = 60.0
    priority: int = 0
    preemptible: bool = False

    def check(self, shape: Shape) -> None:
        """Refuse a shape of slices that a lease cannot hold.

        Raises:
            ValueError: A lease cannot hold the slices; the message has the reason.
        """
        if not isinstance(shape, GpuSlices):
            raise ValueError("slices on leases are GPU slices: give shape=GpuSlices(…)")  # noqa: TRY004  # As for all wrong shapes.
        if shape.label not in {"", RACK_LABEL} or shape.resource:
            raise ValueError("slices on leases support label='rack' or no label, and no resource")
        if shape.gpus_per_host != int(shape.gpus_per_host):
            raise ValueError(f"a lease has whole GPUs of each host, not {shape.gpus_per_host}")

    def take(self, shape: GpuSlices, seconds: float) -> "SliceLease":
        """Take the hosts of one slice.

        Args:
            shape: The shape of the slice.
            seconds: Maximum seconds to wait in the server's queue.

        Raises:
            Exception: The client's error for a refusal.
        """
        held = shape.host_resources
        resources = {
            "gpus": int(shape.gpus_per_host),
            "nodes": shape.hosts,
            "models": [shape.gpu_model] if shape.gpu_model else None,
            "cpu_milli": int(held.get("CPU", 0) * 1000),
            "memory_mib": int(held.get("memory", 0) / _MIB),
            "topology": RACK_LABEL if shape.label else None,
        }
        guard = self.client.lease(
            self.policy,
            clusters=[self.cluster],
            ttl_seconds=self.ttl_seconds,
            wait_seconds=seconds,
            priority=self.priority,
            preemptible=self.preemptible,
            resources={name: value for name, value in resources.items() if value is not None},
        )
        return SliceLease(guard, guard.__enter__())


class SliceLease:
    """The lease of one slice.

    Args:
        guard: The client's context manager, which releases the lease.
        held: The client's held lease.
    """

    def __init__(self, guard: AbstractContextManager[RayValue], held: RayValue) -> None:
        self._guard = guard
        self._held = held
        self._closed = threading.Event()

    @property
    def environment(self) -> dict[str, str]:
        """The variables for tasks of the slice."""
        lease = self._held.lease
        return {"MOORAGE_LEASE_ID": lease.id, "MOORAGE_FENCING": str(lease.fencing)}

    def reserve(self, shape: GpuSlices) -> RayValue:
        """Reserve exactly the GPUs of the lease in Ray, and return the placement group.

        Raises:
            DeviceError: A GPU of the lease is in use.
            TimeoutError: Ray has not reserved the GPUs in time.
        """
        from moorage.ray_devices import Holders  # noqa: PLC0415  # It needs an extra.

        shares = sorted(self._held.placement, key=lambda share: str(share.node_id))
        groups: list[RayValue] = []

        def is_reserved() -> bool:
            groups.append(
                ray.util.placement_group(
                    shape.bundles(),
                    strategy="STRICT_SPREAD" if shape.hosts > 1 else "PACK",
                    bundle_label_selector=[{NODE_ID_LABEL: share.node_id} for share in shares],
                    name=GROUP_PREFIX + self._held.id,
                )
            )
            return bool(groups[0].wait(GROUP_SECONDS_MAX))

        if not _exactly(Holders(), shares, is_reserved):
            ray.util.remove_placement_group(groups[0])
            raise TimeoutError(
                f"Ray has not reserved lease {self._held.id} in {GROUP_SECONDS_MAX} s"
            )
        return groups[0]

    def guard(self, end: Callable[[], None]) -> None:
        """Call `end` as soon as the lease is lost, since others may then hold its GPUs."""

        def watch() -> None:
            while not self._closed.wait(_LOOK_SECONDS):
                if self._held.lost:
                    end()
                    return

        threading.Thread(target=watch, name="slice-lease", daemon=True).start()

    def close(self) -> None:
        """Release the hosts; if the server is unreachable, the hosts are freed after the TTL."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(Exception):  # The lease was lost, or ends by its TTL.
                self._guard.__exit__(None, None, None)


def _exactly(holders: RayValue, shares: Sequence[RayValue], take: Callable[[], bool]) -> bool:
    """Call `take` while a lease's devices are the first that Ray would choose on each node."""
    if not shares:
        return take()
    first, *others = shares
    taken: bool = holders.exact(
        first.node_id, first.gpus, 1.0, lambda: _exactly(holders, others, take)
    )
    return taken
