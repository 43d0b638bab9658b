"""Tests of the moments at which facts go to the ledger and effects leave."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moorage.config.settings import Config
from moorage.core.allocator import Allocator
from moorage.core.state.facts import Fact, Renewed
from moorage.core.turns.effects import Address, Consult, Effect, Respond
from moorage.core.turns.events import (
    Asked,
    ClusterSeen,
    Inquired,
    Proposed,
    ReleaseAsked,
    RenewAsked,
)
from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.inbox import Inbox
from moorage.daemon.tasks import Tasks
from moorage.ledger.memory import MemoryLedger
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Demand,
    Gpu,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    SessionId,
    Tenant,
)

POLICY = PolicyRef("rule", "digest")
TENANT = Tenant("ann")
SECONDS = 2.5
"""Duration of a stall, a little below the time after which a beating loop notices one."""
NODE = Node(NodeId("n"), 64_000, 65_536, (Gpu("0", "A100", 81_920), Gpu("1", "A100", 81_920)))


class SlowLedger(MemoryLedger):
    """A ledger that commits a group only when a test calls `sync`, and logs all its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.syncs: asyncio.Queue[None] = asyncio.Queue()
        self.is_fast = True

    def append(
        self, facts: Sequence[Fact], at: float, *, lone: bool = False
    ) -> Coroutine[Any, Any, int]:
        self.log.append("+".join(type(fact).__name__ for fact in facts))
        return self._sync(super().append(facts, at))

    async def _sync(self, stored: Coroutine[Any, Any, int]) -> int:
        if not self.is_fast:
            await self.syncs.get()
        return await stored

    def sync(self) -> None:
        """Make the oldest group of facts durable."""
        self.syncs.put_nowait(None)


class Log:
    """Records effects, and lets a policy propose a GPU when a test allows the proposal."""

    def __init__(self, ledger: SlowLedger, inbox: Inbox) -> None:
        self._ledger, self._inbox = ledger, inbox
        self.consultations: list[Consult] = []
        self.changed = asyncio.Event()

    def observe_step(self, *_: object) -> None:
        """Ignore the duration of a step."""

    def observe_commit(self, *_: object) -> None:
        """Ignore the duration of a commit."""

    def note_durable(self, facts: Sequence[Fact]) -> None:
        self._ledger.log += [f"durable {type(fact).__name__}" for fact in facts]
        self.changed.set()

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Consult):
            self.consultations.append(effect)
            self._ledger.log.append(f"consult {effect.ask.id}")
        elif isinstance(effect, Respond):
            self._ledger.log.append(f"answer {effect.to.number}")
        self.changed.set()

    def propose(self, gpu: str) -> None:
        """Let the policy propose `gpu` for its oldest consultation."""
        effect = self.consultations.pop(0)
        wanted = {"cluster_id": "c", "node_id": "n", "gpus": [gpu]}
        self._inbox.post(Proposed(effect.ask.id, effect.consultation, wanted))


class Played:
    """A commit loop over a node of two GPUs, with one lease each for `a` and `b`."""

    def __init__(self, folder: Path, ttl_seconds: float) -> None:
        self.ledger, self.inbox, self.allocator = SlowLedger(), Inbox(), Allocator()
        self.effects, self.tasks = Log(self.ledger, self.inbox), Tasks()
        config = Config(data_dir=folder, restart_grace_seconds=30.0)
        parts = self.allocator, self.ledger, self.inbox, self.effects, self.tasks, config
        self.loop = CommitLoop(*parts)
        self._ttl_seconds = ttl_seconds

    def ask(self, name: str, number: int, wait_seconds: float = 0.0) -> None:
        terms = LeaseTerms(ttl_seconds=self._ttl_seconds, wait_seconds=wait_seconds)
        ask = Ask(RequestId(name), TENANT, POLICY, demand=Demand(gpus=1), terms=terms, inputs={})
        self.inbox.post(Asked(Address(SessionId("s"), number), ask), TENANT)

    def release(self, name: str, number: int) -> None:
        to = Address(SessionId("s"), number)
        self.inbox.post(ReleaseAsked(to, RequestId(name), "", TENANT), TENANT)

    async def queue(self, name: str, number: int) -> None:
        """Send a request that does not fit now, and wait until it is in the queue."""
        self.ask(name, number, wait_seconds=60.0)
        await self.rest()
        self.ledger.sync()
        await self.loop.settle()

    async def until(self, entry: str) -> None:
        """Wait for an entry of the log."""
        async with asyncio.timeout(60):
            while entry not in self.ledger.log:
                self.effects.changed.clear()
                await self.effects.changed.wait()

    def left(self) -> list[float]:
        """Return the remaining seconds of each lease."""
        return [x.expires_at - time.time() for x in self.allocator.state.leases.values()]

    async def rest(self) -> None:
        """Wait until the loop has nothing left to do except commits."""
        for _ in range(20):
            await asyncio.sleep(0)


@asynccontextmanager
async def play(folder: Path = Path(), ttl_seconds: float = 60.0) -> AsyncIterator[Played]:
    played = Played(folder, ttl_seconds)
    await played.ledger.open()
    played.tasks.spawn(played.loop.commit_forever())
    played.tasks.spawn(played.loop.step_forever())
    played.inbox.post(ClusterSeen(Cluster(ClusterId("c"), (NODE,))))
    for number, name in enumerate("ab"):
        played.ask(name, number)
        await played.until(f"consult {name}")
        played.effects.propose(str(number))
        await played.until(f"answer {number}")
    await played.loop.settle()
    played.ledger.log.clear()
    played.ledger.is_fast = False
    yield played
    assert not played.tasks.broken.done()
    await played.tasks.close()


async def test_facts_of_a_release_reach_the_disk_before_the_waiter_reaches_its_policy() -> None:
    async with play() as played:
        await played.queue("waiter", 2)
        played.ledger.log.clear()
        played.release("a", 3)
        await played.rest()
        assert played.ledger.log == ["Ended", "consult waiter"]
        played.ledger.sync()
        await played.until("answer 3")


async def test_the_reply_to_a_release_is_sent_before_waiters_are_examined() -> None:
    async with play() as played:
        await played.queue("waiter", 2)
        played.ledger.is_fast = True
        played.ledger.log.clear()
        played.release("a", 3)
        await played.until("consult waiter")
        assert played.ledger.log == ["Ended", "durable Ended", "answer 3", "consult waiter"]


async def test_the_grant_of_a_waiter_follows_the_release_without_waiting_for_the_disk() -> None:
    async with play() as played:
        await played.queue("waiter", 2)
        played.release("a", 3)
        await played.until("consult waiter")
        played.ledger.log.clear()
        played.effects.propose("0")
        await played.rest()
        assert played.ledger.log == ["Granted"]  # Although the release is not durable yet.
        played.ledger.sync()
        await played.until("answer 3")
        assert played.ledger.log == ["Granted", "durable Ended", "answer 3"]
        played.ledger.sync()
        await played.until("answer 2")


async def test_facts_gather_for_one_sync_while_policies_decide() -> None:
    async with play() as played:
        played.release("a", 2)
        await played.rest()
        played.ask("new", 3)
        await played.until("consult new")
        played.release("b", 4)
        await played.rest()
        assert played.ledger.log == ["Ended", "consult new"]
        played.effects.propose("0")
        await played.rest()
        assert played.ledger.log[2:] == ["Ended+Granted"]
        played.ledger.sync()
        played.ledger.sync()
        await played.until("answer 3")
        answers = [each for each in played.ledger.log if each.startswith("answer")]
        assert answers == ["answer 2", "answer 4", "answer 3"]


async def test_an_answer_without_facts_waits_until_earlier_facts_are_durable() -> None:
    async with play() as played:
        played.release("a", 2)
        await played.rest()
        played.inbox.post(Inquired(Address(SessionId("s"), 3), "queue", TENANT), TENANT)
        await played.rest()
        assert played.ledger.log == ["Ended"]
        played.ledger.sync()
        await played.until("answer 3")
        assert [each for each in played.ledger.log if each.startswith("answer")] == [
            "answer 2",
            "answer 3",
        ]


@pytest.mark.parametrize("waits", [False, True])
async def test_checkpoint_beside_returns_once_the_checkpoint_is_written(waits: bool) -> None:
    async with play() as played:
        if waits:
            played.release("a", 2)
            await played.rest()
        written = asyncio.ensure_future(played.loop.checkpoint_beside())
        await played.rest()
        played.release("b", 3)
        await played.rest()
        played.ledger.sync()
        played.ledger.sync()
        await written
        assert played.ledger.checkpoint_seq >= played.ledger.last_seq - 2
        await played.loop.settle()


async def test_leases_get_a_grace_after_a_stall_of_the_disk() -> None:
    """The core decides a renewal while the disk stalls; the reply comes after the lease's end."""
    async with play(ttl_seconds=2.0) as played:
        played.tasks.spawn(played.loop.watch_clocks())
        played.inbox.post(RenewAsked(Address(SessionId("s"), 2), RequestId("a"), "", None))
        await asyncio.sleep(SECONDS)  # No event reports that the disk stalls.
        played.ledger.is_fast = True
        played.ledger.sync()
        await played.until("answer 2")
        async with asyncio.timeout(10):
            while min(played.left()) < 25.0:  # The grace of a restart is 30 s.
                played.effects.changed.clear()
                await played.effects.changed.wait()
        assert "durable Ended" not in played.ledger.log


async def test_a_calendar_set_before_the_start_moves_the_ends_of_leases(tmp_path: Path) -> None:
    """The last fact is dated a day ahead, as after a wrong clock."""
    async with play(tmp_path, 100_000.0) as played:
        played.ledger.is_fast = True
        lease = played.allocator.state.leases[RequestId("a")]
        fact = Renewed(lease.id, lease.expires_at)
        await played.ledger.append([fact], lease.granted_at + 86_400.0)
        await played.loop.follow_calendar()
        await played.loop.settle()
        assert max(played.left()) < 14_000.0
