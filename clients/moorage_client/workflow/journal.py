"""The journal of a run: a file of JSON lines, from which a restarted program continues the run.

A line `asked` with a key is written and fsynced before a lease is requested with this key. So a
program that is killed and started again with the same journal requests the lease with the same key,
and gets the lease that it already has. One fsync covers all lines that wait for it.

| `event` | Fields | Written |
|---|---|---|
| `run` | `id`, `graph` | first; the graph as a digest of its nodes and edges |
| `asked` | `node`, `key` | before a lease is requested |
| `granted` | `node`, `key`, `lease`, `token` | after the lease is granted |
| `released` | `node`, `key` | after the lease ended or was refused; then a new key is used |
| `completed` | `node`, `result` | after the task returned; a result that is not JSON is left out |

A crash can leave an incomplete last line: it is ignored, and removed before the next line.
"""

import fcntl
import hashlib
import json
import os
import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Self

from moorage.records.json_values import JsonMapping, JsonObject
from moorage_client.workflow.errors import JournalError
from moorage_client.workflow.graph import Shape
from moorage_client.workflow.growth import Result

BATCH_MAX: Final = 1000
"""Maximum lines that one fsync makes durable."""

_MODE: Final = 0o600  # It has the tokens of leases.


@dataclass(slots=True)
class _Node:
    """The journal entries of one node."""

    key: str = ""
    asks: int = 0
    lease: str = ""
    token: str = ""
    completed: bool = False
    result: Result = None


@dataclass(slots=True)
class _History:
    """The run id, the graph and the nodes that a journal records."""

    run: str = ""
    graph: str = ""
    nodes: dict[str, _Node] = field(default_factory=dict)

    def tell(self, line: JsonMapping) -> None:
        """Apply one line of the journal."""
        if line["event"] == "run":
            self.run, self.graph = line["id"], line["graph"]
            return
        node = self.nodes.setdefault(line["node"], _Node())
        match line["event"]:
            case "asked":
                node.key, node.asks = line["key"], node.asks + 1
            case "granted":
                node.lease, node.token = line["lease"], line["token"]
            case "released":
                if line["key"] == node.key:
                    node.key = node.lease = node.token = ""
            case "completed":
                node.completed, node.result = True, line.get("result")
            case unknown:
                raise KeyError(unknown)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A lease that a killed program still holds for a node that has completed."""

    node_name: str
    key: str
    lease: str
    token: str


class RunJournal:
    """The journal of one graph: `with RunJournal("training.journal") as journal:`.

    Give the journal to an executor. Nodes that completed in an earlier run with this journal are
    CACHE_HIT and do not run again. Nodes that were running when the program was killed run again,
    under the lease that they still have. Only one program at a time may have the journal open. Safe
    to use from any thread.

    Args:
        path: The file. A new file is readable only for its owner.

    Raises:
        JournalError: The file cannot be read or written, is not a journal, or is open in another
            program.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._lines: SimpleQueue[tuple[bytes, Future[None]] | None] = SimpleQueue()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
        except OSError as error:
            raise JournalError(f"journal {self.path}: {error.strerror}") from error
        try:
            self._history = self._read()
        except BaseException:
            os.close(self._file)
            raise
        self._writer = threading.Thread(target=self._write, name="moorage-journal", daemon=True)
        self._open, self._closed = True, False
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until every line is durable, and close the file; a second close does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._open = True, False
        self._lines.put(None)
        self._writer.join()
        os.close(self._file)

    def begin(self, shape: Shape) -> JsonObject:
        """Begin or continue the run of a graph; return the completed nodes with their results.

        Raises:
            JournalError: The journal belongs to another graph.
        """
        digest = hashlib.sha256(json.dumps([shape.names, shape.following]).encode()).hexdigest()
        with self._lock:
            if self._history.graph not in ("", digest):
                raise JournalError(
                    f"journal {self.path} belongs to another graph; "
                    "take another file, or remove this one if none of its tasks still runs"
                )
            new = not self._history.graph
        if new:
            self._tell(event="run", id=uuid.uuid4().hex, graph=digest).result()
        nodes = self._history.nodes
        return {name: node.result for name, node in nodes.items() if node.completed}

    def next_key(self, node_name: str) -> tuple[str, Future[None]]:
        """Return the key for a node's next lease, and a future that ends when the key is durable.

        The key is that of the node's last line `asked`, unless a line `released` also has this key.
        """
        with self._lock:
            node = self._history.nodes.get(node_name, _Node())
            if node.key:
                done: Future[None] = Future()
                done.set_result(None)
                return node.key, done
            name = hashlib.sha256(node_name.encode()).hexdigest()[:16]
            key = f"{self._history.run}-{name}-{node.asks + 1}"
        return key, self._tell(event="asked", node=node_name, key=key)

    def write_grant(self, node_name: str, key: str, lease: str, token: str) -> Future[None]:
        """Record the lease that was granted for a key."""
        return self._tell(event="granted", node=node_name, key=key, lease=lease, token=token)

    def write_release(self, node_name: str, key: str) -> Future[None]:
        """Record that a key's lease has ended or was refused."""
        return self._tell(event="released", node=node_name, key=key)

    def completed(self, node_name: str, result: Result) -> Future[None]:
        """Record that a node completed, with its result if the result is plain JSON."""
        try:
            json.dumps(result)
        except (TypeError, ValueError, RecursionError):
            return self._tell(event="completed", node=node_name)
        return self._tell(event="completed", node=node_name, result=result)

    def leftovers(self) -> list[Leftover]:
        """Return the leases of completed nodes that a killed program did not release."""
        with self._lock:
            return [
                Leftover(name, node.key, node.lease, node.token)
                for name, node in self._history.nodes.items()
                if node.completed and node.lease
            ]

    def _tell(self, **line: Any) -> Future[None]:
        """Add a line to the journal; return a future that ends when the line is durable."""
        durable: Future[None] = Future()
        with self._lock:
            if not self._open:
                raise JournalError(f"journal {self.path} is closed, or could not be written")
            self._history.tell(line)
            self._lines.put((json.dumps(line).encode() + b"\n", durable))
        return durable

    def _write(self) -> None:
        """Write and fsync all waiting lines at once, in the journal's thread."""
        while (first := self._lines.get()) is not None:
            batch = [first]
            ends = False
            while len(batch) < BATCH_MAX and not self._lines.empty():
                line = self._lines.get()
                if line is None:
                    ends = True
                    break
                batch.append(line)
            try:
                _write_all(self._file, b"".join(text for text, _ in batch))
                os.fsync(self._file)
            except OSError as error:
                with self._lock:  # Threads that found the journal open have queued their lines.
                    self._open = False
                failed = JournalError(f"journal {self.path}: {error.strerror}")
                for _, durable in batch:
                    durable.set_exception(failed)
                self._fail_rest(failed)
                return
            for _, durable in batch:
                durable.set_result(None)
            if ends:
                return

    def _fail_rest(self, failed: JournalError) -> None:
        while not self._lines.empty():
            line = self._lines.get()
            if line is not None:
                line[1].set_exception(failed)

    def _read(self) -> _History:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise JournalError(
                f"journal {self.path} is open already; one program at a time may use it"
            ) from error
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):  # A crash cut the last line short; no code acted on that line.
            os.ftruncate(self._file, whole)
        history = _History()
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                history.tell(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise JournalError(
                    f"journal {self.path}, line {number}: expected an event of a run, "
                    f"got {line[:80]!r}"
                ) from error
        return history


def _write_all(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]
