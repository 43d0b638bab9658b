"""What runs workloads: backends under one Protocol, and `ResourceEngine` over them.

The daemon uses the backends; `ResourceEngine` is a library that stands on its own. Its errors are
drawn in `base`.
"""

from moorage.backends.base import (
    BackendError,
    EngineClosedError,
    UnknownWorkloadError,
    UnsupportedSpecError,
)
from moorage.backends.remote_specs import (
    InstanceResourceSpec,
    PodResourceSpec,
    RayActorResourceSpec,
)
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
from moorage.resources.resources import BaseResource, ResourceStatus, Runner

__all__ = [
    "APIModelResourceSpec",
    "BackendError",
    "BaseResource",
    "BaseResourceSpec",
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
