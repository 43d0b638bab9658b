"""The clients of `kills`: they request and release leases without pause.

A client has one message under way at a time. If the daemon is killed before it answers, the client
sends the same message to the next daemon, with the same idempotency key. So at the end, each
client knows the outcome of all its requests.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import Any, Final, Literal

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from moorage.lab.errors import CommandError

CLIENTS: Final = 4
HELD_MAX: Final = 4
"""Maximum number of leases that one client has at a time."""
SHORT_SHARE: Final = 0.2
"""Share of the workloads that end by themselves."""
REPLY_SECONDS_MAX: Final = 60.0
POLICY: Final = "first_fit:1.0-stable"

Kind = Literal["lasting", "short"]
_GONE: Final = (ConnectionClosed, InvalidHandshake, InvalidMessage, OSError, EOFError)
"""Exceptions that a client gets when the daemon is killed."""
_FULL: Final = frozenset({"no_capacity", "policy_declined"})
"""Codes of refusals that are no errors: leases that are about to end may still hold all GPUs."""


class LeaseStage(Enum):
    """The stage of a lease, as its client knows it."""

    ASKED = auto()
    """The request was sent; no answer has come."""
    HELD = auto()
    """The lease was granted."""
    RELEASING = auto()
    """The release was sent; no answer has come."""
    RELEASED = auto()
    """The server confirmed the release."""


@dataclass(slots=True)
class Wanted:
    """One lease that a client has requested.

    Args:
        kind: Whether its workload ends by itself.
        stage: How far the lease is.
        lease: The lease's id, once it was granted.
    """

    key: str
    kind: Kind
    stage: LeaseStage = LeaseStage.ASKED
    lease: str = ""
    token: str = ""


class KillLoad:
    """Runs the clients; when a daemon is killed, they go on with the next daemon.

    Args:
        draw: Random numbers for the clients' decisions.
        resources: The resources of every lease.
        spec: Makes the spec of a workload.
    """

    def __init__(
        self, draw: Random, resources: Mapping[str, Any], spec: Callable[[Kind], Mapping[str, Any]]
    ) -> None:
        self._draw = draw
        self._resources = resources
        self._spec = spec
        self._clients: list[list[Wanted]] = [[] for _ in range(CLIENTS)]
        self._number = 0
        self.repeated = 0
        """Number of messages that were sent again, because no answer had come."""

    @property
    def granted(self) -> set[str]:
        """Leases that were granted."""
        return {each.lease for wanted in self._clients for each in wanted if each.lease}

    @property
    def held(self) -> set[str]:
        """Granted leases that no client has released, and whose workload does not end by itself."""
        return self._held("lasting")

    @property
    def ended(self) -> set[str]:
        """Granted leases that no client has released, and whose workload ends by itself."""
        return self._held("short")

    def _held(self, kind: Kind) -> set[str]:
        wanted = itertools.chain.from_iterable(self._clients)
        return {
            each.lease for each in wanted if each.stage is LeaseStage.HELD and each.kind == kind
        }

    async def play(self, url: str) -> None:
        """Request and release leases until the daemon is gone.

        Raises:
            CommandError: An answer was wrong.
        """
        await asyncio.gather(*(self._client(url, wanted) for wanted in self._clients))

    async def finish(self, url: str, *, release: bool) -> None:
        """Wait until all requests are answered; then release all leases if `release` is True.

        Raises:
            CommandError: An answer was wrong.
        """
        async with connect(url, compression=None, proxy=None) as socket:
            for wanted in self._clients:
                for each in wanted:
                    if release and each.stage is LeaseStage.HELD:
                        each.stage = LeaseStage.RELEASING
                    if each.stage in {LeaseStage.ASKED, LeaseStage.RELEASING}:
                        await self._say(socket, wanted, each)

    async def _client(self, url: str, wanted: list[Wanted]) -> None:
        try:
            async with connect(url, compression=None, proxy=None) as socket:
                for each in wanted:
                    if each.stage in {LeaseStage.ASKED, LeaseStage.RELEASING}:
                        self.repeated += 1
                        await self._say(socket, wanted, each)
                        break  # One message is under way at a time.
                while True:
                    await self._say(socket, wanted, self._next(wanted))
        except _GONE:
            return

    def _next(self, wanted: list[Wanted]) -> Wanted:
        """Return the next lease to request or to release."""
        lasting = [w for w in wanted if w.stage is LeaseStage.HELD and w.kind == "lasting"]
        if len(lasting) == HELD_MAX:
            given_back = self._draw.choice(lasting)
            given_back.stage = LeaseStage.RELEASING
            return given_back
        self._number += 1
        kind: Kind = "short" if self._draw.random() < SHORT_SHARE else "lasting"
        request = Wanted(f"kills-{self._number}", kind)
        wanted.append(request)
        return request

    async def _say(self, socket: ClientConnection, wanted: list[Wanted], each: Wanted) -> None:
        """Send the pending message of a lease, and read its answer."""
        if each.stage is LeaseStage.RELEASING:
            reply = await say(socket, {"op": "release", "lease": each.lease, "token": each.token})
            if not reply["success"]:
                raise CommandError(f"the release of lease {each.lease} was refused: {reply}")
            each.stage = LeaseStage.RELEASED
            return
        reply = await say(
            socket,
            {
                "adhoc": True,
                "policy_rule_uri": POLICY,
                "inputs": {},
                "resources": self._resources,
                "lease": {"ttl_seconds": 86_400, "idempotency_key": each.key},
                "provision": {"backend": "local", "spec": self._spec(each.kind)},
            },
        )
        if reply["success"]:
            each.lease, each.token = reply["lease"]["id"], reply["lease"]["token"]
            each.stage = LeaseStage.HELD
        elif reply["error"]["code"] in _FULL:
            wanted.remove(each)
        else:
            raise CommandError(f"a request was refused: {reply}")


async def say(socket: ClientConnection, message: Mapping[str, Any]) -> dict[str, Any]:
    """Send one message and return its answer."""
    await socket.send(json.dumps(message))
    async with asyncio.timeout(REPLY_SECONDS_MAX):
        reply: dict[str, Any] = json.loads(await socket.recv())
    return reply


async def leases(url: str) -> dict[str, str]:
    """Return the state of every lease that has not ended, by id."""
    found: dict[str, str] = {}
    message: dict[str, Any] | None = {"op": "leases", "limit": 1000}
    async with connect(url, compression=None, proxy=None) as socket:
        while message is not None:
            page = (await say(socket, message))["data"]
            found |= {each["id"]: each["state"] for each in page["leases"]}
            after = page.get("next")
            message = None if after is None else {**message, "after": after}
    return found


async def fleet(url: str) -> dict[str, Any]:
    """Return the total and free capacity of the only cluster."""
    async with connect(url, compression=None, proxy=None) as socket:
        (cluster,) = (await say(socket, {"op": "fleet"}))["data"]["clusters"]
    found: dict[str, Any] = cluster
    return found
