"""Shows the progress of a test or a backtest on stderr."""

import sys
import time
from typing import Final

PAUSE_SECONDS: Final = 0.1
"""Least seconds between two updates: drawing must not distort the measured times."""


class Progress:
    """Shows a progress line on a terminal."""

    def __init__(self, wanted: bool, what: str, total: int) -> None:
        self._wanted, self._what, self._total = wanted, what, total
        self._done, self._drawn_at = 0, 0.0

    def step(self, news: str = "") -> None:
        """Count one more step; print `news` on a line above."""
        self._done += 1
        if not self._wanted:
            return
        now = time.monotonic()
        if news:
            sys.stderr.write(f"\r\x1b[K{news}\n")
        if news or now - self._drawn_at >= PAUSE_SECONDS:
            self._drawn_at = now
            sys.stderr.write(f"\r\x1b[K{self._what}: {self._done} of {self._total}")
            sys.stderr.flush()

    def end(self) -> None:
        """Erase the progress line."""
        if self._wanted:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
