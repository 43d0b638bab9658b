"""Makes a second data folder under another name, and renames it when it is complete and durable."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from moorage.storage.base import StorageCorrupt, StorageError
from moorage.storage.sqlite import (
    AGENTS_FILE,
    AUDIT_FOLDER,
    AUDIT_MARK,
    CATALOG_FILE,
    LEDGER_FILE,
    SECRET_FILE,
    TOKENS_FILE,
)
from moorage.storage.sqlite import facts as facts_file
from moorage.storage.sqlite import records as records_file
from moorage.storage.sqlite.fact_tables import FactTables
from moorage.storage.sqlite.fencing import LABEL as FENCING
from moorage.storage.sqlite.fencing import fencing_path
from moorage.storage.sqlite.files import (
    OWNER_ONLY,
    check_pages,
    connect,
    connect_to_look,
    owner_only,
    sync_directory,
    translate_errors,
)
from moorage.storage.sqlite.marks import DurableMark, Found, read_mark
from moorage.storage.sqlite.records import RecordTables
from moorage.storage.sqlite.shared_file import (
    SqliteTokens,
    lost_tokens,
    remember_tokens,
    tokens_mark,
)
from moorage.storage.sqlite.storage import read_secret, write_secret

_FREE_BYTES_MIN: Final = 64 << 10
"""If a copy fails and fewer bytes than this are free, the error says that the disk is full."""
UNFINISHED: Final = "unfinished"
"""A file in a folder that is being filled. The process that fills the folder locks this file."""


def is_filled(folder: Path) -> bool:
    """Return whether a path exists and is not an empty folder."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def refuse_unfinished(folder: Path) -> None:
    """Raise an error if a folder is an unfinished copy, or is empty beside its unfinished copy.

    Raises:
        StorageError: The copy is being made, or its command was killed.
    """
    try:
        copy = folder if is_filled(folder) else _staging(folder)
        unfinished = (copy / UNFINISHED).exists()
    except PermissionError:  # Opening a file of the folder raises a better error.
        return
    if unfinished:
        raise StorageError(
            f"{copy} is an unfinished copy: `moored backup`, `moored restore` or `moored storage "
            "copy` is still writing it, or was killed. Wait, or run that command again, or delete "
            "the folder."
        )


def _staging(target: Path) -> Path:
    return target.with_name(target.name + ".new")


@contextlib.contextmanager
def stage(target: Path) -> Iterator[Path]:
    """Yield a folder to fill; then rename it to `target`, durably, or delete it on failure.

    A folder that a killed process left is emptied and filled again.

    Raises:
        StorageError: The target is not empty or is a mount point, another process is filling it, or
            its disk is full.
        OSError: A file cannot be written.
    """
    if is_filled(target):
        raise StorageError(f"The folder {target} is not empty. Give a new or an empty folder.")
    if target.is_mount():
        way = "Give a folder within it, and move the files up afterwards."
        raise StorageError(f"{target} is a mount point, which no folder can replace. {way}")
    new = _staging(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        new.mkdir(mode=0o700)
    mark = new / UNFINISHED
    # A server of an older release may have run in an unfinished copy.
    if is_filled(new) and (not mark.exists() or any(map(_is_of_server, new.iterdir()))):
        raise StorageError(f"{new} is in the way: another program made it. Move it away.")
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    try:
        _claim(descriptor, new)
        _empty(new)
        try:
            yield new
            for each in new.iterdir():
                _sync(each)
            mark.unlink()
            sync_directory(new)
            new.rename(target)  # This may replace an empty folder, but no filled one.
        except BaseException as error:
            full = shutil.disk_usage(new).free < _FREE_BYTES_MIN
            shutil.rmtree(new, ignore_errors=True)
            if full and isinstance(error, Exception):
                room = "Make room there, or give another folder."
                raise StorageError(f"The disk of {target} is full. {room}") from error
            raise
        sync_directory(target.parent)
    finally:
        os.close(descriptor)


def _claim(descriptor: int, new: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StorageError(f"{new} is being written by another process.") from None


def _is_of_server(path: Path) -> bool:
    """Return whether a path is a folder that no copy makes: a server locks its audit log."""
    return path.is_dir() and not (path.name == AUDIT_FOLDER and not (path / "lock").exists())


def _empty(new: Path) -> None:
    new.chmod(0o700)
    for each in new.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != UNFINISHED:
            each.unlink()


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_folder(data: Path, target: Path, *, fencing_skip: int = 0) -> int:
    """Copy the necessary files of a server, which may be running.

    Each file is copied as of one moment, and after the files that refer to it. The ledger is first:
    its leases and waiting requests name clusters and policies that were in the catalog before, so a
    later catalog has them, or a user removed them, and the next start accepts that. A ledger copied
    after the catalog could have leases on clusters that the catalog lacks, and a start would revoke
    these. Fencing numbers come after the ledger, since they are reserved before a grant is stored.
    Agents are registered before their nodes, so agents come after the catalog. Tokens are last, so
    that a token that is revoked during the copy is revoked in the copy. The secret never changes.

    Args:
        data: The data folder of a server.
        target: An empty folder.
        fencing_skip: How many fencing numbers the copy skips.

    Returns:
        The last fencing number that the copy skips.

    Raises:
        StorageError: A file is damaged, missing, or cannot be written.
        OSError: A file cannot be read or written.
    """
    write_secret(target / SECRET_FILE, read_secret(data / SECRET_FILE))
    _copy_ledger(data / LEDGER_FILE, target / LEDGER_FILE)
    reserved = read_mark(fencing_path(data / LEDGER_FILE), FENCING)
    if not reserved.known:
        raise StorageCorrupt(str(data), reserved.doubt)
    fencing = reserved.first + fencing_skip
    DurableMark(fencing_path(target / LEDGER_FILE), FENCING, fencing, 0, reserved.writes).close()
    _copy_catalog(data / CATALOG_FILE, target / CATALOG_FILE)
    _copy_shared(data / AGENTS_FILE, target / AGENTS_FILE)
    _copy_tokens(data / TOKENS_FILE, target / TOKENS_FILE)
    return fencing


def _copy_tokens(source: Path, copy: Path) -> None:
    was_marked = tokens_mark(source).exists()  # Before the copy: tokens may come during it.
    _copy_shared(source, copy)
    has_tokens = False
    if copy.exists():
        with closing(SqliteTokens(copy)) as tokens:
            has_tokens = bool(tokens.rows())
    if has_tokens:
        remember_tokens(copy)
    elif was_marked:
        raise StorageError(lost_tokens(source))


def _copy_shared(source: Path, copy: Path) -> None:
    if not source.exists():
        return
    with translate_errors(str(source)):
        _copy(source, copy)
        with closing(connect_to_look(copy)) as copied:
            for line in check_pages(copied, 1):
                raise StorageCorrupt(str(source), line)


def copy_audit(data: Path, target: Path) -> None:
    """Copy the files of the audit log, if there are any, durably, from a folder without a server.

    Raises:
        OSError: A file cannot be read or written.
    """
    if (data / AUDIT_MARK).exists():
        shutil.copyfile(data / AUDIT_MARK, target / AUDIT_MARK)
        (target / AUDIT_MARK).chmod(OWNER_ONLY)
    files = sorted((data / AUDIT_FOLDER).glob("[0-9]*.jsonl"))
    if files:
        (target / AUDIT_FOLDER).mkdir(mode=0o700)
    for each in files:
        copied = target / AUDIT_FOLDER / each.name
        shutil.copy2(each, copied)  # A file's age says when it is deleted.
        copied.chmod(OWNER_ONLY)
        _sync(copied)


def _copy_ledger(source: Path, copy: Path) -> None:
    place = facts_file.place_of(source)
    with translate_errors(place):
        found = read_mark(facts_file.mark_path(source), facts_file.LABEL)
        _check_mark(place, found)
        _copy(source, copy)
        with closing(connect_to_look(copy)) as connection:
            tables = FactTables(connection)
            if lacking := facts_file.missing(tables, found, new=tables.is_new(place)):
                raise StorageCorrupt(place, lacking)
            last = tables.last_seq()
            numbers = (last, tables.chain_of(last) or 0, found.writes)
        DurableMark(facts_file.mark_path(copy), facts_file.LABEL, *numbers).close()


def _copy_catalog(source: Path, copy: Path) -> None:
    place = records_file.place_of(source)
    with translate_errors(place):
        found = read_mark(records_file.mark_path(source), records_file.LABEL)
        _check_mark(place, found)
        _copy(source, copy)
        with closing(connect_to_look(copy)) as connection:
            changes = RecordTables(connection).commits()
        if changes < found.first:
            raise StorageCorrupt(place, f"the file has {changes} of {found.first} changes")
        numbers = (changes, 0, found.writes)
        DurableMark(records_file.mark_path(copy), records_file.LABEL, *numbers).close()


def _check_mark(place: str, mark: Found) -> None:
    if not mark.known:
        raise StorageCorrupt(place, mark.doubt)


def _copy(source: Path, copy: Path) -> None:
    """Copy a database as of one moment, into one file without a log."""
    owner_only(copy)
    with closing(connect_to_look(source)) as before, closing(connect(copy)) as after:
        before.backup(after)
        after.execute("PRAGMA journal_mode = DELETE")
