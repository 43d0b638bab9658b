"""The attackers of `floods`: one tenant attacks a shared server at full force.

`python -m benchmarks.flood_attacks NAME WS HTTP TOKEN SECONDS` runs one attacker in a process. The
attacker always has a fixed number of messages in flight on each connection, and sends the next one
at each answer. At the end, it prints the counts of answers as one line of JSON.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import count, cycle
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop
from websockets.frames import Opcode

from benchmarks.fast_client import FastClient, FastReply, connect, pack
from moorage.lab.errors import CommandError
from moorage_policies import catalog

POLICY: Final = "first_fit:1.0-stable"
UNCOUNTED: Final = "uncounted"
"""Id of messages whose answers do not count."""
ANSWER_SECONDS_MAX: Final = 120.0
LARGE_BYTES: Final = 1024 * 1024
REFUSED_BYTES: Final = 16 * 1024 * 1024
RETRY_SECONDS: Final = 0.05
"""Seconds of pause after a connection was closed or refused."""
HERE, FULL = "A100", "T4"
"""GPU models: HERE, of the machine that runs commands; FULL, of the GPUs that attackers hold."""
WAITERS: Final = 16_384
BRACKETS: Final = "[" + "[]," * (LARGE_BYTES // 3 - 1) + "[]]"
LARGEST: Final = json.dumps(
    {
        "adhoc": True,
        "policy_rule_uri": POLICY,
        "inputs": {f"name {n}": {"a": [n, "x" * 32]} for n in range(8_000)},
    }
)
"""A message with as many parts as the server accepts."""
ENDLESS: Final = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
        while True:
            pass
"""


def ask(model: str, **more: Any) -> dict[str, Any]:
    """Return a request for one GPU of a model."""
    lease = {"ttl_seconds": 60, **more.pop("lease", {})}
    request = {"adhoc": True, "policy_rule_uri": POLICY, "inputs": {}, "lease": lease}
    return {**request, "resources": {"gpus": 1, "models": [model]}, **more}


class Flood:
    """Attacks a server over its connections, and counts the answers.

    Args:
        ws: URL of the WebSocket.
        http: URL of the HTTP services.
    """

    def __init__(self, ws: str, http: str, token: str) -> None:
        self._ws = ws
        self._address = urlsplit(http)
        self.token = token
        self.sent = 0
        self.outcomes: Counter[str] = Counter()

    def note(self, reply: FastReply) -> None:
        """Count the answer to a message."""
        if not reply.event:
            self.outcomes["success" if reply.error is None else reply.error.code] += 1

    async def ask_once(self, message: dict[str, Any]) -> FastReply:
        """Return the answer to one message."""
        replies: asyncio.Queue[FastReply] = asyncio.Queue()
        client = await connect(self._ws, lambda _, reply: replies.put_nowait(reply), self.token)
        client.send(pack(message))
        reply = await replies.get()
        await client.close()
        self.note(reply)
        return reply

    async def messages(
        self,
        connections: int,
        window: int,
        frames: Iterable[bytes],
        then: Callable[[FastClient, FastReply], None] | None = None,
    ) -> None:
        """Keep `window` messages unanswered on each connection, until cancelled."""
        given = [*frames]
        await _repeat(connections, lambda _: self._talk(window, given, then))

    async def _talk(
        self,
        window: int,
        frames: Sequence[bytes],
        then: Callable[[FastClient, FastReply], None] | None,
    ) -> None:
        room = asyncio.Semaphore(window)

        def take_reply(client: FastClient, reply: FastReply) -> None:
            if not reply.event and reply.id != UNCOUNTED:
                self.note(reply)
                room.release()
                if then is not None:
                    then(client, reply)

        client = await connect(self._ws, take_reply, self.token)
        try:
            for frame in cycle(frames):
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    await client.writable.wait()
                    await room.acquire()
                if client.lost.is_set():
                    return
                client.send(frame)
                self.sent += 1
        finally:
            await client.close()

    async def stream(self, connections: int, frames: bytes) -> None:
        """Send frames over some connections as fast as the server reads them, until cancelled."""

        async def send(_: int) -> None:
            client = await connect(self._ws, lambda _, reply: self.note(reply), self.token)
            try:
                while not client.lost.is_set():
                    await client.writable.wait()
                    client.send(frames)
                    self.sent += 1
                    await asyncio.sleep(0)
            finally:
                await client.close()

        await _repeat(connections, send)

    async def calls(self, connections: int, bodies: Iterator[tuple[str, bytes]]) -> None:
        """Post bodies to paths over some connections; reopen a lost connection."""
        await _repeat(connections, lambda _: self._call(bodies))

    async def post(self, *bodies: tuple[str, bytes]) -> None:
        """Post bodies over one connection, each once."""
        await self._call(iter(bodies))

    async def _call(self, bodies: Iterator[tuple[str, bytes]]) -> None:
        host, port = self._address.hostname, self._address.port
        reader, writer = await asyncio.open_connection(host, port, limit=REFUSED_BYTES)
        try:
            for path, body in bodies:
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
                    f"Authorization: Bearer {self.token}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode())
                writer.write(body)
                self.sent += 1
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                self.outcomes[answer.split(b" ", 2)[1].decode()] += 1
                _, found, rest = answer.partition(b"content-length: ")
                if found:
                    await reader.readexactly(int(rest.split(b"\r\n")[0]))
                else:  # The body comes in chunks.
                    await reader.readuntil(b"0\r\n\r\n")
                if b"connection: close" in answer:
                    return
        finally:
            writer.close()


async def _repeat(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Run a function several times concurrently; start it again whenever it ends or fails."""

    async def again(number: int) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, TimeoutError, CommandError):
                await work(number)
            await asyncio.sleep(RETRY_SECONDS)

    await asyncio.gather(*(again(number) for number in range(count)))


async def short_leases(flood: Flood) -> None:
    """Attack H1: request leases of one second over 16 connections; each runs a command."""
    spec = {"command": ["true"], "stop_seconds": 0}
    wanted = ask(HERE, lease={"ttl_seconds": 1}, provision={"backend": "local", "spec": spec})
    await flood.messages(16, 1, [pack(wanted)])


async def endless_policies(flood: Flood) -> None:
    """Attack H2: keep 64 requests open on each of eight connections; their policies never end."""
    names = [f"endless{n}:1.0-stable" for n in range(8)]
    for each in names:
        await flood.post(("/policy", _policy(each, ENDLESS)))
    wanted = {**ask(HERE), "deadline_seconds": 60}
    await flood.messages(8, 64, [pack({**wanted, "policy_rule_uri": each}) for each in names])


async def brackets(flood: Flood) -> None:
    """Attack H3: send messages of a mebibyte of brackets over eight connections."""
    await flood.messages(8, 2, [pack(BRACKETS)])


async def brackets_200(flood: Flood) -> None:
    """Attack H3: send messages of a mebibyte of brackets over 200 connections."""
    await flood.messages(200, 2, [pack(BRACKETS)])


async def large_requests(flood: Flood) -> None:
    """Attack H3: send requests of 500 KiB, an allowed size, over eight connections."""
    await flood.messages(8, 2, [pack(LARGEST)])


async def bodies(flood: Flood) -> None:
    """Attack H3: post 32 bodies at a time to `/allocate`: brackets, valid and oversized ones."""
    given = (BRACKETS.encode(), LARGEST.encode(), b"[" + b"1," * (REFUSED_BYTES // 2) + b"1]")
    await flood.calls(32, cycle([("/allocate", each) for each in given]))


async def queries(flood: Flood) -> None:
    """Attack H3: send queries of 16 MiB, four at a time."""
    words = json.dumps({"id": {"$in": ["x" * 1_000] * 16_000}}).encode()
    await flood.calls(4, cycle([("/clusters/query", words)]))


async def log_readers(flood: Flood) -> None:
    """Attack H4: let 10,240 readers wait for output that never comes."""
    spec = {"command": ["sleep", "1000"], "stop_seconds": 0}
    lease = {"ttl_seconds": 600}
    granted = await flood.ask_once(
        ask(HERE, lease=lease, provision={"backend": "local", "spec": spec})
    )
    if (held := granted.lease) is None:
        raise CommandError("the server refused the lease whose output the attack reads")
    wanted = {"op": "logs", "lease": held.id, "wait_seconds": 30}
    try:
        await flood.messages(10, 1_024, [pack({**wanted, "id": n}) for n in range(1_024)])
    finally:
        await flood.ask_once({"op": "release", "lease": held.id, "token": held.token})


async def logins(flood: Flood) -> None:
    """Attack H4: log in to the console over 16 connections; each fourth token is wrong."""
    right = json.dumps({"token": flood.token}).encode()
    wrong = json.dumps({"token": "x"}).encode()
    path = "/console/session"
    await flood.calls(16, cycle([(path, right), (path, right), (path, right), (path, wrong)]))


async def recall_fleets(flood: Flood) -> None:
    """Attack H4: ask how the fleet was at an earlier time, over 16 connections."""

    async def fill() -> None:
        for _ in range(25):
            await flood.ask_once(ask(HERE, lease={"ttl_seconds": 30}))

    await asyncio.gather(*(fill() for _ in range(8)))  # One by one would take too long.
    await flood.messages(16, 4, [pack({"op": "past_fleet", "at": time.time()})])


async def uploads(flood: Flood) -> None:
    """Attack H4: publish policies, eight at a time."""
    code = catalog.document("first_fit")["code"]
    given = (("/policy", _policy(f"up{n}:1.0-stable", code)) for n in count())
    await flood.calls(8, given)


async def small_messages(flood: Flood) -> None:
    """Send messages that are answered at once, 64 open on each of 32 connections."""
    kinds = (
        {"op": "status", "lease": "lease-0"},
        {"op": "quotas"},
        ask("no such model"),
        {"op": "why", "request": "request-0"},
    )
    await flood.messages(32, 64, [pack({**each, "id": 1}) for each in kinds])


async def tiny_frames(flood: Flood) -> None:
    """Send empty pings and messages over 32 connections, and do not read the answers."""
    empty = pack("", Opcode.PING) * 4_000 + pack("{}") * 1_000
    await flood.stream(32, empty)


async def small_calls(flood: Flood) -> None:
    """Send queries, and calls of an unknown path, over 200 HTTP connections."""
    given = (("/clusters/query", b"{}"), ("/policy/query", b"{}"), ("/nothing/here", b"{}"))
    await flood.calls(200, cycle(given))


async def waiters(flood: Flood) -> None:
    """Send requests that wait for a second, 512 open on each of 16 connections."""
    await _fill(flood)
    wanted = ask(FULL, lease={"ttl_seconds": 60, "wait_seconds": 1})
    await flood.messages(16, 512, [pack({**wanted, "id": 1})])


async def alternatives(flood: Flood) -> None:
    """Attack M6: let 16,384 requests with seven alternatives each wait for GPUs, all leased."""
    await _fill(flood)
    frames: list[bytes] = []
    for number in range(WAITERS):
        others = [{"gpus": 1, "models": [FULL], "cpu_milli": 1 + number % 64 + n} for n in range(7)]
        lease = {"ttl_seconds": 60, "wait_seconds": 600}
        frames.append(pack({**ask(FULL, lease=lease, alternatives=others), "id": number}))

    def give_back(client: FastClient, reply: FastReply) -> None:
        if (lease := reply.lease) is not None:
            gone = {"op": "release", "lease": lease.id, "token": lease.token, "id": UNCOUNTED}
            client.send(pack(gone))

    share = WAITERS // 4
    await asyncio.gather(
        *(flood.messages(1, share, frames[n * share :][:share]) for n in range(4)),
        flood.messages(4, 4, [pack(ask(HERE, lease={"ttl_seconds": 60}))], give_back),
    )


async def _fill(flood: Flood) -> None:
    """Lease all GPUs of the model `FULL`, so that further requests wait."""
    while (await flood.ask_once(ask(FULL, lease={"ttl_seconds": 3_600}))).lease is not None:
        pass


def _policy(name: str, code: str) -> bytes:
    document = {"policy_rule_uri": name, "type": "python_class_v1", "code": code}
    return json.dumps(document).encode()


ATTACKS: Final[dict[str, Callable[[Flood], Awaitable[None]]]] = {
    each.__name__: each
    for each in (
        short_leases,
        endless_policies,
        brackets,
        brackets_200,
        large_requests,
        bodies,
        queries,
        log_readers,
        logins,
        recall_fleets,
        uploads,
        small_messages,
        tiny_frames,
        small_calls,
        waiters,
        alternatives,
    )
}


async def _attack(name: str, flood: Flood, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ATTACKS[name](flood)


def main(name: str, ws: str, http: str, token: str, seconds: str) -> None:
    """Attack for some seconds, and print the result."""

    async def attack() -> dict[str, Any]:
        flood = Flood(ws, http, token)
        await _attack(name, flood, float(seconds))
        cores = time.process_time() / float(seconds)
        return {"sent": flood.sent, "outcomes": dict(flood.outcomes), "attacker_cores": cores}

    print(json.dumps(uvloop.run(attack())))


if __name__ == "__main__":
    main(*sys.argv[1:])
