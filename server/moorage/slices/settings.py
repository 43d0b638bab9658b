"""Time limits and permissions of slices, read from the environment when a pool is created.

Each setting has a documented name `EFORMER_…`, and a name `MOORAGE_…`, which overrides it.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

HEALTH_CHECK_TIMEOUT_S: Final = 60
"""Default seconds for the members of a pool to report that they are healthy."""
SLICE_ACTOR_START_TIMEOUT_S: Final = 4 * 60 * 60
"""Default seconds for a slice to start and its hosts to be ready."""

NAMES: Final[Mapping[str, str]] = {
    "scale_poll_seconds": "SCALE_POLL_S",
    "scale_add_seconds_max": "SCALE_ADD_TIMEOUT_S",
    "slice_start_seconds_max": "SLICE_ACTOR_START_TIMEOUT_S",
    "health_check_seconds_max": "HEALTH_CHECK_TIMEOUT_S",
    "host_health_seconds_max": "HOST_HEALTH_WAIT_S",
    "scale_retry_seconds": "SCALE_RETRY_SLEEP_S",
    "task_cancel_seconds_max": "TASK_CANCEL_TIMEOUT_S",
    "drain_seconds_max": "DRAIN_TIMEOUT_S",
    "safe_gather": "SAFE_GATHER",
    "moderate": "MODERATE",
    "kill_vfio": "KILL_VFIO",
    "coordinator_port": "COORD_PORT",
}
"""Names of the settings in the environment, after `MOORAGE_` or `EFORMER_`."""

_YES: Final = frozenset({"1", "yes", "on", "true"})
_NO: Final = frozenset({"0", "no", "off", "false", ""})
_PORTS: Final = range(1, 65536)


@dataclass(frozen=True, kw_only=True)
class SliceSettings:
    """The time limits of all waits, and three permissions."""

    scale_poll_seconds: float = 30
    """Seconds between repeated requests to the autoscaler while a pool waits for slices."""
    scale_add_seconds_max: float = 604800
    """Seconds that `scale_multislice` waits for slices by default."""
    slice_start_seconds_max: float = SLICE_ACTOR_START_TIMEOUT_S
    """Seconds that a reserved slice may take to start, and that `prepare_all_slices` may take."""
    health_check_seconds_max: float = HEALTH_CHECK_TIMEOUT_S
    """Seconds for the members of a pool to report that they are healthy."""
    host_health_seconds_max: float = 60
    """Seconds that a new host may take to start and be healthy."""
    scale_retry_seconds: float = 60
    """Seconds that a resumable job pauses when there are too few slices."""
    task_cancel_seconds_max: float = 240
    """Seconds that a cancelled task may take to end."""
    drain_seconds_max: float = 5
    """Seconds that actors get to shut down before they are killed."""
    safe_gather: bool = True
    """Whether `prepare_all_slices` replaces slices that do not answer instead of failing."""
    moderate: bool = False
    """Whether a TPU slice that lost hosts counts as whole, with its remaining hosts."""
    kill_vfio: bool = False
    """Whether the start of a task kills every process that has /dev/vfio open, of any user."""
    coordinator_port: int = 8081
    """The port in `MEGASCALE_COORDINATOR_ADDRESS`."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is float and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{each.name} is {value}; expected seconds above 0")
        if self.coordinator_port not in _PORTS:
            raise ValueError(f"coordinator_port is {self.coordinator_port}; expected 1 to 65535")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "SliceSettings":
        """Read the settings from the environment; missing settings have their defaults.

        A value that is a URL is ignored: Kubernetes sets such a variable for a Service.

        Raises:
            ValueError: A value is invalid for its setting; the message names the variable.
        """
        found: dict[str, Any] = {}
        for each in fields(cls):
            suffix = NAMES[each.name]
            documented = suffix if suffix == "COORD_PORT" else f"EFORMER_{suffix}"
            for name in (f"MOORAGE_{suffix}", documented):
                if name in environment and not environment[name].startswith(("tcp://", "udp://")):
                    found[each.name] = _read(name, environment[name], each.type)
                    break
        return cls(**found)


def _read(name: str, text: str, kind: object) -> bool | float:
    """Return one value of the environment, in the type of its setting."""
    if kind is bool:
        if text.strip().lower() not in _YES | _NO:
            raise ValueError(f"{name} is {text!r}; expected 1 or 0")
        return text.strip().lower() in _YES
    try:
        number = float(text) if kind is float else int(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        expected = "seconds above 0" if kind is float else "a port"
        raise ValueError(f"{name} is {text!r}; expected {expected}")
    return number
