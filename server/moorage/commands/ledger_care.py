"""`moored ledger verify` and `moored ledger repair`: find and repair damage in a data folder.

Both commands check the whole ledger and catalog; a start only checks what it reads.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from moorage.catalog.embedded import verification as catalog
from moorage.ledger import repairing, walk
from moorage.ledger.base import LedgerError, translate_errors
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject
from moorage.storage.base import StorageError
from moorage.storage.sqlite import CATALOG_FILE, LEDGER_FILE
from moorage.storage.sqlite.facts import is_ledger
from moorage.storage.sqlite.lock import WriterLock


@dataclass(frozen=True, slots=True)
class LedgerFindings:
    """The damage that `verify` finds in a data folder, and the numbers of facts and records."""

    ledger: walk.LedgerWalk
    catalog: catalog.CatalogWalk

    @property
    def findings(self) -> list[str]:
        """The damage, one sentence for each fault."""
        unknown = [f"{LEDGER_FILE}: {each}" for each in self.ledger.unknown[: walk.FINDINGS_MAX]]
        return [*self.ledger.findings, *unknown, *self.catalog.findings]

    def report(self) -> JsonObject:
        """Return all findings as JSON values."""
        rows = self.ledger.rows
        return {
            "findings": self.findings,
            "facts": len(rows),
            "first_fact": rows[0].seq if rows else 0,
            "last_fact": rows[-1].seq if rows else 0,
            "oldest_at": rows[0].at if rows else None,
            "checkpoints": [each.seq for each, _ in self.ledger.checkpoints],
            "records": len(self.catalog.rows),
        }


def verify(data: Path) -> LedgerFindings:
    """Check all files of a data directory; the daemon may be running.

    Raises:
        LedgerError: The ledger is missing or renamed, or a newer release wrote ledger or catalog.
        OSError: A file cannot be read at all.
    """
    try:
        found = LedgerFindings(walk.walk(data / LEDGER_FILE), catalog.walk(data / CATALOG_FILE))
    except ServiceError as no:
        raise LedgerError(no.reason) from no
    if not found.ledger.rows and found.ledger.findings:
        _refuse_renamed_file(data)
    if found.ledger.rows and not found.catalog.mark.exists and not (data / CATALOG_FILE).exists():
        found.catalog.say(
            f"{CATALOG_FILE} is missing, with all its records; a server creates it with the ledger."
        )
    return found


def _refuse_renamed_file(data: Path) -> None:
    """Raise an error if the ledger's file was renamed: a repair would make an empty ledger.

    Raises:
        LedgerError: The file was renamed.
    """
    for file in sorted(data.iterdir()):
        if file.name != LEDGER_FILE and file.suffix != ".new" and is_ledger(file):
            raise LedgerError(
                f"{data / LEDGER_FILE} is not a ledger, but {file.name} beside it is one. Nothing "
                f"was changed. Rename {file.name}, and the files whose names begin with its name, "
                f"to {LEDGER_FILE}, or move it elsewhere."
            )


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of a repair.

    Args:
        damage: One sentence per fault; empty: nothing is damaged.
        lost: One sentence per loss.
        stays: Sentences that say how many facts and records remain.
        copy: Folder of the damaged files; None: nothing was changed.
    """

    damage: list[str]
    lost: list[str]
    stays: list[str]
    copy: Path | None = None


def repair(data: Path, *, accept_loss: bool) -> RepairReport:
    """Remove the damaged parts; keep a copy of the damaged files.

    Args:
        data: The data directory; no daemon may be running.
        accept_loss: Whether to repair; otherwise only report the losses.

    Raises:
        LedgerError: A daemon is running, or a newer release wrote the data directory.
        OSError: A file cannot be written.
    """
    lock = WriterLock(data / LEDGER_FILE)
    with translate_errors():
        lock.acquire()
    try:
        found = verify(data)
        if not found.findings:
            return RepairReport([], [], [])
        left = repairing.salvage(found.ledger)
        lost = [*left.said, *(f"in the catalog: {each}" for each in catalog.loss(found.catalog))]
        stays = [
            *repairing.remaining_contents(found.ledger, left).sentences(),
            *catalog.remaining(found.catalog),
        ]
        if not accept_loss:
            return RepairReport(found.findings, lost, stays)
        copy = data / f"damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        copy.mkdir(mode=0o700)
        for pattern in ("ledger.*", "catalog.*"):
            for file in data.glob(pattern):
                if file.suffix != ".reserve":  # Such a file has no contents.
                    shutil.copy2(file, copy)
        if found.ledger.findings:
            repairing.rebuild(data / LEDGER_FILE, found.ledger, left)
        if found.catalog.findings:
            catalog.rebuild(data / CATALOG_FILE, found.catalog)
    except StorageError as error:
        raise LedgerError(f"{data} cannot be repaired: {error}. Restore a backup.") from error
    finally:
        lock.release()
    return RepairReport(found.findings, lost, stays, copy)
