"""What the owner of a lease reads of its workload, at its end."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moorage.backends.local.backend import LocalBackend
from moorage.core.effects import Information
from moorage.core.events import Event, WorkloadEnded
from moorage.daemon.requests.lease_tokens import digest
from moorage.daemon.tasks import Tasks
from moorage.daemon.workloads.access import WorkloadAccess
from moorage.daemon.workloads.control import WorkloadControl
from moorage.model import (
    ClusterId,
    Lease,
    LeaseTerms,
    NodeId,
    Outcome,
    PolicyRef,
    Provision,
    RequestId,
    Share,
    Tenant,
)
from moorage.protocol import messages as wire

NAME = RequestId("held")


class Owner:
    """A lease whose command has ended by itself, and who reads its output."""

    def __init__(self, folder: Path) -> None:
        self.backend = LocalBackend(folder)
        self.ended = asyncio.Event()
        self.tasks = Tasks()
        self.room = WorkloadControl(
            {"local": self.backend}, self._hear, self.tasks, lambda _seen: None
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
        told = await WorkloadAccess(self.room, lambda _name: self.lease).answer(
            message, Tenant("t")
        )
        assert isinstance(told, Information)
        return told.data


@pytest.fixture
async def owner(tmp_path) -> AsyncIterator[Owner]:
    made = Owner(tmp_path)
    await made.room.open([])
    made.room.start(made.lease)
    async with asyncio.timeout(60):
        await made.ended.wait()
    made.lease = replace(made.lease, state="active")  # The core has not been told yet.
    yield made
    await made.backend.stop(NAME)
    await made.room.close()
    await made.backend.close()
    assert not made.tasks.broken.done()


def ended(lease: Lease, attempt: int = 1) -> Lease:
    return replace(lease, state="ending", outcome=Outcome(attempt, "failed", "", 1.0, (), 7))


async def test_the_output_is_over_when_the_lease_says_how_it_ended_and_not_before(owner):
    first = await owner.logs()
    assert (first["text"], first["over"], first["exit_code"]) == ("oh\n", False, None)
    owner.lease = ended(owner.lease)
    rest = await owner.logs(first["offset"])
    assert (rest["text"], rest["over"], rest["exit_code"]) == ("", True, 7)


async def test_where_the_backend_has_forgotten_the_exit_code_the_lease_has_it(owner, tmp_path):
    await owner.backend.stop(NAME)
    for each in tmp_path.rglob("exit.json"):
        each.unlink()  # As of a container: it went with it.
    owner.lease = ended(owner.lease)
    assert (await owner.logs())["exit_code"] == 7
    owner.lease = ended(owner.lease, attempt=0)
    assert (await owner.logs())["exit_code"] is None, "that was another start"
