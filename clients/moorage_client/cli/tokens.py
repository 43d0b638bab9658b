"""The file with the lease tokens that `moorage ask` and `moorage run` received."""

import time
from pathlib import Path
from typing import Final

from moorage_client.answers import Lease
from moorage_client.endpoint import setting
from moorage_client.home import HomeMissing
from moorage_client.state_file import Entries, StateFile, StateUnusable, state_folder

LEASES_MAX: Final = 10_000
"""Maximum leases in the file; beyond this, the leases that end first are dropped."""

KEPT_SECONDS: Final = 7 * 24 * 3600.0
"""Seconds from a lease's known end until its entry is dropped: another program may have renewed it.
"""


def state_path() -> Path:
    """Return the file: `MOORAGE_STATE`, else `leases.json` under `XDG_STATE_HOME`/moorage.

    Raises:
        StateUnusable: The file would be in the home folder, but this user has none.
    """
    if given := setting(None, "MOORAGE_STATE"):
        return Path(given)
    try:
        return state_folder("name a file for lease tokens with MOORAGE_STATE") / "leases.json"
    except HomeMissing as missing:
        raise StateUnusable(str(missing)) from None


class TokenFile:
    """The tokens of the leases that this user requested on this machine.

    Args:
        path: The file; a missing file counts as empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        remedy = "move it away, or name another with MOORAGE_STATE"
        self._file = StateFile(path, "leases", "lease tokens", remedy)

    def token(self, lease: str) -> str | None:
        """Return the token of a lease, or None.

        Raises:
            StateUnusable: The file exists but cannot be read.
        """
        token = self._file.read().get(lease, {}).get("token")
        return None if token is None else str(token)

    def keep(self, lease: Lease, url: str) -> None:
        """Store the token of a lease.

        Raises:
            StateUnusable: The file cannot be changed.
        """
        entry = {"token": lease.token, "url": url, "expires_at": lease.expires_at}
        self._file.change(lambda entries: _prune({**entries, lease.id: entry}))

    def note_renewal(self, lease: Lease) -> None:
        """Store the new end of a stored lease. Errors are those of `keep`."""

        def note(entries: Entries) -> Entries:
            if lease.id in entries:
                entries[lease.id]["expires_at"] = lease.expires_at
            return _prune(entries)

        self._file.change(note)


def _prune(entries: Entries) -> Entries:
    """Return at most `LEASES_MAX` entries, without leases that ended long ago."""
    oldest = time.time() - KEPT_SECONDS
    ends = {lease: float(entry.get("expires_at") or 0.0) for lease, entry in entries.items()}
    leases = sorted((lease for lease in entries if ends[lease] > oldest), key=ends.__getitem__)
    return {lease: entries[lease] for lease in leases[-LEASES_MAX:]}
