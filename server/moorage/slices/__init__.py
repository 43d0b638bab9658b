"""Pools of TPU and GPU slices on Ray, and jobs that run on all of their hosts.

`SlicePoolManager` holds slices, `RayExecutor` runs jobs on them. README.md has examples. The
package can be imported without Ray; calls that need Ray then raise `RayMissingError`. All errors
are one tree:

    SlicesError (a RuntimeError)
    ├── InsufficientSlicesError     no requested number of slices is available
    │   └── SliceDegraded           the same, if slices have lost hosts; the error lists them
    ├── SliceTimeoutError           a wait reached its time limit (also a TimeoutError)
    ├── HostUnhealthyError          a host failed or is being preempted
    ├── HostTaskError               a task failed on one host; it names slice, host and cause
    ├── RetriesExhaustedError       a resumable job was preempted, or failed, too often
    └── RayMissingError             Ray is not installed (also an ImportError)
"""

from moorage.slices.actors.host import DeviceHostActor
from moorage.slices.actors.pool import ResourcePoolManager
from moorage.slices.actors.slice import SliceActor
from moorage.slices.errors import (
    HostTaskError,
    HostUnhealthyError,
    InsufficientSlicesError,
    RayMissingError,
    RetriesExhaustedError,
    SliceDegraded,
    SlicesError,
    SliceTimeoutError,
)
from moorage.slices.jobs.configs import (
    AcceleratorConfigType,
    ComputeResourceConfig,
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    TpuAcceleratorConfig,
)
from moorage.slices.jobs.executor import (
    RayExecutor,
    autoscale_execute,
    autoscale_execute_resumable,
    execute,
    execute_multislice,
    execute_multislice_resumable,
    execute_resumable,
)
from moorage.slices.jobs.hardware import HardwareType, RayResources, available_cpu_cores
from moorage.slices.jobs.statuses import (
    JobError,
    JobFailed,
    JobInfo,
    JobPreempted,
    JobStatus,
    JobSucceeded,
    JobUnsuccessful,
    handle_ray_error,
)
from moorage.slices.jobs.warm import device_remote
from moorage.slices.leases import LeasedHosts
from moorage.slices.manager import SlicePoolManager
from moorage.slices.records import (
    ActorPoolMember,
    DegradedSlice,
    HostInfo,
    MultisliceInfo,
    SliceInfo,
)
from moorage.slices.settings import SliceSettings
from moorage.slices.shapes import GpuSlices, TpuSlices

__all__ = [
    "AcceleratorConfigType",
    "ActorPoolMember",
    "ComputeResourceConfig",
    "CpuAcceleratorConfig",
    "DegradedSlice",
    "DeviceHostActor",
    "GpuAcceleratorConfig",
    "GpuSlices",
    "HardwareType",
    "HostInfo",
    "HostTaskError",
    "HostUnhealthyError",
    "InsufficientSlicesError",
    "JobError",
    "JobFailed",
    "JobInfo",
    "JobPreempted",
    "JobStatus",
    "JobSucceeded",
    "JobUnsuccessful",
    "LeasedHosts",
    "MultisliceInfo",
    "RayExecutor",
    "RayMissingError",
    "RayResources",
    "ResourcePoolManager",
    "RetriesExhaustedError",
    "SliceActor",
    "SliceDegraded",
    "SliceInfo",
    "SlicePoolManager",
    "SliceSettings",
    "SliceTimeoutError",
    "SlicesError",
    "TpuAcceleratorConfig",
    "TpuSlices",
    "autoscale_execute",
    "autoscale_execute_resumable",
    "available_cpu_cores",
    "device_remote",
    "execute",
    "execute_multislice",
    "execute_multislice_resumable",
    "execute_resumable",
    "handle_ray_error",
]
