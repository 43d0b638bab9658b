"""The time that the core is stepped with: it neither jumps, nor passes while nothing runs.

The commit loop is the only caller, and nothing else tells the core a time.
"""

import time
from collections.abc import Callable
from typing import Final

BEAT_SECONDS: Final = 0.5
"""How often the commit loop says that it runs."""
STALL_SECONDS_MIN: Final = 1.5
"""Without a beat for so much longer, it stood still: stopped, suspended, starved or debugged."""
DRIFT_SECONDS_MAX: Final = 1.0
"""How far the time may be from the calendar's; less than that, clocks are adjusted slowly."""


class Clock:
    """Seconds since the epoch, counted on by a clock that cannot be set.

    So a calendar that is set neither ends every lease at once nor has waiters wait for hours.

    Args:
        monotonic: Returns seconds that never go back, and may stop while the machine sleeps.
        calendar: Returns seconds since the epoch, which may be set.

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
        """Return the time; it never goes back but by `follow_calendar`."""
        return self._offset + self._monotonic()

    @property
    def stood_still_seconds(self) -> float:
        """For how long the loop has not run; 0 where it runs."""
        seconds = self._monotonic() - self._beat_at
        return seconds if seconds >= BEAT_SECONDS + STALL_SECONDS_MIN else 0.0

    @property
    def drift_seconds(self) -> float:
        """How much later it is by the calendar; 0 where that is as good as the same."""
        drift = self._calendar() - self.now()
        return drift if abs(drift) >= DRIFT_SECONDS_MAX else 0.0

    def beat(self) -> None:
        """Note that the loop runs."""
        self._beat_at = self._monotonic()

    def follow_calendar(self) -> float:
        """Go by the calendar's time from now on; return how much later that is, in seconds."""
        drift = self.drift_seconds
        self._offset += drift
        return drift
