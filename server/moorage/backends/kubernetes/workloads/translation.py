"""Translates specs into pods: specs of pods, containers, vLLM models and commands."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from moorage.backends.base import UnsupportedSpecError
from moorage.backends.kubernetes.specs import (
    JobResourceSpec,
    PodResourceSpec,
    PodServiceResourceSpec,
)
from moorage.backends.spec_fields import NO_DEVICES
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    ProcessResourceSpec,
    Readiness,
    ServiceResourceSpec,
    VLLMModelResourceSpec,
)
from moorage.protocol.kubernetes_nodes import WHOLE_DEVICES
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

CATEGORIES: Final = frozenset({"pod", "job", "service", "container", "vllm", "process"})
PROCESS_IMAGE: Final = "ubuntu:22.04"
"""The image for a command whose `extra` names none; containers have the same default."""
VLLM_IMAGE: Final = "vllm/vllm-openai:v0.11.0"
_PORT: Final = 8000
"""The port of a pod whose spec names no port."""
DOMAIN: Final = "moorage.dev"
"""The domain of the labels and annotations that only this server sets."""
_DEVICE_LIST: Final = "nvidia-container-devices"
"""Folder name of mounts that NVIDIA's runtime treats as requests for devices."""
_DEVICE_NOTES: Final = re.compile(
    r"(.*\.)?cdi\.k8s\.io/|devices\.nri\.io/|io\.kubernetes\.cri-o\.devices"
)
"""Annotations by which container runtimes add devices; NVIDIA's has its own prefix."""
_OWN_SIZES: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Names of resources that are not devices; resources of huge pages are not devices either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOrder:
    """The fields of a pod, translated from a spec of any kind.

    Args:
        command: Replaces the image's entrypoint; empty: keep it.
        arguments: Arguments of the entrypoint; empty: the image's own.
        workdir: Working folder of the command; empty: the image's own.
        namespace: The requested namespace; empty: the backend's.
        cpu_count: Number of processors; None: the lease's number.
        mem_limit: Memory, in bytes or as text such as `512m`; None: the lease's memory.
        gpus: Requested amount of `gpu_resource`, if there is no lease.
        gpu_resource: The extended resource that counts devices without a DRA driver.
        manifest: Fields of the pod that override all others.
        readiness: The readiness check; None: the pod must only run.
        port: Port behind a Service; None: no Service.
        stop_seconds: Seconds between SIGTERM and SIGKILL.
        job: Whether a Job creates it.
    """

    image: str
    command: Sequence[str] = ()
    arguments: Sequence[str] = ()
    workdir: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    cpu_count: float | None = None
    mem_limit: int | str | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    manifest: JsonMapping = field(default_factory=JsonObject)
    readiness: Readiness | None = None
    port: int | None = None
    stop_seconds: float = 10.0
    job: bool = False


def pod_order(spec: BaseResourceSpec) -> PodOrder:
    """Translate a spec for a pod.

    Raises:
        UnsupportedSpecError: The spec cannot be a pod; the error names the field.
    """
    match spec:
        case PodResourceSpec():
            manifest = _check(spec.manifest)
            _check_environment("environment", spec.environment)
            _check_names("labels", spec.labels)
            if not spec.gpu_resource.endswith(WHOLE_DEVICES):
                ends = " or ".join(WHOLE_DEVICES)
                reason = f"expected a resource that counts GPUs, whose name ends in {ends}"
                raise UnsupportedSpecError(f"gpu_resource: {reason}")
            if not spec.image:
                raise UnsupportedSpecError("image: expected the image of the pod's container")
            port = spec.port if isinstance(spec, PodServiceResourceSpec) else None
            return PodOrder(
                image=spec.image,
                command=spec.command or (),
                environment=spec.environment,
                namespace=spec.namespace,
                labels=spec.labels,
                cpu_count=spec.cpu_count,
                mem_limit=spec.mem_limit,
                gpus=spec.gpus or 0,
                gpu_resource=spec.gpu_resource,
                manifest=manifest,
                readiness=_probe(spec.readiness, port),
                port=port,
                stop_seconds=spec.stop_seconds,
                job=isinstance(spec, JobResourceSpec),
            )
        case ContainerResourceSpec():
            return _of_container(spec)
        case VLLMModelResourceSpec():
            return _of_vllm(spec)
        case ProcessResourceSpec() if spec.category in {"process", "service"}:
            return _of_process(spec)
        case _:  # Only another backend starts it.
            known = ", ".join(sorted(CATEGORIES))
            raise UnsupportedSpecError(
                f"the backend kubernetes starts {known}, not {spec.category}"
            )


def _probe(given: Readiness | None, port: int | None) -> Readiness | None:
    """Return the readiness check of a pod; by default, its port must accept a connection."""
    if given is None:
        return Readiness(port=port) if port else None
    if given.command is None and not (given.port or port):
        raise UnsupportedSpecError(
            "readiness.port: expected the port to which the check connects, or `readiness.command`"
        )
    return given


def _of_container(spec: ContainerResourceSpec) -> PodOrder:
    for name, what in (("mount", "folders of one machine"), ("host_ip", "an address of one")):
        if getattr(spec, name):
            raise UnsupportedSpecError(
                f"{name}: expected nothing: it names {what}; a pod has spec.volumes in `manifest`"
            )
    if any(spec.ports.values()):
        reason = "expected 0 for each: a pod has an address, and ports, of its own"
        raise UnsupportedSpecError(f"ports: {reason}")
    if not isinstance(spec.gpus, int | None):
        raise UnsupportedSpecError("gpus: expected a number; the lease decides the devices")
    _check_environment("environment", spec.environment)
    port = spec.container_port or next(iter(spec.ports), None)
    return PodOrder(
        image=spec.title,
        arguments=spec.command or (),
        environment=spec.environment,
        cpu_count=spec.cpu_count,
        mem_limit=spec.mem_limit,
        gpus=spec.gpus or 0,
        readiness=_probe(spec.readiness, port) if spec.readiness else None,
        port=port,
        stop_seconds=spec.stop_seconds,
    )


def _of_process(spec: ProcessResourceSpec) -> PodOrder:
    """Translate a command for a pod; its `extra` may name the `image` to run it in."""
    if not spec.command:
        raise UnsupportedSpecError("command: expected a list of texts, the program first")
    if spec.reset_command:
        raise UnsupportedSpecError("reset_command: expected nothing: a pod is reset by a new one")
    image = spec.extra.get("image", PROCESS_IMAGE)
    if not (isinstance(image, str) and image):
        raise UnsupportedSpecError("extra.image: expected the image that the command runs in")
    _check_environment("environment", spec.environment)
    port, command, own = None, spec.command, {}
    if isinstance(spec, ServiceResourceSpec):
        port = spec.port or _PORT
        command = [each.replace("{port}", str(port)) for each in command]
        own = {"PORT": str(port)}
    return PodOrder(
        image=image,
        command=command,
        workdir=spec.workdir or "",
        environment={**spec.environment, **own},
        cpu_count=spec.cpu_count,
        mem_limit=spec.mem_limit,
        gpus=spec.gpus or 0,
        readiness=_probe(getattr(spec, "readiness", None), port),
        port=port,
        stop_seconds=spec.stop_seconds,
    )


def _of_vllm(spec: VLLMModelResourceSpec) -> PodOrder:
    for name in ("python", "template"):
        if getattr(spec, name):
            raise UnsupportedSpecError(f"{name}: expected nothing: {VLLM_IMAGE} has its own")
    port = spec.port or _PORT
    service = spec.service()
    command = service.command[3:]  # Without `python -m module`: the image's entrypoint.
    replacements = {"127.0.0.1": "0.0.0.0", "{port}": str(port)}  # noqa: S104  # Only in the pod.
    return PodOrder(
        image=VLLM_IMAGE,
        arguments=[replacements.get(each, each) for each in command],
        gpus=service.gpus or 0,
        readiness=service.readiness,
        port=port,
    )


class _Resources(msgspec.Struct):
    claims: list[JsonValue] = []
    limits: JsonObject = {}
    requests: JsonObject = {}


class _Variable(msgspec.Struct):
    name: str


class _Source(msgspec.Struct):
    prefix: str = ""


class _Mount(msgspec.Struct, rename="camel"):
    mount_path: str = ""


class _Container(msgspec.Struct, rename="camel"):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    resources: _Resources = msgspec.field(default_factory=_Resources)
    env: list[_Variable] = []
    env_from: list[_Source] = []
    volume_mounts: list[_Mount] = []
    restart_policy: str = ""


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    resources: _Resources = msgspec.field(default_factory=_Resources)
    affinity: dict[str, JsonObject] = {}
    tolerations: list[JsonObject] = []
    resource_claims: list[JsonValue] = []
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    ephemeral_containers: list[_Container] = []


class _Metadata(msgspec.Struct):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Manifest(msgspec.Struct):
    """The fields of a manifest that this module reads; the API server checks the rest."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


def _check(manifest: JsonMapping) -> JsonObject:
    """Check a manifest; return it without nulls, which Kubernetes reads as missing fields.

    Raises:
        UnsupportedSpecError: The manifest is not of a Pod, names a node, or requests devices.
    """
    plain: JsonObject = _without_nulls(manifest)
    try:
        read = msgspec.convert(plain, _Manifest)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        field_name = f"manifest{place.removesuffix('`')}"
        raise UnsupportedSpecError(f"{field_name}: {reason[:1].lower()}{reason[1:]}") from error
    spec = read.spec
    _check_metadata("manifest", plain)
    if spec.node_name:
        raise UnsupportedSpecError(
            "manifest.spec.nodeName: expected nothing: the lease decides the node"
        )
    if spec.resource_claims:
        _refuse_devices("manifest.spec.resourceClaims")
    _check_resources("manifest.spec.resources", spec.resources)
    for container in (*spec.containers, *spec.init_containers, *spec.ephemeral_containers):
        _check_resources("manifest.spec.containers", container.resources)
        _check_environment("manifest.spec.containers", [each.name for each in container.env])
        for mount in container.volume_mounts:
            if _DEVICE_LIST in mount.mount_path.split("/"):
                _refuse_devices(f"manifest.spec.containers: volumeMounts: {mount.mount_path}")
    return plain


def _check_resources(field_name: str, given: _Resources) -> None:
    """Refuse extended resources in a manifest: each one counts as a device."""
    for name in (*given.limits, *given.requests):
        if name not in _OWN_SIZES and not name.startswith("hugepages-"):
            _refuse_devices(f"{field_name}: {name}")
    if given.claims:
        _refuse_devices(f"{field_name}: claims")


def _check_metadata(path: str, value: JsonValue) -> None:
    """Refuse reserved names in labels and annotations of a pod, also in templates within it."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            _check_metadata(f"{path}[{number}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in {"labels", "annotations"} and isinstance(each, dict):
                _check_names(f"{path}.{key}", each)
            else:
                _check_metadata(f"{path}.{key}", each)


def _check_names(field_name: str, names: Iterable[str]) -> None:
    for name in names:
        domain = name.partition("/")[0].lower()
        if domain == DOMAIN or domain.endswith(f".{DOMAIN}"):
            reason = f"expected no name of {DOMAIN}, which this server sets itself"
            raise UnsupportedSpecError(f"{field_name}.{name}: {reason}")
        if _DEVICE_NOTES.match(name.lower()):
            _refuse_devices(f"{field_name}.{name}")


def _without_nulls(value: JsonValue) -> JsonValue:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _check_environment(field_name: str, names: Iterable[str]) -> None:
    for name in names:
        if name in NO_DEVICES:
            _refuse_devices(f"{field_name}: {name}")


def _refuse_devices(field_name: str) -> None:
    reason = "expected no devices: a workload gets the devices of its lease"
    raise UnsupportedSpecError(f"{field_name}: {reason}")
