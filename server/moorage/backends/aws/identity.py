"""`Identity`: the server's id in tags of instances, and the regions that may have instances."""

import json
import os
import threading
import uuid
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError
from moorage.backends.local import workload_store
from moorage.records.json_values import JsonObject
from moorage.storage.base import SharedNames, StorageError

_FILE: Final = "server.json"
_ID: Final = "aws id"
_REGION: Final = "aws region "


class Identity:
    """The server's id and its regions, in a folder that outlives the daemon.

    Args:
        folder: Created at the first write.
        names: Shares the id and the regions with later leaders; None: this server is alone.
    """

    def __init__(self, folder: Path, names: SharedNames | None = None) -> None:
        self.folder = folder
        self._names = names
        self._lock = threading.Lock()
        self._server = ""
        self._regions: set[str] = set()

    @property
    def server(self) -> str:
        """The server's id in tags; created at random at its first use."""
        with self._lock:
            self._read()
            return self._server

    def regions(self) -> list[str]:
        """Return the regions in which this server, or a former leader, may have instances."""
        with self._lock:
            self._read()
            return sorted(self._regions)

    def enter(self, region: str) -> None:
        """Store a region before an instance is launched there; durable when this returns.

        Raises:
            BackendError: The region cannot be stored.
        """
        with self._lock:
            self._read()
            if region not in self._regions:
                self._write(*self._agree(self._server, self._regions | {region}))

    def _read(self) -> None:
        if self._server:
            return
        path = self.folder / _FILE
        stored, damage = None, None
        try:
            document = json.loads(path.read_text())
            stored = str(document["server"]), {str(each) for each in document["regions"]}
        except FileNotFoundError:
            pass  # This server has launched nothing yet.
        except (OSError, ValueError, KeyError, TypeError) as error:
            damage = error
        server, regions = stored or ("" if damage else uuid.uuid4().hex, set[str]())
        joined = self._agree(server, regions)
        if not joined[0]:
            reason = "the file has the marks of this server's instances at AWS"
            way = "restore it from a backup"
            raise BackendError(f"{path} cannot be read ({damage}): {reason}; {way}") from damage
        if joined != stored:
            self._write(*joined)
        self._server, self._regions = joined

    def _agree(self, server: str, regions: set[str]) -> tuple[str, set[str]]:
        """Return the id and the regions that all servers of the database use.

        Args:
            server: The id of this server, which becomes the shared id if there is none; "" if this
                server does not know its id.
            regions: The regions of this server, which are stored for the next leader.

        Raises:
            BackendError: The database cannot be reached.
        """
        if self._names is None:
            return server, regions
        try:
            ids = self._names.agreed(_ID) or [server and self._names.agree(_ID, server)]
            shared = set(self._names.agreed(_REGION))
            for region in regions - shared:
                self._names.agree(f"{_REGION}{region}", region)
        except StorageError as error:
            raise BackendError(str(error)) from error
        return ids[0], regions | shared

    def _write(self, server: str, regions: set[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        document: JsonObject = {"server": server, "regions": sorted(regions)}
        workload_store.write(self.folder / _FILE, document)
        entry = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
        self._server, self._regions = server, regions
