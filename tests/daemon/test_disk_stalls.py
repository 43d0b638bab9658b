"""The commit loop over a disk that stalls: nothing runs out that was renewed meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from moorage.config.settings import Config
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Ended, Fact, Renewed
from moorage.core.turns.effects import Address, Consult, Effect, LeaseNews, Respond
from moorage.core.turns.events import Asked, ClusterSeen, Event, Proposed, RenewAsked
from moorage.core.turns.turn import Turn
from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.inbox import Inbox
from moorage.daemon.tasks import Tasks
from moorage.ledger.memory import MemoryLedger
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Demand,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    SessionId,
    Tenant,
)

SECONDS = 2.5
"""Of a stall, and a little less than a stall is noticed after beside a loop that beats."""
NODE = Cluster(ClusterId("c"), (Node(NodeId("n"), 8_000, 8_000),))


class SlowLedger(MemoryLedger):
    """A ledger whose disk can stall."""

    def __init__(self) -> None:
        super().__init__()
        self.works = asyncio.Event()
        self.works.set()

    async def append(self, facts: Sequence[Fact], at: float) -> int:
        await self.works.wait()
        return await super().append(facts, at)


class Scene:
    """A commit loop, and what comes out of it."""

    def __init__(self, folder: Path) -> None:
        self.ledger, self.inbox, self.tasks = SlowLedger(), Inbox(), Tasks()
        self.allocator = Allocator()
        config = Config(data_dir=folder, restart_grace_seconds=30.0)
        parts = self.allocator, self.ledger, self.inbox, self, self.tasks, config
        self.loop = CommitLoop(*parts)
        self.facts: asyncio.Queue[Fact] = asyncio.Queue()
        self.answers: asyncio.Queue[Respond] = asyncio.Queue()

    def stepped(self, event: Event, turn: Turn, seconds: float) -> None:
        """As `Effects`."""

    def committed(self, facts: Sequence[Fact], last: int, seconds: float) -> None:
        """As `Effects`."""

    def durable(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            self.facts.put_nowait(fact)

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Consult):
            placement = {"cluster_id": "c", "node_id": "n", "gpus": [], "cpu_milli": 1}
            self.inbox.post(Proposed(effect.ask.id, effect.consultation, placement))
        elif isinstance(effect, Respond):
            self.answers.put_nowait(effect)

    def post(self, event: Event) -> None:
        self.inbox.post(event)

    async def granted(self, name: str, ttl_seconds: float) -> None:
        demand, policy = Demand(gpus=0, cpu_milli=1), PolicyRef("rule", "digest")
        request = (RequestId(name), Tenant("ann"), policy)
        ask = Ask(*request, token_digest=name, demand=demand, terms=LeaseTerms(ttl_seconds))
        self.post(Asked(TO, ask))
        assert isinstance((await self.answers.get()).answer, LeaseNews)


TO = Address(SessionId("s"), 1)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    await scene.ledger.open()
    for each in (scene.loop.step_forever, scene.loop.commit_forever, scene.loop.watch_clocks):
        scene.tasks.spawn(each())
    scene.post(ClusterSeen(NODE))
    yield scene
    await scene.tasks.close()
    await scene.ledger.close()


async def test_leases_have_a_grace_after_a_stall_of_the_disk(scene: Scene) -> None:
    """A renewal is stepped while the disk stalls, and its reply comes when its time is up."""
    for name in ("renewed", "unheard"):
        await scene.granted(name, 2.0)
    scene.ledger.works.clear()
    scene.post(RenewAsked(TO, RequestId("renewed"), "renewed", None))
    await asyncio.sleep(SECONDS)  # The disk stalls, which reports nothing.
    scene.ledger.works.set()
    now = time.time()  # The grace of a restart is 30 s.
    assert isinstance((await scene.answers.get()).answer, LeaseNews)
    until: dict[str, float] = {}
    while min(until.get(name, 0.0) for name in ("renewed", "unheard")) < now + 25.0:
        fact = await scene.facts.get()
        assert not isinstance(fact, Ended), fact
        if isinstance(fact, Renewed):
            until[fact.lease] = fact.expires_at


async def test_a_calendar_that_was_set_before_the_start_is_followed_first(scene: Scene) -> None:
    """The last fact is of a day after this one, as under a clock that was wrong."""
    await scene.granted("lease", 100_000.0)
    (lease,) = scene.allocator.state.leases.values()
    await scene.ledger.append([Renewed(lease.id, lease.expires_at)], lease.granted_at + 86_400.0)
    await scene.loop.follow_calendar()
    await scene.loop.settled()
    left = scene.allocator.state.leases[lease.id].expires_at - time.time()
    assert left < 14_000.0
