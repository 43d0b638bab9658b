"""Opens the database that the configuration names."""

from collections.abc import Callable
from pathlib import Path

from moorage.extras import install_command
from moorage.storage.base import Storage, StorageError
from moorage.storage.sqlite import LEDGER_FILE
from moorage.storage.sqlite.backup import refuse_unfinished
from moorage.storage.sqlite.lock import WriterLock
from moorage.storage.sqlite.storage import SqliteStorage


def open_storage(address: str, folder: Path, *, looks: bool = False) -> Storage:
    """Return a server's storage: PostgreSQL at the address, or the folder if the address is empty.

    Args:
        address: Address of the database, or empty.
        folder: The data folder.
        looks: Whether tokens, agents and logins in the folder are only read, and no file is made.

    Raises:
        StorageError: The extra `postgres` is missing, the address is invalid, or the folder is an
            unfinished copy.
    """
    if not address:
        refuse_unfinished(folder)
        return SqliteStorage(folder, looks=looks)
    need_postgres()
    from moorage.storage.postgres.storage import PostgresStorage  # noqa: PLC0415  # An extra.

    return PostgresStorage(address)


def claim_folder(address: str, folder: Path) -> Callable[[], None]:
    """Keep servers of other databases out of a data folder; return a function that ends this.

    If the address is empty, the ledger in the folder has a lock of its own.

    Raises:
        StorageLocked: A server of another database uses the folder.
        StorageError: The address is invalid, or the folder cannot be locked.
    """
    if not address:
        return lambda: None
    from moorage.storage.postgres.connection import place_of  # noqa: PLC0415  # An extra.

    lock = WriterLock(folder / LEDGER_FILE)
    lock.share(place_of(address))
    return lock.release


def need_postgres() -> None:
    """Raise an error if the extra `postgres` is not installed.

    Raises:
        StorageError: The extra is missing.
    """
    try:
        import psycopg  # noqa: F401, PLC0415  # Whether it is there.
    except ImportError as error:  # Without libpq, psycopg raises another than ModuleNotFoundError.
        way = f"{install_command('postgres')}, or leave out storage"
        raise StorageError(f"storage needs psycopg: {way}") from error
