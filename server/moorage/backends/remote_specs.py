"""What can be started elsewhere: an actor of Ray, a pod of Kubernetes, a virtual machine.

See `specs` for those of one machine, and `spec_documents` for all of them as JSON.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import pydantic

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
from moorage.backends.specs import BaseResourceSpec, ProcessResourceSpec, Readiness

__all__ = [
    "InstanceResourceSpec",
    "JobResourceSpec",
    "PodResourceSpec",
    "PodServiceResourceSpec",
    "RayActorResourceSpec",
    "RayJobResourceSpec",
]

Price = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclass(kw_only=True)
class RayActorResourceSpec(BaseResourceSpec):
    """An actor of a Ray cluster.

    Args:
        actor_cls_path: `package.module.Class`, importable on the cluster.
        init_args: Its arguments.
        init_kwargs: Its named arguments.
        ray_actor_options: As `ray.remote(...).options` takes them.

    """

    category: str = "ray_actor"

    actor_cls_path: str = ""
    init_args: list[Any] = field(default_factory=list[Any])
    init_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    ray_actor_options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def title(self) -> str:
        """Return the class."""
        return self.actor_cls_path or "default"


@dataclass(kw_only=True)
class RayJobResourceSpec(ProcessResourceSpec):
    """A command that calls `ray.init()`: its tasks and actors get what the lease holds, no more."""

    category: str = "job"


@dataclass(kw_only=True)
class PodResourceSpec(BaseResourceSpec):
    """A pod of a Kubernetes cluster.

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
    manifest: dict[str, Any] = field(default_factory=dict[str, Any])
    readiness: Readiness | None = None
    stop_seconds: StopSeconds = 10.0
    start_timeout: StartSeconds | None = 300.0

    @property
    def title(self) -> str:
        """Return the image."""
        return self.image or "default"


@dataclass(kw_only=True)
class JobResourceSpec(PodResourceSpec):
    """A pod that a Job of Kubernetes makes, once; a failure is the lease's to start again."""

    category: str = "job"


@dataclass(kw_only=True)
class PodServiceResourceSpec(PodResourceSpec):
    """A pod that a Service of Kubernetes leads to.

    Args:
        port: Where it listens, and where the Service does.

    """

    category: str = "service"

    port: Port = 8000


@dataclass(kw_only=True)
class InstanceResourceSpec(BaseResourceSpec):
    """A virtual machine of a cloud.

    Args:
        instance_type: E.g. `g5.xlarge`; the cheapest that has what is asked for where not given.
        gpus: At least so many, where no type is given.
        gpu_model: Of this model, as `A100` or `A100-80GB`, where no type is given.
        cpu_count: At least so many, where no type is given.
        mem_limit: At least so much, where no type is given.
        image_id: What it boots; Amazon Linux 2023, or with GPUs AWS's Ubuntu with their driver,
            where not given.
        region: Where; that of the credentials where not given.
        zones: In the order they are tried; all of the region where empty.
        subnets: Zone -> subnet; the default ones where empty.
        security_groups: Ids.
        key_name: Of the SSH key pair.
        instance_profile: Name or ARN.
        user_data: Run at the first boot. A shell script finds the lease in its environment.
        volume_gib: Of the root volume; the image's own where not given.
        spot: Try the spot market first.
        on_demand_fallback: Where the spot market has none.
        max_price_per_hour: In USD; offers above it, or of which no price is known, are passed over.
        readiness_port: It is ready when a connection to it succeeds; None waits for the status
            checks of AWS instead, which take minutes.
        tags: Its own, beside those that Moorage sets.
        start_timeout: Seconds until it must be ready.

    """

    category: str = "instance"

    instance_type: Name | None = None
    gpus: Count = 0
    gpu_model: Name | None = None
    cpu_count: Cpus | None = None
    mem_limit: Memory | None = None
    image_id: Name | None = None
    region: Name | None = None
    zones: list[str] = field(default_factory=list[str])
    subnets: dict[str, str] = field(default_factory=dict[str, str])
    security_groups: list[str] = field(default_factory=list[str])
    key_name: Name | None = None
    instance_profile: Name | None = None
    user_data: str | None = None
    volume_gib: Annotated[int, pydantic.Field(ge=1, le=65_536)] | None = None
    spot: bool = False
    on_demand_fallback: bool = True
    max_price_per_hour: Price | None = None
    readiness_port: Port | None = None
    tags: dict[str, str] = field(default_factory=dict[str, str])
    start_timeout: StartSeconds | None = 600.0

    @property
    def title(self) -> str:
        """Return the instance type."""
        return self.instance_type or "cheapest"
