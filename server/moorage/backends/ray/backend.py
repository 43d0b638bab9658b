"""`RayBackend`: runs a workload as one detached Ray actor per node.

A separate process talks to Ray (`connection`, `driver`). If Ray hangs or crashes, calls fail,
workloads continue, and the next process finds them by the names of their actors.
"""

import asyncio
import base64
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from moorage.backends.base import (
    LOG_BYTES_MAX,
    BackendError,
    CommandExecution,
    CommonBackend,
    Log,
    Order,
    Phase,
    Support,
    UnknownAttemptError,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.completion import finish
from moorage.backends.ray import orders
from moorage.backends.ray.connection import RayConnection, WorkloadFailedError
from moorage.backends.ray.records import Records
from moorage.backends.ray.specs import RayJobResourceSpec
from moorage.backends.specs import BaseResourceSpec
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue

ANSWER_SECONDS_MAX: Final = 30.0
"""Longest wait for an answer of Ray."""
STOPPING_SECONDS: Final = 0.02
"""Seconds between two checks whether a stop has finished."""
STOP_SECONDS_MAX: Final = 3660.0
"""Longest wait for a stop: the longest stop time that a spec may have, and a minute."""
_GONE: Final = "Ray no longer knows the workload's actor{}: its node or the cluster was lost"


class RayBackend(CommonBackend):
    """Runs commands, services, jobs, containers and actors on the nodes of a Ray cluster.

    Args:
        root: Folder for data that must outlive the daemon; a restarted daemon opens it again.
        address: Address of the cluster: `auto`, `HOST:PORT`, or `ray://HOST:PORT`.
        leased: Whether workloads get their resources from leases; if not, from their specs.
    """

    name: Final = "ray"
    _support: Final = Support(
        categories=orders.CATEGORIES,
        default="process",
        execute=True,
        logs=True,
        gangs=True,
        kinds={"job": RayJobResourceSpec},
    )

    def __init__(self, root: Path, address: str = "auto", *, leased: bool = True) -> None:
        self._leased = leased
        self._records = Records(root)
        self._nodes = frozenset[str]()
        self.on_failure: Callable[[], None] = lambda: None
        """Called from any thread when a workload has failed, since its node may be lost."""
        self._unwanted: set[str] = set()
        self._busy: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.connection = RayConnection(
            address,
            self._records.server,
            orders.NAMESPACE,
            root,
            self._look_again,
            self._report_end,
        )

    @property
    def support(self) -> Support:
        return replace(self._support, nodes=self._nodes)

    def refuse(self, spec: BaseResourceSpec) -> None:
        orders.check(spec, leased=self._leased)

    async def discover(self) -> Collection[WorkloadReport]:
        found = await self._discover()
        known = {name: _report(name, each) for name, each in found.items()}
        for name in self._records.ready() - known.keys():
            known[name] = _gone_report(name)
        return list(known.values())

    async def _discover(self) -> JsonObject:
        shapes = self._records.shapes()
        found: JsonObject = await self.connection.call(
            "discover", ANSWER_SECONDS_MAX, shapes=shapes
        )
        return found

    async def start(self, order: Order) -> WorkloadReport:
        self.refuse(order.spec)
        plans = orders.plans(order, self._records.server())
        if order.resumed or order.id in self._records.ready():
            try:
                known = await self.connection.call("start", None, plans=plans, new=False)
            except WorkloadFailedError:  # A part was lost: end the rest.
                await finish(self._undone(order.id))
                raise
            self._records.note(order.id, plans[0]["shape"])  # For a former leader's start.
            gone = _gone_report(order.id, _nodes(plans))
            return gone if known is None else _report(order.id, known)
        self._tell(WorkloadReport(order.id, Phase.STARTING, detail=_where(plans)))
        with self._in_hand(order.id):
            with self._lock:
                self._unwanted.discard(order.id)  # From an earlier, failed start.
            try:
                async with asyncio.timeout(order.timeout_seconds):
                    answer = await self.connection.call("start", None, plans=plans, new=True)
                self._records.note(order.id, plans[0]["shape"])
            except BaseException as error:
                await finish(self._undone(order.id, order.undo_seconds(error)))
                if isinstance(error, TimeoutError):
                    reason = f"it was not ready within {order.timeout_seconds:g} s"
                    if trouble := self.connection.trouble:
                        reason += f": Ray at {self.connection.address} is not reached: {trouble}"
                    raise TimeoutError(reason) from None
                raise
        report = _report(order.id, answer)
        if not report.phase.over:
            self._tell(report)
        return report

    async def _undone(self, workload: str, stop_seconds_max: float | None = None) -> None:
        """Remove all actors of a failed start; if Ray does not answer, remove them later."""
        with self._lock:
            self._unwanted.add(workload)
        if self.connection.trouble:
            return
        with contextlib.suppress(BackendError):
            await self._end(workload, stop_seconds_max)

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        with self._in_hand(workload):
            was = await self._end(workload, stop_seconds_max)
        if was:
            self._tell(WorkloadReport(workload, Phase.STOPPED))

    async def _end(self, workload: str, stop_seconds_max: float | None) -> bool:
        """Remove all actors of a workload, and store its output; return whether it existed."""
        left = await self.connection.call(
            "stop", STOP_SECONDS_MAX, workload=workload, stop_seconds_max=stop_seconds_max
        )
        with self._lock:
            self._unwanted.discard(workload)
        was = left is not None or workload in self._records.ready()
        if left is not None and left["data"] is not None:
            await asyncio.to_thread(self._records.archive, workload, left)
        self._records.forget(workload)
        return was

    async def status(self, workload: str) -> WorkloadReport:
        return await self._look(workload, probe=False)

    async def probe(self, workload: str) -> WorkloadReport:
        return await self._look(workload, probe=True)

    async def _look(self, workload: str, *, probe: bool) -> WorkloadReport:
        try:
            seen = await self.connection.call(
                "status",
                ANSWER_SECONDS_MAX,
                workload=workload,
                shape=self._records.shapes().get(workload),
                probe=probe,
            )
        except UnknownWorkloadError:
            if workload in self._records.ready():
                return _gone_report(workload)
            raise
        return _report(workload, seen)

    async def reset(self, workload: str) -> JsonValue:
        """Refuse a reset: no spec of Ray has a reset command."""
        await self.status(workload)
        raise UnsupportedSpecError("a workload on Ray cannot be reset: end it, and start another")

    async def execute(
        self,
        workload: str,
        command: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        workdir: str | None = None,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandExecution:
        """Run a command on the first node of a workload; see `Backend.execute`."""
        if user is not None:
            raise UnsupportedSpecError("user: on Ray, commands run as the cluster's own user")
        code, output = await self.connection.call(
            "execute",
            None if timeout_seconds is None else timeout_seconds + ANSWER_SECONDS_MAX,
            workload=workload,
            command=list(command),
            seconds=timeout_seconds,
            folder=workdir,
            environment=dict(environment or {}),
        )
        if code is None:
            raise TimeoutError(f"{command[0]} ran longer than {timeout_seconds} s")
        return CommandExecution(code, output)

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        """Read the output of the first node of a workload; see `Backend.logs`."""
        archive = await asyncio.to_thread(self._records.archived, workload)
        if attempt in archive:
            return _archive_log(archive[attempt], offset)
        try:
            piece = await self.connection.call(
                "logs", ANSWER_SECONDS_MAX, workload=workload, offset=offset
            )
        except UnknownWorkloadError:
            try:
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    while workload in self._busy:  # noqa: ASYNC110  # Until its stop has stored the output.
                        await asyncio.sleep(STOPPING_SECONDS)  # As above.
            except TimeoutError:
                return Log("", max(offset, 0))  # The stop takes long: ask again.
            archive = await asyncio.to_thread(self._records.archived, workload)
            if (last := attempt or max(archive, default=0)) in archive:
                return _archive_log(archive[last], offset)
            raise
        if attempt not in {0, piece["attempt"]}:
            raise UnknownAttemptError(workload, (*sorted(archive), piece["attempt"]))
        data = base64.b64decode(piece["data"])
        return Log.of(data, piece["start"], over=piece["over"], exit_code=piece["exit_code"])

    async def close(self) -> None:
        """Close the connection to Ray; workloads continue to run."""
        self._listener = None
        self.on_failure = lambda: None
        await asyncio.to_thread(self.connection.close)

    # The cluster -------------------------------------------------------------------------------

    async def observe(self) -> JsonObject:
        """Return the capacity and the use of the Ray cluster; see `inventory`.

        Raises:
            BackendError: Ray does not answer.
        """
        seen: JsonObject = await self.connection.call("observe", ANSWER_SECONDS_MAX)
        self._nodes = frozenset(str(each["id"]) for each in seen["nodes"])
        return seen

    async def request(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Request capacity for `bundles` from Ray's autoscaler; this replaces earlier requests."""
        await self.connection.call("request", ANSWER_SECONDS_MAX, bundles=list(bundles))

    # News --------------------------------------------------------------------------------------

    def _report_end(self, workload: str, report: JsonMapping) -> None:
        self._tell(_report(workload, report))

    def _look_again(self) -> None:
        """Check all workloads in a thread, since Ray answers again after an outage."""
        check = threading.Thread(target=lambda: asyncio.run(self._catch_up()), daemon=True)
        check.start()

    async def _catch_up(self) -> None:
        before = self._records.ready()
        try:
            found = await self._discover()
            for name in sorted(self._unwanted):
                with self._lock:
                    wanted = name in self._busy or name not in self._unwanted
                if not wanted:
                    await self._undone(name)
            for name in before:
                with self._lock:
                    busy = name in self._busy
                if busy or name not in self._records.ready():
                    continue  # The start or stop under way reports it.
                if name not in found:
                    self._tell(_gone_report(name))
                elif _report(name, found[name]).phase.over:
                    self._tell(_report(name, found[name]))
        except BackendError:
            return  # `_look_again` repeats this when Ray answers again.

    @contextlib.contextmanager
    def _in_hand(self, workload: str) -> Iterator[None]:
        """Mark a workload as being started or stopped until the `with` block ends."""
        with self._lock:
            self._busy[workload] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[workload] -= 1
                self._busy += Counter()  # Drops zero counts.

    def _tell(self, workload: WorkloadReport) -> None:
        if workload.phase is Phase.FAILED:
            self.on_failure()
        super()._tell(workload)


def _report(workload: str, seen: JsonMapping) -> WorkloadReport:
    return WorkloadReport(
        workload,
        Phase(seen["phase"]),
        endpoint=seen.get("endpoint") or "",
        detail=seen.get("detail") or "",
        exit_code=seen.get("exit_code"),
        log_tail=tuple(seen.get("log_tail") or ()),
    )


def _archive_log(piece: JsonMapping, offset: int) -> Log:
    """Return a piece of the stored output of a stopped workload."""
    data, first = base64.b64decode(piece["data"]), int(piece["start"])
    size = first + len(data)
    start = min(max(size + offset if offset < 0 else offset, first), size)
    part = data[start - first :][:LOG_BYTES_MAX]
    over = start + len(part) >= size
    return Log.of(part, start, over=over, exit_code=piece["exit_code"])


def _gone_report(workload: str, nodes: str = "") -> WorkloadReport:
    where = f" on {nodes}" if nodes else ""
    return WorkloadReport(workload, Phase.FAILED, detail=_GONE.format(where))


def _where(plans: Sequence[JsonMapping]) -> str:
    nodes = _nodes(plans)
    return f"requested from Ray on {nodes}" if nodes else "requested from Ray"


def _nodes(plans: Sequence[JsonMapping]) -> str:
    return ", ".join(each["node"] for each in plans if each["node"])
