"""Which specs become pods, and how: those of pods, and the local backend's container and vLLM."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

from moorage.backends.base import UnsupportedSpecError
from moorage.backends.remote_specs import (
    JobResourceSpec,
    PodResourceSpec,
    PodServiceResourceSpec,
)
from moorage.backends.specs import (
    BaseResourceSpec,
    ContainerResourceSpec,
    Readiness,
    VLLMModelResourceSpec,
)
from moorage.protocol.kubernetes_nodes import WHOLE_DEVICES, mig_profile

CATEGORIES: Final = frozenset({"pod", "job", "service", "container", "vllm"})
VLLM_IMAGE: Final = "vllm/vllm-openai:v0.11.0"
_VLLM_PORT: Final = 8000
_ALL_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOrder:
    """A spec, as one of a pod.

    Args:
        image: Of its container.
        command: In the place of the image's entrypoint; none keeps that.
        arguments: Of the entrypoint; none keeps the image's.
        environment: Variables.
        namespace: Where it wants to be; empty for where the backend says.
        labels: Its own.
        cpu_count: Processors; None for those of the lease.
        mem_limit: Memory; None for that of the lease.
        gpus: Of `gpu_resource`, where there is no lease.
        gpu_resource: What counts devices that no driver publishes.
        manifest: Merged over all of it.
        readiness: How to see that it answers; None: it runs.
        port: That a Service leads to; None: there is none.
        stop_seconds: Between SIGTERM and SIGKILL.
        job: Whether a Job makes it.

    """

    image: str
    command: Sequence[str] = ()
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    cpu_count: float | None = None
    mem_limit: int | str | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    manifest: Mapping[str, Any] = field(default_factory=dict[str, Any])
    readiness: Readiness | None = None
    port: int | None = None
    stop_seconds: float = 10.0
    job: bool = False


def pod_order(spec: BaseResourceSpec) -> PodOrder:
    """Return what a spec means as a pod.

    Raises:
        UnsupportedSpecError: It means none; it says which field.

    """
    match spec:
        case PodResourceSpec():
            manifest = _checked(spec.manifest)
            _check_environment("environment", spec.environment)
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
        case _:  # What another backend starts.
            known = ", ".join(sorted(CATEGORIES))
            raise UnsupportedSpecError(
                f"the backend kubernetes starts {known}, not {spec.category}"
            )


def _probe(given: Readiness | None, port: int | None) -> Readiness | None:
    """Return how to see that a pod answers; a port alone must accept a connection."""
    if given is None:
        return Readiness(port=port) if port else None
    if given.command is None and not (given.port or port):
        raise UnsupportedSpecError("readiness.port: expected the port to ask")
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
        raise UnsupportedSpecError("gpus: expected a number; a lease names the devices")
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


def _of_vllm(spec: VLLMModelResourceSpec) -> PodOrder:
    for name in ("python", "template"):
        if getattr(spec, name):
            raise UnsupportedSpecError(f"{name}: expected nothing: {VLLM_IMAGE} has its own")
    port = spec.port or _VLLM_PORT
    service = spec.service()
    command = service.command[3:]  # Behind `python -m module`, which the image brings.
    told = {"127.0.0.1": "0.0.0.0", "{port}": str(port)}  # noqa: S104  # Of the pod alone.
    return PodOrder(
        image=VLLM_IMAGE,
        arguments=[told.get(each, each) for each in command],
        gpus=service.gpus or 0,
        readiness=service.readiness,
        port=port,
    )


class _Resources(msgspec.Struct):
    claims: list[Any] = []
    limits: dict[str, Any] = {}
    requests: dict[str, Any] = {}


class _Variable(msgspec.Struct):
    name: str


class _Container(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    resources: _Resources = msgspec.field(default_factory=_Resources)
    env: list[_Variable] = []


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    affinity: dict[str, dict[str, Any]] = {}
    tolerations: list[dict[str, Any]] = []
    resource_claims: list[Any] = []
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    ephemeral_containers: list[_Container] = []


class _Metadata(msgspec.Struct):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Manifest(msgspec.Struct):
    """What is read of a manifest here; the API server checks the rest."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


def _checked(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without its nulls, which Kubernetes takes for what is not there.

    Raises:
        UnsupportedSpecError: It is none of a Pod, names a node, or wants devices.

    """
    plain: dict[str, Any] = _without_nulls(manifest)
    try:
        read = msgspec.convert(plain, _Manifest)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        field_name = f"manifest{place.removesuffix('`')}"
        raise UnsupportedSpecError(f"{field_name}: {reason[:1].lower()}{reason[1:]}") from error
    spec = read.spec
    if spec.node_name:
        raise UnsupportedSpecError("manifest.spec.nodeName: expected nothing: the lease says where")
    if spec.resource_claims:
        _refuse_devices("manifest.spec.resourceClaims")
    for container in (*spec.containers, *spec.init_containers, *spec.ephemeral_containers):
        sizes = container.resources
        wanted = {*sizes.limits, *sizes.requests}
        if sizes.claims or any(x.endswith(WHOLE_DEVICES) or mig_profile(x) for x in wanted):
            _refuse_devices("manifest.spec.containers")
        _check_environment("manifest.spec.containers", [each.name for each in container.env])
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _check_environment(field_name: str, names: Iterable[str]) -> None:
    if _ALL_DEVICES in names:  # NVIDIA's runtime gives a container whatever GPUs that names.
        _refuse_devices(f"{field_name}: {_ALL_DEVICES}")


def _refuse_devices(field_name: str) -> None:
    reason = "expected no devices: a workload has those that its lease holds"
    raise UnsupportedSpecError(f"{field_name}: {reason}")
