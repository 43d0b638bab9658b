"""The clock of the core. The commit loop reads it for each step; nothing else gives a time."""

import time
from collections.abc import Callable
from typing import Final

BEAT_SECONDS: Final = 0.5
"""Between two beats of the commit loop."""
STALL_SECONDS_MIN: Final = 1.5
"""A beat that is this late shows a stall: the process was stopped, suspended or starved."""
DRIFT_SECONDS_MAX: Final = 1.0
"""A larger difference from the calendar means that the calendar was set."""


class Clock:
    """Seconds since the epoch, advanced by the monotonic clock.

    A calendar that is set therefore neither ends all leases at once nor prolongs them by hours.

    Args:
        monotonic: Returns seconds; never set, but stops while the machine sleeps.
        calendar: Returns seconds since the epoch; an administrator or NTP may set it.

    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._calendar = calendar
        self._offset = calendar() - monotonic()
        self._beat_at = monotonic()

    def now(self) -> float:
        """Return the time; only `follow_calendar` can set it back."""
        return self._offset + self._monotonic()

    @property
    def stood_still_seconds(self) -> float:
        """Length of the present stall of the loop; 0 if there is none."""
        seconds = self._monotonic() - self._beat_at
        return seconds if seconds >= BEAT_SECONDS + STALL_SECONDS_MIN else 0.0

    @property
    def drift_seconds(self) -> float:
        """Calendar time minus this clock's time; 0 within `DRIFT_SECONDS_MAX`."""
        drift = self._calendar() - self.now()
        return drift if abs(drift) >= DRIFT_SECONDS_MAX else 0.0

    def beat(self) -> None:
        """Record that the loop runs."""
        self._beat_at = self._monotonic()

    def follow_calendar(self) -> float:
        """Adopt the calendar's time; return the seconds added."""
        drift = self.drift_seconds
        self._offset += drift
        return drift
