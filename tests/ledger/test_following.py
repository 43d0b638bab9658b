"""A follower of a ledger that another process writes continues after its last fact."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from moorage.core.state.facts import ClusterRemoved, Fact
from moorage.ledger.base import LedgerError, LedgerFailed
from moorage.ledger.following import PIECE_FACTS, FollowedLedger
from moorage.ledger.stored import StoredLedger
from moorage.model import ClusterId
from moorage.storage.base import StorageFailed
from moorage.storage.sqlite.facts import SqliteFacts

NOW = 1_763_647_000.0


class Beside:
    """Reads the facts of a store that is open for writing, as another process would."""

    def __init__(self, store: SqliteFacts) -> None:
        self.store, self.place, self.is_broken = store, store.place, False
        self.reading, self.close = store.reading, store.close

    def last_seq(self) -> int:
        if self.is_broken:
            raise StorageFailed("the network is down")
        with self.store.reading() as facts:
            return facts.last_seq()


def facts(first: int, count: int) -> list[Fact]:
    return [ClusterRemoved(ClusterId(f"c{number}")) for number in range(first, first + count)]


@pytest.fixture
async def write_facts(tmp_path: Path):
    store = SqliteFacts(tmp_path / "ledger.db")
    ledger = StoredLedger(store)
    await ledger.open()
    yield store, ledger
    await ledger.close()


async def test_a_follower_applies_each_fact_once_and_in_order(write_facts) -> None:
    store, ledger = write_facts
    await ledger.append(facts(0, 5), NOW)
    await ledger.checkpoint(3, facts(0, 2))  # As if two facts had the state of all three.
    taken: list[Fact] = []
    followed = FollowedLedger(Beside(store))
    await followed.load(taken.extend)
    assert taken == [*facts(0, 2), *facts(3, 2)]
    assert followed.last_seq == 5
    taken.clear()
    assert await followed.follow(taken.extend)
    assert taken == []
    many = 2 * PIECE_FACTS + 1
    await ledger.append(facts(5, many), NOW)
    assert await followed.follow(taken.extend)
    assert taken == facts(5, many)
    assert followed.last_seq == ledger.last_seq == 5 + many
    assert await followed.read(limit=7) == await ledger.read(limit=7)


async def test_a_follower_reports_only_applied_facts(write_facts) -> None:
    store, ledger = write_facts
    followed = FollowedLedger(Beside(store))
    await ledger.append(facts(0, 3), NOW)
    await followed.load(lambda _: None)
    await ledger.append(facts(3, 3), NOW)
    assert [entry.seq for entry in await followed.read()] == [1, 2, 3]
    assert await followed.history("c4") == []
    await followed.follow(lambda _: None)
    assert [entry.seq for entry in await followed.history("c4")] == [5]


async def test_a_follower_tries_an_unreachable_database_again(write_facts) -> None:
    store, ledger = write_facts
    beside = Beside(store)
    followed = FollowedLedger(beside)
    await followed.load(lambda _: None)
    beside.is_broken = True
    with pytest.raises(LedgerFailed, match="network is down"):
        await followed.follow(lambda _: None)
    beside.is_broken = False
    await ledger.append(facts(0, 1), NOW)
    assert await followed.follow(lambda _: None)
    assert followed.last_seq == 1


async def test_a_follower_does_not_follow_another_history(write_facts, tmp_path: Path) -> None:
    store, ledger = write_facts
    await ledger.append(facts(0, 3), NOW)
    beside = Beside(store)
    followed = FollowedLedger(beside)
    await followed.load(lambda _: None)
    # The database that took over lacked an acknowledged fact, and continued without it.
    other = SqliteFacts(tmp_path / "other.db")
    promoted = StoredLedger(other)
    await promoted.open()
    await promoted.append([*facts(0, 2), *facts(9, 2)], NOW)
    beside.store, beside.reading = other, other.reading
    followed._reading = beside  # As if its connection now led to another database.
    with pytest.raises(LedgerError, match="do not continue from fact 3"):
        await followed.follow(lambda _: None)
    await promoted.close()


async def test_a_follower_resumes_its_history_or_reads_another_history_from_its_start(
    write_facts, tmp_path: Path
) -> None:
    store, ledger = write_facts
    await ledger.append(facts(0, 5), NOW)
    await ledger.checkpoint(3, facts(0, 2))
    followed = FollowedLedger(Beside(store))
    await followed.load(lambda _: None)
    known = followed.position
    assert known is not None
    await ledger.append(facts(5, 2), NOW)
    await ledger.close()
    heir = StoredLedger(SqliteFacts(tmp_path / "ledger.db"))
    recovery = await heir.open(known)
    assert (recovery.goes_on, recovery.last_seq, recovery.checkpoint_seq) == (True, 7, 3)
    assert list(recovery.facts) == facts(5, 2)
    assert await heir.append(facts(7, 1), NOW) == 8
    await heir.close()
    recovery = await heir.open(known._replace(chain=known.chain + 1))
    assert not recovery.goes_on
    assert list(recovery.facts) == [*facts(0, 2), *facts(3, 5)]
    await heir.close()


async def test_a_follower_does_not_resume_from_a_partial_read(write_facts) -> None:
    store, ledger = write_facts
    followed = FollowedLedger(Beside(store))
    assert followed.position is None
    await followed.load(lambda _: None)
    await ledger.append(facts(0, 2), NOW)

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await followed.follow(fail)
    assert followed.position is None


async def test_a_follower_that_was_cancelled_continues_after_the_last_complete_piece(
    write_facts,
) -> None:
    store, ledger = write_facts
    followed = FollowedLedger(Beside(store))
    await followed.load(lambda _: None)
    await ledger.append(facts(0, 3 * PIECE_FACTS), NOW)
    taken: list[Fact] = []

    def take(piece: Sequence[Fact]) -> None:
        taken.extend(piece)
        if len(taken) == PIECE_FACTS:
            following.cancel()

    following = asyncio.create_task(followed.follow(take))
    with pytest.raises(asyncio.CancelledError):
        await following
    assert followed.position is not None
    assert followed.position.seq == len(taken) == PIECE_FACTS
    assert await followed.follow(take)
    assert taken == facts(0, 3 * PIECE_FACTS)
