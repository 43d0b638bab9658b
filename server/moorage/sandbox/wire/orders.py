"""The two fixed-size messages between host process and zygote, imported by both sides."""

import signal
import struct
from typing import Final

ORDER: Final = struct.Struct("<I")
"""Host to zygote: the number of the spawn order."""
WHERE_SIGNAL: Final = signal.SIGUSR1
"""Signal from the host to a cell: write the line that the policy executes."""
REPORT: Final = struct.Struct("<cIiIIQ")
"""Zygote to host: kind, order or 0, process id or errno, wait status, KiB, CPU milliseconds.

Only the report of an ended cell has the last two: the most memory that the cell held beyond what it
started with, and the CPU time that it used.

Kinds: `Z` ready, `R` spawned (with channel and pidfd), `E` fork failed, `X` a cell ended.
"""
