"""All errors of slices, as one tree of classes; the package docstring shows the tree."""

from collections.abc import Sequence

from moorage.extras import install_command
from moorage.slices.records import DegradedSlice


class SlicesError(RuntimeError):
    """Root of every error that this package raises on purpose. A `RuntimeError`, as documented."""


class RayMissingError(SlicesError, ImportError):
    """Ray is needed and is not installed."""

    def __init__(self) -> None:
        super().__init__(f"slices need Ray, which is not installed: {install_command('ray')}")


class InsufficientSlicesError(SlicesError):
    """None of the requested numbers of slices is available; the message has the numbers.

    Hosts are missing or were preempted while the pool was scaled, or the autoscaler did not add
    hosts in time.
    """


class SliceDegraded(InsufficientSlicesError):  # noqa: N818  # A state of a slice.
    """A slice lost hosts, and no other slice can replace it.

    Args:
        message: The numbers of requested and of available slices.
        slices: The slices that lost hosts, each with its hosts.
    """

    def __init__(self, message: str, slices: Sequence[DegradedSlice]) -> None:
        super().__init__(message, tuple(slices))
        self.slices = tuple(slices)

    def __str__(self) -> str:
        return str(self.args[0])


class SliceTimeoutError(SlicesError, TimeoutError):
    """A wait reached its time limit; the message names the event and the setting of the limit."""


class HostUnhealthyError(SlicesError):
    """A host failed or is being preempted, and could not be replaced in time."""


class HostTaskError(SlicesError):
    """A task failed on one host; the tasks of all other hosts were cancelled.

    Args:
        slice_index: The slice's number from 0, as in the results.
        slice_name: The slice's name.
        host_id: The host's number in that slice, from 0.
        cause: The error of the task or of Ray.
    """

    def __init__(self, slice_index: int, slice_name: str, host_id: int, cause: Exception) -> None:
        super().__init__(slice_index, slice_name, host_id, cause)
        self.slice_index = slice_index
        self.slice_name = slice_name
        self.host_id = host_id
        self.cause = cause

    def __str__(self) -> str:
        return f"slice {self.slice_index} ({self.slice_name}), host {self.host_id}: {self.cause}"


class RetriesExhaustedError(SlicesError):
    """A resumable job was preempted or failed too often; the cause is the last error."""
