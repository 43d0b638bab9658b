"""Both ends of an agent's connection over loopback, and their behaviour when it is lost."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from moorage.backends.agents import backend, host, wire
from moorage.backends.agents.backend import FleetBackend
from moorage.backends.agents.host import AgentHost
from moorage.backends.agents.link import AgentLink
from moorage.backends.base import (
    BackendError,
    CommandExecution,
    Log,
    Order,
    Phase,
    WorkloadReport,
)
from moorage.backends.local import deadline
from moorage.backends.local.deadline import HeardFile
from moorage.backends.local.measurements import Measurement
from moorage.backends.memory.backend import MemoryBackend
from moorage.backends.specs import MemoryResourceSpec
from moorage.model import (
    ClusterId,
    Lease,
    LeaseTerms,
    NodeId,
    PolicyRef,
    RequestId,
    Share,
    Tenant,
)
from moorage.protocol.agent_socket import AgentSocket
from tests.waiting import async_until as until

PLACE = (ClusterId("c"), NodeId("n1"))
PLACEMENT = (Share(*PLACE, cpu_milli=100),)


class World:
    """The server's end of a connection, and an agent that can connect repeatedly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leases: dict[str, Lease] = {}
        self.fleet = FleetBackend(MemoryBackend(), self.leases.get)
        self.machine = self.fleet.machine(PLACE)
        self.there: dict[str, Any] = {}
        self.agents = MemoryBackend(self.there)
        self.heard: list[float] = []
        self.host = AgentHost(self.agents, folder, self.heard.append)
        self.link: AgentLink | None = None
        self.port = 0
        self.epoch = 1
        """The server's epoch, which is sent with each order."""

    async def take(self, connection: ServerConnection) -> None:
        link = self.link = AgentLink(
            AgentSocket(connection), partial(self.fleet.tell, self.machine), self.epoch
        )
        self.machine.hear(link)
        attaching = asyncio.ensure_future(self.fleet.attach(self.machine, link))
        await link.run()
        await asyncio.gather(attaching, return_exceptions=True)
        self.machine.disconnect(link)

    async def connected(self) -> "asyncio.Task[None]":
        """Connect the agent, and return the task that serves it."""

        async def live() -> None:
            async with connect(f"ws://127.0.0.1:{self.port}") as connection:
                await self.host.serve(AgentSocket(connection), 0.05, self.epoch)

        living = asyncio.create_task(live())
        await until(lambda: self.machine.link)
        return living

    async def disconnect(self) -> None:
        assert self.link is not None
        self.link.abort()
        await until(lambda: self.machine.link is None)

    async def lose(self) -> None:
        """Disconnect the agent, and count its machine as lost."""
        await self.disconnect()
        self.machine.note(lost=True)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with serve(world.take, "127.0.0.1", 0) as server:
        world.port = server.sockets[0].getsockname()[1]
        living = await world.connected()
        yield world
        living.cancel()
        with suppress(asyncio.CancelledError):
            await living
        await world.host.close()
        await world.fleet.close()


def order(name: str = "a", fencing: int = 1, start_seconds: float = 0.0, **more) -> Order:
    spec = MemoryResourceSpec(start_seconds=start_seconds)
    return Order(name, spec, PLACEMENT, fencing=fencing, **more)


async def test_an_order_goes_to_the_machine_of_its_placement(world: World) -> None:
    assert (await world.fleet.start(order())).phase is Phase.READY
    assert [each.id for each in await world.agents.discover()] == ["a"]
    await world.fleet.start(Order("b", MemoryResourceSpec(), (Share(PLACE[0], NodeId("n2")),)))
    assert [each.id for each in await world.agents.discover()] == ["a"]
    assert {each.id for each in await world.fleet.discover()} == {"a", "b"}


async def test_an_agent_and_its_successor_refuse_an_order_with_a_smaller_fencing_number(
    world: World,
) -> None:
    await world.fleet.start(order(fencing=5))
    with pytest.raises(BackendError, match="fencing number 4 is outdated: an order with number 5"):
        await world.fleet.start(order(fencing=4))
    again = AgentHost(MemoryBackend(), world.folder)
    with pytest.raises(BackendError, match="outdated"):
        await again._start(wire.StartOrder.of(order(fencing=4)))
    assert (await world.fleet.start(order(fencing=5))).phase is Phase.READY


async def test_an_agent_refuses_orders_of_a_replaced_server(world: World) -> None:
    await world.fleet.start(order("a", fencing=3))
    deposed = world.link
    assert deposed is not None
    async with connect(f"ws://127.0.0.1:{world.port}") as connection:
        # Another server leads, and the former leader has not noticed.
        await until(lambda: world.link is not deposed)
        following = asyncio.create_task(world.host.serve(AgentSocket(connection), 0.05, 2))
        await until(lambda: world.host._epoch == 2)
        for late in (wire.StartOrder.of(order("b", fencing=4)), wire.StopOrder("a", 0.0)):
            refusal = "with epoch 1 was not carried out: a server with epoch 2 has led since"
            with pytest.raises(BackendError, match=refusal):
                await deposed.call(late)
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    assert list(world.there) == ["a"]


async def test_metrics_count_as_heartbeats_and_a_hanging_driver_delays_no_heartbeat(
    world: World,
) -> None:
    hangs, measured = threading.Event(), threading.Event()

    def measure() -> Measurement:
        measured.set()
        hangs.wait()
        return Measurement({"gpu": {"count": 1.0}}, [], {})

    heard: list[float] = []
    world.host = AgentHost(world.agents, world.folder, heard.append, measure=measure)
    async with connect(f"ws://127.0.0.1:{world.port}") as connection:
        serving = asyncio.create_task(world.host.serve(AgentSocket(connection), 0.05, 1))
        await until(lambda: measured.is_set() and len(heard) > 3)
        assert world.machine.measured is None
        hangs.set()
        metrics, _ = await until(lambda: world.machine.measured)
        assert metrics.at in heard
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def test_the_server_refuses_an_agent_that_does_not_list_its_workloads_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(backend, "DISCOVER_SECONDS_MAX", 0.1)
    monkeypatch.setattr(world.agents, "discover", hang)
    assert world.link is not None
    with pytest.raises(TimeoutError, match=r"within 0\.1 s what runs there"):
        await world.fleet.attach(world.machine, world.link)


async def test_an_agent_leaves_a_silent_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "SILENT_SECONDS_MIN", 0.2)
    async with (
        serve(lambda connection: connection.wait_closed(), "127.0.0.1", 0) as silent,
        connect(f"ws://127.0.0.1:{silent.sockets[0].getsockname()[1]}") as connection,
        asyncio.timeout(10),
    ):
        assert await world.host.serve(AgentSocket(connection), 0.05, 1) >= 0.2


async def test_a_start_continues_while_its_agent_is_disconnected(world: World) -> None:
    starting = asyncio.create_task(world.fleet.start(order(start_seconds=0.4)))
    await until(lambda: world.host._starts)
    await world.lose()
    assert not starting.done(), "it may run there, so it must not start elsewhere"
    living = await world.connected()
    assert (await starting).phase is Phase.READY
    assert list(world.there) == ["a"]
    living.cancel()


async def test_an_order_to_cancel_tells_the_agent_how_long_the_end_of_the_start_may_take(
    world: World,
) -> None:
    bounds: list[float | None] = []

    class Noting(MemoryBackend):
        async def start(self, order: Order) -> WorkloadReport:
            try:
                return await super().start(order)
            except asyncio.CancelledError as error:
                bounds.append(order.undo_seconds(error))
                raise

    world.host._backend = Noting()
    for seconds in (None, 3.0):
        starting = asyncio.create_task(world.fleet.start(order("a", 1, 60.0)))
        await until(lambda: world.host._starts)
        starting.cancel(seconds)
        with suppress(asyncio.CancelledError):
            await starting
    assert bounds == [None, 3.0]


async def test_workloads_without_a_lease_are_stopped_when_the_agent_connects(world: World) -> None:
    await world.fleet.start(order())
    await world.disconnect()
    living = await world.connected()
    await until(lambda: not world.there)
    living.cancel()


async def test_errors_about_a_lost_machine_say_since_when_it_is_lost(world: World) -> None:
    await world.lose()
    with pytest.raises(BackendError, match="the machine n1 is not heard of since 20"):
        await world.fleet.start(order())
    resumed = asyncio.create_task(world.fleet.start(order(resumed=True)))
    stopping = asyncio.create_task(world.fleet.stop("a"))
    await asyncio.sleep(0)  # Both calls begin to wait.
    assert not resumed.done()
    reports: list[WorkloadReport] = []
    world.fleet.listen(reports.append)
    world.fleet.forget(world.machine)
    assert (await resumed).phase is Phase.FAILED
    await stopping
    assert [(each.id, each.phase) for each in reports] == [("a", Phase.FAILED)]
    assert "an operator removed the machine" in reports[0].detail


async def test_an_agent_learns_when_the_server_read_its_heartbeats(world: World) -> None:
    await until(lambda: world.heard)
    assert world.heard[0] <= deadline.now()


async def test_workloads_of_an_abandoned_machine_are_reported_as_failed(world: World) -> None:
    await world.fleet.start(order())
    await world.lose()
    starting = asyncio.create_task(world.fleet.start(order("b", resumed=True)))
    stopping = asyncio.create_task(world.fleet.stop("a"))
    await asyncio.sleep(0)  # Both calls begin to wait.
    reports: list[WorkloadReport] = []
    world.fleet.listen(reports.append)
    world.fleet.give_up(world.machine)
    assert (await starting).phase is Phase.FAILED
    await stopping
    assert {each.id: each.phase for each in reports} == {"a": Phase.FAILED, "b": Phase.FAILED}
    assert "and has ended its workloads" in reports[0].detail
    living = await world.connected()
    assert not world.machine.idle
    living.cancel()


def lease_on(name: str, *nodes: str) -> Lease:
    placement = tuple(Share(PLACE[0], NodeId(each), cpu_milli=100) for each in nodes)
    about = Tenant("t"), "", PolicyRef("rule", "0"), placement, 1, 0.0, 60.0, LeaseTerms(60.0)
    return Lease(RequestId(name), *about)


async def test_workloads_of_a_lost_machine_count_as_lost_until_the_machine_reconnects(
    world: World,
) -> None:
    for name in ("a", "over"):
        await world.fleet.start(order(name))
    world.leases["a"] = lease_on("a", "n1")
    await world.lose()
    reports: list[WorkloadReport] = []
    world.fleet.listen(reports.append)
    world.fleet.lose(world.machine)
    assert [(each.id, each.phase) for each in reports] == [("a", Phase.LOST)]
    assert "the machine n1 is not heard of since" in reports[0].detail
    living = await world.connected()
    await until(lambda: len(reports) > 1)
    assert (reports[1].id, reports[1].phase) == ("a", Phase.READY)
    living.cancel()


async def test_a_gang_counts_as_lost_until_all_its_machines_are_heard_again(world: World) -> None:
    other = world.fleet.machine((PLACE[0], NodeId("n2")))
    world.leases["a"] = lease_on("a", "n1", "n2")
    await world.agents.start(order())
    ready = WorkloadReport("a", Phase.READY)
    for machine in (world.machine, other):
        world.fleet.tell(machine, ready)
    world.fleet._remember("a", [world.machine, other])
    reports: list[WorkloadReport] = []
    world.fleet.listen(reports.append)
    for machine in (world.machine, other):
        machine.note(lost=True)
        world.fleet.lose(machine)
    assert "machine n2" in reports[-1].detail
    world.machine.note(lost=False)
    world.fleet.tell(world.machine, ready)
    assert {each.phase for each in reports} == {Phase.LOST}
    other.note(lost=False)
    world.fleet.tell(other, ready)
    assert reports[-1].phase is Phase.READY
    assert len(reports) == 3


async def test_a_gang_ends_although_an_ended_member_is_reported_ready_late(
    world: World,
) -> None:
    other = world.fleet.machine((PLACE[0], NodeId("n2")))
    world.fleet._remember("a", [world.machine, other])
    reports: list[WorkloadReport] = []
    world.fleet.listen(reports.append)
    ends, late = Phase.SUCCEEDED, Phase.READY
    for machine, phase in ((world.machine, ends), (world.machine, late), (other, ends)):
        world.fleet.tell(machine, WorkloadReport("a", phase))
    assert [each.phase for each in reports] == [Phase.SUCCEEDED]


async def test_an_agent_cannot_report_on_a_workload_that_moved(world: World) -> None:
    await world.fleet.start(order())
    reports: list[WorkloadReport] = []
    world.fleet.listen(reports.append)
    gone = WorkloadReport("a", Phase.STOPPED)
    world.fleet.tell(world.fleet.machine((PLACE[0], NodeId("n2"))), gone)
    assert reports == []
    world.fleet.tell(world.machine, gone)
    assert reports == [gone]


@pytest.mark.parametrize(("code", "bounded"), [(2**64 - 1, 2**31 - 1), (-(2**63), -(2**31))])
@pytest.mark.parametrize(
    "value", [WorkloadReport("a", Phase.FAILED), Log("", 0), CommandExecution(1, "")]
)
def test_exit_codes_from_agents_are_cut_to_32_bits(value: Any, code: int, bounded: int) -> None:
    raw = msgspec.Raw(wire.encode(dataclasses.replace(value, exit_code=code)))
    assert backend._value(raw, type(value)).exit_code == bounded


def test_the_limit_of_silence_stays_until_the_server_has_agreed_to_a_longer_limit(
    tmp_path: Path,
) -> None:
    assert not HeardFile(tmp_path, 0.0).passed
    before = deadline.now()
    HeardFile(tmp_path, 50.0).note_agreement(before)
    file = tmp_path / "heard.json"
    assert json.loads(file.read_text())["seconds"] == 50
    later = HeardFile(tmp_path, 0.0)
    later.note_contact(before + 1)
    assert json.loads(file.read_text())["seconds"] == 50
    shorter = HeardFile(tmp_path, 20.0)
    assert json.loads(file.read_text())["seconds"] == 20
    assert json.loads(file.read_text())["at"] == before + 1
    shorter.note_contact(before - 100)
    assert not shorter.passed
    later.note_agreement(before)
    assert not file.exists()


async def test_a_gang_found_after_a_restart_survives_a_second_stop_of_the_server(
    world: World,
) -> None:
    away = NodeId("n2")
    world.fleet.machine((PLACE[0], away))
    await world.agents.start(order())
    gang = Order("a", MemoryResourceSpec(), (*PLACEMENT, Share(PLACE[0], away)), resumed=True)
    finding = asyncio.create_task(world.fleet.start(gang))
    reports: list[WorkloadReport] = []
    world.agents.listen(reports.append)
    await asyncio.sleep(0.1)  # Nothing happens: the start waits for the other machine.
    assert not finding.done()
    finding.cancel()
    with suppress(asyncio.CancelledError):
        await finding
    assert list(world.there) == ["a"]
    assert reports == []


async def test_a_gang_with_a_forgotten_machine_ends_while_its_other_machines_are_away(
    world: World,
) -> None:
    """The server has restarted, and no agent has connected yet."""
    away, forgotten = (world.fleet.machine((PLACE[0], NodeId(each))) for each in ("n2", "n3"))
    shares = (*PLACEMENT, *(Share(*each.place) for each in (away, forgotten)))
    gang = Order("a", MemoryResourceSpec(), shares, resumed=True)
    finding = asyncio.create_task(world.fleet.start(gang))
    await asyncio.sleep(0)  # The call begins to wait.
    world.fleet.forget(forgotten)
    async with asyncio.timeout(60):
        found = await finding
    assert (found.phase, found.detail) == (
        Phase.FAILED,
        "of the gang, the member on node n3 is gone",
    )


async def test_a_gang_starts_once_all_its_machines_are_reachable(world: World) -> None:
    away = world.fleet.machine((PLACE[0], NodeId("n2")))
    away.note(_is_known=True)  # The server has its list of workloads: not this gang.
    gang = Order("a", MemoryResourceSpec(), (*PLACEMENT, Share(PLACE[0], NodeId("n2"))))
    starting = asyncio.create_task(world.fleet.start(gang))
    await asyncio.sleep(0.1)  # Nothing happens: the start waits for the other machine.
    assert (starting.done(), world.there) == (False, {})
    away.note(lost=True)
    with pytest.raises(BackendError, match="the machine n2 is not heard of since"):
        await starting
    assert not world.there


async def test_a_gang_with_a_machine_that_has_no_agent_is_refused(world: World) -> None:
    gang = Order("a", MemoryResourceSpec(), (*PLACEMENT, Share(PLACE[0], NodeId("n9"))))
    with pytest.raises(BackendError, match="server's own; n9 is neither"):
        await world.fleet.start(gang)


async def test_a_gang_with_a_forgotten_machine_is_never_reported_healthy(
    world: World,
) -> None:
    """The server was down when the machine was forgotten, so it only knows the lease."""
    await world.agents.start(order())
    world.leases["a"] = lease_on("a", "n1", "n9")
    for look in (world.fleet.status, world.fleet.probe):
        with pytest.raises(BackendError, match="an operator removed the machine n9"):
            await look("a")
    await world.fleet.stop("a")
    assert await world.agents.discover() == []
