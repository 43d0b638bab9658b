"""A pool of a Moorage server's resources: each node holds a lease while it runs.

Executors use `LeasedPool` like `ResourcePool`. The server and the named policy decide the place
and the order of grants. Up to `claims_max` nodes of a run wait in the server's queue at a time.

| Requirement | Asked for |
|---|---|
| `gpu` | whole GPUs of one node, or, below 1, a share of one GPU |
| `cpu`, `cpu_slots` | cores |
| `memory_mb` | MiB |
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final, Self, Unpack

from moorage.model import Code, Demand, LeaseTerms
from moorage.records.fields import TTL_SECONDS
from moorage.records.json_values import JsonObject
from moorage_client.asking import Request, request_message
from moorage_client.client import Client
from moorage_client.errors import LeaseLost, MoorageError, RequestRefused
from moorage_client.holding import HeldLease, Keeping
from moorage_client.loops import LoopThread
from moorage_client.workflow.errors import ResourceError, WorkflowError
from moorage_client.workflow.grants import Claim, Grant
from moorage_client.workflow.journal import RunJournal
from moorage_client.workflow.requirements import UNITS, ResourceRequirements, amount_of, units
from moorage_client.workflow.timeline import SNAPSHOTS_MAX, ResourceTimeline

CLAIMS_MAX: Final = 64
"""Default maximum of one run's nodes that wait in the server's queue at a time."""
WAIT_SECONDS: Final = 3600.0
"""Seconds that a node waits in the server's queue before it fails."""
LEASES_LOST_MAX: Final = 3
"""Number of ended or lost leases after which a node's request fails."""
CLOSE_SECONDS_MAX: Final = 30.0
"""Maximum seconds that `close` waits for releases; other leases end by their TTL."""
PROBLEMS_MAX: Final = 1000
"""Maximum failed releases that `problems` lists: the first ones."""

_SHARES: Final = {"gpu": "gpu", "cpu": "cpu", "cpu_slots": "cpu", "memory_mb": "memory_mb"}
_MILLI: Final = UNITS // 1000


@dataclass(slots=True)
class _Place:
    """The state of one claim."""

    task: asyncio.Task[None] | None = None
    settled: bool = False
    withdrawn: bool = False


@dataclass(slots=True)
class _Held:
    """A lease that a node holds."""

    lease: HeldLease
    key: str
    units: dict[str, int]
    keeping: Keeping | None = None


class LeasedPool:
    """A pool of a Moorage server's resources, for `ResourceAwareExecutor` and its async form.

        with LeasedPool("first_fit:1.0-stable") as pool:
            result = ResourceAwareExecutor(dag, pool, requirements).execute(tasks)

    Each node's lease is requested when the node is ready, renewed while it runs, and released
    after. The task finds its placement in `current_node()`. When a lease is lost, the task gets a
    stop signal and its node fails, or is tried again. A separate thread sends requests and
    renewals.

    Args:
        policy_rule_uri: The policy that decides, `name:version-tag`.
        url: URL of the server, or of several, separated by commas; default `MOORAGE_URL`, else
            `ws://127.0.0.1:8765`.
        token: The token of the caller; default `MOORAGE_TOKEN`, else the file `MOORAGE_TOKEN_FILE`,
            else none.
        ca_file: PEM file of the authority that signed the server's certificate; default
            `MOORAGE_CA_FILE`, else `SSL_CERT_FILE`, else the authorities that this machine knows.
        ttl_seconds: Seconds for which the server holds the GPUs after this program died.
        wait_seconds: Seconds after which a node in the server's queue fails with
            `NoCapacity`.
        priority: The priority of the leases; the server grants those with a higher number first.
        preemptible: Whether the server may end the leases for a request of higher priority.
        claims_max: At most this many nodes of one run wait in the server's queue at a time.
        snapshots_max: The timeline stores at most this many snapshots; None: all.
        **request: Other arguments of `Client.ask`: `clusters`, `filter`, `inputs` and so on.
    """

    def __init__(
        self,
        policy_rule_uri: str,
        url: str | None = None,
        token: str | None = None,
        *,
        ttl_seconds: float = TTL_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        priority: int = 0,
        preemptible: bool = False,
        claims_max: int = CLAIMS_MAX,
        ca_file: str | None = None,
        snapshots_max: int | None = SNAPSHOTS_MAX,
        **request: Unpack[Request],
    ) -> None:
        if unsuitable := request.keys() & {"resources", "dry_run", "explain"}:
            raise TypeError(f"LeasedPool takes no arguments {', '.join(sorted(unsuitable))}")
        if claims_max < 1:
            raise WorkflowError(f"claims_max is {claims_max}; expected 1 or more")
        self.claims_max = claims_max
        self.problems: list[MoorageError] = []
        self._policy = policy_rule_uri
        self._address = (url, token, ca_file)
        self._terms = (ttl_seconds, wait_seconds, priority, preemptible)
        self._request = request
        self._lock = threading.Lock()
        self._timeline = ResourceTimeline(snapshots_max)
        self._capacities: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._returning: set[Future[None]] = set()
        self._thread: LoopThread | None = None
        self._client: Client | None = None

    def __enter__(self) -> Self:
        """Connect, and read the capacities of the fleet.

        Raises:
            ConnectionFailed: No server answers.
            RequestRefused: The server refused the token.
        """
        if self._thread is not None:
            raise WorkflowError("this pool is open already, or was closed; make a new one")
        self._thread = LoopThread("moorage-workflow-leases")
        try:
            self._thread.run(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until the leases are released, and disconnect; a second call does nothing."""
        if self._thread is None or self._client is None:
            return
        with self._lock:
            returning = list(self._returning)
        wait(returning, CLOSE_SECONDS_MAX)
        client, self._client = self._client, None
        try:
            self._thread.run(client.close())
        finally:
            self._thread.stop()

    @property
    def capacities(self) -> dict[str, float]:
        """The total capacity of the fleet when the pool was opened."""
        return {name: amount_of(count) for name, count in self._capacities.items()}

    @property
    def allocated(self) -> dict[str, float]:
        """The amounts that nodes of this pool hold."""
        with self._lock:
            return {name: amount_of(count) for name, count in self._used.items()}

    @property
    def timeline(self) -> ResourceTimeline:
        """The amounts that nodes of this pool held over time."""
        return self._timeline

    @property
    def releases(self) -> int:
        """Always 0: the server's queue serves waiting nodes, so the run need not check again."""
        return 0

    def can_satisfy(self, requirements: ResourceRequirements) -> bool:
        """Return whether the whole fleet has the amounts; a policy may still refuse the request.

        Raises:
            ResourceError: No server can grant this requirement (a ValueError).
        """
        demand_of(requirements)
        counts = _counts(requirements)
        return all(count <= self._capacities.get(name, 0) for name, count in counts.items())

    def take(self, requirements: ResourceRequirements, node_name: str) -> Grant | None:
        """Return a grant for a node that needs nothing, and None for all others."""
        if _counts(requirements):
            return None
        self._note(node_name, "acquire", {})
        return Grant(requirements)

    def claim(self, claim: Claim) -> None:
        """Send a request for a claim's requirements to the server."""
        claim.place = _Place()
        self._opened.submit(self._ask(claim))

    def withdraw(self, claim: Claim) -> bool:
        """Remove a claim from the server's queue; False if the claim is already granted."""
        place = claim.place
        with self._lock:
            if place.settled:
                return False
            place.withdrawn = True
        self._later(self._withdraw(place))
        return True

    def exchange(self, waiting: Claim, claim: Claim) -> bool:  # noqa: ARG002  # `Pool` has the arguments.
        """Do nothing: the server decides the order of waiting nodes."""
        return False

    def outsized(self, requirements: ResourceRequirements, than: ResourceRequirements) -> bool:  # noqa: ARG002  # As `exchange`.
        """Return False: a request that does not fit waits in the server's queue."""
        return False

    def give_back(
        self,
        grant: Grant,
        node_name: str,
        by: Callable[[], None] | None,  # noqa: ARG002  # The server decides which claim is next.
        journal: RunJournal | None,
    ) -> None:
        """Release a node's lease, in the background."""
        held: _Held | None = grant.held
        self._note(node_name, "release", held.units if held else {})
        if held is not None:
            if held.keeping is not None:
                held.keeping.cancel()
            self._later(self._release(held.lease, node_name, held.key, journal))

    def watch(self, wake: Callable[[], None], releases: int) -> bool:  # noqa: ARG002  # As `releases`.
        """Do nothing: waiting nodes have a claim, or get one later."""
        return True

    def unwatch(self, wake: Callable[[], None]) -> None:
        """Do nothing: this pool has no watches to end."""

    def resume(self, journal: RunJournal) -> None:
        """Release the leases that a killed program left for completed nodes."""
        for left in journal.leftovers():
            self._later(
                self._release_leftover(left.lease, left.token, left.node_name, left.key, journal)
            )

    @property
    def _opened(self) -> LoopThread:
        if self._thread is None or self._client is None:
            raise WorkflowError("this pool is not open; use it as `with LeasedPool(…) as pool:`")
        return self._thread

    @property
    def _connected(self) -> Client:
        if self._client is None:
            raise WorkflowError("this pool was closed while its nodes ran")
        return self._client

    async def _open(self) -> None:
        url, token, ca_file = self._address
        self._client = Client(url, token, ca_file=ca_file, renewals_on=self._thread)
        await self._client.__aenter__()
        clusters = await self._client.fleet().all()
        milli = {"gpu": "gpu_milli_total", "cpu": "cpu_milli_total"}
        self._capacities = {
            name: sum(each.get(field, 0) for each in clusters) * _MILLI
            for name, field in milli.items()
        }
        self._capacities["memory_mb"] = UNITS * sum(
            each.get("memory_mib_total", 0) for each in clusters
        )
        self._used = dict.fromkeys(self._capacities, 0)

    async def _ask(self, claim: Claim) -> None:
        """Request a lease, retry until there is an answer, and wake the run."""
        place: _Place = claim.place
        if place.withdrawn:
            return
        place.task = asyncio.current_task()
        try:
            claim.grant = self._grant(claim, await self._wait_grant(claim))
        except asyncio.CancelledError:
            claim.error = WorkflowError("the pool was closed while this node waited for a lease")
        except Exception as error:  # noqa: BLE001  # The run must not wait forever.
            claim.error = error
        with self._lock:
            place.settled = not place.withdrawn
        if place.settled:
            claim.wake(claim)
        elif claim.grant is not None:  # The claim was withdrawn while the server granted it.
            self.give_back(claim.grant, claim.node_name, None, claim.journal)

    async def _withdraw(self, place: _Place) -> None:
        """Cancel a request, and wait until it has left the server's queue."""
        if place.task is not None:
            place.task.cancel()
            await asyncio.wait([place.task])

    async def _wait_grant(self, claim: Claim) -> _Held:
        """Return the lease for a claim; a journal may name one that an earlier program got."""
        journal, lost = claim.journal, 0
        while True:
            key = await _key(claim)
            wanted: Request = {**self._request, "resources": demand_of(claim.requirements)}
            message = request_message(self._policy, LeaseTerms(*self._terms, key), **wanted)
            try:
                lease = await self._connected.acquire(message, None)
            except asyncio.CancelledError:
                if journal is not None:  # Without a journal, the client cancels the request.
                    await self._recall(message, claim.node_name, key, journal)
                raise
            except LeaseLost:
                await _note_release(journal, claim.node_name, key)
                lost += 1
                if lost == LEASES_LOST_MAX:
                    raise
            except RequestRefused:
                await _note_release(journal, claim.node_name, key)
                raise
            else:
                if journal is not None:
                    journal.write_grant(claim.node_name, key, lease.id, lease.token)
                return _Held(lease, key, _counts(claim.requirements))

    async def _recall(
        self, message: JsonObject, node_name: str, key: str, journal: RunJournal
    ) -> None:
        """Leave the queue after a cancelled request; release the lease if it was granted."""
        try:
            await self._connected.cancel(key)
        except RequestRefused:
            # The request has left the queue. The same key returns its lease, if there is one.
            terms = {**message["lease"], "wait_seconds": 0}
            with contextlib.suppress(MoorageError):
                lease = await self._connected.acquire({**message, "lease": terms}, None)
                await self._connected.hand_back(lease)
        except MoorageError as error:
            self._problem(error)
            return
        await _note_release(journal, node_name, key)

    def _grant(self, claim: Claim, held: _Held) -> Grant:
        placement = held.lease.placement
        grant = Grant(claim.requirements, placement, environment_of(held.lease), held)

        def note_loss() -> None:
            try:
                held.lease.check()
            except LeaseLost as error:
                grant.lost = error
                if grant.on_lost is not None:
                    grant.on_lost(error)

        held.keeping = self._connected.keep(held.lease, note_loss)
        self._note(claim.node_name, "acquire", held.units)
        return grant

    async def _release(
        self, lease: HeldLease, node_name: str, key: str, journal: RunJournal | None
    ) -> None:
        try:
            await self._connected.hand_back(lease)
        except LeaseLost:
            pass  # `note_loss` has told the node.
        except MoorageError as error:
            self._problem(error)
            return
        await _note_release(journal, node_name, key)

    async def _release_leftover(
        self, lease: str, token: str, node_name: str, key: str, journal: RunJournal
    ) -> None:
        try:
            await self._connected.release(lease, token)
        except RequestRefused as refused:
            if refused.code not in (Code.UNKNOWN_LEASE, Code.LEASE_ENDED):
                self._problem(refused)
                return
        except MoorageError as error:
            self._problem(error)
            return
        await _note_release(journal, node_name, key)

    def _later(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine on the pool's thread; `close` waits for its end."""
        future = self._opened.submit(work)
        with self._lock:
            self._returning.add(future)
            future.add_done_callback(self._returning.discard)

    def _problem(self, error: MoorageError) -> None:
        """Store the error of a failed release; the lease ends by its TTL."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(error)

    def _note(self, node_name: str, event: str, counts: Mapping[str, int]) -> None:
        with self._lock:
            sign = 1 if event == "acquire" else -1
            for name, count in counts.items():
                self._used[name] = self._used.get(name, 0) + sign * count
            names = tuple(self._used)
            there = tuple(max(self._capacities.get(each, 0), self._used[each]) for each in names)
            self._timeline.note(names, there, tuple(self._used.values()), node_name, event)


async def _key(claim: Claim) -> str:
    """Return a request's idempotency key once the journal has stored it; "" without a journal."""
    if claim.journal is None:
        return ""
    key, durable = claim.journal.next_key(claim.node_name)
    await asyncio.wrap_future(durable)
    return key


async def _note_release(journal: RunJournal | None, node_name: str, key: str) -> None:
    if journal is not None:
        await asyncio.wrap_future(journal.write_release(node_name, key))


def _counts(requirements: ResourceRequirements) -> dict[str, int]:
    """Return the required units of each resource, under the fleet's names, without zeros."""
    counts: dict[str, int] = {}
    for name, amount in requirements.resources.items():
        own = _SHARES.get(name, name)
        counts[own] = counts.get(own, 0) + units(amount, name)
    return {name: count for name, count in counts.items() if count}


def demand_of(requirements: ResourceRequirements) -> Demand:
    """Return the demand to send to a server.

    Raises:
        ResourceError: No server has a resource, or the number of GPUs is neither whole nor
            below 1 (a ValueError).
    """
    counts = _counts(requirements)
    if unknown := counts.keys() - _SHARES.values():
        raise ResourceError(
            f"a server has no {', '.join(sorted(unknown))}; it has gpu, cpu and memory_mb"
        )
    gpus, part = divmod(counts.get("gpu", 0), UNITS)
    if gpus and part:
        raise ResourceError(
            f"{amount_of(counts['gpu'])} GPUs were required; expected a whole number or less than 1"
        )
    return Demand(
        gpus=gpus or (1 if part else 0),
        gpu_milli=-(-part // _MILLI) if part else 1000,
        cpu_milli=-(-counts.get("cpu", 0) // _MILLI),
        memory_mib=-(-counts.get("memory_mb", 0) // UNITS),
    )


def environment_of(lease: HeldLease) -> dict[str, str]:
    """Return the variables that a task's processes need to use a lease.

    Workloads that the server starts have the same variables.
    """
    share = lease.placement[0]
    return {
        # GPU ids are in the order of NVML; CUDA's own default order begins with the fastest GPU.
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "CUDA_VISIBLE_DEVICES": ",".join(share.gpus),
        "MOORAGE_CLUSTER_ID": share.cluster_id,
        "MOORAGE_NODE_ID": share.node_id,
        "MOORAGE_NODES": ",".join(each.node_id for each in lease.placement),
        "MOORAGE_LEASE_ID": lease.id,
        "MOORAGE_FENCING": str(lease.fencing),
    }
