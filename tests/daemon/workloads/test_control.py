"""Tests of orders and reports of a workload that several leases use one after the other."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog
from msgspec.structs import replace

from moorage.backends.base import Order, WorkloadReport
from moorage.backends.memory.backend import MemoryBackend
from moorage.backends.specs import MemoryResourceSpec
from moorage.core.turns.events import (
    Event,
    WorkloadEnded,
    WorkloadFailed,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.daemon.tasks import Tasks
from moorage.daemon.workloads.control import WorkloadControl
from moorage.ledger.base import LedgerFailed
from moorage.model import (
    ClusterId,
    Lease,
    LeaseTerms,
    NodeId,
    Notice,
    PolicyRef,
    Provision,
    RequestId,
    Share,
    Tenant,
)

PLACE = (Share(ClusterId("c"), NodeId("n"), ("0",)),)


def lease(name: str, fencing: int, inherited: str = "", **spec) -> Lease:
    terms = LeaseTerms(60.0)
    provision = Provision("memory", spec, keep_warm_seconds=60.0)
    policy = PolicyRef("rule", "0")
    held = Lease(RequestId(name), Tenant("t"), "", policy, PLACE, fencing, 0.0, 60.0, terms)
    return replace(held, provision=provision, state="starting", inherited=inherited)


class House:
    """A `WorkloadControl` over the backend `memory`, with the events that it posts."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        self.events: list[Event] = []
        self._heard = asyncio.Event()
        self.progress: list[WorkloadReport] = []
        self.tasks = Tasks()
        backends = {"memory": backend or MemoryBackend()}
        self.leads = True
        self.room = WorkloadControl(
            backends, self._hear, self.tasks, self.progress.append, self._check
        )

    def _check(self) -> None:
        if not self.leads:
            raise LedgerFailed("this server does not lead any more")

    def _hear(self, event: Event) -> None:
        self.events.append(event)
        self._heard.set()

    async def heard(self, kind: type[Event]) -> Event:
        async with asyncio.timeout(60):
            while not any(isinstance(event, kind) for event in self.events):
                self._heard.clear()
                await self._heard.wait()
        return next(event for event in self.events if isinstance(event, kind))

    async def settle(self) -> None:
        """Wait until all orders have ended."""
        async with asyncio.timeout(60):
            await asyncio.gather(*self.tasks._running)

    async def warm(self, **spec) -> Lease:
        """Start a workload for a lease that has ended in the meantime, and drop its events."""
        first = lease("first", 1, **spec)
        self.room.start(first)
        await self.heard(WorkloadStarted)
        await asyncio.sleep(0)  # The order has ended.
        self.events.clear()
        return lease("second", 2, inherited="first", **spec)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.room.open([])
    yield house
    await house.room.close()
    assert not house.tasks.broken.done()


async def test_a_replaced_server_starts_and_stops_no_workload():
    """The server also starts and stops nothing if an order waited while the server was deposed."""
    backend = MemoryBackend()
    house = House(backend)
    await house.room.open([])
    first, second = lease("first", 1), lease("second", 2)
    house.room.start(first)
    await house.heard(WorkloadStarted)
    house.room.start(second)
    house.room.stop(first)
    house.leads = False  # Before either order has begun.
    with pytest.raises(LedgerFailed):
        await house.tasks.broken
    assert [each.id for each in await backend.discover()] == ["first"]
    await house.room.close()


async def test_the_takeover_of_a_workload_is_reported_once_and_at_once(house):
    second = await house.warm()
    house.room.look(second)
    said = [WorkloadStarted(second.id, second.fencing, "memory://first")]
    assert house.events == said, "reported before any wait"
    house.room.start(second)
    await house.settle()
    assert house.events == said


async def test_the_end_of_a_workload_after_its_takeover_is_reported_to_the_new_lease(house):
    second = await house.warm(die_seconds=0.2, exit_code=3)
    house.room.look(second)
    ended = await house.heard(WorkloadEnded)
    assert (ended.lease, ended.fencing, ended.exit_code) == (second.id, second.fencing, 3)
    house.room.start(second)  # The grant is durable now, and the lease has the report.
    await house.settle()
    assert len(house.events) == 2


async def test_a_lease_that_takes_over_an_ended_warm_workload_starts_it_again(house):
    second = await house.warm(die_seconds=0.1)
    await house.heard(WorkloadEnded)
    await asyncio.sleep(0)
    house.events.clear()
    house.room.look(second)
    assert house.events == []
    house.room.start(second)
    started = await house.heard(WorkloadStarted)
    assert started.lease == second.id


async def test_the_takeover_of_a_workload_is_not_reported_while_an_order_runs(house):
    second = await house.warm()
    house.room.keep(replace(second, id=RequestId("first"), fencing=1, inherited=""))
    house.room.look(second)
    assert house.events == []
    house.room.start(second)
    assert (await house.heard(WorkloadStarted)).lease == second.id


async def test_no_news_of_a_lease_comes_before_its_start_is_ordered(house):
    """While the new grant is not durable, watchers know the workload by its first lease."""
    second = await house.warm(die_seconds=0.2)
    house.progress.clear()
    house.room.look(second)
    await house.heard(WorkloadEnded)
    assert {each.id for each in house.progress} == {"first"}


class SlowBackend(MemoryBackend):
    """A backend that reports its running workloads only after a test allows the report."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()

    async def discover(self) -> list[WorkloadReport]:
        await self.let.wait()
        return list(await super().discover())


async def test_a_backend_that_does_not_answer_delays_no_start():
    backend, tasks = SlowBackend(), Tasks()
    await backend.start(Order("orphan", MemoryResourceSpec()))
    room = WorkloadControl({"memory": backend}, [].append, tasks, [].append, lambda: None)
    async with asyncio.timeout(60):
        await room.open([])
        backend.let.set()
        while await MemoryBackend.discover(backend):  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.05)  # As above.
    await room.close()
    assert not tasks.broken.done()


class SerialBackend(MemoryBackend):
    """A backend that records starts, stops and resets of a workload that overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.overlaps: list[str] = []
        self._busy: dict[str, str] = {}

    @contextlib.contextmanager
    def _alone(self, name: str, what: str) -> Iterator[None]:
        if name in self._busy:
            self.overlaps.append(f"{what} beside {self._busy[name]}")
        self._busy[name] = what
        try:
            yield
        finally:
            self._busy.pop(name, None)

    async def start(self, order: Order) -> WorkloadReport:
        with self._alone(order.id, "start"):
            try:
                return await super().start(order)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)  # A real backend also takes time to undo a start.
                raise

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        with self._alone(workload, "stop"):
            await super().stop(workload, stop_seconds_max)

    async def reset(self, workload: str) -> None:
        with self._alone(workload, "reset"):
            await asyncio.sleep(0.005)  # Other orders may come meanwhile.
            await super().reset(workload)


async def test_a_stop_of_a_workload_waits_for_all_orders_before_it():
    """A start runs, and a second start waits; the stop cancels both, then ends the workload."""
    backend = SerialBackend()
    house = House(backend)
    held = lease("first", 1, start_seconds=60.0)
    house.room.start(held)
    await asyncio.sleep(0.02)  # The start is under way.
    house.room.start(held)
    await asyncio.sleep(0)  # The second start waits.
    house.room.stop(held)
    await house.heard(WorkloadStopped)
    assert backend.overlaps == []
    assert await backend.discover() == []
    await house.room.close()
    assert not house.tasks.broken.done()


@pytest.mark.parametrize("seed", range(4))
async def test_orders_of_one_workload_never_overlap(seed):
    draw = random.Random(seed)
    backend = SerialBackend()
    house = House(backend)
    for number in range(60):
        held = lease(
            f"w{draw.randrange(3)}",
            number,
            start_seconds=draw.choice([0.0, 0.004, 0.02]),
            stop_seconds=draw.choice([0.0, 0.004]),
            die_seconds=draw.choice([None, 0.0, 0.003]),
            fail_stops=draw.choice([0] * 30 + [1]),
        )
        held = replace(held, inherited=draw.choice(["", "w0"]))
        order = draw.choice([house.room.start, house.room.stop, house.room.keep])
        order(held)
        await asyncio.sleep(draw.choice([0, 0, 0.001, 0.005]))
    for name in ("w0", "w1", "w2"):
        house.room.stop(lease(name, 100))
    async with asyncio.timeout(30):
        while sum(isinstance(e, WorkloadStopped) and e.fencing == 100 for e in house.events) < 3:  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.01)  # As above.
    assert backend.overlaps == []
    assert await backend.discover() == []
    await house.room.close()
    assert not house.tasks.broken.done()


class DefectiveBackend(MemoryBackend):
    """A backend that raises a given error from one of its calls, a given number of times."""

    def __init__(self, call: str, error: Exception) -> None:
        super().__init__()
        self._call, self._error = call, error
        self._left = 1

    def _fail(self, call: str, workload: str) -> None:
        if call == self._call and workload == "first" and self._left:
            self._left -= 1
            raise self._error

    async def start(self, order: Order) -> WorkloadReport:
        self._fail("start", order.id)
        return await super().start(order)

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        self._fail("stop", workload)
        await super().stop(workload, stop_seconds_max)

    async def status(self, workload: str) -> WorkloadReport:
        self._fail("status", workload)
        return await super().status(workload)

    async def probe(self, workload: str) -> WorkloadReport:
        self._fail("probe", workload)
        return await super().probe(workload)

    async def reset(self, workload: str) -> None:
        self._fail("reset", workload)
        await super().reset(workload)


@pytest.mark.parametrize("call", ["start", "stop", "status", "probe", "reset"])
async def test_a_defect_in_one_workload_ends_only_its_lease(call):
    backend = DefectiveBackend(call, KeyError("first"))
    house = House(backend)
    await house.room.open([])
    ends = WorkloadFailed | WorkloadStopped | WorkloadEnded
    first, other = lease("first", 1, die_seconds=0.05), lease("other", 2)
    with structlog.testing.capture_logs() as logs:
        house.room.start(other)
        house.room.start(first)
        if call in {"probe", "reset"}:
            house.room.keep(first)
        if call == "stop":
            house.room.stop(first)
        end = await house.heard(ends)
    assert (end.lease, end.fencing) == ("first", 1)
    if isinstance(end, WorkloadFailed):
        assert "KeyError: 'first'" in end.reason
    assert [each["event"] for each in logs if each.get("exc_info")] == ["backend_failed"]
    assert [each.id for each in await backend.discover()] == ["other"]
    house.room.stop(other)
    await house.heard(WorkloadStopped)
    await house.room.close()
    assert not house.tasks.broken.done()


async def test_the_setting_and_the_notice_bound_the_time_in_which_a_workload_stops():
    class Noting(MemoryBackend):
        bounds: list[float | None] = []  # noqa: RUF012  # Used by one test only.

        async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
            self.bounds.append(stop_seconds_max)
            await super().stop(workload, stop_seconds_max)

    tasks, events = Tasks(), []
    backend = Noting()
    room = WorkloadControl({"memory": backend}, events.append, tasks, [].append, lambda: None, 60.0)
    held = lease("first", 1, stop_seconds=0.01)
    notice = Notice(RequestId("other"), 1.0, "preempted")
    short = replace(held, notice=notice, terms=LeaseTerms(60.0, notice_seconds=3.0))
    for each in (held, short, replace(held, notice=notice)):
        room.stop(each)
        await asyncio.sleep(0.05)  # Let each stop run as its own order.
    assert backend.bounds == [60.0, 3.0, 10.0]
    await room.close()
    assert not tasks.broken.done()


async def test_the_notice_bounds_the_time_in_which_a_starting_workload_stops():
    class Noting(MemoryBackend):
        bounds: list[float | None] = []  # noqa: RUF012  # Used by one test only.

        async def start(self, order: Order) -> WorkloadReport:
            try:
                return await super().start(order)
            except asyncio.CancelledError as error:
                self.bounds.append(order.undo_seconds(error))
                raise

    house = House(backend := Noting())
    held = lease("first", 1, start_seconds=60.0)
    notice = Notice(RequestId("other"), 1.0, "preempted")
    short = replace(held, notice=notice, terms=LeaseTerms(60.0, notice_seconds=3.0))
    for each in (held, short):
        house.room.start(each)
        await asyncio.sleep(0.02)  # The start is under way.
        house.room.stop(each)
        await house.heard(WorkloadStopped)
        house.events.clear()
    assert backend.bounds == [120.0, 3.0]
    await house.room.close()
    assert not house.tasks.broken.done()
