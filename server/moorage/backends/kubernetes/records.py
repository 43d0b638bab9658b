"""Makes records of a cluster's nodes, pods, claims and published devices from API objects.

`inventory` calls this module with the bytes that the API server sends, and stores the records;
`documents` builds the cluster document from the records. A function returns None if the object does
not matter. No I/O.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from moorage.backends.kubernetes.objects import (
    ApiContainer,
    ApiDevice,
    ApiMeta,
    ApiPod,
    ApiResourceClaim,
    ApiResourceSlice,
    ApiSizes,
)
from moorage.protocol.cluster_documents import MIB, device
from moorage.protocol.kubernetes_nodes import WHOLE_DEVICES, NodeReading, mig_profile, quantity
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonMapping, JsonValue

SERVER_LABEL: Final = "moorage.dev/server"
"""Label with the name of the server that made a pod or claim."""
GPUS_ANNOTATION: Final = "moorage.dev/gpus"
"""Annotation of pods with counted devices: the leased device ids, separated by commas."""

MODEL_ATTRIBUTES: Final = ("productName", "model", "gpuModel")
LINK_ATTRIBUTES: Final = ("linkGroup", "nvlinkGroup", "nvlinkDomain", "cliqueId")
NUMA_ATTRIBUTES: Final = ("numaNode", "numa")
"""Names that drivers use for the NUMA node of a device; the first attribute present counts. A
prefix with a slash, as in `resource.kubernetes.io/numaNode`, does not matter."""

DeviceName = tuple[str, str, str]
"""Driver, pool, and name of the device within the pool."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node: its document, including devices that are only counted, without names."""

    document: Document
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class PodRecord:
    """The resources that a pod takes on its node.

    Args:
        node: Name of its node.
        server: The Moorage server that created the pod; empty: another client created it.
        cpu_milli: Requested CPU.
        memory_mib: Requested memory.
        counts: Pairs of an extended resource and the requested number.
        gpus: Ids of the counted devices that its lease holds.
    """

    node: str
    server: str = ""
    cpu_milli: int = 0
    memory_mib: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """A part of a driver's pool of devices on one node."""

    node: str
    driver: str
    pool: str
    generation: int
    slices: int
    devices: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The devices allocated to a claim."""

    server: str
    devices: tuple[DeviceName, ...]


def node_record(item: JsonMapping) -> NodeRecord:
    """Return the record of a Node.

    Raises:
        WrongNodeError: A field does not have the form that the API documents.
    """
    reading = NodeReading(item)
    document = reading.document()
    for index, each in enumerate(document["gpus"]["gpus"]):
        each.setdefault("id", str(index))
    why_not = reading.why_not()
    document |= {"unavailable": why_not} if why_not else {}
    taints = reading.at("spec.taints")
    document |= {"taints": taints} if taints else {}
    return NodeRecord(document, reading.replicas())


def pod_record(pod: ApiPod) -> PodRecord | None:
    """Return the record of a pod that takes resources of a node."""
    spec = pod.spec
    if not spec.node_name or pod.status.phase in {"Succeeded", "Failed"}:
        return None
    wanted = _scheduler_requests(pod)
    annotations = pod.metadata.annotations or {}
    return PodRecord(
        node=spec.node_name,
        server=_server(pod.metadata),
        cpu_milli=round(wanted.pop("cpu", 0) * 1000),
        memory_mib=int(wanted.pop("memory", 0) / MIB),
        counts=tuple(
            (name, int(amount))
            for name, amount in sorted(wanted.items())
            if amount and (name.endswith(WHOLE_DEVICES) or mig_profile(name))
        ),
        gpus=tuple(filter(None, annotations.get(GPUS_ANNOTATION, "").split(","))),
    )


def _scheduler_requests(pod: ApiPod) -> dict[str, float]:
    """Return the resources that the scheduler reserves for a pod, by its own formula."""
    spec = pod.spec
    running = [_requests(each.resources) for each in spec.containers or ()]
    stays, starting = dict[str, float](), dict[str, float]()
    for container in spec.init_containers or ():
        own = _requests(container.resources)
        if _stays(container):
            stays = _sum([stays, own])
            own = stays
        else:
            own = _sum([stays, own])
        starting = _most(starting, own)
    wanted = _most(_sum([stays, *running]), starting)
    wanted |= _requests(spec.resources)  # Requests of the pod as a whole replace these.
    return _sum([wanted, _amounts(spec.overhead)])


def _stays(container: ApiContainer) -> bool:
    return container.restart_policy == "Always"


def _requests(sizes: ApiSizes | None) -> dict[str, float]:
    """Return a container's requests; a resource without a request requests its limit."""
    return {} if sizes is None else _amounts(sizes.limits) | _amounts(sizes.requests)


def _amounts(given: Mapping[str, str | int] | None) -> dict[str, float]:
    return {name: quantity(text) or 0 for name, text in (given or {}).items()}


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total


def _most(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def slice_record(found: ApiResourceSlice) -> SliceRecord | None:
    """Return the record of a slice of one node's devices; None for devices of several nodes."""
    spec = found.spec
    if not spec.node_name:
        return None
    devices = (_device(spec.driver, spec.pool.name, each) for each in spec.devices or ())
    return SliceRecord(
        node=spec.node_name,
        driver=spec.driver,
        pool=spec.pool.name,
        generation=spec.pool.generation,
        slices=spec.pool.resource_slice_count,
        devices=tuple(each for each in devices if each is not None),
    )


def _device(driver: str, pool: str, found: ApiDevice) -> Document | None:
    """Return a device in the form of `gpus.gpus`; None unless it is a GPU that leases can get."""
    values = {
        name.rpartition("/")[2]: next(
            (x for x in (each.text, each.number, each.flag, each.version) if x is not None), None
        )
        for name, each in (found.attributes or {}).items()
    }
    instance = values.get("type") == "mig"
    if any(taint.effect in {"NoSchedule", "NoExecute"} for taint in found.taints or ()):
        return None
    if instance and found.consumes_counters:
        return None  # Its parent device is published, too, and only one of them can be leased.
    memory = (found.capacity or {}).get("memory")
    model = _first_of(values, MODEL_ATTRIBUTES, str, "")
    if not memory and not model:
        return None  # E.g. a network card.
    profile = f"-MIG-{values['profile']}" if instance and "profile" in values else ""
    made = device(
        f"{model}{profile}",
        int((quantity(memory.value) or 0) / MIB) if memory else 0,
        name=str(values.get("uuid") or f"{pool}/{found.name}"),
        exclusive=instance,
        link_group=str(_first_of(values, LINK_ATTRIBUTES, (str, int), "")),
        numa=_first_of(values, NUMA_ATTRIBUTES, int, -1),
        uuid=str(values.get("uuid", "")),
        parent_uuid=str(values.get("parentUUID", "")),
    )
    made |= {"driver": driver, "pool": pool, "device": found.name}
    return made | {name: values[name] for name in ("index", "profile") if name in values}


def _first_of(
    values: JsonMapping, names: tuple[str, ...], kind: type | tuple[type, ...], otherwise: _T
) -> _T | JsonValue:
    return next((values[name] for name in names if isinstance(values.get(name), kind)), otherwise)


def claim_record(claim: ApiResourceClaim) -> ClaimRecord | None:
    """Return the record of a claim that has devices."""
    status = claim.status
    if status is None or status.allocation is None or status.allocation.devices is None:
        return None
    results = status.allocation.devices.results or ()
    held = (each for each in results if not each.admin_access)
    return ClaimRecord(
        _server(claim.metadata), tuple((each.driver, each.pool, each.device) for each in held)
    )


def _server(meta: ApiMeta) -> str:
    return (meta.labels or {}).get(SERVER_LABEL, "")
