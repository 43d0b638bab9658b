"""Tests of the output and exit code that a lease's owner reads at the workload's end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from moorage.backends.base import CommandExecution, Log, RunFiles
from moorage.backends.local.backend import LocalBackend
from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Information
from moorage.core.turns.events import Event, WorkloadEnded
from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.tasks import Tasks
from moorage.daemon.workloads.access import (
    EXECUTIONS_ALL_MAX,
    EXECUTIONS_MAX,
    EXECUTIONS_OF_TENANT_MAX,
    FILE_READS_MAX,
    WorkloadAccess,
)
from moorage.daemon.workloads.control import WorkloadControl
from moorage.daemon.workloads.readers import READERS_MAX
from moorage.model import (
    ClusterId,
    Code,
    Lease,
    LeaseTerms,
    NodeId,
    Outcome,
    PolicyRef,
    Provision,
    RequestId,
    SessionId,
    Share,
    Tenant,
)
from moorage.protocol import messages as wire

NAME = RequestId("held")
SESSION = SessionId("session")


class Owner:
    """A lease whose command has ended by itself, and a reader of its output."""

    def __init__(self, folder: Path) -> None:
        self.backend = LocalBackend(folder)
        self.ended = asyncio.Event()
        self.tasks = Tasks()
        self.room = WorkloadControl(
            {"local": self.backend}, self._hear, self.tasks, lambda _seen: None, lambda: None
        )
        spec = {"command": ["sh", "-c", "echo oh; exit 7"]}
        place = (Share(ClusterId("c"), NodeId("n")),)
        policy, terms = PolicyRef("rule", "0"), LeaseTerms(60.0)
        held = Lease(NAME, Tenant("t"), digest(""), policy, place, 1, 0.0, 60.0, terms)
        self.lease = replace(held, provision=Provision("local", spec), state="starting")

    def _hear(self, event: Event) -> None:
        if isinstance(event, WorkloadEnded):
            self.ended.set()

    async def logs(self, offset: int = 0) -> dict[str, Any]:
        message = wire.Logs(lease=NAME, token="", offset=offset)
        access = WorkloadAccess(self.room, lambda _name: self.lease)
        reply = await access.answer(message, Tenant("t"), SESSION)
        assert isinstance(reply, Information)
        return reply.data


@pytest.fixture
async def owner(tmp_path) -> AsyncIterator[Owner]:
    made = Owner(tmp_path)
    await made.room.open([])
    made.room.start(made.lease)
    async with asyncio.timeout(60):
        await made.ended.wait()
    made.lease = replace(made.lease, state="active")  # The core does not know of the end yet.
    yield made
    await made.backend.stop(NAME)
    await made.room.close()
    await made.backend.close()
    assert not made.tasks.broken.done()


def end_of(lease: Lease, attempt: int = 1) -> Lease:
    return replace(lease, state="ending", outcome=Outcome(attempt, "failed", "", 1.0, (), 7))


async def test_the_output_of_a_workload_ends_when_the_lease_reports_the_end_and_not_before(owner):
    first = await owner.logs()
    assert (first["text"], first["over"], first["exit_code"]) == ("oh\n", False, None)
    owner.lease = end_of(owner.lease)
    rest = await owner.logs(first["offset"])
    assert (rest["text"], rest["over"], rest["exit_code"]) == ("", True, 7)


async def test_readers_get_the_exit_code_from_the_lease_if_the_backend_has_lost_it(owner, tmp_path):
    await owner.backend.stop(NAME)
    for each in tmp_path.rglob("exit.json"):
        each.unlink()  # As for a container, whose exit code is lost with it.
    owner.lease = end_of(owner.lease)
    assert (await owner.logs())["exit_code"] == 7
    owner.lease = end_of(owner.lease, attempt=0)
    assert (await owner.logs())["exit_code"] is None, "the code belongs to another start"


class CountingBackend(LocalBackend):
    """A backend that counts the lookups of output."""

    looks = 0

    async def logs(self, workload: str, offset: int = 0, attempt: int = 0) -> Log:
        self.looks += 1
        return await super().logs(workload, offset, attempt)


class Silent:
    """A lease whose command writes nothing until a file exists, and then `more`."""

    def __init__(self, folder: Path) -> None:
        self.go = folder / "go"
        self.backend = CountingBackend(folder)
        self.room = WorkloadControl(
            {"local": self.backend}, lambda _event: None, Tasks(), lambda _seen: None, lambda: None
        )
        script = f"while [ ! -e {self.go} ]; do sleep 0.05; done; echo more"
        spec = {"command": ["sh", "-c", script]}
        place = (Share(ClusterId("c"), NodeId("n")),)
        policy, terms = PolicyRef("rule", "0"), LeaseTerms(60.0)
        held = Lease(NAME, Tenant("t"), digest(""), policy, place, 1, 0.0, 60.0, terms)
        self.lease = replace(held, provision=Provision("local", spec), state="starting")
        self.access = WorkloadAccess(self.room, lambda _name: self.lease)

    def read(
        self, session: str = SESSION, tenant: str = "t", offset: int = 0
    ) -> asyncio.Task[Information | Refusal]:
        message = wire.Logs(lease=NAME, token="", offset=offset, wait_seconds=60)
        answer = self.access.answer(message, Tenant(tenant), SessionId(session))
        return asyncio.create_task(answer)

    async def wait_looks(self, more: int) -> None:
        """Wait until the backend has looked for output `more` more times."""
        before = self.backend.looks
        async with asyncio.timeout(60):
            while self.backend.looks < before + more:  # noqa: ASYNC110  # No event reports a count.
                await asyncio.sleep(0.01)  # As above.


@pytest.fixture
async def silent(tmp_path) -> AsyncIterator[Silent]:
    made = Silent(tmp_path)
    await made.room.open([])
    made.room.start(made.lease)
    yield made
    made.go.touch()
    await made.backend.stop(NAME)
    await made.room.close()
    await made.backend.close()


async def test_a_single_lookup_of_output_serves_all_readers_of_one_start(silent):
    readers = [silent.read() for _ in range(READERS_MAX)]
    while silent.backend.looks < READERS_MAX:  # noqa: ASYNC110  # Each reader looks once by itself.
        await asyncio.sleep(0.01)  # As above.
    await silent.wait_looks(5)
    assert silent.backend.looks < READERS_MAX + 10
    silent.go.touch()
    texts = [(await each).data["text"] for each in readers]
    assert texts == ["more\n"] * READERS_MAX


async def test_the_number_of_waiting_readers_is_bounded_and_reads_without_a_wait_are_answered(
    silent,
):
    readers = [silent.read() for _ in range(READERS_MAX)]
    await silent.wait_looks(1)
    refused = await silent.read()
    assert isinstance(refused, Refusal)
    assert refused.code is Code.BUSY
    assert f"{READERS_MAX} readers wait for output of lease {NAME}" in refused.reason
    at_once = wire.Logs(lease=NAME, token="")
    assert isinstance(await silent.access.answer(at_once, Tenant("t"), SESSION), Information)
    readers.pop().cancel()
    await asyncio.sleep(0)
    another = silent.read()
    await silent.wait_looks(2)
    assert not another.done()
    silent.go.touch()
    await asyncio.gather(another, *readers)


async def test_a_wait_for_output_ends_with_its_session_and_lookups_end_with_the_last_wait(silent):
    ours, theirs = silent.read("ours"), silent.read("theirs")
    await silent.wait_looks(4)
    silent.access.drop_session(SessionId("ours"))
    with pytest.raises(asyncio.CancelledError):
        await ours
    await silent.wait_looks(2)
    assert not theirs.done()
    silent.access.drop_session(SessionId("theirs"))
    with pytest.raises(asyncio.CancelledError):
        await theirs
    readers = silent.access._readers
    assert not any(vars(readers)[each] for each in vars(readers) if each != "lost")


async def test_a_reader_that_has_not_read_all_output_is_answered_at_once(silent):
    first = silent.read()
    await silent.wait_looks(2)
    silent.go.touch()
    assert (await first).data["text"] == "more\n"
    waiting = silent.read(offset=5)
    await silent.wait_looks(2)
    assert (await silent.read()).data["text"] == "more\n"
    waiting.cancel()


class Busy(LocalBackend):
    """Counts running commands and file listings, which all wait until a test sets `end`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.running = 0
        self.most = 0
        self.end = asyncio.Event()

    async def _work(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.end.wait()
        self.running -= 1

    async def execute(self, *args: Any, **more: Any) -> CommandExecution:
        await self._work()
        return CommandExecution(0, "")

    async def files(self, workload: str, attempt: int = 0) -> RunFiles:
        await self._work()
        return RunFiles((), ())


def crowd(tmp_path: Path, leases: int) -> tuple[Busy, WorkloadAccess]:
    backend = Busy(tmp_path)
    room = WorkloadControl(
        {"local": backend}, lambda _event: None, Tasks(), lambda _seen: None, lambda: None
    )
    place = (Share(ClusterId("c"), NodeId("n")),)
    policy, terms = PolicyRef("rule", "0"), LeaseTerms(60.0)
    held = {
        name: replace(
            Lease(name, Tenant(tenant), digest(""), policy, place, 1, 0.0, 60.0, terms),
            provision=Provision("local", {"command": ["true"]}),
            state="active",
        )
        for tenant in ("mallory", "bob")
        for name in (RequestId(f"{tenant}{number}") for number in range(leases))
    }
    return backend, WorkloadAccess(room, held.get)


async def test_commands_of_one_tenant_leave_room_for_commands_of_another_tenant(tmp_path):
    backend, access = crowd(tmp_path, EXECUTIONS_ALL_MAX // EXECUTIONS_MAX)

    def execute(tenant: str, number: int) -> asyncio.Task[Information | Refusal]:
        lease = f"{tenant}{number // EXECUTIONS_MAX}"
        message = wire.Exec(lease=lease, command=("true",))
        return asyncio.create_task(access.answer(message, Tenant(tenant), SESSION))

    flood = [execute("mallory", number) for number in range(EXECUTIONS_OF_TENANT_MAX + 1)]
    refused = await flood.pop()
    assert isinstance(refused, Refusal)
    assert (refused.code, "of your tenant" in refused.reason) == (Code.BUSY, True)
    others = [execute("bob", number) for number in range(16)]
    await asyncio.sleep(0)
    assert backend.running == EXECUTIONS_ALL_MAX
    backend.end.set()
    assert all(isinstance(each, Information) for each in await asyncio.gather(*flood, *others))


async def test_listings_of_folders_of_workloads_take_turns(tmp_path):
    backend, access = crowd(tmp_path, 1)

    def look(tenant: str) -> asyncio.Task[Information | Refusal]:
        message = wire.Files(lease=f"{tenant}0")
        return asyncio.create_task(access.answer(message, Tenant(tenant), SESSION))

    flood = [look("mallory") for _ in range(20)]
    await asyncio.sleep(0)
    assert backend.running == FILE_READS_MAX - 1
    other = look("bob")
    await asyncio.sleep(0)
    assert backend.running == FILE_READS_MAX
    backend.end.set()
    await asyncio.gather(*flood, other)
    assert backend.most == FILE_READS_MAX
