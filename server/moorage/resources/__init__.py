"""What runs workloads: backends under one Protocol, and `ResourceEngine` over them.

The daemon uses the backends; `ResourceEngine` is a library that stands on its own, and README.md
shows it, by example. Its errors are drawn in `base`.
"""

try:
    from moorage.backends.aws.specs import InstanceResourceSpec
    from moorage.backends.base import (
        BackendError,
        EngineClosedError,
        UnknownWorkloadError,
        UnsupportedSpecError,
    )
    from moorage.backends.kubernetes.specs import PodResourceSpec
    from moorage.backends.ray.specs import RayActorResourceSpec
    from moorage.backends.specs import (
        APIModelResourceSpec,
        BaseResourceSpec,
        ContainerResourceSpec,
        LocalEnvResourceSpec,
        MemoryResourceSpec,
        ProcessResourceSpec,
        Readiness,
        ServiceResourceSpec,
        SpecError,
        VLLMModelResourceSpec,
    )
    from moorage.resources.context import Context, ContextConfig
    from moorage.resources.resource_engine import ResourceEngine
    from moorage.resources.resources import BaseResource, CommandOutput, ResourceStatus, Runner
except ModuleNotFoundError as error:
    from moorage.extras import install_command

    raise ModuleNotFoundError(
        f"moorage.resources needs {error.name}: {install_command('server')}", name=error.name
    ) from error

__all__ = [
    "APIModelResourceSpec",
    "BackendError",
    "BaseResource",
    "BaseResourceSpec",
    "CommandOutput",
    "ContainerResourceSpec",
    "Context",
    "ContextConfig",
    "EngineClosedError",
    "InstanceResourceSpec",
    "LocalEnvResourceSpec",
    "MemoryResourceSpec",
    "PodResourceSpec",
    "ProcessResourceSpec",
    "RayActorResourceSpec",
    "Readiness",
    "ResourceEngine",
    "ResourceStatus",
    "Runner",
    "ServiceResourceSpec",
    "SpecError",
    "UnknownWorkloadError",
    "UnsupportedSpecError",
    "VLLMModelResourceSpec",
]
