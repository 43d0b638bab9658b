"""`FleetBackend`: the server's own machine and the machines of agents, as one backend `local`.

A workload whose lease is placed on the node of an agent runs there; all others run here. The daemon
attaches agents. Orders for a machine without a connection wait until it reports again, counts as
lost, or is removed by an operator: see each method of `AgentMachine`.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec
import structlog

from moorage.backends.agents import wire
from moorage.backends.agents.gangs import join_reports, member_orders
from moorage.backends.agents.link import AgentLink, LinkLost
from moorage.backends.agents.own_machine import (
    OwnLook,
    OwnMachine,
    has_workload,
    refuse_unreachable,
)
from moorage.backends.base import (
    NO_NODE,
    Backend,
    BackendError,
    CommandExecution,
    CommonBackend,
    FilePiece,
    Listener,
    Log,
    Order,
    Phase,
    RunFiles,
    Support,
    UnknownWorkloadError,
    UnsupportedSpecError,
    WorkloadReport,
)
from moorage.backends.completion import finish
from moorage.backends.specs import BaseResourceSpec
from moorage.model import ClusterId, Lease, NodeId
from moorage.records.json_values import JsonMapping, JsonValue

CALL_WAIT_SECONDS: Final = 5.0
"""Seconds that a call about a workload waits for its machine's agent to connect."""
DISCOVER_SECONDS_MAX: Final = 60.0
"""Seconds that a connected agent may take to list the workloads on its machine."""
RETRY_SECONDS: Final = 2.0
"""Pause in seconds before the stop of a workload without a lease is repeated."""
PLACES_MAX: Final = 10_000
"""Maximum workloads whose machines are remembered; for older ones, the lease names the machine."""
_OWN_NEWS: Final = frozenset({Phase.FAILED, Phase.SUCCEEDED, Phase.PULLING, Phase.STARTING})
"""Phases of a gang that are reported once its members' reports show them.

`start` and `stop` report the other phases.
"""

log = structlog.get_logger("moored")

Place = tuple[ClusterId, NodeId]
T = TypeVar("T")


class AgentMachine:
    """Sends orders to the agent of one machine, or waits while no agent is connected.

    Attributes:
        heard_time: Time of the last message from its agent, in seconds since the epoch.
        lost: Whether its agent has been silent for longer than the server allows.
        idle: Whether the silence is so long that the agent must have ended all workloads there.
        gone: Whether an operator removed the machine.
        revoked: Whether an operator revoked its agent.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.heard_time = time.time()
        self.lost = False
        self.idle = False
        self.gone = False
        self.revoked = False
        self._made_at = time.monotonic()
        self._link: AgentLink | None = None
        self._latest: AgentLink | None = None  # The link last heard; perhaps not in use.
        self._measured = b"", 0.0
        self._ending: asyncio.Future[list[None]] | None = None  # Stops workloads without a lease.
        self._is_known = False  # Whether this server has listed its workloads.
        self._change: asyncio.Event | None = None  # Exists only while a task waits: saves memory.

    @property
    def link(self) -> AgentLink | None:
        """The connection to its agent; None while there is none."""
        return self._link

    @property
    def heard_at(self) -> float:
        """Monotonic time of the agent's last message, or of this object's creation if none came."""
        return self._made_at if self._latest is None else self._latest.heard_at

    @property
    def measured(self) -> tuple[wire.AgentMetrics, float] | None:
        """The agent's last metrics, and their time in seconds since the epoch."""
        frame, at = self._measure()
        metrics = wire.decode_report(frame) if frame else None
        return (metrics, at) if isinstance(metrics, wire.AgentMetrics) else None

    def _measure(self) -> tuple[bytes, float]:
        if self._latest is not None and self._latest.measured:
            self._measured = self._latest.measured, self._latest.measured_at
        return self._measured

    @property
    def reachable(self) -> bool:
        """Whether there is a connection to its agent."""
        return self._link is not None

    @property
    def absence(self) -> str:
        """A sentence for people on why the machine cannot be reached."""
        if self.gone:
            return f"an operator removed the machine {self.place[1]}"
        since = datetime.fromtimestamp(self.heard_time, UTC)
        text = f"the machine {self.place[1]} is not heard of since {since:%Y-%m-%d %H:%M:%S} UTC"
        text += ", its agent is revoked" if self.revoked else ""
        return f"{text}, and has ended its workloads" if self.idle else text

    def note(self, **changes: object) -> None:
        """Change attributes, and wake all tasks that wait for a change."""
        for name, value in changes.items():
            setattr(self, name, value)
        if self._change is not None:
            self._change.set()
            self._change = None

    def hear(self, link: AgentLink) -> None:
        """Record a message of the agent on a connection that carries no orders yet."""
        self._measured = self._measure()
        self._latest = link

    def connect(self, link: AgentLink, ending: "asyncio.Future[list[None]]") -> None:
        """Send orders over a connection from now on.

        Starts wait for the future `ending`: the end of the workloads without a lease.
        """
        self._is_known = True
        self._ending = ending
        self.note(_link=link, lost=False, idle=False)

    def disconnect(self, link: AgentLink) -> None:
        """Record that a connection is gone."""
        if self._link is link:
            self.note(_link=None, heard_time=time.time())

    async def look(self, order: wire.AnyOrder, kind: type[T], *, again: bool = True) -> T:
        """Send an order and return its result; wait `CALL_WAIT_SECONDS` for a connection first.

        Args:
            order: The order.
            kind: The type of its result.
            again: Whether to send the order again if the connection breaks before the result.

        Raises:
            BackendError: No agent is connected, or the `Backend` method of the order raised it.
        """
        end = time.monotonic() + CALL_WAIT_SECONDS
        while True:
            link = await self._wait_for_link(end=end)
            try:
                return _value(await self._call(link, order), kind)
            except LinkLost:
                if not again:
                    reason = "the machine's connection broke; the order may have been carried out"
                    raise BackendError(reason) from None

    async def start(self, order: Order) -> WorkloadReport:
        """Start a workload; see `Backend.start`.

        The start fails if the machine is lost. But if the order may have reached the machine, the
        workload may run there; the start then waits until the machine is back or `idle`.
        """
        frame, may_run = wire.StartOrder.of(order), order.resumed or not self._is_known
        while True:
            try:
                link = await self._wait_for_link(unless_lost=not may_run)
            except BackendError:
                if not (self.gone or self.idle) or not order.resumed:
                    raise
                return WorkloadReport(order.id, Phase.FAILED, detail=self.absence)
            if self._ending is not None:  # Ending workloads may use the same devices.
                await asyncio.wait([self._ending])
            may_run = True
            with suppress(LinkLost):
                return _value(await self._call(link, frame), WorkloadReport)

    async def has(self, order: Order) -> bool:
        """Return whether a workload is on this machine; wait for the machine as `start` does.

        Raises:
            BackendError: The machine is lost.
        """
        unless_lost = not (order.resumed or not self._is_known)
        while True:
            try:
                link = await self._wait_for_link(unless_lost=unless_lost)
            except BackendError:
                if not order.resumed:
                    raise
                return False
            with suppress(LinkLost, UnknownWorkloadError):
                _value(await self._call(link, wire.StatusOrder(order.id)), WorkloadReport)
                return True
            if link is self._link:
                return False

    async def meet(self) -> wire.Meeting:
        """Return the address at which other machines reach this one."""
        return await self.look(wire.MeetOrder(), wire.Meeting)

    async def stop(self, workload: str, stop_seconds_max: float | None) -> None:
        """Stop a workload; wait for its machine without a limit; see `Backend.stop`."""
        while not (self.gone or self.idle):
            try:
                link = await self._wait_for_link()
            except BackendError:
                continue  # The machine is `gone` or `idle`.
            with suppress(LinkLost):
                await self._call(link, wire.StopOrder(workload, stop_seconds_max))
                return

    async def _call(self, link: AgentLink, order: wire.AnyOrder) -> msgspec.Raw:
        try:
            return await link.call(order)
        except LinkLost:
            self.disconnect(link)
            raise

    async def _wait_for_link(
        self, *, unless_lost: bool = False, end: float | None = None
    ) -> AgentLink:
        """Wait for a connection to the agent, and return it.

        Args:
            unless_lost: Whether to give up if the machine is lost.
            end: Monotonic time at which to give up; None: never.

        Raises:
            BackendError: The agent did not connect, or the machine is lost.
        """
        while (link := self._link) is None:
            left = None if end is None else end - time.monotonic()
            in_vain = self.gone or self.idle or (unless_lost and self.lost)
            if in_vain or (left is not None and left <= 0):
                raise BackendError(self.absence)
            self._change = self._change or asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), left)
        return link


Member = AgentMachine | OwnMachine


class FleetBackend(CommonBackend):
    """The backend `local`: this machine and machines with agents.

    Args:
        lease: Returns the lease that has, or last had, the workload of this name.
        address: Address of this machine for members of gangs on other machines; empty: the address
            at which the first of these machines reaches the server.
        look: Measures this machine; None: its metrics are not reported.
        here: Whether workloads may start on this machine; if not, running ones continue.
    """

    name: Final = "local"

    def __init__(
        self,
        own: Backend,
        lease: Callable[[str], Lease | None],
        address: str = "",
        look: OwnLook | None = None,
        *,
        here: bool = True,
    ) -> None:
        self.look = look
        self._here = here
        self._own = own
        self._alone = OwnMachine((ClusterId(""), NodeId("")), own)
        self._lease = lease
        self._address = address
        self._machines: dict[Place, AgentMachine] = {}
        self._own_machines: dict[Place, OwnMachine] = {}
        self._own_gangs: dict[str, tuple[OwnMachine, asyncio.AbstractEventLoop]] = {}
        self._places: dict[str, tuple[Member, ...]] = {}
        self._members: dict[str, dict[str, WorkloadReport]] = {}
        self._lost: set[str] = set()  # Workloads that were reported as lost.
        self._nodes: frozenset[str] = frozenset()

    # For the daemon ----------------------------------------------------------------------------

    def machine(self, place: Place) -> AgentMachine:
        """Return the `AgentMachine` of a node; create it if there is none."""
        if place not in self._machines:
            self._machines[place] = AgentMachine(place)
            self._nodes = frozenset(node for _, node in self._machines)
        return self._machines[place]

    def machines(self) -> tuple[AgentMachine, ...]:
        """Return all machines with agents."""
        return tuple(self._machines.values())

    def lose(self, machine: AgentMachine) -> None:
        """Report the workloads of a lost machine as lost: their state is unknown for now."""
        for name in [each for each, there in self._places.items() if machine in there]:
            if self._is_held(name, machine.place):
                self._lost.add(name)
                self._tell(WorkloadReport(name, Phase.LOST, detail=machine.absence))

    def forget(self, machine: AgentMachine) -> None:
        """Remove a machine that will not come back; report its workloads as failed."""
        machine.note(gone=True)
        del self._machines[machine.place]
        self._nodes = frozenset(node for _, node in self._machines)
        self._fail_all(machine)

    def give_up(self, machine: AgentMachine) -> None:
        """Record that a silent machine has ended all its workloads, as agreed with its agent."""
        machine.note(idle=True)
        self._fail_all(machine)

    def _fail_all(self, machine: AgentMachine) -> None:
        for name in [each for each, there in self._places.items() if machine in there]:
            self._tell(WorkloadReport(name, Phase.FAILED, detail=machine.absence))

    async def attach(self, machine: AgentMachine, link: AgentLink) -> None:
        """Send a machine's orders over a connection; end its workloads that have no lease.

        Raises:
            LinkLost: The connection broke before the machine was attached.
            BackendError: The agent cannot list its workloads.
            TimeoutError: The list of its workloads came too late.
        """
        try:
            async with asyncio.timeout(DISCOVER_SECONDS_MAX):
                said = await link.call(wire.DiscoverOrder())
        except TimeoutError:
            reason = f"the agent did not say within {DISCOVER_SECONDS_MAX:g} s what runs there"
            raise TimeoutError(reason) from None
        found = _value(said, list[WorkloadReport])
        orphans = [each.id for each in found if not self._is_held(each.id, machine.place)]
        for report in map(wire.cut_to_bounds, found):
            if report.id not in orphans:
                if machine not in self._machines_of(report.id):
                    self._places.pop(report.id, None)  # The workload's lease has moved here.
                self._remember(report.id, self._machines_of(report.id))
                self._tell_member(machine, report)
        ending = asyncio.gather(*(self._end(link, each) for each in orphans))
        machine.connect(link, ending)
        await ending

    def tell(self, machine: AgentMachine, report: WorkloadReport) -> None:
        """Pass an agent's report to the listener, unless another machine has the workload now."""
        if machine in self._machines_of(report.id):
            self._tell_member(machine, wire.cut_to_bounds(report))

    def _hear_own(self, report: WorkloadReport) -> None:
        """Pass on a report of this machine; called in any thread."""
        gang = self._own_gangs.get(report.id)
        if gang is None:
            self._tell(report)
        else:
            machine, loop = gang
            loop.call_soon_threadsafe(self._tell_member, machine, report)

    def _tell_member(self, machine: Member, report: WorkloadReport) -> None:
        """Pass on a report; for a member of a gang, only if it changes the gang's state."""
        machines = self._machines_of(report.id)
        if len(machines) < 2:  # noqa: PLR2004  # A gang has more than one.
            self._tell(report)
            return
        known, node = self._members.setdefault(report.id, {}), machine.place[1]
        # An agent may report the end of a short-lived member before it reports it as ready.
        if report.phase.over or not known.get(node, report).phase.over:
            known[node] = report
        nodes = [each.place[1] for each in machines]
        if known[node].phase is Phase.SUCCEEDED and not known.keys() >= set(nodes):
            return
        state = join_reports({node: known[node] for node in nodes if node in known})
        is_found = report.id in self._lost and not any(
            each.lost for each in machines if each is not machine
        )
        # `start` and `stop` report the start and stop of the whole gang.
        if is_found or state.phase in _OWN_NEWS:
            self._tell(state)

    def _tell(self, workload: WorkloadReport) -> None:
        if workload.phase is not Phase.LOST:
            self._lost.discard(workload.id)
        super()._tell(workload)

    async def _end(self, link: AgentLink, workload: str) -> None:
        """Stop a workload without a lease; repeat the stop until it succeeds."""
        while True:
            try:
                await link.call(wire.StopOrder(workload, None))
            except (BackendError, TimeoutError) as error:
                log.warning(
                    "agent_stop_failed", name=self.name, workload=workload, finding=str(error)
                )
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    def _is_held(self, workload: str, place: Place) -> bool:
        lease = self._lease(workload)
        return (
            lease is not None
            and lease.state != "ended"
            and any((each.cluster_id, each.node_id) == place for each in lease.placement)
        )

    # For all -----------------------------------------------------------------------------------

    @property
    def support(self) -> Support:
        own = self._own.support
        here = own.nodes if self._here else frozenset({NO_NODE})
        return replace(own, nodes=here and here | self._nodes, gangs=bool(self._machines))

    def listen(self, listener: Listener | None) -> None:
        super().listen(listener)
        self._own.listen(None if listener is None else self._hear_own)

    def refuse(self, spec: BaseResourceSpec) -> None:
        self._own.refuse(spec)

    async def discover(self) -> Collection[WorkloadReport]:
        """Return the workloads here and on connected machines; see `Backend.discover`."""
        found: dict[str, dict[str, WorkloadReport]] = {}
        for machine in self.machines():
            if machine.link is not None:
                for report in await machine.look(wire.DiscoverOrder(), list[WorkloadReport]):
                    found.setdefault(report.id, {})[machine.place[1]] = wire.cut_to_bounds(report)
        here = []
        for report in await self._own.discover():
            own = self._note_own(report.id, self._machines_of(report.id))
            if own is None:
                here.append(report)
            else:
                found.setdefault(report.id, {})[own.place[1]] = report
        return [*here, *(join_reports(each) for each in found.values())]

    async def start(self, order: Order) -> WorkloadReport:
        if len(order.placement) > 1:
            return await self._start_gang(order)
        places = [(each.cluster_id, each.node_id) for each in order.placement]
        machines = [self._machines[each] for each in places if each in self._machines]
        self._remember(order.id, machines)
        if machines:
            return await machines[0].start(order)
        if not (self._here or await has_workload(self._own, order.id)):
            self._refuse_here(order)
        return await self._own.start(order)

    async def _start_gang(self, order: Order) -> WorkloadReport:
        """Start a member on each machine once all are reachable; see `Backend.start`."""
        found = [self._member((each.cluster_id, each.node_id)) for each in order.placement]
        machines = [each for each in found if each is not None]
        self._remember(order.id, machines)
        reason = _why_not(order, found)
        if reason:
            if order.resumed:
                return WorkloadReport(order.id, Phase.FAILED, detail=reason)
            raise UnsupportedSpecError(reason)
        self._members[order.id] = {}
        self._note_own(order.id, machines)
        touched = [each for each in machines if each.reachable]
        try:
            seen = await _look_for_members(order, machines)
            there = [each for each, is_there in seen.items() if is_there]
            if order.resumed and len(there) < len(machines):
                lost = ", ".join(each.place[1] for each, is_there in seen.items() if not is_there)
                reason = f"of the gang, the member on node {lost} is gone"
                return WorkloadReport(order.id, Phase.FAILED, detail=reason)
            touched = machines
            if len(there) < len(machines) and order.id in self._own_gangs:
                self._refuse_here(order)
            if there and len(there) < len(machines):
                most = order.stop_seconds_max
                await asyncio.gather(*(each.stop(order.id, most) for each in there))
            meetings = await self._meetings(machines)
            pairs = zip(machines, member_orders(order, meetings), strict=True)
            starting = [asyncio.ensure_future(each.start(member)) for each, member in pairs]
            reports = await _all_or_none(starting)
        except BaseException as error:
            # A server that is stopped while it looks for a running gang leaves the gang alone.
            if not (order.resumed and isinstance(error, asyncio.CancelledError)):
                await finish(asyncio.gather(*(each.stop(order.id, 0.0) for each in touched)))
            raise
        nodes = [each.place[1] for each in machines]
        news = self._members.get(order.id, {})
        ended = {node: report for node, report in news.items() if report.phase.over}
        known = self._members[order.id] = dict(zip(nodes, reports, strict=True)) | ended
        return join_reports({node: known[node] for node in nodes})

    async def _meetings(self, machines: Sequence[Member]) -> list[wire.Meeting]:
        """Return the address and port of each member, in the order of `machines`."""
        agents = [each for each in machines if isinstance(each, AgentMachine)]
        said = await asyncio.gather(*(each.meet() for each in agents))
        meetings = dict(zip(agents, said, strict=True))
        address = self._address
        if not address and len(agents) < len(machines):
            address = next((each.link.server_address for each in agents if each.link), "")
            refuse_unreachable(address, [each.address for each in said])
        return [
            each.meeting(address) if isinstance(each, OwnMachine) else meetings[each]
            for each in machines
        ]

    def _member(self, place: Place) -> Member | None:
        """Return a node's machine; None if it is neither this machine nor one with an agent."""
        if place in self._machines:
            return self._machines[place]
        if place[1] not in self._own.support.nodes:
            return None
        return self._own_machines.setdefault(place, OwnMachine(place, self._own))

    def _note_own(self, workload: str, machines: Sequence[Member]) -> OwnMachine | None:
        """If a gang has a member on this machine, record that and return the machine; else None."""
        own = next((each for each in machines if isinstance(each, OwnMachine)), None)
        if own is not None:
            self._own_gangs[workload] = own, asyncio.get_running_loop()
        return own

    def _refuse_here(self, order: Order) -> None:
        if not self._here:
            nodes = ", ".join(f"{each.cluster_id}/{each.node_id}" for each in order.placement)
            reason = f"the backend local starts on machines with agents, not on {nodes}"
            raise UnsupportedSpecError(reason)

    async def stop(self, workload: str, stop_seconds_max: float | None = None) -> None:
        there = self._hosts(workload)
        await asyncio.gather(*(each.stop(workload, stop_seconds_max) for each in there))
        self._own_gangs.pop(workload, None)
        if self._members.pop(workload, None) is not None:
            self._tell(WorkloadReport(workload, Phase.STOPPED))

    async def status(self, workload: str) -> WorkloadReport:
        return await self._look_at_all(wire.StatusOrder(workload))

    async def probe(self, workload: str) -> WorkloadReport:
        return await self._look_at_all(wire.ProbeOrder(workload))

    async def _look_at_all(self, order: wire.StatusOrder | wire.ProbeOrder) -> WorkloadReport:
        machines = self._hosts(order.workload)
        seen = await asyncio.gather(*(each.look(order, WorkloadReport) for each in machines))
        if len(seen) == 1:
            return seen[0]
        return join_reports({m.place[1]: each for m, each in zip(machines, seen, strict=True)})

    def glance(self, workload: str) -> WorkloadReport | None:
        """Look at a process of this machine at once; see `Backend.glance`."""
        return None if self._machines_of(workload) else self._own.glance(workload)

    async def control(self, workload: str, limits: JsonMapping) -> None:
        order = wire.ControlOrder(workload, dict(limits))
        await asyncio.gather(*(each.look(order, type(None)) for each in self._hosts(workload)))

    async def reset(self, workload: str) -> JsonValue:
        order = wire.ResetOrder(workload)
        done = (each.look(order, object, again=False) for each in self._hosts(workload))
        return (await asyncio.gather(*done))[0]

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
        variables = None if environment is None else dict(environment)
        order = wire.ExecuteOrder(workload, command, timeout_seconds, workdir, user, variables)
        return await self._hosts(workload)[0].look(order, CommandExecution, again=False)

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        order = wire.LogsOrder(workload, offset, attempt)
        return await self._hosts(workload)[0].look(order, Log)

    async def files(self, workload: str, attempt: int = 0) -> RunFiles:
        """List the files of a run; for a gang, those of its rank 0. See `FileSource.files`."""
        return await self._hosts(workload)[0].look(wire.FilesOrder(workload, attempt), RunFiles)

    async def read_file(
        self, workload: str, path: str, offset: int = 0, attempt: int = 0
    ) -> FilePiece:
        order = wire.ReadFileOrder(workload, path, offset, attempt)
        return await self._hosts(workload)[0].look(order, FilePiece)

    async def close(self) -> None:
        """Close the connections. Workloads continue to run."""
        self._listener = None
        await self._own.close()

    def _remember(self, workload: str, machines: Iterable[Member]) -> None:
        self._places.pop(workload, None)
        self._places[workload] = tuple(machines)
        if len(self._places) > PLACES_MAX:
            old = next(iter(self._places))
            del self._places[old]
            self._members.pop(old, None)
            self._own_gangs.pop(old, None)

    def _hosts(self, workload: str) -> tuple[Member, ...]:
        """Return the machines of a workload, rank 0 first."""
        return self._machines_of(workload) or (self._alone,)

    def _machines_of(self, workload: str) -> tuple[Member, ...]:
        """Return the machines of a workload, rank 0 first; () if it runs on this machine alone."""
        if workload in self._places:
            return self._places[workload]
        lease = self._lease(workload)
        places = lease.placement if lease is not None else ()
        found = [(each.cluster_id, each.node_id) for each in places]
        if len(found) < 2:  # noqa: PLR2004  # A gang has more than one.
            return tuple(self._machines[each] for each in found if each in self._machines)
        # A member without a machine counts as gone, so the gang has failed.
        return tuple(self._member(each) or _missing_machine(each) for each in found)


def _why_not(order: Order, found: Sequence[Member | None]) -> str:
    """Return why a gang cannot run on these machines; empty if the gang can."""
    missing = [s.node_id for s, each in zip(order.placement, found, strict=True) if each is None]
    if missing:
        there = "with agents, and on the server's own"
        return f"a gang runs on machines {there}; {', '.join(missing)} is neither"
    here = [each.place[1] for each in found if isinstance(each, OwnMachine)]
    if len(here) > 1:
        return f"the nodes {', '.join(here)} are one machine, the server's, with one member"
    return ""


def _missing_machine(place: Place) -> AgentMachine:
    machine = AgentMachine(place)
    machine.note(gone=True)
    return machine


async def _look_for_members(order: Order, machines: Sequence[Member]) -> dict[Member, bool]:
    """Wait until a gang's machines are reachable; return, by machine, whether its member is there.

    If a machine lacks a member that was ready before, the gang has failed. The result then lacks
    the machines that have not answered yet.

    Raises:
        BackendError: A machine is lost.
    """
    looks = [asyncio.ensure_future(each.has(order)) for each in machines]
    try:
        for look in asyncio.as_completed(looks):
            if not await look and order.resumed:
                break
    finally:
        for each in looks:
            each.cancel()
        seen = await asyncio.gather(*looks, return_exceptions=True)
    return {m: there for m, there in zip(machines, seen, strict=True) if isinstance(there, bool)}


async def _all_or_none(starting: Sequence["asyncio.Task[WorkloadReport]"]) -> list[WorkloadReport]:
    """Await the starts of all members; if one fails, cancel the others, then raise its error."""
    try:
        return await asyncio.gather(*starting)
    except BaseException:
        for each in starting:
            each.cancel()
        await finish(asyncio.gather(*starting, return_exceptions=True))
        raise


def _value(raw: msgspec.Raw, kind: type[T]) -> T:
    try:
        return wire.cut_to_bounds(wire.decode_value(raw, kind))
    except msgspec.MsgspecError as error:
        raise BackendError(f"this server cannot read the agent's answer: {error}") from error
