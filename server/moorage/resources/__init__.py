"""Start workloads without a server: `ResourceEngine`, over backends with one interface.

The daemon uses the backends; `ResourceEngine` is a library that needs no server. README.md has
examples. The docstring of `moorage.backends.base` shows the tree of errors.
"""

try:
    from moorage.backends.aws.specs import InstanceResourceSpec
    from moorage.backends.base import (
        BackendError,
        BackendUnavailableError,
        EngineClosedError,
        UnknownWorkloadError,
        UnsupportedSpecError,
    )
    from moorage.backends.kubernetes.specs import PodResourceSpec
    from moorage.backends.ray.specs import RayActorResourceSpec
    from moorage.backends.specs import (
        APIModelResourceSpec,
        BaseResourceSpec,
        ContainerCategory,
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
    from moorage.resources.resources import (
        BaseResource,
        BaseRunner,
        CommandOutput,
        ContainerResource,
        ResourceStatus,
        Runner,
    )
    from moorage.resources.runners import (
        APIModelResource,
        CloudRunner,
        K8sRunner,
        LocalEnvResource,
        LocalRunner,
        RayContainerResource,
        RayRunner,
        VLLMModelResource,
    )
except ModuleNotFoundError as error:
    from moorage.extras import install_command

    raise ModuleNotFoundError(
        f"moorage.resources needs {error.name}: {install_command('server')}", name=error.name
    ) from error

__all__ = [
    "APIModelResource",
    "APIModelResourceSpec",
    "BackendError",
    "BackendUnavailableError",
    "BaseResource",
    "BaseResourceSpec",
    "BaseRunner",
    "CloudRunner",
    "CommandOutput",
    "ContainerCategory",
    "ContainerResource",
    "ContainerResourceSpec",
    "Context",
    "ContextConfig",
    "EngineClosedError",
    "InstanceResourceSpec",
    "K8sRunner",
    "LocalEnvResource",
    "LocalEnvResourceSpec",
    "LocalRunner",
    "MemoryResourceSpec",
    "PodResourceSpec",
    "ProcessResourceSpec",
    "RayActorResourceSpec",
    "RayContainerResource",
    "RayRunner",
    "Readiness",
    "ResourceEngine",
    "ResourceStatus",
    "Runner",
    "ServiceResourceSpec",
    "SpecError",
    "UnknownWorkloadError",
    "UnsupportedSpecError",
    "VLLMModelResource",
    "VLLMModelResourceSpec",
]
