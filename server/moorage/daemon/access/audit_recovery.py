"""Restores entries of the audit log that a kill lost, from the ledger, at the start."""

import asyncio
from collections.abc import Coroutine

import structlog

from moorage.daemon.access.audit_log import PENDING_MAX, AuditLog
from moorage.daemon.access.audit_trail import AuditTrail
from moorage.ledger.base import Ledger, LedgerError
from moorage.records.audit import AuditEntry
from moorage.storage.base import StorageError

log = structlog.get_logger("moored")


def recover(audit: AuditLog, trail: AuditTrail, ledger: Ledger) -> Coroutine[object, object, None]:
    """Queue entries for facts that the log lacks, then the entry of the server's start.

    Entries queued after this call, even before the coroutine ends, follow the recovered ones.

    Args:
        audit: The audit log, which has no entry of this server's run yet.
        trail: Makes the entries. Recovered entries do not have the values before a change.
        ledger: The open ledger, to which this server has appended nothing yet.
    """
    audit.hold()
    return _recover(audit, trail, ledger, ledger.last_seq)


async def _recover(audit: AuditLog, trail: AuditTrail, ledger: Ledger, until: int) -> None:
    found = list[AuditEntry]()
    try:
        last = await asyncio.to_thread(audit.last_seq) if audit.is_on else None
        # At most this many entries waited for the disk when a server was killed.
        seq = until if last is None else max(last, until - PENDING_MAX)
        while seq < until and (page := await ledger.read(seq, until - seq)):
            found += trail.recovered(page)
            seq = page[-1].seq
    except (OSError, ValueError, StorageError, LedgerError) as error:
        # The server starts even if its log is damaged, or a fact that nothing else reads.
        log.error("audit_failed", reason=f"entries that a kill lost cannot be restored: {error}")  # noqa: TRY400  # A traceback says no more.
    audit.let_go(found, until)
    await audit.flush()
