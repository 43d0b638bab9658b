"""What the backend keeps on this machine: the server's own id, and which workloads were ready.

Ray forgets an actor that has ended, and a cluster that is started again forgets all. So a workload
that was ready and that Ray no longer knows has ended, and is not started a second time.
"""

import hashlib
import json
import os
import threading
import uuid
from pathlib import Path
from typing import Final, Literal

from moorage.backends.base import BackendError

__all__ = ["Records"]

State = Literal["ready", "unwanted"]
_SERVER: Final = "server.json"


class Records:
    """A folder that outlives the daemon. Two backends over one: a daemon before and after a crash.

    Args:
        folder: Made when something is first written.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._server = ""
        self._known: dict[str, State] | None = None

    def server(self) -> str:
        """Return the id that actors' names begin with; drawn when it is first needed."""
        with self._lock:
            if not self._server:
                path = self.folder / _SERVER
                try:
                    self._server = str(json.loads(path.read_text())["server"])
                except FileNotFoundError:
                    self._server = f"moorage-{uuid.uuid4().hex[:12]}"
                    self._write(path, {"server": self._server})
                except (OSError, ValueError, KeyError, TypeError) as error:
                    reason = "it says which actors on Ray are this server's; restore it"
                    raise BackendError(f"{path} cannot be read ({error}): {reason}") from error
            return self._server

    def all(self) -> dict[str, State]:
        """Return workloads that were ready, and such that are to be ended when Ray answers."""
        with self._lock:
            return dict(self._loaded())

    def state(self, workload: str) -> State | None:
        """Return what is noted of a workload."""
        with self._lock:
            return self._loaded().get(workload)

    def note(self, workload: str, state: State) -> None:
        """Note it; durable when this returns."""
        with self._lock:
            if self._loaded().get(workload) != state:
                self._write(self._path(workload), {"workload": workload, "state": state})
                self._loaded()[workload] = state

    def forget(self, workload: str) -> None:
        """Note no more of a workload."""
        with self._lock:
            if self._loaded().pop(workload, None) is not None:
                self._path(workload).unlink(missing_ok=True)

    def _path(self, workload: str) -> Path:
        digest = hashlib.sha256(workload.encode()).hexdigest()[:32]
        return self.folder / "workloads" / f"{digest}.json"

    def _loaded(self) -> dict[str, State]:
        if self._known is None:
            self._known = {}
            for path in (self.folder / "workloads").glob("*.json"):
                try:
                    document = json.loads(path.read_text())
                    self._known[str(document["workload"])] = document["state"]
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise BackendError(f"{path} cannot be read ({error}): remove it") from error
        return self._known

    def _write(self, path: Path, document: dict[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_suffix(".draft")
        with draft.open("w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
