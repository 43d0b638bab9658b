"""Waits for Ray, each with a time limit."""

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from moorage.slices.errors import SliceTimeoutError
from moorage.slices.lazy_ray import ray
from moorage.slices.ray_values import RayValue

_FETCH_SECONDS_MAX: Final = 30
"""Seconds that a finished result may take to be transferred here."""


class Deadline:
    """The time at which a wait ends.

    Args:
        seconds: Seconds from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until the deadline, never below 0."""
        return max(0.0, self._at - time.monotonic())


def outcomes(refs: Sequence[RayValue], seconds: float) -> list[RayValue]:
    """Return for each reference its value or its exception; raise nothing.

    For a result that does not come within `seconds`, the exception is a `SliceTimeoutError`.
    """
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=max(0.0, seconds))
    come = set(ready)
    return [_outcome(ref) if ref in come else _late(seconds) for ref in refs]


def value(ref: RayValue, seconds: float, awaited: str) -> RayValue:
    """Return the value of a reference of Ray, once it has come.

    Raises:
        SliceTimeoutError: The value has not come within `seconds`; the message begins with
            `awaited`.
    """
    try:
        return ray.get(ref, timeout=max(0.0, seconds))
    except ray.exceptions.GetTimeoutError:
        raise SliceTimeoutError(f"{awaited} took more than {seconds:g} s") from None


def kill(actor: RayValue) -> None:
    """Kill an actor for good; do nothing if it has ended already."""
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor, no_restart=True)


def _outcome(ref: RayValue) -> RayValue:
    try:
        return ray.get(ref, timeout=_FETCH_SECONDS_MAX)
    except Exception as error:  # noqa: BLE001  # Any error of the task.
        return error


def _late(seconds: float) -> SliceTimeoutError:
    return SliceTimeoutError(f"no answer within {seconds:g} s")
