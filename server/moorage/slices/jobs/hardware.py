"""The resources of a task in Ray's terms, and Ray's names of accelerators."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue

_MODEL: Final = "accelerator_type:"
_MODEL_AMOUNT: Final = 0.001
"""Amount of Ray's resource of a GPU model that a task requests to get a node of that model."""


def available_cpu_cores() -> int:
    """Return the number of CPUs of this machine; inside a Slurm job, of the job on this machine."""
    within_slurm = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(within_slurm) if within_slurm.isdigit() else os.cpu_count() or 1


@dataclass
class RayResources:
    """The resources of a task or an actor of Ray.

    Args:
        num_cpus: CPUs.
        num_gpus: GPUs.
        resources: All other resources, by Ray's names.
        runtime_env: Ray's runtime environment.
        accelerator_type: Ray's name of the accelerator, see `HardwareType`; None: any.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: dict[str, float] = field(default_factory=dict)
    runtime_env: dict[str, RayValue] = field(default_factory=dict)
    accelerator_type: str | None = None

    def to_kwargs(self) -> dict[str, RayValue]:
        """Return the resources as options of `ray.remote`."""
        options: dict[str, RayValue] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            "runtime_env": dict(self.runtime_env),
        }
        if self.accelerator_type is not None:
            options["accelerator_type"] = self.accelerator_type
        return options

    def to_resource_dict(self) -> dict[str, float]:
        """Return the resources in the form of a node or a bundle."""
        found = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        if self.accelerator_type is not None:
            found[_MODEL + self.accelerator_type] = _MODEL_AMOUNT
        return found

    @classmethod
    def from_resource_dict(cls, resource_spec: Mapping[str, float]) -> Self:
        """Return the resources of a task from those of a bundle."""
        models = [name for name in resource_spec if name.startswith(_MODEL)]
        others = {
            name: amount
            for name, amount in resource_spec.items()
            if name not in {"CPU", "GPU", *models}
        }
        model = models[0].removeprefix(_MODEL) if models else None
        cpus, gpus = resource_spec.get("CPU", 0), resource_spec.get("GPU", 0)
        return cls(cpus, gpus, others, accelerator_type=model)

    @staticmethod
    def cancel_all_futures(futures: Iterable[RayValue]) -> None:
        """Cancel tasks by their references; finished tasks stay as they are."""
        for each in futures:
            ray.cancel(each)


class HardwareType:
    """Ray's names of accelerators, for `gpu_model` and `accelerator_type`."""

    NVIDIA_TESLA_V100 = "V100"
    NVIDIA_TESLA_P100 = "P100"
    NVIDIA_TESLA_T4 = "T4"
    NVIDIA_TESLA_P4 = "P4"
    NVIDIA_TESLA_K80 = "K80"
    NVIDIA_TESLA_A10G = "A10G"
    NVIDIA_L4 = "L4"
    NVIDIA_L40S = "L40S"
    NVIDIA_A100 = "A100"
    NVIDIA_A100_40G = "A100-40G"
    NVIDIA_A100_80G = "A100-80G"
    NVIDIA_H100 = "H100"
    NVIDIA_H200 = "H200"
    NVIDIA_H20 = "H20"
    INTEL_MAX_1550 = "Intel-GPU-Max-1550"
    INTEL_MAX_1100 = "Intel-GPU-Max-1100"
    INTEL_GAUDI = "Intel-GAUDI"
    AMD_INSTINCT_MI100 = "AMD-Instinct-MI100"
    AMD_INSTINCT_MI210 = "AMD-Instinct-MI210"
    AMD_INSTINCT_MI250 = "AMD-Instinct-MI250X-MI250"
    AMD_INSTINCT_MI250x = "AMD-Instinct-MI250X"
    AMD_INSTINCT_MI300x = "AMD-Instinct-MI300X-OAM"
    AMD_RADEON_R9_200_HD_7900 = "AMD-Radeon-R9-200-HD-7900"
    AMD_RADEON_HD_7900 = "AMD-Radeon-HD-7900"
    AWS_NEURON_CORE = "aws-neuron-core"
    GOOGLE_TPU_V2 = "TPU-V2"
    GOOGLE_TPU_V3 = "TPU-V3"
    GOOGLE_TPU_V4 = "TPU-V4"
    GOOGLE_TPU_V5P = "TPU-V5P"
    GOOGLE_TPU_V5LITEPOD = "TPU-V5LITEPOD"
    GOOGLE_TPU_V6E = "TPU-V6E"
    HUAWEI_NPU_910B = "Ascend910B"
    HUAWEI_NPU_910B4 = "Ascend910B4"
