"""Lets agents in, puts their machines into the registry, and notices when they are lost.

The gateway passes agents' connections to `serve`; `backends.agents` starts workloads over them. An
agent is not a caller: its key is valid on this path only.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from importlib.metadata import version
from typing import Final

import msgspec
import structlog

from moorage.backends.agents import wire
from moorage.backends.agents.backend import AgentMachine, FleetBackend, Place
from moorage.backends.agents.link import AgentLink, LinkLost
from moorage.backends.base import BackendError
from moorage.catalog.documents.encoding import encode
from moorage.catalog.ports import Catalog
from moorage.daemon.access.tokens import LOCAL
from moorage.daemon.agents.agent_nodes import AgentNodes
from moorage.daemon.agents.agent_store import (
    USED,
    AgentOrigin,
    AgentRecord,
    AgentStore,
    AgentStoreError,
    JoiningToken,
)
from moorage.daemon.agents.measurements import AgentMeasurements, with_busy, without_busy
from moorage.daemon.agents.store_thread import StoreThread
from moorage.model import LOST, ClusterId, Code, NodeId
from moorage.protocol.agent_socket import AgentSocket
from moorage.protocol.cluster_documents import nodes_of
from moorage.protocol.faults import ServiceError
from moorage.protocol.json_bounds import is_deeper
from moorage.records.audit import AuditEntry
from moorage.records.fields import DEPTH_MAX
from moorage.records.history import AbsentAgent, AgentsNow
from moorage.records.json_values import JsonObject
from moorage.records.rights import SERVER_ITSELF, Caller

HELLO_SECONDS_MAX: Final = 10.0
"""How long an agent may take to send its hello."""
ANSWER_SECONDS_MAX: Final = 3.0
"""How long a connected agent may take to answer when another agent shows the same key."""
BEAT_SECONDS: Final = (5.0, 10.0)
"""Shortest and longest pause between two beats of an agent. If `agent_lost_seconds` is low, both
are shorter."""
BEATS_A_SECOND: Final = 50
"""Beats of all agents per second, within `BEAT_SECONDS`; Nomad's `max_heartbeats_per_second`."""
UNHEARD_MARGIN_SECONDS: Final = 10.0
"""Leases start elsewhere once a machine was silent for its agent's `unheard_seconds` and this
margin, in which its workloads end and clocks may differ."""
ABSENT_MAX: Final = 20
"""Maximum disconnected agents that `now` names."""
OWN_LOOK_SECONDS: Final = 10.0
"""Seconds between two measurements of the server's own machine, as for agents."""
_WATCH_SECONDS: Final = 0.5
"""Seconds between two checks of the machines, unless the store of agents changes."""
_LOOK_SECONDS: Final = 0.1
"""Seconds between two checks for changes of the store: SQLite does not report them."""
COPIED: Final = (
    "this data folder is not the one with which {0} joined: it was copied or moved, and the "
    "workloads at {0} may still run; join with an empty --data folder, a token and a --name of its "
    "own, or "
    "first run `moored agent forget {0}` if nothing runs there any more"
)
"""The refusal of a copied data folder."""
DISPLACED_MAX: Final = 100
"""Maximum registered nodes that a machine replaces, since they have its devices or ids."""

log = structlog.get_logger("moored")


class _Refusal(Exception):  # noqa: N818  # It names an answer, not a fault.
    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.farewell = wire.AgentFarewell(reason, final)


class AgentRoster:
    """Lets agents in, and manages their machines in the registry and the backend.

    Args:
        store: The agents that may connect, and the tokens with which machines may join.
        fleet: The backend `local`; None: this server has no such backend.
        catalog: The documents and metrics of clusters.
        lost_seconds: How long a machine may be silent before it counts as lost.
        audit: Takes entries of the audit log.
    """

    def __init__(
        self,
        store: AgentStore,
        fleet: FleetBackend | None,
        catalog: Catalog,
        lost_seconds: float,
        audit: Callable[[AuditEntry], None],
    ) -> None:
        self._store = store
        self._thread = StoreThread(store)
        self._epoch = self._reclaimed = 0
        self._fleet = fleet
        self._registry, self._owner = AgentNodes(catalog.clusters), catalog.memory.owner
        self._documents = catalog.memory.clusters
        self._lost_seconds = lost_seconds
        self._audit = audit
        self._measurements = AgentMeasurements(catalog.metrics)
        self._nodes: dict[Place, bytes] = {}  # As agents have described them, encoded.
        self._busy: dict[Place, dict[str, str]] = {}  # As `_describe` last published it.
        self._beat_seconds = self._beat_seconds_of(0)
        self._coming: set[Place] = set()
        self._shown_lost: set[Place] = set()
        self._own: Place | None = None

    def open(self, epoch: int) -> None:
        """Tell the backend which machines have agents, before it looks at leases.

        Args:
            epoch: The epoch of this server; 0: no other server can replace it.

        Raises:
            AgentStoreError: The store cannot be read.
        """
        self._epoch = epoch
        places = self._store.agents().keys() | self._store.forgotten()
        if self._fleet is not None and places:
            self._store.note_disconnection(None, time.time())
            for place in places:
                self._fleet.machine(place)

    def _beat_seconds_of(self, agents: int) -> float:
        """Return the pause between two beats of an agent, by the number of agents."""
        # A silent connection is closed when at most two thirds of `agent_lost_seconds` are over.
        silence = self._lost_seconds / wire.BEATS_MISSED_MAX
        shortest, longest = min(BEAT_SECONDS[0], silence / 2), min(BEAT_SECONDS[1], silence * 2 / 3)
        return min(max(shortest, agents / BEATS_A_SECOND), longest)

    def close(self) -> None:
        """Make the pending changes of the store, and end its thread."""
        self._thread.close()

    def now(self) -> AgentsNow:
        """Return the numbers of connected, absent and lost agents, and some absent agents."""
        machines = [each for each in self._fleet.machines() if not each.gone] if self._fleet else []
        absent = sorted((each for each in machines if each.link is None), key=_absent_longest)
        first = [
            AbsentAgent(*each.place, each.heard_time, each.lost) for each in absent[:ABSENT_MAX]
        ]
        lost = sum(each.lost for each in absent)
        return AgentsNow(len(machines) - len(absent), len(absent), lost, first)

    def maintains(self, cluster_id: str) -> bool:
        """Return whether the server maintains a cluster, for agents or its own machine."""
        machines = self._fleet.machines() if self._fleet is not None else ()
        of_agents = any(each.place[0] == cluster_id and not each.gone for each in machines)
        return of_agents or (self._own is not None and self._own[0] == cluster_id)

    async def admits(self, secret: str | None) -> bool | None:
        """Return whether a token or key is known; None where the store cannot be read now."""
        try:
            return secret is not None and await self._find(secret) is not None
        except AgentStoreError as error:
            log.error("agent_store_failed", reason=str(error))  # noqa: TRY400  # A traceback says no more.
            return None

    async def _find(self, secret: str) -> AgentRecord | JoiningToken | None:
        return await self._thread.read(self._store.find, secret, time.time())

    async def serve(self, secret: str, address: str, socket: AgentSocket) -> None:
        """Serve an agent's machine as a part of the fleet until the connection is gone."""
        try:
            hello = await self._hello(socket)
            now, unheard_seconds = time.time(), hello.unheard_seconds
            shown = AgentOrigin(address, hello.release, unheard_seconds, now, hello.folder)
            fleet, machine, key = await self._let_in(secret, hello, shown)
        except _Refusal as refusal:
            log.warning("agent_refused", address=address, reason=refusal.farewell.reason)
            await socket.send(wire.encode(refusal.farewell))
            return
        try:
            epoch = self._epoch + self._reclaimed
            link = AgentLink(socket, partial(fleet.tell, machine), epoch)
            machine.hear(link)  # First: later messages of the agent continue from the hello.
            if key:
                about = {"cluster": machine.place[0], "node": machine.place[1]}
                self._audit(
                    AuditEntry(time.time(), "agent.joined", "moored", remote=address, about=about)
                )
            else:
                await self._thread.change(self._store.note_connection, machine.place, shown)
            beat_seconds = self._beat_seconds
            if hello.unheard_seconds:
                beat_seconds = min(beat_seconds, hello.unheard_seconds / wire.BEATS_MISSED_MAX)
            welcome = wire.AgentWelcome(*machine.place, key, epoch, beat_seconds)
            await socket.send(wire.encode(welcome))
            await self._take_part(fleet, machine, link, hello)
        except AgentStoreError as error:
            log.warning("agent_failed", machine="/".join(machine.place), reason=str(error))
        finally:
            self._coming.discard(machine.place)
            if machine.link is None and not machine.gone:
                with contextlib.suppress(AgentStoreError):  # Only `moored agent list` reads this.
                    note, gone = self._store.note_disconnection, (machine.place, shown.changed_at)
                    await self._thread.change(note, gone, time.time())

    async def _take_part(
        self, fleet: FleetBackend, machine: AgentMachine, link: AgentLink, hello: wire.AgentHello
    ) -> None:
        name = "/".join(machine.place)
        attaching = asyncio.create_task(self._attach(fleet, machine, link, hello))
        attaching.add_done_callback(lambda done: link.abort() if _failure(done) else None)
        failure: BaseException | None = None
        try:
            await link.run()
        except msgspec.MsgspecError as error:
            failure = error
        finally:
            link.abort()
            attaching.cancel()
            await asyncio.wait([attaching])
            machine.disconnect(link)
            log.info("agent_disconnected", machine=name)
        match failure or _failure(attaching):
            case None | LinkLost():
                pass
            case msgspec.MsgspecError() | ServiceError() | BackendError() | TimeoutError() as known:
                log.warning("agent_failed", machine=name, reason=str(known))
            case defect:
                raise defect

    async def _attach(
        self, fleet: FleetBackend, machine: AgentMachine, link: AgentLink, hello: wire.AgentHello
    ) -> None:
        """Let the machine take part in placement."""
        self._nodes[machine.place] = wire.encode(hello.node)
        hello.node = {}  # The node is large, and this connection may last long.
        await fleet.attach(machine, link)
        link.rely_on_beats()
        self._coming.discard(machine.place)
        await self._describe(machine, hello.busy)
        log.info("agent_connected", machine="/".join(machine.place))

    async def _hello(self, socket: AgentSocket) -> wire.AgentHello:
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                frame = await socket.receive()
            any_hello = wire.decode_hello(frame or b"")
        except (TimeoutError, msgspec.MsgspecError):
            raise _Refusal("expected the agent's hello as its first frame") from None
        if any_hello.version != wire.VERSION:
            raise _Refusal(
                f"the agent (release {any_hello.release[:40]}) speaks version {any_hello.version}"
                f" of the agents' protocol, and this server (release {version('moorage')}) version"
                f" {wire.VERSION}; install the same release on both machines"
            )
        try:
            hello = wire.decode_report(frame or b"")
        except msgspec.MsgspecError as error:
            raise _Refusal(f"the hello of the agent cannot be read: {error}") from error
        assert isinstance(hello, wire.AgentHello)
        if hello.unheard_seconds and not self._outlasts(hello.unheard_seconds):
            raise _Refusal(
                f"the agent ends workloads if it hears no server for {hello.unheard_seconds:g} s; "
                f"this server's agent_lost_seconds, {self._lost_seconds:g}, must be "
                f"{UNHEARD_MARGIN_SECONDS:g} s longer: change one of the two settings"
            )
        return hello

    def _outlasts(self, unheard_seconds: float) -> bool:
        """Return whether a machine counts as lost only after its agent has ended its workloads."""
        return self._lost_seconds >= unheard_seconds + UNHEARD_MARGIN_SECONDS

    async def _let_in(
        self, secret: str, hello: wire.AgentHello, shown: AgentOrigin
    ) -> tuple[FleetBackend, AgentMachine, str]:
        """Return the machine of an agent, and its new key; empty: it already has a key."""
        if self._fleet is None:
            raise _Refusal(
                "agents are of the backend local, which this server's `backends` lacks; "
                "set MOORAGE_BACKENDS=local at the server"
            )
        try:
            known = await self._find(secret)
            hello.node = _plain(hello.node)
            self._reclaimed = await self._thread.read(self._store.reclaimed)
            if known is None:
                raise _Refusal(
                    "this token or key is not known, has expired, or is revoked; "
                    "`moored agent token` makes a new token",
                    final=True,
                )
            if isinstance(known, AgentRecord):
                if known.agent != hello.agent:
                    reason = f"this key belongs to {known.name}, which has another data folder"
                    raise _Refusal(reason, final=True)
                machine, _ = await self._take_over(self._fleet, known.place, hello)
                return self._fleet, machine, ""
            if known.agent not in {"", hello.agent}:
                raise _Refusal(USED, final=True)
            return self._fleet, *await self._join(self._fleet, known, hello, shown)
        except AgentStoreError as error:
            raise _Refusal(str(error)) from error
        except ServiceError as error:
            reason = str(error)
            if error.code == Code.CONFLICT:
                reason = reason.removeprefix(f"{error.field}: ")
                reason += "; or start this agent with --no-machine-id"
            elif error.code == Code.TOO_LARGE and isinstance(known, JoiningToken):
                reason += self._say_how_to_make_room(known.cluster_id)
            raise _Refusal(reason) from error

    async def _join(
        self, fleet: FleetBackend, token: JoiningToken, hello: wire.AgentHello, shown: AgentOrigin
    ) -> tuple[AgentMachine, str]:
        """Register the machine of a new agent; return it and the agent's key."""
        name = hello.node.get("id")
        if not isinstance(name, str) or not name.strip() or "/" in name or not name.isprintable():
            raise _Refusal(f"the name of a machine is a text without `/`, not {str(name)[:40]!r}")
        place = ClusterId(token.cluster_id), NodeId(name)
        machine, is_new = await self._take_over(fleet, place, hello)
        by_hand: JsonObject | None = None
        try:
            if is_new:
                by_hand = await self._read_node_by_hand(place)
                await self._open_cluster(place)
            if is_new and by_hand is None:
                await self._thread.change(self._store.note_joining, place, time.time())
            node = without_busy(hello.node, hello.busy)
            await self._register(place, partial(self._registry.put, place, node))
            join = self._store.join
            key = await self._thread.change(join, token, place, hello.agent, shown)
        except BaseException as error:
            if is_new:
                fleet.forget(machine)
                if by_hand is not None:
                    await self._registry.put(place, by_hand)
                elif not isinstance(error, _Refusal):
                    await self._registry.take_out(place)
                    await self._erase(place)
            self._coming.discard(place)
            raise
        if by_hand is not None:
            self._note_displaced(place, "/".join(place), self._owner(place[0]))
        return machine, key

    def _say_how_to_make_room(self, cluster: str) -> str:
        """Return advice for a cluster that is too large for another machine."""
        remedy = "; have this machine join another cluster (`moored agent token --cluster`)"
        owner = self._owner(cluster)
        if owner in {"", SERVER_ITSELF}:
            return remedy
        delete = f"`moorage fleet delete {cluster}`"
        return f"{remedy}, or remove this one, which the tenant {owner} registered ({delete})"

    async def _take_over(
        self, fleet: FleetBackend, place: Place, hello: wire.AgentHello
    ) -> tuple[AgentMachine, bool]:
        """Return a node's machine, and whether it is new; refuse if another agent has the node."""
        taken = place in self._coming
        self._coming.add(place)
        try:
            return await self._claim(fleet, place, hello, taken=taken)
        except BaseException:
            if not taken:
                self._coming.discard(place)
            raise

    async def _claim(
        self, fleet: FleetBackend, place: Place, hello: wire.AgentHello, *, taken: bool
    ) -> tuple[AgentMachine, bool]:
        name = "/".join(place)
        record = (await self._thread.read(self._store.agents)).get(place)
        if record is not None and record.agent != hello.agent:
            raise _Refusal(
                f"another machine is named {name} already; give this one a --name of its own, or "
                f"`moored agent forget {name}` if this machine replaces it"
            )
        if record is None and not taken and place in await self._thread.read(self._store.forgotten):
            await self._drop(fleet.machine(place))  # `watch` has not dropped it yet.
        machine = fleet.machine(place)
        first = None if record is None else record.folder
        is_copy = hello.folder is not None and first is not None and hello.folder.is_copy_of(first)
        if is_copy and machine.link is None:  # The original agent may hang, and its workloads run.
            raise _Refusal(COPIED.format(name), final=True)
        if not taken and not is_copy and not await self._answers(machine):
            return machine, record is None
        reason = f"an agent named {name} is connected already"
        if record is not None and record.address:
            reason += f" from {record.address}"
        raise _Refusal(f"{reason}: a copied disk needs a data folder and a token of its own")

    async def _answers(self, machine: AgentMachine) -> bool:
        """Return whether a machine's agent answers; if not, close its connection."""
        link = machine.link
        if link is None:
            return False
        asking = asyncio.ensure_future(link.call(wire.StatusOrder("")))
        await asyncio.wait([asking], timeout=ANSWER_SECONDS_MAX)
        answers = asking.done()
        if not answers:
            link.abort()
        (answer,) = await asyncio.gather(asking, return_exceptions=True)
        return answers and not isinstance(answer, LinkLost)

    async def _read_node_by_hand(self, place: Place) -> JsonObject | None:
        """Return the node that a tenant registered under the name of a new agent, or None.

        Raises:
            _Refusal: The server itself has registered it.
        """
        node = await self._registry.get(place)
        if node is not None and not await self._is_by_hand(place):
            raise _Refusal(
                f"{'/'.join(place)} is registered, and has no agent; "
                "give this machine a --name of its own, or remove the other node"
            )
        return node

    async def _is_by_hand(self, place: Place) -> bool:
        """Return whether a tenant registered a node: no agent has it, nor the server itself."""
        look = None if self._fleet is None else self._fleet.look
        own = self._own or (look and look.place())
        by_tenant = self._owner(place[0]) not in {"", SERVER_ITSELF}
        return (
            by_tenant and place != own and place not in await self._thread.read(self._store.agents)
        )

    async def _register(self, place: Place, put: Callable[[], Awaitable[None]]) -> None:
        """Put a machine's node into its cluster; remove a tenant's node for the same machine."""
        for _ in range(DISPLACED_MAX):
            try:
                return await put()
            except ServiceError as error:
                await self._displace(place, error)
        raise ServiceError(Code.CONFLICT, f"the devices of {'/'.join(place)} are registered again")

    async def _displace(self, place: Place, conflict: ServiceError) -> None:
        """Remove a node that a tenant registered for the machine of an agent."""
        for name in ("registered_as", "node"):
            cluster, _, node = str(conflict.details.get(name, "")).partition("/")
            other = ClusterId(cluster), NodeId(node)
            own = place == self._own  # Without tokens, the importer may own the server.
            if own and not self._is_of_tenant(cluster):
                continue
            if node and other != place and await self._is_by_hand(other):
                await self._registry.take_out(other)
                self._note_displaced(place, "/".join(other), self._owner(other[0]))
                return
        raise conflict

    async def _open_cluster(self, place: Place) -> None:
        """Let a tenant's cluster take part in placement before its first machine joins.

        From then on the server maintains it, and an operator may exclude it.
        """
        first = all(place[0] != each[0] for each in await self._thread.read(self._store.agents))
        owner = self._owner(place[0])
        if first and owner and (before := await self._registry.open(place[0])):
            self._note_displaced(place, f"{place[0]} ({before})", owner)

    def _note_displaced(self, place: Place, before: str, owner: str) -> None:
        about: JsonObject = {"cluster": place[0], "node": place[1], "tenant": owner}
        entry = AuditEntry(time.time(), "agent.displaced", "moored", about=about)
        entry.before, entry.why = before, "this machine has registered itself"
        self._audit(entry)
        log.warning("agent_displaced", machine="/".join(place), before=before)

    async def register_own(self, document: JsonObject, noted: tuple[str, str] | None) -> Place:
        """Register the server's own machine, under its earlier name if there is one.

        Args:
            document: The document of a cluster that has only this machine.
            noted: The node as which it was registered before; None: unknown.

        Returns:
            The machine's node; from now on, only the server and operators change its cluster.

        Raises:
            ServiceError: The registry refuses the document.
        """
        (node,) = nodes_of(document)
        before = self._own_before(document, noted)
        self._own = place = before or (ClusterId(document["id"]), NodeId(node["id"]))
        renamed = {**document, "id": place[0], "nodes": {"nodeData": [{**node, "id": place[1]}]}}
        try:
            by_hand = before is None and await self._registry.get(place) is not None
            if before is None:
                await self._open_cluster(place)
            await self._register(place, partial(self._registry.put_own, renamed, place))
        except BaseException:
            self._own = None
            raise
        if by_hand and self._is_of_tenant(place[0]):
            self._note_displaced(place, "/".join(place), self._owner(place[0]))
        return place

    def _own_before(self, document: JsonObject, noted: tuple[str, str] | None) -> Place | None:
        """Return the registered node of the server's own machine; None: there is none.

        The node that the data folder notes takes precedence over a node with the same machine id,
        which copies of one disk share. A tenant's document of a machine with this id is ignored.
        """
        nodes = {
            (cluster, str(each.get("id"))): each
            for cluster, entry in self._documents.items()
            for each in nodes_of(entry.document)
        }
        if noted in nodes:
            return ClusterId(noted[0]), NodeId(noted[1])
        key = nodes_of(document)[0].get("machineId")
        if document["id"] in self._documents or not key:
            return None
        same = (place for place, each in nodes.items() if each.get("machineId") == key)
        found = next((each for each in same if not self._is_of_tenant(each[0])), None)
        return found and (ClusterId(found[0]), NodeId(found[1]))

    def _is_of_tenant(self, cluster: str) -> bool:
        """Return whether a tenant owns a cluster, except `local`, which owns all without tokens."""
        return self._owner(cluster) not in {"", SERVER_ITSELF, LOCAL.tenant}

    async def _describe(self, machine: AgentMachine, busy: dict[str, str]) -> None:
        """Put a connected machine's node into its cluster, without devices in use by others."""
        self._busy[machine.place] = busy
        node: JsonObject = msgspec.msgpack.decode(self._nodes[machine.place])
        put = partial(self._registry.put, machine.place, without_busy(node, busy))
        await self._register(machine.place, put)
        self._shown_lost.discard(machine.place)

    async def watch(self) -> None:
        """Follow the store, and check the machines, until cancelled."""
        changed, due_at = False, 0.0
        while True:
            # A revocation takes effect at once; but connecting agents change the store, too.
            await asyncio.sleep(_WATCH_SECONDS if changed else _LOOK_SECONDS)
            try:
                changed = await self._thread.read(self._store.has_changed)
                if not changed and time.monotonic() < due_at:
                    continue
                due_at = time.monotonic() + _WATCH_SECONDS
                records = await self._thread.read(self._store.agents)
            except AgentStoreError:
                continue  # `admits` logs the error.
            machines = self._fleet.machines() if self._fleet is not None else ()
            self._beat_seconds = self._beat_seconds_of(len(machines))
            due = ((each, self._look(each, records.get(each.place))) for each in machines)
            changes = [self._change(each, change) for each, change in due if change is not None]
            await asyncio.gather(*changes)
            await self._measurements.publish(machines)

    async def watch_own(self) -> None:
        """Measure the server's own machine as agents measure theirs, until cancelled."""
        look = None if self._fleet is None else self._fleet.look
        while look is not None:
            place = look.place()
            try:
                measured = await asyncio.to_thread(look.measure) if place else None
            except Exception as error:  # noqa: BLE001  # A driver may raise anything.
                log.warning("measuring_failed", reason=f"{type(error).__name__}: {error}")
                measured = None
            self._measurements.own = None
            if place is not None and measured is not None:
                own = ClusterId(place[0]), NodeId(place[1])
                self._measurements.own = own, wire.AgentMetrics(*measured), time.time()
                await self._mark_own(own, measured.busy)
            await asyncio.sleep(OWN_LOOK_SECONDS)

    async def _mark_own(self, place: Place, busy: dict[str, str]) -> None:
        """Exclude the devices of the server's own machine that other programs use."""
        try:
            await self._registry.change(place, lambda node: node and with_busy(node, busy))
        except ServiceError as error:
            log.warning("agent_failed", machine="/".join(place), reason=str(error))

    def _look(
        self, machine: AgentMachine, record: AgentRecord | None
    ) -> Coroutine[object, object, None] | None:
        """Check a machine; return the change that is due, or None."""
        link, now = machine.link, time.monotonic()
        if record is None and machine.place not in self._coming:
            return self._drop(machine)
        machine.revoked = revoked = record is not None and record.revoked
        if link is not None:
            silent = now - link.heard_at > wire.BEATS_MISSED_MAX * self._beat_seconds
            if silent or record is None or revoked:
                link.abort()
                machine.disconnect(link)
            elif link.busy is not None and link.busy != self._busy.get(machine.place):
                return self._describe(machine, link.busy)
        if machine.link is None and (revoked or now - machine.heard_at > self._lost_seconds):
            if machine.place not in self._shown_lost:
                return self._lose(machine)
            if record is not None and not machine.idle:
                self._give_up(machine, record.unheard_seconds)
        return None

    async def _change(self, machine: AgentMachine, change: Coroutine[object, object, None]) -> None:
        try:
            await change
        except (ServiceError, AgentStoreError) as error:
            log.warning("agent_failed", machine="/".join(machine.place), reason=str(error))

    async def _lose(self, machine: AgentMachine) -> None:
        """Exclude a lost machine from placement; its workloads keep running."""
        machine.note(lost=True)

        def lost(node: JsonObject | None) -> JsonObject | None:
            if machine.link is not None:  # It is connected again, and its node is put in next.
                return None
            return node and {**node, "unavailable": f"{LOST}{machine.absence}"}

        await self._registry.change(machine.place, lost)
        if machine.link is not None:
            return
        self._shown_lost.add(machine.place)
        if self._fleet is not None:
            self._fleet.lose(machine)
        log.warning("agent_lost", machine="/".join(machine.place), reason=machine.absence)

    def _give_up(self, machine: AgentMachine, unheard_seconds: float) -> None:
        """Requeue leases of a lost machine elsewhere, if its agent has ended their workloads."""
        # Its agent may have connected just now, even if the connection is not in use yet.
        lost = time.monotonic() - machine.heard_at > self._lost_seconds and machine.link is None
        if self._fleet is not None and unheard_seconds and self._outlasts(unheard_seconds) and lost:
            self._fleet.give_up(machine)
            log.warning("agent_idle", machine="/".join(machine.place), reason=machine.absence)

    async def forget(self, place: Place, caller: Caller, remote: str) -> str:
        """Give up a machine that will not come back; return its new state.

        Raises:
            ServiceError: The machine has no agent, or its agent is connected.
        """
        name = "/".join(place)
        try:
            if place not in await self._thread.read(self._store.agents):
                reason = f"no machine with an agent is named {name}."
                raise ServiceError(Code.NOT_FOUND, reason, field="node")
            await self._thread.change(self._store.forget, name)
        except AgentStoreError as error:
            raise ServiceError(Code.CONFLICT, f"{error}.") from error
        about = {"cluster": place[0], "node": place[1]}
        who = caller.tenant, caller.role, caller.token_name, remote
        self._audit(AuditEntry(time.time(), "agent.forgotten", *who, about=about))
        if self._fleet is not None:
            await self._drop(self._fleet.machine(place))
        return "forgotten"

    async def _drop(self, machine: AgentMachine) -> None:
        if self._fleet is None or machine.gone:
            return
        self._nodes.pop(machine.place, None)
        self._shown_lost.discard(machine.place)
        self._fleet.forget(machine)
        if machine.link is not None:
            machine.link.abort()
        await self._registry.take_out(machine.place)
        await self._erase(machine.place)

    async def _erase(self, place: Place) -> None:
        with contextlib.suppress(AgentStoreError):  # The next start erases the record.
            await self._thread.change(self._store.erase, place)


def _plain(node: JsonObject) -> JsonObject:
    """Return an agent's node as plain JSON: its frame may hold values that JSON does not have.

    Raises:
        ServiceError: The value cannot be a document, or is nested too deep.
    """
    encoded = encode(node)
    if is_deeper(encoded, DEPTH_MAX):
        reason = f"the node has more than {DEPTH_MAX} arrays and objects within one another"
        raise ServiceError(Code.BAD_MESSAGE, reason)
    plain: JsonObject = msgspec.json.decode(encoded)
    return plain


def _failure(done: "asyncio.Task[None]") -> BaseException | None:
    """Return why a task failed; None if it succeeded or was cancelled."""
    return None if done.cancelled() else done.exception()


def _absent_longest(machine: AgentMachine) -> tuple[bool, float]:
    """Return a sort key: machines that count as lost first, then those silent for longest."""
    return not machine.lost, machine.heard_time
