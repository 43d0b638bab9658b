"""Makes the arguments for a new container from its order and its devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.backends.base import Order, UnsupportedSpecError
from moorage.backends.local.devices import DEVICE_ORDER, DeviceBinding
from moorage.backends.spec_fields import NO_DEVICES, memory_bytes
from moorage.backends.specs import ContainerResourceSpec

LOOPBACK: Final = "127.0.0.1"
MOUNT_OPTIONS: Final = frozenset({"ro", "rw", "bind", "rbind"})
"""Options allowed after a mount's path in the container; mounts are `rbind` in any case."""
_GPU: Final = "nvidia.com/gpu"
"""The kind of GPUs in NVIDIA's specifications for the Container Device Interface."""
_SHELLS: Final = frozenset({"sh", "ash", "bash", "dash", "fish", "ksh", "zsh"})
_ANY_HOST: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # Compared, not bound.


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """The arguments for a new container.

    Args:
        name: Unique name of the container.
        image: The image.
        command: The command to run; None: the image's own.
        stdin: Whether its standard input stays open, so that a shell waits instead of ending.
        labels: Labels by which it is found again.
        cpu_count: Limit of CPU time, in processors; None: no limit.
        memory_bytes: Memory limit, beyond which it is killed; None: no limit.
        devices: Names in the Container Device Interface, e.g. `nvidia.com/gpu=0`.
        ports: Port in the container -> port of the host, 0 for a free one.
        host_ip: Address of the host on which ports are opened.
        mounts: Path of the host, path in the container, and whether it is read-only.
    """

    name: str
    image: str
    command: Sequence[str] | None = None
    stdin: bool = False
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    cpu_count: float | None = None
    memory_bytes: int | None = None
    devices: Sequence[str] = ()
    ports: Mapping[int, int] = field(default_factory=dict[int, int])
    host_ip: str = "127.0.0.1"
    mounts: Sequence[tuple[str, str, bool]] = ()


def plan(
    order: Order,
    spec: ContainerResourceSpec,
    grant: DeviceBinding,
    name: str,
    labels: Mapping[str, str],
) -> ContainerPlan:
    """Return the arguments for the container of an order.

    If the spec sets no processors, memory or GPUs, the container gets those of its lease.

    Args:
        order: The order to carry out.
        spec: The order's spec.
        grant: The devices that the container is bound to.
        name: Name of the container.
        labels: Labels by which it is found again.

    Raises:
        UnsupportedSpecError: Fields of the spec contradict each other.
    """
    share = order.placement[0] if order.placement else None
    cpus = spec.cpu_count
    if cpus is None and share is not None and share.cpu_milli:
        cpus = share.cpu_milli / 1000
    size = None if spec.mem_limit is None else memory_bytes(spec.mem_limit)
    if size is None and share is not None and share.memory_mib:
        size = share.memory_mib << 20
    # The container sees only its own devices, numbered from 0, so a list of host ids would be
    # wrong; and an engine that assigns devices by this variable must not add any.
    gpus = {**NO_DEVICES}
    gpus |= {key: value for key, value in grant.environment.items() if "MPS" in key}
    order_of_gpus = DEVICE_ORDER if _gpus(order, spec, grant) else {}
    ports = {port: 0 for port in (spec.container_port, probe_port(spec)) if port is not None}
    return ContainerPlan(
        name=name,
        image=spec.title,
        command=spec.command,
        stdin=spec.command is None or is_shell(spec.command),
        environment={**order_of_gpus, **spec.environment, **gpus, **order.environment},
        labels=labels,
        cpu_count=cpus,
        memory_bytes=size,
        devices=[f"{_GPU}={each}" for each in _gpus(order, spec, grant)],
        ports={**ports, **spec.ports},
        host_ip=spec.host_ip or LOOPBACK,
        mounts=mounts(spec),
    )


def is_shell(command: Sequence[str]) -> bool:
    """Return whether a command is a shell that reads commands from its standard input."""
    program, *options = command or [""]
    known = Path(program).name in _SHELLS
    return known and all(each in {"-i", "-l", "-il", "-li", "--login"} for each in options)


def reachable_host(spec: ContainerResourceSpec) -> str:
    """Return the address at which this machine reaches the ports of a container."""
    given = spec.host_ip or ""
    return LOOPBACK if given in _ANY_HOST else given


def _gpus(order: Order, spec: ContainerResourceSpec, grant: DeviceBinding) -> Sequence[str]:
    """Return a container's GPUs: those of its lease or of the slot pool, else those of its spec."""
    if order.placement or isinstance(spec.gpus, int | None):
        return grant.gpus
    return ["all"] if isinstance(spec.gpus, str) else spec.gpus


def probe_port(spec: ContainerResourceSpec) -> int | None:
    """Return the container port that the readiness probe connects to; None without such a probe.

    Raises:
        UnsupportedSpecError: The probe needs a port, and none is given.
    """
    probe = spec.readiness
    if probe is None:
        return None
    port = probe.port or spec.container_port
    if port is None and (probe.path is not None or probe.command is None):
        reason = "readiness: expected a container_port, or a port or command in the probe"
        raise UnsupportedSpecError(reason)
    return port


def mounts(spec: ContainerResourceSpec) -> list[tuple[str, str, bool]]:
    """Return each mount as a tuple: host path, path in the container, whether it is read-only.

    Raises:
        UnsupportedSpecError: A mount has a path that is not absolute, or an unknown option.
    """
    found = []
    for outside, given in spec.mount.items():
        inside, _, written = given.partition(":")
        options = set(written.split(",")) if written else set[str]()
        if unknown := options - MOUNT_OPTIONS:
            raise UnsupportedSpecError(
                f"mount: expected options among {', '.join(sorted(MOUNT_OPTIONS))}, not"
                f" {min(unknown)!r} of {given!r}"
            )
        if not (Path(outside).is_absolute() and Path(inside).is_absolute()):
            reason = f"mount: expected absolute paths, not {outside!r}: {given!r}"
            raise UnsupportedSpecError(reason)
        found.append((outside, inside, "ro" in options))
    return found
