"""The backend's notes on this machine: the server's own id, and the regions it has used."""

import json
import os
import threading
import uuid
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError

_FILE: Final = "server.json"


class Identity:
    """A folder that outlives the daemon. Two backends over one: a daemon before and after a crash.

    Args:
        folder: Made when something is first written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._server = ""
        self._regions: set[str] = set()

    @property
    def server(self) -> str:
        """The server's id in tags; drawn at its first use."""
        with self._lock:
            if not self._server:
                self._read()
            return self._server

    def regions(self) -> list[str]:
        """Return the regions where something may run."""
        with self._lock:
            if not self._server:
                self._read()
            return sorted(self._regions)

    def enter(self, region: str) -> None:
        """Note a region before anything is started there; durable when it returns."""
        with self._lock:
            if not self._server:
                self._read()
            if region not in self._regions:
                self._write(self._regions | {region})

    def _read(self) -> None:
        path = self.folder / _FILE
        try:
            document = json.loads(path.read_text())
            self._server, self._regions = str(document["server"]), set(document["regions"])
        except FileNotFoundError:
            self._server = uuid.uuid4().hex
            self._write(set())
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = "it says which instances at AWS are this server's; restore it from a backup"
            raise BackendError(f"{path} cannot be read ({error}): {reason}") from error

    def _write(self, regions: set[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.folder / f"{_FILE}.draft"
        with draft.open("w") as file:
            json.dump({"server": self._server, "regions": sorted(regions)}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.folder / _FILE)
        entry = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
        self._regions = regions
