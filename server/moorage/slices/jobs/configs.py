"""The resources of a job: CPUs, GPUs or TPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self
from uuid import uuid4

from moorage.slices.jobs.hardware import RayResources, available_cpu_cores
from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue
from moorage.slices.shapes import GpuSlices, TpuSlices


def _name() -> str:
    return str(uuid4())


@dataclass(frozen=True)
class ComputeResourceConfig:
    """The resources of a job; a subclass has those of one task.

    Args:
        execution_env: Ray's runtime environment of the tasks.
        runtime_name: The name of the job.
    """

    execution_env: Mapping[str, RayValue] = field(default_factory=dict, kw_only=True)
    runtime_name: str = field(default_factory=_name, kw_only=True)

    def resources(self) -> dict[str, float]:
        """Return the resources of one task."""
        raise NotImplementedError(  # Not abstract: the documented base class is not.
            f"{type(self).__name__} does not say what a task takes"
        )

    def hardware_identifier(self) -> str | None:
        """Return the accelerator, such as `A100`; None: none is needed, or any is accepted."""
        return None

    def to_ray_resources(self) -> RayResources:
        """Return the resources of one task, with its runtime environment."""
        return replace(
            RayResources.from_resource_dict(self.resources()), runtime_env=dict(self.execution_env)
        )

    def get_remote_options(self) -> dict[str, RayValue]:
        """Return the resources of one task, as options of `ray.remote`."""
        return self.to_ray_resources().to_kwargs()

    def create_remote_decorator(self) -> RayValue:
        """Return `ray.remote` with these options."""
        return ray.remote(**self.get_remote_options())

    def with_environment_variables(
        self, env_vars: Mapping[str, str] | None = None, /, **more: str
    ) -> Self:
        """Return a copy of this configuration with more environment variables."""
        variables = {**self.execution_env.get("env_vars", {}), **(env_vars or {}), **more}
        return replace(self, execution_env={**self.execution_env, "env_vars": variables})


@dataclass(frozen=True)
class CpuAcceleratorConfig(ComputeResourceConfig):
    """The resources of a job on CPUs.

    Args:
        core_count: CPUs of each task; None: the number of CPUs of this machine.
        worker_count: Number of tasks.
        resource_name: Name of the resource in messages.
    """

    core_count: int = field(default_factory=available_cpu_cores)
    worker_count: int = 1
    resource_name: str = "CPU"

    def resources(self) -> dict[str, float]:
        """Return the resources of one task."""
        return {"CPU": self.core_count}


@dataclass(frozen=True)
class GpuAcceleratorConfig(ComputeResourceConfig):
    """The resources of a job on GPUs.

    Args:
        device_count: GPUs of each task.
        gpu_model: Ray's name of the accelerator, such as `H100`; None: any.
        cpu_count: CPUs of each task.
        worker_count: Number of tasks; for slices, number of hosts of each slice.
        pod_count: The number of slices, or a list of all acceptable numbers.
        slice_label: A node label that has the same value on all hosts of a slice.
        slice_resource: A resource that each host has; a slice takes 1 of it on each host.
        resource_name: Name of the resource in messages.
    """

    device_count: int = 1
    gpu_model: str | None = None
    cpu_count: int = 1
    worker_count: int = 1
    pod_count: int | Sequence[int] = 1
    slice_label: str = ""
    slice_resource: str = ""
    resource_name: str = "GPU"

    def resources(self) -> dict[str, float]:
        """Return the resources of one task."""
        model = {f"accelerator_type:{self.gpu_model}": 0.001} if self.gpu_model else {}
        return {"CPU": self.cpu_count, "GPU": self.device_count, **model}

    def hardware_identifier(self) -> str | None:
        """Return the model of the GPUs; None if any model is accepted."""
        return self.gpu_model

    def slices(self) -> GpuSlices:
        """Return the shape of a slice."""
        return GpuSlices(
            gpus_per_host=self.device_count,
            hosts=self.worker_count,
            label=self.slice_label,
            resource=self.slice_resource,
            gpu_model=self.gpu_model or "",
            host_resources={"CPU": self.cpu_count} if self.cpu_count else {},
        )


@dataclass(frozen=True)
class TpuAcceleratorConfig(ComputeResourceConfig):
    """The resources of a job on TPUs.

    Args:
        tpu_version: The type of the TPU slices, such as `v4-8`.
        pod_count: The number of slices, or a list of all acceptable numbers.
        cpu_count: CPUs of a task that `create_remote_decorator` makes. A task on a slice has a
            whole host, and takes no CPUs.
        chips_per_host: Chips of each host; None: all chips of the host.
        worker_count: Number of hosts of the slice that `execute` uses, from the first one; None:
            all.
        resource_name: Name of the resource in messages.
    """

    tpu_version: str
    pod_count: int | Sequence[int] = 1
    cpu_count: int = 2
    chips_per_host: int | None = None
    worker_count: int | None = None
    resource_name: str = "TPU"

    def resources(self) -> dict[str, float]:
        """Return the resources of one task."""
        return {"CPU": self.cpu_count, "TPU": self.chips_per_host or 0}

    def hardware_identifier(self) -> str:
        """Return the type of the TPUs, such as `v4-8`."""
        return self.tpu_version

    def slices(self) -> TpuSlices:
        """Return the shape of a slice."""
        return TpuSlices(self.tpu_version, chips_per_host=self.chips_per_host)


AcceleratorConfigType = CpuAcceleratorConfig | GpuAcceleratorConfig | TpuAcceleratorConfig
