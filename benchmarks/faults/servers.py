"""Runs two servers on one PostgreSQL, restarts each when it ends, and plays faults on them.

Each server has two proxies: through one it reaches the database, through the other one clients
reach it.
"""

import asyncio
import contextlib
import json
import random
import signal
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.faults.database import PostgresServer
from benchmarks.faults.disks import full_disk, small_disk
from benchmarks.faults.proxy import WAYS, Proxy
from moorage.lab.errors import CommandError
from moorage.storage.base import LEAD_SECONDS
from moorage.testing.daemon_process import serve_command, serve_variables, tail
from moorage_policies import catalog as shipped

NODES: Final = 2
GPUS_A_NODE: Final = 4
CLUSTER: Final = "faults"
POLICY: Final = "first_fit:1.0-stable"
RESTART_SECONDS: Final = 0.3
"""Seconds between the end of a server and its next start, as with a supervisor."""
LOOK_SECONDS: Final = 0.02
SETTLE_SECONDS_MAX: Final = 90.0
"""Maximum seconds for a server to lead, to end, or to start again."""
SKEWED_CLOCK: Final = Path(__file__).with_name("skewed_clock")
"""A folder for PYTHONPATH whose module shifts the calendar clock of a server."""
SKEW_SECONDS_MAX: Final = 300.0
"""Maximum shift of a server's clock; twice this is still less than requests may wait."""
FOLDER_MEBIBYTES: Final = 64
"""Mebibytes of a disk for the folder of one server."""
CUT_OFF_SECONDS: Final = (0.5, 2.5)
"""Minimum and maximum seconds for which clients do not reach the server that leads."""


class ServerSeat:
    """Runs one server process after another behind the same two proxies.

    Args:
        name: Name of the folder and the log.
        storage: Returns the address of the database behind a port.

    Attributes:
        process: The running server process.
        generation: Number of server processes that became ready at this seat.
        folder: The servers' data folder.
        http: Address of the servers' HTTP services.
        clients: The proxy between clients and the server.
        database: The proxy between the server and the database.
    """

    def __init__(
        self, name: str, folder: Path, database_port: int, storage: Callable[[int], str]
    ) -> None:
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.generation = 0
        self.clients, self.database = Proxy(0), Proxy(database_port)
        self.log = folder / f"{name}.log"
        self.folder = folder / name
        self.folder.mkdir()
        self._clock = folder / f"{name}.clock"
        self._clock.write_bytes(bytes(8))
        self._storage = storage
        self.http = ""
        self._is_ready = asyncio.Condition()

    @property
    def label(self) -> str:
        """The name of the running server process."""
        return f"{self.name}{self.generation}"

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"ws://127.0.0.1:{self.clients.port}"

    async def run(self) -> None:
        """Run servers at this seat, one after the other, until the task is cancelled."""
        await self.clients.open()
        await self.database.open()
        variables = {
            **serve_variables(),
            "MOORAGE_STORAGE": self._storage(self.database.port),
            "MOORAGE_ADVERTISE_URL": self.url,
            "PYTHONPATH": str(SKEWED_CLOCK),
            "SKEWED_CLOCK": str(self._clock),
        }
        try:
            while True:
                await self._serve(variables)
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            await self._stop()
            await self.clients.close()
            await self.database.close()

    async def _serve(self, variables: dict[str, str]) -> None:
        with self.log.open("a") as errors:
            self.process = process = await asyncio.create_subprocess_exec(
                *serve_command(self.folder),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=variables,
            )
        assert process.stdout is not None
        if line := await process.stdout.readline():
            ready: dict[str, Any] = json.loads(line)
            self.clients.target = int(ready["ws"].rpartition(":")[2])
            self.http = ready["http"]
            async with self._is_ready:
                self.generation += 1
                self._is_ready.notify_all()
        await process.wait()

    async def _stop(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), SETTLE_SECONDS_MAX)
        except TimeoutError:
            process.kill()

    def set_clock(self, seconds: float) -> None:
        """Shift the calendar clock of this seat's servers, of the running one and later ones."""
        with self._clock.open("r+b") as file:  # Never empty: each process has it mapped.
            file.write(struct.pack("d", seconds))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def follows(self, generation: int) -> None:
        """Wait until a process that started after the given one is ready at this seat.

        Raises:
            CommandError: No other process becomes ready, or the old one does not end.
        """
        async with self._is_ready:
            try:
                async with asyncio.timeout(SETTLE_SECONDS_MAX):
                    await self._is_ready.wait_for(lambda: self.generation > generation)
            except TimeoutError:
                reason = f"server {self.name}{generation} is not followed by another one"
                raise CommandError(f"{reason}:\n{tail(self.log)}") from None

    async def leads(self, http: httpx.AsyncClient) -> bool:
        """Return whether the process says that it leads."""
        try:
            return (await http.get(f"{self.http}/readyz", timeout=1)).is_success
        except httpx.HTTPError:
            return False


class ServerPair:
    """Runs servers at two seats on one database, and plays faults on them.

    Args:
        postgres: The running database.
        draw: Random numbers for the details of faults.
        small_disks: Whether each server's folder is on its own small disk.

    Attributes:
        seats: The two seats.
    """

    def __init__(
        self,
        folder: Path,
        postgres: PostgresServer,
        draw: random.Random,
        *,
        small_disks: bool = False,
    ) -> None:
        name = postgres.database().rpartition("/")[2]
        self._postgres, self._draw, self._name = postgres, draw, name

        def storage(port: int) -> str:
            return postgres.url(name, port=port)

        self._storage = storage
        self._small_disks = small_disks
        self.seats = [ServerSeat(each, folder, postgres.port, storage) for each in "ab"]

    @property
    def address(self) -> str:
        """The URL of the database itself."""
        return self._storage(self._postgres.port)

    @property
    def urls(self) -> str:
        """The URLs of both servers, for clients."""
        return ",".join(each.url for each in self.seats)

    def name_server(self, url: str) -> str:
        """Return the label of the process at an address; empty if no seat has this address."""
        return next((each.label for each in self.seats if each.url == url), "")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run both servers until the block ends."""
        tasks: list[asyncio.Task[None]] = []
        disks = contextlib.ExitStack()
        try:
            for seat in self.seats:
                if self._small_disks:
                    disks.enter_context(small_disk(seat.folder, FOLDER_MEBIBYTES))
                tasks.append(asyncio.create_task(seat.run()))
                await seat.follows(0)
            leader, _ = await self.roles()
            await self._fill(leader)
            yield
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            disks.close()

    async def _fill(self, leader: ServerSeat) -> None:
        models = [{"modelName": "A100", "memory": 81_920}] * GPUS_A_NODE
        gpus = {"count": GPUS_A_NODE, "gpus": models}
        rows = [
            {"id": f"n{number}", "gpus": gpus, "vcpus": {"count": 64}, "memory": 262_144}
            for number in range(NODES)
        ]
        cluster = {"id": CLUSTER, "nodes": {"count": NODES, "nodeData": rows}}
        async with httpx.AsyncClient(base_url=leader.http, trust_env=False) as http:
            (await http.post("/clusters", json=cluster)).raise_for_status()
            (await http.post("/policy", json=shipped.document("first_fit"))).raise_for_status()

    async def roles(self) -> tuple[ServerSeat, ServerSeat]:
        """Wait until one server leads and the other stands by; return both.

        Raises:
            CommandError: The servers do not reach these roles in time.
        """
        a, b = self.seats
        end = time.monotonic() + SETTLE_SECONDS_MAX
        async with httpx.AsyncClient(trust_env=False) as http:
            while time.monotonic() < end:
                leading = [each for each in self.seats if await each.leads(http)]
                if len(leading) == 1 and await self._stands_by(b if leading == [a] else a):
                    return (a, b) if leading == [a] else (b, a)
                await asyncio.sleep(LOOK_SECONDS)
        raise CommandError(
            f"after {SETTLE_SECONDS_MAX:g} s, there is not one leader and one standby:"
            f"\n{tail(a.log)}\n{tail(b.log)}"
        )

    async def _stands_by(self, seat: ServerSeat) -> bool:
        query = "SELECT count(*) FROM moorage.standby WHERE ws = %s"
        recent = f"{query} AND at > clock_timestamp() - interval '2 seconds'"
        rows = await asyncio.to_thread(self._postgres.execute, recent, self._name, (seat.url,))
        return rows == [(1,)]

    async def kill(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """Kill the leader with SIGKILL."""
        leader.signal(signal.SIGKILL)
        await settle()

    async def freeze(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """Pause the leader for longer than it may go without a heartbeat."""
        leader.signal(signal.SIGSTOP)
        await settle()
        await asyncio.sleep(self._draw.uniform(0, LEAD_SECONDS))
        leader.signal(signal.SIGCONT)

    async def partition(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """Hold back traffic between leader and database in one direction until `settle` returns."""
        leader.database.cut(self._draw.choice(WAYS))
        try:
            await settle()
        finally:
            leader.database.heal()

    async def end_sessions(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """End all of the leader's database sessions."""
        assert leader.process is not None
        await asyncio.to_thread(
            self._postgres.execute,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ %s",
            "postgres",
            (f"^moored .* {leader.process.pid}$",),
        )
        await settle()

    async def restart_database(
        self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]
    ) -> None:
        """Restart PostgreSQL as after a crash."""
        del leader
        await asyncio.to_thread(self._postgres.restart)
        await settle()

    async def promote_standby(
        self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]
    ) -> None:
        """Kill PostgreSQL's primary, promote its standby, and make both proxies use it."""
        del leader
        await asyncio.to_thread(self._postgres.promote)
        for each in self.seats:
            each.database.target = self._postgres.port
        await settle()
        await asyncio.to_thread(self._postgres.forget_lost)
        await asyncio.to_thread(self._postgres.add_standby)

    async def cut_off_clients(
        self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]
    ) -> None:
        """Hold back traffic in one direction between the server and its clients for a while."""
        await leader.clients.partition(
            self._draw.uniform(*CUT_OFF_SECONDS), self._draw.choice(WAYS)
        )
        await settle()

    async def skew(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """Set the leader's clock wrong, kill the leader, and set the clock right afterwards."""
        leader.set_clock(self._draw.uniform(-SKEW_SECONDS_MAX, SKEW_SECONDS_MAX))
        await asyncio.sleep(self._draw.uniform(0, LEAD_SECONDS))
        leader.signal(signal.SIGKILL)
        await settle()
        leader.set_clock(0.0)

    async def pool(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """Kill the leader, and put PgBouncer before its database; no server starts there."""
        with self._postgres.pooler(self._draw.choice(("session", "transaction"))) as port:
            leader.database.target = port
            leader.signal(signal.SIGKILL)
            await settle()
            await asyncio.sleep(self._draw.uniform(0, LEAD_SECONDS))
            leader.database.target = self._postgres.port

    async def fill_folder(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """Fill the disk of the leader's folder, kill the leader, and wait for its restart."""
        generation = leader.generation
        with full_disk(leader.folder):
            await asyncio.sleep(self._draw.uniform(0, LEAD_SECONDS))
            leader.signal(signal.SIGKILL)
            await settle()
            await leader.follows(generation)

    async def fill_database(
        self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]
    ) -> None:
        """Fill the disk of PostgreSQL and its standby until some time after the leader's end."""
        assert leader.process is not None
        with full_disk(self._postgres.folder):
            await asyncio.wait_for(leader.process.wait(), SETTLE_SECONDS_MAX)
            await asyncio.sleep(self._draw.uniform(0, LEAD_SECONDS))
        await asyncio.to_thread(self._postgres.mend)
        await settle()

    async def resign(self, leader: ServerSeat, settle: Callable[[], Awaitable[None]]) -> None:
        """Make the leader give up its lead, as `moored lead --resign` does, or by SIGTERM."""
        if self._draw.random() < 1 / 2:
            leader.signal(signal.SIGTERM)
        else:
            from moorage.storage.postgres.leadership import ask_to_resign  # noqa: PLC0415  # An extra.

            await asyncio.to_thread(ask_to_resign, self.address)
        await settle()

    async def committed(self) -> list[int]:
        """Return the fencing numbers of all grants in the ledger."""
        return await asyncio.to_thread(read_grants, self.address)


def read_grants(address: str) -> list[int]:
    """Return the fencing numbers of grants in the order of their commits; no server may run.

    Raises:
        LedgerCorrupt: The ledger is not whole.
        StorageError: The ledger cannot be read.
    """
    from moorage.core.state.facts import Granted  # noqa: PLC0415  # With the extra.
    from moorage.ledger.codec import unseal  # noqa: PLC0415  # As above.
    from moorage.ledger.inspection import check_links  # noqa: PLC0415  # As above.
    from moorage.storage.postgres.contents import reading  # noqa: PLC0415  # An extra.

    numbers = []
    with reading(address) as contents:
        after = contents.facts.pruned_seq()
        chain = contents.facts.chain_of(after)
        for rows in contents.fact_pages():
            check_links(rows, after, chain, [], contents.place)
            after, chain = rows[-1].seq, rows[-1].chain
            facts = [unseal(row, contents.place).fact for row in rows]
            numbers += [each.lease.fencing for each in facts if isinstance(each, Granted)]
    return numbers
