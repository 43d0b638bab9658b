"""A standby answers from the state that it follows, and never with data older than its bound."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.catalog.opening import open_catalog
from moorage.core.allocator import Allocator
from moorage.core.state.facts import ClusterSet, Fact
from moorage.daemon import following
from moorage.daemon.following import AGE_SECONDS_MAX, Follower
from moorage.ledger.base import LedgerError
from moorage.ledger.following import FollowedLedger
from moorage.ledger.stored import StoredLedger
from moorage.model import Cluster, ClusterId
from moorage.storage.base import StorageFailed
from moorage.storage.sqlite.facts import SqliteFacts
from moorage.storage.sqlite.records import SqliteRecords


class Beside:
    """A follower of a file's facts, as in another process, whose access the test can break."""

    def __init__(self, store: SqliteFacts) -> None:
        self.place, self.reading, self.close = store.place, store.reading, store.close
        self.is_broken = False

    def last_seq(self) -> int:
        if self.is_broken:
            raise StorageFailed("the network is down")
        with self.reading() as facts:
            return facts.last_seq()


class Scene:
    """A ledger with a writer, and a standby's follower of this ledger."""

    def __init__(self, ledger: StoredLedger, beside: Beside, follower: Follower) -> None:
        self.ledger, self.beside, self.follower = ledger, beside, follower
        self.durable: list[Fact] = []
        self.running = asyncio.create_task(follower.run(self.durable.extend))

    async def append(self, *names: str) -> int:
        return await self.ledger.append([ClusterSet(Cluster(ClusterId(n), ())) for n in names], 0.0)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = SqliteFacts(tmp_path / "ledger.db")
    ledger, allocator = StoredLedger(store), Allocator()
    await ledger.open()
    catalog = await open_catalog(SqliteRecords(tmp_path / "catalog.db"), follows=True)
    assert catalog.following is not None
    beside = Beside(store)
    followed = FollowedLedger(beside)
    await followed.load(allocator.follow)
    scene = Scene(ledger, beside, Follower(followed, allocator, catalog.following, 0.0))
    yield scene
    scene.running.cancel()
    await catalog.close()
    await ledger.close()


async def test_a_standby_waits_for_a_fact_and_dates_its_answer(scene: Scene) -> None:
    revision = await scene.append("a", "b")
    assert await scene.follower.has(revision)
    assert scene.follower.revision == revision == 2
    assert len(scene.durable) == 2
    assert scene.follower.is_fresh


async def test_the_wait_of_a_standby_for_a_fact_is_bounded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "WAIT_SECONDS_MAX", 0.01)
    assert not await scene.follower.has(1)


async def test_a_standby_is_stale_without_the_database_and_recovers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_SECONDS", 0.01)
    assert await scene.follower.has(await scene.append("a"))
    scene.beside.is_broken = True
    revision = await scene.append("b")
    scene.follower._looked -= AGE_SECONDS_MAX  # As if the last look were too long ago.
    assert not scene.follower.is_fresh
    assert scene.follower.revision == revision - 1
    scene.beside.is_broken = False
    assert await scene.follower.has(revision)
    assert await scene.follower.has(await scene.append("c"))
    assert scene.follower.is_fresh


async def test_a_standby_ends_if_the_database_has_another_history(scene: Scene) -> None:
    assert await scene.follower.has(await scene.append("a"))
    scene.follower._ledger._chain += 1  # As if another fact had been read.
    await scene.append("b")
    with pytest.raises(LedgerError, match="do not continue from fact 1"):
        await scene.running
