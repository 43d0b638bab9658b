"""Clients that request and release leases during faults, and record the answers."""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.faults.history import AcknowledgedGrant, AcknowledgedRelease, FaultHistory
from moorage.lab.errors import CommandError
from moorage.records.leases import Lease
from moorage_client import Client
from moorage_client.errors import ConnectionFailed, MoorageError, RequestRefused, Timeout

HELD_MAX: Final = 2
"""Maximum leases of one client. With fewer GPUs than leases, some clients wait."""
TTL_SECONDS: Final = 900.0
WAIT_SECONDS: Final = 600.0
REPEATED: Final = 0.2
"""Share of the requests that are sent a second time after their answer."""
RECONNECT_SECONDS: Final = 60.0
ANSWER_SECONDS_MAX: Final = 60.0
"""Seconds after which a request without an answer counts as forgotten."""


class LoadStalled(Exception):  # noqa: N818  # It names what happened.
    """Clients got no more answers."""


@dataclass(frozen=True)
class Target:
    """The servers that clients call, and what the clients request.

    Args:
        urls: The URLs of the servers, separated by commas.
        policy: Name and tag of the policy.
        clusters: Ids of the clusters to choose from; empty: all.
        gpus: Number of GPUs of each lease.
        name_server: Returns a name of the server process that answers at a URL.
        alone: Whether the servers have no other clients than these.
    """

    urls: str
    policy: str
    clusters: tuple[str, ...]
    gpus: int
    name_server: Callable[[str], str]
    alone: bool


class Load:
    """Runs a number of clients, each in its own task, and records their history.

    Attributes:
        history: The answers that the clients saw.
    """

    def __init__(self, target: Target, clients: int, seed: int) -> None:
        self.history = FaultHistory()
        self._target = target
        self._clients = clients
        self._seed = seed
        self._over = asyncio.Event()
        self._held: list[Lease] = []
        """Leases of clients that have ended."""
        self._has_answered = asyncio.Condition()
        self._answers: Counter[str] = Counter()

    async def during(self, work: Callable[[], Awaitable[None]]) -> None:
        """Send requests with all clients while `work` plays faults; then read the leader's state.

        At the end, each client has at most one lease, which is released after the state was read.
        If `work` raises `LoadStalled`, it ends early.

        Raises:
            CommandError: A client was refused.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                clients = [tasks.create_task(self._play(each)) for each in range(self._clients)]
                with contextlib.suppress(LoadStalled):
                    await work()
                self._over.set()
                _, stalled = await asyncio.wait(clients, timeout=ANSWER_SECONDS_MAX)
                for each in stalled:  # Its request counts as forgotten.
                    each.cancel()
        except* MoorageError as refused:
            raise CommandError(str(refused.exceptions[0])) from None
        async with Client(self._target.urls, reconnect_seconds=RECONNECT_SECONDS) as client:
            await self._look(client)
            for lease in self._held:
                with contextlib.suppress(MoorageError):  # Then the lease ends by its TTL.
                    await client.release(lease.id, lease.token)

    async def answers(self, more: int, of_other_than: str = "") -> None:
        """Wait for `more` answers from server processes other than `of_other_than`.

        Raises:
            LoadStalled: The answers do not come in time.
        """

        def count() -> int:
            return self._answers.total() - sum(self._answers[each] for each in {"", of_other_than})

        enough = count() + more
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX), self._has_answered:
                await self._has_answered.wait_for(lambda: count() >= enough)
        except TimeoutError:
            raise LoadStalled from None

    async def _look(self, client: Client) -> None:
        """Record the final state of the leading server."""
        known = {each.lease for each in self.history.grants}
        async for lease in client.leases():
            if self._target.alone or lease.id in known:
                self.history.leases[lease.id] = lease.fencing
        if self._target.alone:
            self.history.waiting = [str(each["request"]) async for each in client.queue()]

    async def _play(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        held: list[Lease] = []
        client = Client(self._target.urls, reconnect_seconds=RECONNECT_SECONDS)
        async with client:
            for turn in itertools.count():
                if self._over.is_set():
                    break
                key = f"{self._seed}-{number}-{turn}-{time.time_ns()}"
                held.append(await self._ask(client, key))
                if draw.random() < REPEATED:
                    await self._ask(client, key)
                if len(held) >= HELD_MAX:
                    await self._release(client, held.pop(0))
            while len(held) > 1:
                await self._release(client, held.pop())
        self._held += held

    async def _ask(self, client: Client, key: str) -> Lease:
        terms = {"ttl_seconds": TTL_SECONDS, "wait_seconds": WAIT_SECONDS, "idempotency_key": key}
        begun = time.monotonic()
        self.history.sent.setdefault(key, begun)
        while True:
            before = client.url
            with contextlib.suppress(ConnectionFailed, Timeout):  # The client sends a new request.
                answer = await client.ask(
                    self._target.policy,
                    clusters=self._target.clusters or None,
                    resources={"gpus": self._target.gpus},
                    lease=terms,
                )
                break
        lease = answer.lease
        assert lease is not None
        gpus = tuple(
            (share.cluster_id, share.node_id, str(gpu))
            for share in lease.placement
            for gpu in share.gpus
        )
        server = self._server(before, client.url)
        now = time.monotonic()
        self.history.grants.append(
            AcknowledgedGrant(key, lease.id, lease.fencing, gpus, server, begun, now)
        )
        await self._tell(server)
        return lease

    async def _release(self, client: Client, lease: Lease) -> None:
        begun = time.monotonic()
        self.history.released_at[lease.id] = begun
        while True:
            before = client.url
            try:
                await client.release(lease.id, lease.token)
            except (ConnectionFailed, Timeout):
                continue
            except RequestRefused as refused:
                self.history.refusals.append(f"the release of {lease.id}: {refused}")
                return
            break
        server = self._server(before, client.url)
        self.history.releases.append(AcknowledgedRelease(lease.id, server, begun, time.monotonic()))
        await self._tell(server)

    def _server(self, before: str, after: str) -> str:
        """Return the process that answered, or "" if the client changed its address meanwhile."""
        return self._target.name_server(after) if before == after else ""

    async def _tell(self, server: str) -> None:
        self._answers[server] += 1
        async with self._has_answered:
            self._has_answered.notify_all()
