"""A private JSON file that commands of one user share; a change locks and replaces all of it."""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moorage.records.json_values import JsonObject
from moorage_client.errors import MoorageError
from moorage_client.home import home

LOCK_SECONDS_MAX: Final = 15.0
"""Seconds to wait for other commands that write; another command may be waiting for an issuer."""

_LOCK_PAUSE_SECONDS: Final = 0.02

Entries = dict[str, JsonObject]


class StateUnusable(MoorageError):  # noqa: N818  # As the rest of the tree.
    """A file of this user cannot be read or written."""


def state_folder(remedy: str) -> Path:
    """Return the folder of clients: `XDG_STATE_HOME`/moorage, else in the home folder.

    Args:
        remedy: Advice in the error for a user without a home folder.

    Raises:
        HomeMissing: This user has no home folder.
    """
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "moorage"
    return home(remedy) / ".local" / "state" / "moorage"


class StateFile:
    """A JSON file that maps names to objects.

    Args:
        path: The file; a missing file counts as empty.
        key: The top-level key of the file whose value is the mapping.
        what: Name of the objects, for errors.
        remedy: A sentence with the remedy if the file has other contents.
    """

    def __init__(self, path: Path, key: str, what: str, remedy: str) -> None:
        self.path = path
        self._key = key
        self._what = what
        self._remedy = remedy

    def read(self) -> Entries:
        """Return all objects.

        Raises:
            StateUnusable: The file exists but cannot be read.
        """
        try:
            document = json.loads(self.path.read_bytes())
            return {str(name): dict(entry) for name, entry in document[self._key].items()}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StateUnusable(f"cannot read {self.path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateUnusable(
                f"{self.path} is not a file of {self._what}; {self._remedy}"
            ) from error

    def change(self, change: Callable[[Entries], Entries]) -> None:
        """Replace all objects by the result of `change`, under the lock.

        Raises:
            StateUnusable: The file cannot be changed.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._hold_lock():
                self._write(change(self.read()))
        except OSError as error:
            raise StateUnusable(f"cannot write {self.path}: {error.strerror}") from error

    def _write(self, entries: Entries) -> None:
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(file, "w", encoding="utf-8") as writer:
                os.fchmod(writer.fileno(), 0o600)  # A leftover file may have other rights.
                json.dump({"version": 1, self._key: entries}, writer, indent=1)
            fresh.replace(self.path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        # The lock is a file of its own, since the file itself is replaced.
        path = self.path.with_name(f"{self.path.name}.lock")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            give_up_at = time.monotonic() + LOCK_SECONDS_MAX
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= give_up_at:
                        raise StateUnusable(f"{path} stayed locked by another command") from None
                    time.sleep(_LOCK_PAUSE_SECONDS)  # flock has no time limit.
            yield
        finally:
            os.close(lock)
