"""Health: whether requests can be served (`/readyz`), and a log line about a full disk."""

import asyncio
from dataclasses import dataclass
from typing import Final

import structlog

from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.tasks import Tasks
from moorage.gateway.server import Gateway
from moorage.ledger.base import Ledger
from moorage.records.json_values import JsonObject
from moorage.sandbox.host.contract import Mode
from moorage.sandbox.host.sandbox import Sandbox

LOOK_SECONDS: Final = 1.0
"""Seconds between two checks whether the disk is full."""
log = structlog.get_logger("moored")


@dataclass(frozen=True, slots=True)
class Health:
    """Checks all parts that requests need.

    Args:
        gateway: Listens until the daemon stops.
        ledger: The open ledger.
        commit_loop: Steps the core.
        sandbox: Runs policies.
        mode: The isolation of policies.
        tasks: Says whether a background task failed.
    """

    gateway: Gateway
    ledger: Ledger
    commit_loop: CommitLoop
    sandbox: Sandbox
    mode: Mode
    tasks: Tasks

    def readiness(self) -> tuple[bool, JsonObject]:
        """Return whether requests can be served, and the state of each component."""
        up = self.sandbox.up
        details = {
            "role": "writer",
            "ledger_seq": self.ledger.last_seq,
            "disk": "full" if self.ledger.is_full else "ok",
            "backlog": self.commit_loop.backlog,
            "sandbox": self.mode if up else "down",
        }
        return self.gateway.listening and up and not self.tasks.broken.done(), details


async def follow_disk(ledger: Ledger) -> None:
    """Log one line when the disk becomes full and one when it has room again. Runs until cancelled.

    Raises:
        LedgerFailed: The ledger failed while nothing was being written.
    """
    full = False
    while True:
        ledger.check()
        if ledger.is_full != full:
            full = not full
            if full:
                log.error(
                    "disk_full", finding="no leases are granted until the disk has room again"
                )
            else:
                log.warning("disk_has_room", finding="leases are granted again")
        await asyncio.sleep(LOOK_SECONDS)
