"""Checks all instances periodically, and reports those that ended by themselves."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from moorage.backends.aws.instances import CONSISTENCY_SECONDS, Ec2Instance
from moorage.backends.base import BackendError, Listener, Phase, WorkloadReport

UNWANTED_SECONDS: Final = 3600.0
"""Seconds for which the thread looks at AWS for an instance that a failed start left there."""


@dataclass(slots=True)
class _Followed:
    title: str
    port: int | None
    since: float


class InstanceWatch:
    """Reports ended instances, from a thread that runs from the first `follow` until `close`.

    Args:
        look: Returns all instances of the server, or raises `BackendError`.
        sweep: Ends all instances of a workload, or raises `BackendError`.
        tell: Called with the report of each workload that ended by itself.
    """

    def __init__(
        self,
        look: Callable[[], Iterable[Ec2Instance]],
        sweep: Callable[[str], object],
        tell: Listener,
        every_seconds: float,
    ) -> None:
        self._look = look
        self._sweep = sweep
        self._tell = tell
        self._every_seconds = every_seconds
        self._lock = threading.Lock()
        self._followed: dict[str, _Followed] = {}
        self._unwanted: dict[str, float] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, instance: Ec2Instance, port: int | None = None) -> None:
        """Report when an instance ends by itself. `port` is the port of its endpoint."""
        if instance.over:
            return
        with self._lock:
            known = self._followed.get(instance.workload)
            port = port if port is not None else (known.port if known else None)
            self._followed[instance.workload] = _Followed(instance.title, port, time.monotonic())
            self._begin()

    def forget(self, workload: str) -> None:
        """Report nothing more about a workload, since it is being stopped."""
        with self._lock:
            self._followed.pop(workload, None)

    def terminate_soon(self, workload: str) -> None:
        """Terminate this workload's instance as soon as AWS shows it and allows its end."""
        with self._lock:
            self._unwanted[workload] = time.monotonic()
            self._begin()

    def wanted(self, workload: str) -> None:
        """Cancel `terminate_soon`: the workload is started again."""
        with self._lock:
            self._unwanted.pop(workload, None)

    def port(self, workload: str) -> int | None:
        """Return the port of a workload's endpoint."""
        with self._lock:
            known = self._followed.get(workload)
            return known.port if known else None

    def close(self) -> None:
        """End the thread, and wait for its end."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aws-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._every_seconds):
            with self._lock:
                busy = bool(self._followed or self._unwanted)
            if busy:
                with contextlib.suppress(BackendError):  # The next round tries again.
                    self._round()

    def _round(self) -> None:
        began = time.monotonic()
        seen = list(self._look())
        alive = {each.workload for each in seen if not each.over}
        last = {each.workload: each for each in seen if not each.stopped}
        with self._lock:
            over = {
                name: each
                for name, each in self._followed.items()
                if name not in alive and (name in last or began - each.since > CONSISTENCY_SECONDS)
            }
            for name in over:
                del self._followed[name]
            old = [name for name, at in self._unwanted.items() if began - at > UNWANTED_SECONDS]
            for name in old:
                del self._unwanted[name]
            unwanted = [name for name in self._unwanted if name in alive]
        for name, each in over.items():
            gone = WorkloadReport(
                name, Phase.FAILED, detail=f"{each.title}: AWS no longer knows it"
            )
            self._tell(last[name].as_workload() if name in last else gone)
        for name in unwanted:
            self._sweep(name)
