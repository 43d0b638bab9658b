"""Statuses of a job: a result, or an error and its kind."""

from dataclasses import dataclass

from moorage.slices.errors import HostTaskError, HostUnhealthyError
from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue


@dataclass
class JobInfo:
    """The name of a job, and its host."""

    name: str
    state: str
    kind: str


@dataclass
class JobStatus:
    """The status of a job that has ended."""

    info: JobInfo


@dataclass
class JobSucceeded(JobStatus):
    """The status of a job whose tasks all returned."""

    result: RayValue


@dataclass
class JobUnsuccessful(JobStatus):
    """The base of the statuses of a job without success; has the error."""

    error: Exception


@dataclass
class JobPreempted(JobUnsuccessful):
    """The status of a job that lost a node, a host or a process: a repetition may succeed."""


@dataclass
class JobFailed(JobUnsuccessful):
    """The status of a job that could not run: code outside of Ray raised an error."""


@dataclass
class JobError(JobUnsuccessful):
    """The status of a job if a task, or Ray itself, raised an error."""


_TEXTS = ("preempt", "owner died", "owner has exited")


def handle_ray_error(job_info: JobInfo, e: Exception) -> JobStatus:
    """Return the status of a job for an error of Ray, by the error's class.

    Args:
        job_info: The job.
        e: The error.
    """
    lost = (
        ray.exceptions.NodeDiedError,
        ray.exceptions.OwnerDiedError,
        ray.exceptions.ActorDiedError,
        ray.exceptions.ActorUnavailableError,
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.ActorPlacementGroupRemoved,
        ray.exceptions.TaskPlacementGroupRemoved,
    )
    return JobPreempted(job_info, e) if isinstance(e, lost) else JobError(job_info, e)


def status_of(info: JobInfo, error: Exception) -> JobStatus:
    """Return the status of a job for any error.

    The class of the error decides. The text decides only for an error of Ray whose class does not
    say that something was lost, and never for a task's own error.
    """
    if isinstance(error, HostTaskError):
        where = f"slice {error.slice_index} ({error.slice_name}), host {error.host_id}"
        error = error.cause
        error.add_note(where)
    if isinstance(error, HostUnhealthyError):
        return JobPreempted(info, error)
    if not isinstance(error, ray.exceptions.RayError):
        return JobFailed(info, error)
    status = handle_ray_error(info, error)
    if isinstance(status, JobError) and not isinstance(error, ray.exceptions.RayTaskError):
        text = str(error).lower()
        if any(each in text for each in _TEXTS):
            return JobPreempted(info, error)
    return status
