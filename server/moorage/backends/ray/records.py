"""Stores the server's id and the workloads that were ready, on this machine.

Ray forgets ended actors, and a restarted cluster forgets all. So a workload that was ready and that
Ray no longer knows counts as ended, and is not started a second time.
"""

import contextlib
import hashlib
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from moorage.backends.base import BackendError
from moorage.backends.local import workload_store
from moorage.records.json_values import JsonMapping, JsonObject

OUTPUTS_MAX: Final = 200
"""Maximum stopped workloads whose output is stored, up to a MiB each."""
_SERVER: Final = "server.json"


class Records:
    """The server's id, ready workloads and stored output, in a folder that outlives the daemon.

    Args:
        folder: Created at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._server = ""
        self._known: dict[str, JsonObject | None] | None = None

    def server(self) -> str:
        """Return the server's random, stored id, with which its actors' names begin."""
        with self._lock:
            if not self._server:
                path = self.folder / _SERVER
                try:
                    self._server = str(json.loads(path.read_text())["server"])
                except FileNotFoundError:
                    self._server = f"moorage-{uuid.uuid4().hex[:12]}"
                    self._write(path, {"server": self._server})
                except (OSError, ValueError, KeyError, TypeError) as error:
                    reason = "the file has the marks of this server's actors on Ray; restore it"
                    raise BackendError(f"{path} cannot be read ({error}): {reason}") from error
            return self._server

    def join(self, agree: Callable[[str], str]) -> None:
        """Store the id on which all servers of one database agree; see `SharedNames`."""
        own = self.server()
        if (server := agree(own)) != own:
            self._write(self.folder / _SERVER, {"server": server})
            self._server = server

    def ready(self) -> set[str]:
        """Return the workloads that were ready and were not stopped since."""
        with self._lock:
            return set(self._load())

    def shapes(self) -> dict[str, JsonObject]:
        """Return the shape of each workload, except those stored by an older release."""
        with self._lock:
            return {name: shape for name, shape in self._load().items() if shape is not None}

    def note(self, workload: str, shape: JsonObject) -> None:
        """Store durably that a workload was ready, with its shape."""
        with self._lock:
            if workload not in self._load():
                self._write(self._path(workload), {"workload": workload, "shape": shape})
                self._load()[workload] = shape

    def forget(self, workload: str) -> None:
        """Delete the record that a workload was ready."""
        with self._lock:
            self._path(workload).unlink(missing_ok=True)
            self._load().pop(workload, None)

    def archive(self, workload: str, output: JsonMapping) -> None:
        """Store the output of a stopped workload; delete the oldest output beyond `OUTPUTS_MAX`."""
        name = f"{self._path(workload).stem}.{int(output['attempt'])}.json"
        folder = self.folder / "output"
        self._write(folder / name, dict(output))
        with self._lock:  # Two calls at a time would delete too much.
            files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for old in files[:-OUTPUTS_MAX]:
                old.unlink(missing_ok=True)

    def archived(self, workload: str) -> dict[int, JsonObject]:
        """Return the stored output of a workload, by attempt."""
        found = {}
        for path in (self.folder / "output").glob(f"{self._path(workload).stem}.*.json"):
            with contextlib.suppress(FileNotFoundError):  # Just deleted as the oldest.
                document: JsonObject = json.loads(path.read_text())
                found[int(document["attempt"])] = document
        return found

    def _path(self, workload: str) -> Path:
        digest = hashlib.sha256(workload.encode()).hexdigest()[:32]
        return self.folder / "workloads" / f"{digest}.json"

    def _load(self) -> dict[str, JsonObject | None]:
        if self._known is None:
            self._known = {}
            for path in (self.folder / "workloads").glob("*.json"):
                try:
                    noted = json.loads(path.read_text())
                    self._known[str(noted["workload"])] = noted.get("shape")
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise BackendError(f"{path} cannot be read ({error}): remove it") from error
        return self._known

    def _write(self, path: Path, document: JsonMapping) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        workload_store.write(path, document)
