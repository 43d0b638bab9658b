"""The file where `moorage ask` and `run` keep the tokens of leases, so that no user pastes them.

Private (0600), replaced atomically, changed under a lock: many commands may run at once.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from moorage_client.answers import Lease
from moorage_client.cli.exits import TokenMissing
from moorage_client.endpoint import setting
from moorage_client.home import HomeMissing, home

LEASES_MAX: Final = 10_000
"""Leases in the file; beyond it those that ended first are forgotten."""

KEPT_SECONDS: Final = 7 * 24 * 3600.0
"""An entry is forgotten this long after its lease ran out: others may have renewed it."""

LOCK_SECONDS_MAX: Final = 5.0
"""How long to wait for other commands that write."""

_LOCK_PAUSE_SECONDS: Final = 0.02

Entries = dict[str, dict[str, Any]]


class StateUnusable(TokenMissing):
    """The file of tokens cannot be read or written."""


def state_path() -> Path:
    """Return the file: `MOORAGE_STATE`, else `leases.json` under `XDG_STATE_HOME`/moorage.

    Raises:
        StateUnusable: It would lie in the home folder, and this user has none.

    """
    if given := setting(None, "MOORAGE_STATE"):
        return Path(given)
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "moorage" / "leases.json"
    try:
        folder = home("name a file for lease tokens with MOORAGE_STATE")
    except HomeMissing as missing:
        raise StateUnusable(str(missing)) from None
    return folder / ".local" / "state" / "moorage" / "leases.json"


class TokenFile:
    """The tokens of the leases that this user requested on this machine.

    Args:
        path: The file; missing is the same as empty.

    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def token(self, lease: str) -> str | None:
        """Return the token of a lease, or None.

        Raises:
            StateUnusable: The file is there, but cannot be read.

        """
        token = self._read().get(lease, {}).get("token")
        return None if token is None else str(token)

    def keep(self, lease: Lease, url: str) -> None:
        """Remember a lease.

        Raises:
            StateUnusable: The file cannot be changed.

        """
        entry = {"token": lease.token, "url": url, "expires_at": lease.expires_at}
        self._change(lambda entries: entries.__setitem__(lease.id, entry))

    def renewed(self, lease: Lease) -> None:
        """Note when a remembered lease now ends. Errors as `keep`."""

        def note(entries: Entries) -> None:
            if lease.id in entries:
                entries[lease.id]["expires_at"] = lease.expires_at

        self._change(note)

    def _read(self) -> Entries:
        try:
            document = json.loads(self.path.read_bytes())
            entries = document["leases"]
            return {str(lease): dict(entry) for lease, entry in entries.items()}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StateUnusable(f"cannot read {self.path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateUnusable(
                f"{self.path} is not a file of lease tokens; move it away, "
                "or name another with MOORAGE_STATE"
            ) from error

    def _change(self, change: Callable[[Entries], Any]) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                entries = self._read()
                change(entries)
                self._write(_pruned(entries))
        except OSError as error:
            raise StateUnusable(f"cannot write {self.path}: {error.strerror}") from error

    def _write(self, entries: Entries) -> None:
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(file, "w", encoding="utf-8") as writer:
                os.fchmod(writer.fileno(), 0o600)  # Also where the file was left over.
                json.dump({"version": 1, "leases": entries}, writer, indent=1)
            fresh.replace(self.path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
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
                    time.sleep(_LOCK_PAUSE_SECONDS)  # flock cannot wait with a bound.
            yield
        finally:
            os.close(lock)


def _pruned(entries: Entries) -> Entries:
    """Return the entries without those that are long over, at most `LEASES_MAX`."""
    oldest = time.time() - KEPT_SECONDS
    ends = {lease: float(entry.get("expires_at") or 0.0) for lease, entry in entries.items()}
    leases = sorted((lease for lease in entries if ends[lease] > oldest), key=ends.__getitem__)
    return {lease: entries[lease] for lease in leases[-LEASES_MAX:]}
