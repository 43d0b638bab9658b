"""Moorage as a peer: the policy `fgd` in a jailed process, eight sockets, and a synced ledger."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.peers.servers import library
from benchmarks.peers.session import Peer
from moorage.bench import replay
from moorage.bench.placements import CONNECTIONS, CPU_MILLI, MEMORY_MIB, Booking, Nodes
from moorage.lab import trace
from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon

WAIT_SECONDS: Final = 60
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


class _Session:
    def __init__(self, pid: int, uri: str, sockets: Sequence[ClientConnection]) -> None:
        self.pids = [pid]
        self._sockets = itertools.cycle(sockets)
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        resources = {"gpus": 1, "cpu_milli": CPU_MILLI, "memory_mib": MEMORY_MIB}
        self._ask = {"adhoc": True, "policy_rule_uri": uri, "inputs": {}, "resources": resources}

    async def place(self) -> Booking | None:
        return _booking(await self._send(self._message(0)))

    async def release(self, booking: Booking) -> None:
        reply = await self._send({"op": "release", "lease": booking.handle})
        if not reply["success"]:
            raise CommandError(f"a release was refused: {reply}")

    async def wait(self, parked: asyncio.Event) -> Booking:
        sent = asyncio.ensure_future(self._send(self._message(WAIT_SECONDS)))
        parked.set()
        booking = _booking(await sent)
        assert booking is not None
        return booking

    async def read(self, socket: ClientConnection) -> None:
        async for text in socket:
            reply = _decode(text)
            self._replies.pop(reply["id"]).set_result(reply)

    def _message(self, wait_seconds: int) -> dict[str, Any]:
        lease = {"ttl_seconds": replay.LEASE_SECONDS, "wait_seconds": wait_seconds}
        return {**self._ask, "lease": lease}

    async def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        await next(self._sockets).send(_encode({**message, "id": number}), text=True)
        return await reply


def _booking(reply: dict[str, Any]) -> Booking | None:
    if (lease := reply.get("lease")) is None:
        if (reply.get("error") or {}).get("code") != "no_capacity":
            raise CommandError(f"a request was refused: {reply}")
        return None
    (share,) = lease["placement"]
    (gpu,) = share["gpus"]
    return Booking(lease["id"], share["node_id"], str(gpu))


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    with daemon() as running:
        pods = [trace.TracePod("pod", CPU_MILLI, MEMORY_MIB, 1, 1000)]
        uri = replay.prepare(running, trace.cluster_document(nodes), "fgd", pods)
        async with contextlib.AsyncExitStack() as stack:
            sockets = [
                await stack.enter_async_context(
                    connect(running.ws, compression=None, max_size=None, proxy=None)
                )
                for _ in range(CONNECTIONS)
            ]
            session = _Session(running.pid, uri, sockets)
            readers = [asyncio.ensure_future(session.read(each)) for each in sockets]
            yield session
            for each in readers:
                each.cancel()


PEER: Final = Peer(
    name="moorage",
    group="home-made",
    title="Moorage, `fgd`",
    decides="node, devices, by a user's policy in a jail; queue, reasons",
    stores="yes, synced",
    install="",
    version=lambda: library("moorage"),
    run=_run,
)
