"""What runs workloads: backends under one Protocol, and `ResourceEngine` over them.

The daemon uses the backends; `ResourceEngine` is a library that stands on its own. Its errors are
drawn in `base`.
"""

from moorage.engines.base import (
    EngineClosedError,
    EngineError,
    UnknownWorkloadError,
    UnsupportedSpecError,
)
from moorage.engines.context import Context, ContextConfig
from moorage.engines.remote_specs import (
    InstanceResourceSpec,
    PodResourceSpec,
    RayActorResourceSpec,
)
from moorage.engines.resource_engine import ResourceEngine
from moorage.engines.resources import BaseResource, ResourceStatus, Runner
from moorage.engines.specs import (
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

__all__ = [
    "APIModelResourceSpec",
    "BaseResource",
    "BaseResourceSpec",
    "ContainerResourceSpec",
    "Context",
    "ContextConfig",
    "EngineClosedError",
    "EngineError",
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
