"""The peer Prefect: for its global concurrency limit, a server counts leases in SQLite."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx

from benchmarks.peers.servers import folder, free_port, library, program
from benchmarks.peers.session import Peer
from moorage.bench.placements import Booking, Nodes
from moorage.lab.errors import CommandError

WRITERS: Final = 3
"""Maximum requests at a time: with four or more, SQLite is locked, and most get status 503."""
TRIES_MAX: Final = 50
BUSY_SECONDS: Final = 0.1
POLL_SECONDS: Final = 1.0
"""Seconds between two polls, as in Prefect's own client."""
_CONNECTIONS: Final = httpx.Limits(max_keepalive_connections=0)
"""Each request has a new connection, as the server may close idle ones while it is busy."""
_LIMIT: Final = "gpus"
_LIMITS: Final = "/v2/concurrency_limits"


class _Session:
    def __init__(self, pid: int, client: httpx.AsyncClient) -> None:
        self.pids = [pid]
        self._client = client
        self._writers = asyncio.Semaphore(WRITERS)

    async def place(self) -> Booking | None:
        wanted = {"names": [_LIMIT], "slots": 1, "mode": "concurrency", "lease_duration": 3600}
        answer = await self._post("increment", wanted)
        if answer.status_code == httpx.codes.LOCKED:
            return None
        answer.raise_for_status()
        return Booking(answer.json()["lease_id"])

    async def release(self, booking: Booking) -> None:
        answer = await self._post("decrement", {"lease_id": booking.handle})
        answer.raise_for_status()

    async def _post(self, change: str, body: dict[str, Any]) -> httpx.Response:
        """Change the number of taken slots; retry while the server's database is busy."""
        async with self._writers:
            for _ in range(TRIES_MAX):
                answer = await self._client.post(f"{_LIMITS}/{change}-with-lease", json=body)
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    break
                await asyncio.sleep(BUSY_SECONDS)  # The answer names no time.
        return answer

    async def wait(self, parked: asyncio.Event) -> Booking:
        while (booking := await self.place()) is None:
            parked.set()
            await asyncio.sleep(POLL_SECONDS)  # Prefect has no other way to wait.
        return booking


@contextlib.asynccontextmanager
async def _run(nodes: Nodes) -> AsyncIterator[_Session]:
    port = free_port()
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-services"]
    with folder() as home:
        variables = {"PREFECT_HOME": str(home), "DO_NOT_TRACK": "1", "PREFECT_UI_ENABLED": "false"}
        async with (
            program(command, port, home / "log", variables) as pid,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}/api", timeout=60, limits=_CONNECTIONS
            ) as client,
        ):
            limit: dict[str, Any] = {"name": _LIMIT, "limit": sum(node.gpus for node in nodes)}
            answer = await client.post(f"{_LIMITS}/", json=limit)
            if answer.is_error:
                raise CommandError(f"Prefect did not make the limit: {answer.text[:500]}")
            yield _Session(pid, client)


PEER: Final = Peer(
    name="prefect",
    group="schedulers",
    title="Prefect, concurrency limit",
    decides="a number",
    stores="yes; the lease in memory",
    install="pip install prefect",
    version=lambda: library("prefect"),
    run=_run,
)
