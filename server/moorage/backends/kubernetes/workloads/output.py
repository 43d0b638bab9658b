"""Reads the output of pods while they run, and stores it when they end.

A kubelet deletes the output together with the pod, and has no byte offsets. So the output of a pod
with a reader is followed from its start, and the end of each output is stored in a file before the
pod is deleted.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.backends.base import (
    LOG_BYTES_MAX,
    LOG_TAIL_LINES,
    Log,
    UnknownAttemptError,
    UnknownWorkloadError,
    exit_code,
)
from moorage.backends.kubernetes.connection import ClusterConnection
from moorage.backends.kubernetes.errors import KubernetesError, RefusedError
from moorage.backends.kubernetes.workloads import manifests
from moorage.backends.kubernetes.workloads.states import PodState
from moorage.records.json_values import JsonObject, JsonValue

KEPT_BYTES_MAX: Final = 4 * LOG_BYTES_MAX
"""Maximum bytes of a pod's output that are stored; older output is dropped."""
KEPT_STARTS_MAX: Final = 200
KEEP_SECONDS_MAX: Final = 5.0
"""Longest wait for the output of an ended pod; after that, the pod is deleted without it."""
IDLE_SECONDS_MAX: Final = 60.0
"""After this time without a reader, a pod's output is no longer followed."""
_NOT_YET: Final = 400


@dataclass(slots=True)
class _Tail:
    """The last part of an output: `data` begins at offset `base`."""

    data: bytearray = field(default_factory=bytearray)
    base: int = 0

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def add(self, piece: bytes) -> None:
        self.data += piece
        if len(self.data) > 2 * KEPT_BYTES_MAX:  # Rarely, since a cut moves all remaining bytes.
            self.cut()

    def cut(self) -> None:
        """Drop the oldest bytes beyond `KEPT_BYTES_MAX`."""
        spare = max(len(self.data) - KEPT_BYTES_MAX, 0)
        del self.data[:spare]
        self.base += spare

    def read(self, offset: int, *, over: bool, code: int | None) -> Log:
        """Return a piece of output from an offset on, or from the oldest stored byte after it."""
        start = max(self.end + offset, 0) if offset < 0 else offset
        start = min(max(start, self.base), self.end)
        piece = bytes(self.data[start - self.base :][:LOG_BYTES_MAX])
        last = over and start + len(piece) == self.end
        return Log.of(piece, start, over=last, exit_code=code if over else None)


@dataclass(slots=True)
class _Follower:
    tail: _Tail
    task: asyncio.Task[None]
    read_at: float


class PodOutput:
    """Reads and stores the output of one cluster's pods.

    Args:
        folder: Folder for the output of ended pods.
    """

    def __init__(self, connection: ClusterConnection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._followers: dict[str, _Follower] = {}

    def close(self) -> None:
        """Stop following the output of pods."""
        for each in self._followers.values():
            each.task.cancel()

    async def read(self, pod: PodState, offset: int) -> Log:
        """Return the output of a pod from an offset on; a negative offset counts from the end."""
        if pod.over:
            await self.keep(pod)
            return self.stored_log(pod.workload, offset, pod.attempt)
        if offset < 0 and pod.uid not in self._followers:
            return (await self._whole(pod)).read(offset, over=False, code=None)
        if pod.uid not in self._followers:  # The first reader gets all output so far.
            tail = await self._whole(pod)
        follower = self._followers.get(pod.uid)
        if follower is None or (follower.task.done() and follower.tail.end <= offset):
            tail = follower.tail if follower else tail
            follower = _Follower(tail, asyncio.create_task(self._follow(pod, tail)), 0.0)
            self._followers[pod.uid] = follower
        follower.read_at = time.monotonic()
        return follower.tail.read(offset, over=False, code=None)

    async def keep(self, pod: PodState) -> tuple[str, ...]:
        """Store the output of a pod in a file, and return its last lines.

        Stores an empty output if the kubelet does not send it in time.
        """
        place = self._place(pod.workload, pod.attempt)
        follower = self._followers.pop(pod.uid, None)
        if follower is not None:
            follower.task.cancel()
        if not place.exists():
            tail = follower.tail if follower else _Tail()
            with contextlib.suppress(KubernetesError, TimeoutError):
                async with asyncio.timeout(KEEP_SECONDS_MAX):
                    tail = await self._whole(pod)
            tail.cut()
            self._write(place, pod, tail)
        text = self.stored_log(pod.workload, -LOG_BYTES_MAX, pod.attempt).text
        return tuple(text.splitlines()[-LOG_TAIL_LINES:])

    def stored_log(self, workload: str, offset: int, attempt: int) -> Log:
        """Return the stored output of an ended start; attempt 0 means the last start.

        Raises:
            UnknownWorkloadError: No output of the workload is stored.
        """
        starts = {
            int(each.stem.rpartition("-")[2]): each
            for each in self._folder.glob(f"{_digest(workload)}-*.log")
        }
        place = starts.get(attempt or max(starts, default=0))
        if place is None:
            if starts:
                raise UnknownAttemptError(workload, tuple(sorted(starts)))
            raise UnknownWorkloadError(workload)
        head, _, data = place.read_bytes().partition(b"\n")
        about: JsonObject = json.loads(head)
        tail = _Tail(bytearray(data), about["base"])
        return tail.read(offset, over=True, code=about["exit_code"])

    def _write(self, place: Path, pod: PodState, tail: _Tail) -> None:
        code = exit_code(pod.ended[0]) if pod.over and pod.ended else None
        about = {"workload": pod.workload, "base": tail.base, "exit_code": code}
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = place.with_suffix(".draft")
        draft.write_bytes(json.dumps(about).encode() + b"\n" + tail.data)
        draft.replace(place)
        files = sorted(self._folder.glob("*.log"), key=lambda each: each.stat().st_mtime)
        for each in files[:-KEPT_STARTS_MAX]:
            each.unlink(missing_ok=True)

    def _place(self, workload: str, attempt: int) -> Path:
        return self._folder / f"{_digest(workload)}-{attempt}.log"

    async def _whole(self, pod: PodState) -> _Tail:
        tail = _Tail()
        await self._pour(pod, tail, 0)
        return tail

    async def _follow(self, pod: PodState, tail: _Tail) -> None:
        """Read a pod's output until it ends, the connection breaks, or no reader is left."""
        with contextlib.suppress(KubernetesError):
            await self._pour(pod, tail, tail.end, follow="true")

    async def _pour(self, pod: PodState, tail: _Tail, skipped: int, **query: JsonValue) -> None:
        path = f"{manifests.PODS.format(pod.namespace)}/{pod.name}/log"
        try:
            async with self._connection.stream(
                path, container=manifests.CONTAINER, **query
            ) as lines:
                while piece := await lines.read(65536):
                    dropped = min(skipped, len(piece))
                    skipped -= dropped
                    tail.add(piece[dropped:])
                    follower = self._followers.get(pod.uid) if query else None
                    if follower and time.monotonic() - follower.read_at > IDLE_SECONDS_MAX:
                        del self._followers[pod.uid]
                        return
        except RefusedError as error:
            if error.status != _NOT_YET:  # The container has not started yet.
                raise


def _digest(workload: str) -> str:
    return hashlib.sha256(workload.encode()).hexdigest()[:24]
