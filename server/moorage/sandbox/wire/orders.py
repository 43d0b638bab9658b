"""The two fixed-size messages between host and zygote. Imported by the `zygote` of both."""

import signal
import struct
from typing import Final

ORDER: Final = struct.Struct("<I")
"""Host to zygote: the number of the spawn order."""
WHERE_SIGNAL: Final = signal.SIGUSR1
"""Host to cell: write which lines you are at."""
REPORT: Final = struct.Struct("<cIiIIQ")
"""Zygote to host: kind, order or 0, process id or errno, wait status, and of a cell that ended the
most memory that it held beyond what it started with, in KiB, and the CPU time that it used, in ms.

Kinds: `Z` ready, `R` spawned (with channel and pidfd), `E` fork failed, `X` a cell ended.
"""
