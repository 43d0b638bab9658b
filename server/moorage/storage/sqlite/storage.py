"""The data folder as a storage, with the file of each kind of data."""

import secrets
from pathlib import Path

from moorage.storage.base import SECRET_BYTES, StorageError
from moorage.storage.sqlite import (
    AGENTS_FILE,
    CATALOG_FILE,
    LEDGER_FILE,
    LOGINS_FILE,
    SECRET_FILE,
    TOKENS_FILE,
)
from moorage.storage.sqlite.facts import SqliteFacts
from moorage.storage.sqlite.files import read_file, write_durably
from moorage.storage.sqlite.records import SqliteRecords
from moorage.storage.sqlite.shared_file import SqliteAgents, SqliteLogins, SqliteTokens


class SqliteStorage:
    """The data of a server in a folder; implements `storage.base.Storage`.

    Args:
        folder: The data folder, which exists.
        looks: Whether tokens, agents and logins are only read, and no file is made.
    """

    def __init__(self, folder: Path, *, looks: bool = False) -> None:
        self._folder = folder
        self._looks = looks

    def facts(self) -> SqliteFacts:
        return SqliteFacts(self._folder / LEDGER_FILE)

    def records(self) -> SqliteRecords:
        return SqliteRecords(self._folder / CATALOG_FILE)

    def tokens(self) -> SqliteTokens:
        return SqliteTokens(self._folder / TOKENS_FILE, looks=self._looks)

    def agents(self) -> SqliteAgents:
        return SqliteAgents(self._folder / AGENTS_FILE, looks=self._looks)

    def logins(self) -> SqliteLogins:
        return SqliteLogins(self._folder / LOGINS_FILE, looks=self._looks)

    def audit(self) -> None:
        return

    def election(self) -> None:
        """Return None: one process has the lock of the files; see `Storage.election`."""

    def followed(self) -> None:
        """Return None: no other server reads the folder; see `Storage.followed`."""

    def names(self) -> None:
        """Return None: no other server uses the folder; see `Storage.names`."""

    def has_records(self) -> bool:
        return (self._folder / CATALOG_FILE).exists()

    def secret(self) -> bytes:
        path = self._folder / SECRET_FILE
        try:
            return read_secret(path)
        except FileNotFoundError:
            return write_secret(path, secrets.token_bytes(SECRET_BYTES))


def read_secret(path: Path) -> bytes:
    """Return the secret from which the tokens of leases are derived.

    Raises:
        FileNotFoundError: There is no secret.
        StorageError: The secret is damaged or cannot be read.
    """
    try:
        secret = read_file(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from error
    if len(secret) != SECRET_BYTES:
        raise StorageError(
            f"{path} is damaged: it has {len(secret)} bytes, and {SECRET_BYTES} were written. "
            "Restore it from a backup. Or delete it: the next start makes a new one. Leases and "
            "their tokens stay valid, but a client that lost the token of its lease cannot get "
            "another."
        )
    return secret


def write_secret(path: Path, secret: bytes) -> bytes:
    """Store a secret so that it survives a power cut, and return it.

    Raises:
        OSError: The file cannot be written.
    """
    write_durably(path, secret)
    return secret
