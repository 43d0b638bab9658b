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
        image: Of its one container.
        command: What runs in it; the image's own where not given.
        environment: Variables.
        namespace: Where it lives; the backend's own where not given.
        labels: Its own, beside those that Moorage sets.
        cpu_count: Processors; those of the lease where not given.
        mem_limit: Bytes, or text as `512m`, `2g`; that of the lease where not given.
        gpus: Of `gpu_resource`; those of the lease where there is one.
        gpu_resource: The extended resource's name, where devices are only counted.
        manifest: Merged over what the other fields make.
        readiness: How to see that it answers; that it runs where not given.
        stop_seconds: Between SIGTERM and SIGKILL.
        start_timeout: Seconds until it must be ready.
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
        port: Where it listens, and where the Service does.
    """

    category: str = "service"

    port: Port = 8000
