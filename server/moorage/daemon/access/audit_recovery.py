"""Restores entries of the audit log that a kill lost, from the ledger, at the start."""

import asyncio

import structlog

from moorage.daemon.access.audit_log import PENDING_MAX, AuditLog
from moorage.daemon.access.audit_trail import AuditTrail
from moorage.ledger.base import Ledger, LedgerError
from moorage.storage.base import StorageError

__all__ = ["recover"]

log = structlog.get_logger("moored")


async def recover(audit: AuditLog, trail: AuditTrail, ledger: Ledger) -> None:
    """Note facts of the ledger that the log lacks, then the start of the server.

    Args:
        audit: Nothing was noted yet of what this server does.
        trail: Makes the entries. What held before a change is unknown to it.
        ledger: Open; nothing was appended yet.

    """
    if not audit.is_on:
        return
    try:
        last = await asyncio.to_thread(audit.last_seq)
        # No more were waiting when it was killed.
        seq = ledger.last_seq if last is None else max(last, ledger.last_seq - PENDING_MAX)
        while page := await ledger.read(after=seq):
            audit.note_all(trail.recovered(page))
            seq = page[-1].seq
    except (OSError, ValueError, StorageError, LedgerError) as error:
        # The server serves also where its log is damaged, or a fact that nothing else reads.
        log.error("audit_failed", reason=f"what a kill took is not noted again: {error}")  # noqa: TRY400  # It has no more to say.
    audit.note_server("started", ledger.last_seq)
    await audit.written()
