"""The clock of the core. The commit loop reads it for each step; the core knows no other time."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

BEAT_SECONDS: Final = 0.5
"""Seconds between two beats of the commit loop."""
STALL_SECONDS_MIN: Final = 1.5
"""Least delay of a beat, in seconds, that counts as a stall: the process did not run."""
DRIFT_SECONDS_MAX: Final = 1.0
"""A larger difference from the calendar, in seconds, means that someone set the calendar."""
CALENDAR: Final = "calendar.json"
"""File in the data folder that holds when the machine started, by its calendar."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def uptime() -> float:
    """Return the seconds since the machine started, including time asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """Seconds since the epoch, advanced by the monotonic clock.

    So a change of the calendar neither ends all leases at once nor prolongs them by hours.

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
        """Seconds that the loop has stalled so far; 0 if it is not stalled."""
        seconds = self._monotonic() - self._beat_at
        return seconds if seconds >= BEAT_SECONDS + STALL_SECONDS_MIN else 0.0

    @property
    def drift_seconds(self) -> float:
        """Calendar time minus the time of this clock; 0 within `DRIFT_SECONDS_MAX`."""
        drift = self._calendar() - self.now()
        return drift if abs(drift) >= DRIFT_SECONDS_MAX else 0.0

    def beat(self) -> None:
        """Record that the loop runs."""
        self._beat_at = self._monotonic()

    def note_stall(self, since: float) -> None:
        """Record a stall that began at `since`, by the monotonic clock, although the loop ran."""
        self._beat_at = min(self._beat_at, since)

    def follow_calendar(self) -> float:
        """Adopt the calendar's time; return the seconds added."""
        drift = self.drift_seconds
        self._offset += drift
        return drift


class CalendarRecord:
    """Detects by a file that the machine's calendar was set while no server ran.

    Args:
        folder: The server's data folder; None: no shift is detected, since another machine's server
            may have stored the facts.
        calendar: The calendar of the machine, as that of `Clock`.
        running: Returns the seconds since the machine started.
    """

    def __init__(
        self,
        folder: Path | None,
        calendar: Callable[[], float] = time.time,
        running: Callable[[], float] = uptime,
    ) -> None:
        self._file = folder / CALENDAR if folder else None
        self._calendar = calendar
        self._running = running

    def calendar_shift(self, last_at: float) -> float:
        """Return the seconds by which the calendar was set since the last fact; 0: none known.

        Args:
            last_at: The time at which the last fact was durable. Without a record since the machine
                started, only a calendar that is behind this time is detected.
        """
        now, moved = self._calendar(), 0.0
        with suppress(OSError, ValueError, KeyError, TypeError):  # The file may be incomplete.
            known = json.loads(self._file.read_text()) if self._file else {}
            if known["boot"] == _BOOT.read_text().strip():
                moved = now - self._running() - float(known["started_at"])
        moved = min(moved, now - last_at) if now - moved < last_at else moved
        return moved if abs(moved) >= DRIFT_SECONDS_MAX else 0.0

    def write(self) -> None:
        """Store when the machine started by the calendar, for the next server to compare."""
        if self._file is None:
            return
        with suppress(OSError):
            boot, started_at = _BOOT.read_text().strip(), self._calendar() - self._running()
            fresh = self._file.with_suffix(".new")
            fresh.touch(mode=0o600)
            fresh.write_text(json.dumps({"boot": boot, "started_at": started_at}))
            fresh.replace(self._file)
