"""Stores the time at which workloads end without contact to the server: `heard.json`.

The machine's agent writes it. Supervisors and the container reaper read it, so the deadline holds
even if the agent has ended.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from moorage.backends.local import workload_store

HEARD: Final = "heard.json"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def now() -> float:
    """Return the seconds since the machine started, including the time that it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeardFile:
    """The file `heard.json`, for the agent that writes it.

    Args:
        seconds: How long workloads may run without contact to the server; 0: no limit. Until the
            server accepts this value, the shorter of this and the last accepted value holds.
    """

    def __init__(self, root: Path, seconds: float) -> None:
        self._file = root.absolute() / HEARD
        self._wanted = seconds
        self._boot = _BOOT.read_text().strip()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = workload_store.read(self._file)
        if known is not None:
            same = known["boot"] == self._boot  # After a reboot, no workload is left.
            self._seconds, self._at = float(known["seconds"]), known["at"] if same else now()
        else:
            self._seconds, self._at = 0.0, now()
        if seconds:
            self._seconds = min(seconds, self._seconds or seconds)
        self._write()

    @property
    def passed(self) -> bool:
        """Whether workloads must end, since the last contact to the server was too long ago."""
        return bool(self._seconds) and now() > self._at + self._seconds

    def note_contact(self, at: float) -> None:
        """Record that the server has received a message that the agent sent at time `at`."""
        self._at = max(self._at, at)
        self._write()

    def note_agreement(self, at: float) -> None:
        """Record that the server accepted `seconds` in answer to a message sent at time `at`."""
        self._seconds = self._wanted
        self.note_contact(at)

    def _write(self) -> None:
        """Replace the file without a sync: after a restart of the machine, the file is useless."""
        if not self._seconds:
            self._file.unlink(missing_ok=True)
            return
        document = {"boot": self._boot, "seconds": self._seconds, "at": self._at}
        fresh = self._file.with_suffix(".new")
        with suppress(OSError):  # Then the deadline stays.
            fresh.write_text(json.dumps(document))
            fresh.replace(self._file)
