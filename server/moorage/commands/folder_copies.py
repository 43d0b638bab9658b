"""Makes a backup of a data folder, and a data folder from a backup, both fully checked."""

from dataclasses import dataclass
from pathlib import Path

from moorage.commands.ledger_care import LedgerFindings, verify
from moorage.storage.base import FENCING_SKIP, StorageError
from moorage.storage.sqlite import LEDGER_FILE
from moorage.storage.sqlite.backup import (
    copy_audit,
    copy_folder,
    refuse_unfinished,
    stage,
)
from moorage.storage.sqlite.lock import read_database


@dataclass(frozen=True, slots=True)
class FolderCopy:
    """The contents of a new folder.

    Args:
        newest_at: The time at which the last fact was appended; 0: no facts.
        fencing: New fencing numbers are larger than this number.
    """

    facts: int
    records: int
    newest_at: float
    fencing: int


def back_up(data: Path, target: Path) -> FolderCopy:
    """Copy a data folder, while its server may be running.

    Raises:
        StorageError: The target is not empty or in the data folder; or the data folder is damaged
            or unfinished, or its last server kept the data in a database elsewhere.
        LedgerError: Another release wrote the data folder.
        OSError: A file cannot be read or written.
    """
    _refuse_inside(target, data)
    refuse_unfinished(data)
    if database := read_database(data / LEDGER_FILE):
        raise StorageError(
            f"The last server of {data} kept its data in {database}, so the files of this folder "
            "are old. Copy the database with pg_dump."
        )
    with stage(target) as new:
        fencing = copy_folder(data, new)
        return _describe_copy(_whole(new, data), fencing)


def restore_folder(backup: Path, data: Path) -> FolderCopy:
    """Make a data folder from a backup; skip fencing numbers that were used since.

    A copy of a whole data folder also has the audit log, which is then copied, too.

    Raises:
        StorageError: The data folder is not empty or in the backup, or the backup is damaged or
            unfinished.
        LedgerError: Another release wrote the backup.
        OSError: A file cannot be read or written.
    """
    _refuse_inside(data, backup)
    refuse_unfinished(backup)
    with stage(data) as new:
        found = _whole(backup, backup)
        fencing = copy_folder(backup, new, fencing_skip=FENCING_SKIP)
        copy_audit(backup, new)
        return _describe_copy(found, fencing)


def _refuse_inside(target: Path, source: Path) -> None:
    if source.resolve() in target.resolve().parents:
        raise StorageError(f"{target} is inside {source}. Give a folder elsewhere.")


def _whole(folder: Path, shown: Path) -> LedgerFindings:
    found = verify(folder)
    if found.findings:
        raise StorageError(f"{shown} is damaged and was not copied: {' '.join(found.findings)}")
    return found


def _describe_copy(found: LedgerFindings, fencing: int) -> FolderCopy:
    facts = found.ledger.rows
    newest_at = facts[-1].at if facts else 0.0
    return FolderCopy(len(facts), len(found.catalog.rows), newest_at, fencing)
