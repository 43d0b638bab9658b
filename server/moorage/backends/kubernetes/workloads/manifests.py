"""Makes Kubernetes objects from an order: claims, pods or Jobs, a Service. No I/O.

The name of an object identifies the workload and its start, so that a second creation has no
effect. The pod is pinned to the node of its lease by affinity, and kube-scheduler binds it: only
kube-scheduler knows taints, cordons and the resources of other pods. The manifest in the spec
overrides the fields that this module sets.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

from moorage.backends.base import BackendError, Order
from moorage.backends.kubernetes.records import GPUS_ANNOTATION, SERVER_LABEL
from moorage.backends.kubernetes.workloads.bounds import hide_devices, keep_within
from moorage.backends.kubernetes.workloads.translation import DOMAIN, PodOrder
from moorage.backends.spec_fields import memory_bytes
from moorage.backends.specs import Readiness
from moorage.model import GPU_MILLI, Share
from moorage.protocol.registry import Document
from moorage.records.json_values import JsonValue

WORKLOAD: Final = f"{DOMAIN}/workload"
"""Annotation: the full name of the object's workload."""
START: Final = f"{DOMAIN}/start"
"""Label: the name that all objects of one start share."""
SIZE: Final = f"{DOMAIN}/pods"
"""Annotation: the number of pods of the start."""
ATTEMPT: Final = f"{DOMAIN}/attempt"
KIND: Final = f"{DOMAIN}/kind"
"""Annotation: `job` on pods that a Job made."""
ENDPOINT: Final = f"{DOMAIN}/endpoint"
"""Annotation: the endpoint of the workload once it is ready."""
PROBED: Final = f"{DOMAIN}/probed"
"""Annotation: the pod has a readiness check."""
CONTAINER: Final = "main"
PIN: Final = "requiredDuringSchedulingIgnoredDuringExecution"

PODS: Final = "/api/v1/namespaces/{}/pods"
SERVICES: Final = "/api/v1/namespaces/{}/services"
CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"
JOBS: Final = "/apis/batch/v1/namespaces/{}/jobs"
SCHEDULING: Final = "/apis/scheduling.k8s.io"
"""The API group that has PodGroups, in clusters that support them."""


@dataclass(frozen=True, slots=True)
class StartObjects:
    """The Kubernetes objects of one start of a workload.

    Args:
        claims: ResourceClaims, which are created first.
        pods: Pods, or Jobs that create them.
        owned: Pairs of API path and object; they are created last, and the first pod owns them.
        jobs: Whether `pods` are Jobs.
    """

    name: str
    namespace: str
    claims: tuple[Document, ...]
    pods: tuple[Document, ...]
    owned: tuple[tuple[str, Document], ...]
    jobs: bool

    @property
    def pods_path(self) -> str:
        """The path at which pods or Jobs are created."""
        return (JOBS if self.jobs else PODS).format(self.namespace)


def start_name(server: str, order: Order) -> str:
    """Return the common name of all objects of a start: a DNS label, unique to that start.

    Another order with the same id and attempt gives another name, so objects left by that order are
    never mistaken for those of this start.
    """
    said = "\0".join((server, order.id, repr(order.spec), repr(order.placement)))
    digest = hashlib.sha256(said.encode()).hexdigest()[:10]
    short = re.sub("[^a-z0-9]+", "-", order.id.lower()).strip("-")[:24].strip("-")
    number = str(order.fencing or order.attempt)
    return "-".join(filter(None, ("moorage", short, digest, number)))


def tenant_namespace(template: str, tenant: str) -> str:
    """Return the namespace of a tenant; different tenants always get different namespaces."""
    short = re.sub("[^a-z0-9]+", "-", tenant.lower()).strip("-")[:30].strip("-")
    if short != tenant:
        short = f"{short or 't'}-{hashlib.sha256(tenant.encode()).hexdigest()[:8]}"
    return template.replace("{tenant}", short)


def start_objects(
    order: Order,
    pod: PodOrder,
    server: str,
    namespace: str,
    published: Mapping[str, Mapping[str, Document]],
    group_api: str = "",
) -> StartObjects:
    """Return the Kubernetes objects for an order.

    Args:
        order: The order to carry out.
        pod: The order's spec, translated for a pod.
        server: Value of `SERVER_LABEL` on this server's objects.
        namespace: The namespace of the objects.
        published: Devices that DRA drivers publish, by node and device id.
        group_api: The version of the API that has PodGroups; empty: the cluster has no PodGroups.

    Raises:
        BackendError: Kubernetes cannot allocate the devices of the lease.
    """
    name = start_name(server, order)
    shares: Sequence[Share | None] = order.placement or (None,)
    endpoint = f"http://{name}.{namespace}.svc:{pod.port}" if pod.port else ""
    labels = {SERVER_LABEL: server, START: name, "app.kubernetes.io/managed-by": "moorage"}
    notes = {
        WORKLOAD: order.id,
        SIZE: str(len(shares)),
        ATTEMPT: str(order.attempt),
        KIND: "job" if pod.job else "pod",
        **({ENDPOINT: endpoint} if endpoint else {}),
        **({PROBED: "true"} if pod.readiness else {}),
    }
    claims, pods = list[Document](), list[Document]()
    for rank, share in enumerate(shares):
        own = name if len(shares) == 1 else f"{name}-{rank}"
        meta = {"name": own, "namespace": namespace, "labels": labels, "annotations": notes}
        devices = _devices(share, published)
        if devices:
            claims.append(_claim(meta, devices))
        made = _pod(order, pod, share, rank, counted=not devices)
        has_devices = bool(devices or _counts(pod, share))
        hide_devices(made["spec"], CONTAINER if has_devices else "")
        if share is not None:
            keep_within(made["spec"], share, CONTAINER)
        _own(made, meta, share, own if devices else "", pod)
        if order.stop_seconds_max is not None:
            _bound_stop(made["spec"], math.ceil(order.stop_seconds_max))
        if group_api and len(shares) > 1:
            made["spec"]["schedulingGroup"] = {"podGroupName": name}
        pods.append(_job(made, meta) if pod.job else made)
    owned = list[tuple[str, Document]]()
    meta = {"name": name, "namespace": namespace, "labels": labels}
    if group_api and len(shares) > 1:
        path = f"/apis/{group_api}/namespaces/{namespace}/podgroups"
        owned.append((path, _group(meta, notes, group_api, len(shares))))
    if pod.port:
        owned.append((SERVICES.format(namespace), _service(meta, notes, pod.port)))
    return StartObjects(name, namespace, tuple(claims), tuple(pods), tuple(owned), pod.job)


def _devices(
    share: Share | None, published: Mapping[str, Mapping[str, Document]]
) -> list[Document]:
    """Return the published devices of a lease's share; empty if the node only counts devices."""
    if share is None or not share.gpus:
        return []
    if share.gpu_milli != GPU_MILLI:
        raise BackendError(
            f"a pod has whole devices, and the lease holds {share.gpu_milli} thousandths of each:"
            " ask for gpu_milli 1000"
        )
    here = published.get(share.node_id, {})
    if not here:
        return []
    lost = [each for each in share.gpus if each not in here]
    if lost:
        raise BackendError(
            f"no driver publishes {', '.join(lost)} of node {share.node_id} any more:"
            " see `kubectl get resourceslices`"
        )
    found = [here[each] for each in share.gpus]
    for each in found:
        if not each.get("uuid"):
            raise BackendError(
                f"{each['driver']} publishes no uuid of {each['id']}, so no claim can name it"
            )
    return found


def _claim(meta: Document, devices: Sequence[Document]) -> Document:
    """Return a claim on exactly these devices, with one request per device to keep their order."""
    requests = []
    for index, each in enumerate(devices):
        driver, uuid = each["driver"], json.dumps(each["uuid"])
        chosen = f"device.driver == '{driver}' && device.attributes['{driver}'].uuid == {uuid}"
        exactly = {
            "deviceClassName": device_class(each),
            "allocationMode": "ExactCount",
            "count": 1,
            "selectors": [{"cel": {"expression": chosen}}],
        }
        requests.append({"name": f"gpu-{index}", "exactly": exactly})
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": meta,
        "spec": {"devices": {"requests": requests}},
    }


def device_class(device: Document) -> str:
    """Return the DeviceClass name of a device: its driver's name; `mig.…` for MIG instances."""
    driver = str(device["driver"])
    instance = "profile" in device and driver.startswith("gpu.")
    return f"mig.{driver.removeprefix('gpu.')}" if instance else driver


def _pod(order: Order, pod: PodOrder, share: Share | None, rank: int, *, counted: bool) -> Document:
    given = dict(order.environment)
    if share is not None:
        given |= {"MOORAGE_CLUSTER_ID": share.cluster_id, "MOORAGE_NODE_ID": share.node_id}
        given |= {"MOORAGE_RANK": str(rank)}
    sizes = _sizes(pod) | (_counts(pod, share) if counted else {})
    container: Document = {
        "name": CONTAINER,
        "image": pod.image,
        "env": [{"name": key, "value": text} for key, text in {**pod.environment, **given}.items()],
        "resources": {"requests": sizes, "limits": sizes},
        **({"command": list(pod.command)} if pod.command else {}),
        **({"args": list(pod.arguments)} if pod.arguments else {}),
        **({"workingDir": pod.workdir} if pod.workdir else {}),
        **({"readinessProbe": _probe(pod.readiness, pod.port)} if pod.readiness else {}),
        **({"ports": [{"containerPort": pod.port}]} if pod.port else {}),
    }
    made = {
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(pod.stop_seconds),
            "automountServiceAccountToken": False,
            "containers": [container],
        }
    }
    merged: Document = _merge(made, deepcopy(pod.manifest))  # A copy for each pod of a gang.
    return merged


def _sizes(pod: PodOrder) -> dict[str, str]:
    milli = round(pod.cpu_count * 1000) if pod.cpu_count else 0
    size = memory_bytes(pod.mem_limit) if pod.mem_limit else 0
    sizes = {"cpu": f"{milli}m" if milli else "", "memory": str(size) if size else ""}
    return {key: text for key, text in sizes.items() if text}


def _counts(pod: PodOrder, share: Share | None) -> dict[str, str]:
    """Return how many of each extended resource to request for counted devices."""
    if share is None:
        return {pod.gpu_resource: str(pod.gpus)} if pod.gpus else {}
    counts: dict[str, int] = {}
    for each in share.gpus:  # Ids of counted MIG instances begin with their profile.
        profile = each.rpartition("-")[0] if each.startswith("mig-") else ""
        resource = f"nvidia.com/{profile}" if profile else pod.gpu_resource
        counts[resource] = counts.get(resource, 0) + 1
    return {resource: str(count) for resource, count in counts.items()}


def _probe(readiness: Readiness, port: int | None) -> Document:
    """Return the Kubernetes probe of a readiness check, by its command, else path, else port."""
    at = readiness.port or port
    if readiness.command is not None:
        check: Document = {"exec": {"command": readiness.command}}
    elif readiness.path is not None:
        check = {"httpGet": {"path": f"/{readiness.path.lstrip('/')}", "port": at}}
    else:
        check = {"tcpSocket": {"port": at}}
    return check | {
        "periodSeconds": max(1, math.ceil(readiness.every_seconds)),
        "timeoutSeconds": max(1, math.ceil(readiness.timeout_seconds)),
    }


def _own(pod: Document, meta: Document, share: Share | None, claim: str, order: PodOrder) -> None:
    """Set the pod's fields that no manifest may change: labels, annotations and node."""
    given = pod.get("metadata", {})
    pod["apiVersion"], pod["kind"] = "v1", "Pod"
    notes = {**given.get("annotations", {}), **meta["annotations"]}
    if share is not None and share.gpus and not claim:
        notes[GPUS_ANNOTATION] = ",".join(share.gpus)
    labels = {**order.labels, **given.get("labels", {}), **meta["labels"]}
    pod["metadata"] = {**meta, "labels": labels, "annotations": notes}
    spec = pod["spec"]
    if share is not None:
        field = {"key": "metadata.name", "operator": "In", "values": [share.node_id]}
        terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        affinity = spec.setdefault("affinity", {})
        affinity["nodeAffinity"] = {**affinity.get("nodeAffinity", {}), PIN: terms}
    if claim:
        spec["resourceClaims"] = [{"name": "gpus", "resourceClaimName": claim}]
        resources = next(x for x in spec["containers"] if x["name"] == CONTAINER)["resources"]
        resources["claims"] = [{"name": "gpus"}]
    if claim or order.gpus or (share is not None and share.gpus):
        # The API server adds this toleration only to pods with counted devices, not for claims.
        held = {"key": order.gpu_resource, "operator": "Exists"}
        spec["tolerations"] = [*spec.get("tolerations", []), held]


def _bound_stop(spec: Document, seconds: int) -> None:
    """Limit the seconds between SIGTERM and SIGKILL, which include `preStop` hooks."""
    places = [spec] + [
        probe
        for each in (*spec["containers"], *(spec.get("initContainers") or ()))
        for name in ("livenessProbe", "startupProbe")
        if (probe := each.get(name))
    ]
    for place in places:
        given = place.get("terminationGracePeriodSeconds")
        if isinstance(given, int | float) and given > seconds:
            place["terminationGracePeriodSeconds"] = seconds


def _job(pod: Document, meta: Document) -> Document:
    template = {
        "metadata": {key: pod["metadata"][key] for key in ("labels", "annotations")},
        "spec": pod["spec"],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {"backoffLimit": 0, "template": template},
    }


def _service(meta: Document, notes: Document, port: int) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**meta, "annotations": {WORKLOAD: notes[WORKLOAD]}},
        "spec": {"selector": {START: meta["name"]}, "ports": [{"port": port, "targetPort": port}]},
    }


def _group(meta: Document, notes: Document, api: str, size: int) -> Document:
    """Return the PodGroup of a gang: the scheduler places all of the gang's pods, or none."""
    return {
        "apiVersion": api,
        "kind": "PodGroup",
        "metadata": {**meta, "annotations": {WORKLOAD: notes[WORKLOAD]}},
        "spec": {"schedulingPolicy": {"gang": {"minCount": size}}},
    }


def _merge(made: JsonValue, given: JsonValue) -> JsonValue:
    """Merge a manifest into our object; items of lists are merged if they have the same name."""
    if isinstance(made, dict) and isinstance(given, dict):
        both = {key: _merge(made[key], given[key]) for key in made.keys() & given.keys()}
        return {**made, **given, **both}
    if (
        isinstance(made, list)
        and isinstance(given, list)
        and _have_names(made)
        and _have_names(given)
    ):
        named = {each["name"]: each for each in made}
        return [
            *({**named, **{x["name"]: _merge(named.get(x["name"]), x) for x in given}}).values()
        ]
    return given


def _have_names(things: Sequence[JsonValue]) -> bool:
    return all(isinstance(each, dict) and "name" in each for each in things)
