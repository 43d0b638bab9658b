"""Stores the contexts of policies across restarts, at a bounded rate of writes."""

import asyncio
import time
from typing import Final

import structlog

from moorage.catalog.embedded.contexts import KeptContexts
from moorage.daemon.publishing.management import read_changes_entry
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import Sandbox

SAVE_SECONDS: Final = 1.0
"""Seconds between two writes; if the process dies, the changes since the last write are lost."""
SAVE_BYTES_MAX: Final = 8 << 20
"""Maximum bytes of contexts in one write; the rest goes with the next write."""

log = structlog.get_logger("moored")


class ContextKeeper:
    """Writes changed contexts to the catalog."""

    def __init__(self, contexts: KeptContexts, sandbox: Sandbox) -> None:
        self._contexts = contexts
        self._sandbox = sandbox
        self._failed = False

    async def restore(self) -> None:
        """Load the stored contexts into the sandbox, before any policy runs."""
        # No context has this many changes, so later numbers are higher than all stored numbers.
        entries = await self._contexts.load()
        contexts = [each for each in entries if read_changes_entry(each) is None]
        self._sandbox.restore_contexts(contexts, time.time_ns() // 1000)
        for each in filter(None, map(read_changes_entry, entries)):
            self._sandbox.managed.put(*each)

    async def run(self) -> None:
        """Save changed contexts once a second, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Write changed contexts, up to `SAVE_BYTES_MAX`."""
        changes = self._sandbox.take_changed_contexts(SAVE_BYTES_MAX)
        if not changes:
            return
        try:
            await self._contexts.save(changes)
        except ServiceError as error:
            self._sandbox.return_contexts(key for key, _, _ in changes)
            if not self._failed:  # Once, not every second.
                log.warning(
                    "contexts_not_stored",
                    finding=f"a restart would lose changes of policies' contexts: {error.reason}",
                )
            self._failed = True
        else:
            self._failed = False

    async def close(self) -> None:
        """Write all remaining changes, before the catalog closes."""
        before = -1
        while (left := self._sandbox.contexts_waiting) and left != before:
            before = left
            await self.save()
