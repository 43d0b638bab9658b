"""Opens the database that the configuration names."""

from pathlib import Path

from moorage.extras import install_command
from moorage.storage.base import Storage, StorageError
from moorage.storage.sqlite.backup import refuse_unfinished
from moorage.storage.sqlite.storage import SqliteStorage


def open_storage(address: str, folder: Path) -> Storage:
    """Return a server's storage: PostgreSQL at the address, or the folder if the address is empty.

    Raises:
        StorageError: The extra `postgres` is missing, the address is invalid, or the folder is an
            unfinished copy.
    """
    if not address:
        refuse_unfinished(folder)
        return SqliteStorage(folder)
    need_postgres()
    from moorage.storage.postgres.storage import PostgresStorage  # noqa: PLC0415  # An extra.

    return PostgresStorage(address)


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
