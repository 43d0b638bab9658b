"""The specs of the backend `kubernetes`."""

from dataclasses import dataclass, field

from moorage.backends.spec_fields import (
    Command,
    Count,
    Cpus,
    Environment,
    Memory,
    Name,
    Port,
    StartSeconds,
    StopSeconds,
)
from moorage.backends.specs import BaseResourceSpec, Readiness
from moorage.records.json_values import JsonObject


@dataclass(kw_only=True)
class PodResourceSpec(BaseResourceSpec):
    """A pod in a Kubernetes cluster.

    Args:
        image: Image of its container.
        command: The command to run; by default the image's own.
        environment: Environment variables.
        namespace: The pod's namespace; by default the backend's own.
        labels: Further labels, beside those that Moorage sets.
        cpu_count: Number of processors; by default the lease's.
        mem_limit: Bytes, or text as `512m`, `2g`; by default the lease's memory.
        gpus: Number of GPUs, as `gpu_resource`; with a lease, its GPUs.
        gpu_resource: Name of the extended resource, on nodes that only count devices.
        manifest: Fields of the pod; they override those that follow from the other fields.
        readiness: The readiness check; by default the pod must only run.
        stop_seconds: Seconds between SIGTERM and SIGKILL.
        start_timeout: Seconds until the pod must be ready.
    """

    category: str = "pod"

    image: str = ""
    command: Command | None = None
    environment: Environment = field(default_factory=dict[str, str])
    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict[str, str])
    cpu_count: Cpus | None = None
    mem_limit: Memory | None = None
    gpus: Count | None = None
    gpu_resource: Name = "nvidia.com/gpu"
    manifest: JsonObject = field(default_factory=JsonObject)
    readiness: Readiness | None = None
    stop_seconds: StopSeconds = 10.0
    start_timeout: StartSeconds | None = 300.0


@dataclass(kw_only=True)
class JobResourceSpec(PodResourceSpec):
    """A pod that a Kubernetes Job runs once; after a failure the lease restarts it, not the Job."""

    category: str = "job"


@dataclass(kw_only=True)
class PodServiceResourceSpec(PodResourceSpec):
    """A pod behind a Kubernetes Service.

    Args:
        port: Port of the pod, and of the Service.
    """

    category: str = "service"

    port: Port = 8000
