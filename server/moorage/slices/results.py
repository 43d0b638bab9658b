"""Collects results of tasks on many hosts; at the first failure, cancels the other tasks."""

from collections.abc import Sequence
from dataclasses import dataclass

from moorage.slices.errors import HostTaskError, SliceTimeoutError
from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue
from moorage.slices.waiting import Deadline, outcomes


@dataclass(frozen=True, eq=False)
class HostCall:
    """A task on one host: its reference and its place."""

    ref: RayValue
    host: RayValue
    slice_index: int
    slice_name: str
    host_id: int

    def __str__(self) -> str:
        return f"slice {self.slice_index} ({self.slice_name}), host {self.host_id}"


def collect(
    calls: Sequence[Sequence[HostCall]], timeout: float | None, cancel_seconds: float
) -> list[list[RayValue]]:
    """Return the results of all calls; at a failure or the time limit, cancel the other calls.

    Args:
        calls: The calls of each slice.
        timeout: Maximum seconds for all calls; None: no limit.
        cancel_seconds: Maximum seconds for cancelled tasks to end.

    Raises:
        HostTaskError: A task failed; the error has the first failure with its slice and host.
        SliceTimeoutError: The time limit passed; the message names the hosts that have not
            answered.
    """
    every = [call for calls_of_slice in calls for call in calls_of_slice]
    by_ref = {call.ref: call for call in every}
    results: dict[RayValue, RayValue] = {}
    pending = list(by_ref)
    deadline = None if timeout is None else Deadline(timeout)
    while pending:
        left = None if deadline is None else deadline.left
        done, pending = ray.wait(pending, timeout=left)
        if not done:
            late = [by_ref[ref] for ref in pending]
            cancel(late, cancel_seconds)
            raise SliceTimeoutError(
                f"no result within {timeout:g} s from {'; '.join(map(str, late))}: cancelled"
            )
        for ref in done:
            try:
                results[ref] = ray.get(ref)
            except Exception as error:
                call = by_ref[ref]
                cancel([by_ref[each] for each in pending], cancel_seconds)
                where = call.slice_index, call.slice_name, call.host_id
                raise HostTaskError(*where, error) from error
    return [[results[call.ref] for call in calls_of_slice] for calls_of_slice in calls]


def cancel(calls: Sequence[HostCall], seconds: float) -> None:
    """Cancel tasks on hosts, and wait until these tasks or the hosts have ended.

    `ray.cancel` could end this process: Ray fails an assertion when a task ends at that moment.
    """
    outcomes([call.host.cancel_current.remote() for call in calls], seconds)
