"""Keeps the contexts of rules across restarts: what changed goes to the disk, at a bounded rate."""

import asyncio
import time
from typing import Final

import structlog

from moorage.catalog.contexts import KeptContexts
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host import Sandbox

SAVE_SECONDS: Final = 1.0
"""Pause between two writes; at most this much of contexts is lost with the process."""
SAVE_BYTES_MAX: Final = 8 << 20
"""Contexts of one write; what is left goes with the next one."""

log = structlog.get_logger("moored")


class Remembering:
    """Writes changed contexts.

    Args:
        kept: The disk.
        rules: Has the contexts.

    """

    def __init__(self, kept: KeptContexts, rules: Sandbox) -> None:
        self._kept = kept
        self._rules = rules
        self._failed = False

    async def restore(self) -> None:
        """Give the sandbox what was kept; before any rule is asked."""
        # More microseconds have gone by since the epoch than changes can ever have been made.
        self._rules.restore_contexts(await self._kept.load(), time.time_ns() // 1000)

    async def run(self) -> None:
        """Write what changed, again and again, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Write what changed, as much of it as one write may hold."""
        changes = self._rules.changed_contexts(SAVE_BYTES_MAX)
        if not changes:
            return
        try:
            await self._kept.save(changes)
        except ServiceError as error:
            self._rules.contexts_unsaved(key for key, _, _ in changes)
            if not self._failed:  # Once, not every second.
                log.warning("contexts", finding=f"they are not kept for a restart: {error.reason}")
            self._failed = True
        else:
            self._failed = False

    async def close(self) -> None:
        """Write all that is left, before the catalog closes."""
        before = -1
        while (left := self._rules.contexts_waiting) and left != before:
            before = left
            await self.save()
