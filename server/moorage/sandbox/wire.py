"""The two fixed-size messages between host and zygote. Imported by `control` and `zygote`."""

import struct
from typing import Final

ORDER: Final = struct.Struct("<I")
"""Host to zygote: the number of the spawn order."""
REPORT: Final = struct.Struct("<cIiI")
"""Zygote to host: kind, order or 0, process id or errno, wait status.

Kinds: `Z` ready, `R` spawned (with channel and pidfd), `E` fork failed, `X` a cell ended.
"""
