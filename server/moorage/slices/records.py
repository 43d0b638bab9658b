"""Records of a pool about its members: plain values that Ray can send between processes."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from moorage.slices.ray_values import RayValue

ActorInfoT = TypeVar("ActorInfoT")


@dataclass(frozen=True)
class ActorPoolMember(Generic[ActorInfoT]):
    """An actor of a pool, with the info that it returned about itself.

    Args:
        actor: Ray's handle of the actor.
        actor_info: The actor's info: `SliceInfo` or `HostInfo`.
    """

    actor: RayValue
    actor_info: ActorInfoT


@dataclass
class SliceInfo:
    """The info of a slice, which is a group of hosts that work together.

    Args:
        slice_name: The slice's name, from Ray or from the label of its hosts.
        num_hosts: Number of hosts.
        ip_address: Address of the first host.
        num_accelerators_per_host: TPU chips or GPUs of each host.
        node_ids: Ray's ids of the hosts, in their order; None until the hosts are prepared.
        host_infos: For each host `ip`, `node_id`, `pod_name`, `num_devices` and `num_hosts`.
    """

    slice_name: str
    num_hosts: int
    ip_address: str
    num_accelerators_per_host: int
    node_ids: list[str] | None = None
    host_infos: list[dict[str, RayValue]] | None = None


@dataclass(frozen=True)
class DegradedSlice:
    """A slice that lacks hosts.

    Args:
        slice_name: The name of the slice.
        num_hosts: Number of hosts of the whole slice.
        hosts: Addresses of the existing hosts.
        lost: Addresses of the lost hosts, as far as Ray knows.
    """

    slice_name: str
    num_hosts: int
    hosts: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def __str__(self) -> str:
        here = f"slice {self.slice_name} has {len(self.hosts)} of its {self.num_hosts} hosts"
        there = f" ({', '.join(self.hosts)})" if self.hosts else ""
        lost = f", and lost {', '.join(self.lost)}" if self.lost else ""
        return here + there + lost


@dataclass(frozen=True)
class HostInfo:
    """A host of a slice.

    Args:
        host_id: Index of the host in the slice, from 0.
        slice_name: The name of the slice.
        num_devices: TPU chips or GPUs for each task on this host.
        healthy: Whether the host neither failed nor was being preempted at the time of its report.
        failed: Whether the host's actor was shut down.
        node_id: Ray's id of the host's node.
    """

    host_id: int
    slice_name: str
    num_devices: int
    healthy: bool
    failed: bool
    node_id: str | None = None


@dataclass(frozen=True)
class MultisliceInfo:
    """Facts that a slice needs about the other slices of a job.

    Args:
        coordinator_ip: Address of the first host of slice 0.
        slice_id: Index of this slice, from 0.
        num_slices: Number of slices.
        port: The coordinator's port.
    """

    coordinator_ip: str
    slice_id: int
    num_slices: int
    port: int = 8081
