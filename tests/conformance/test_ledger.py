"""The conformance suite of ledgers: in memory, in files, and in PostgreSQL."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from moorage.core.state.facts import ClusterRemoved, Ended, Fact, Granted, Renewed
from moorage.ledger.base import (
    PAGE_BYTES_MAX,
    PAGE_FACTS_MAX,
    FactUnknown,
    FactUnwritable,
    Ledger,
    LedgerCorrupt,
    LedgerError,
    LedgerLocked,
)
from moorage.ledger.codec import FactRow, _checksum
from moorage.ledger.memory import MemoryLedger, MemoryStorage
from moorage.ledger.stored import StoredLedger
from moorage.model import (
    ClusterId,
    Lease,
    LeaseTerms,
    NodeId,
    PolicyRef,
    Provision,
    RequestId,
    Share,
    Tenant,
)
from moorage.storage.sqlite.facts import SqliteFacts
from tests.ledger.facts import NOW, numbered_facts

POSTGRES = (pytest.mark.heavy, pytest.mark.postgres)


class Place(Protocol):
    """The storage of a ledger under test, and ways to damage it while it is closed."""

    def ledger(self) -> Ledger: ...
    def relabel(self, seq: int, kind: str, version: int) -> None: ...
    def flip_a_bit(self, seq: int) -> None: ...
    def lose(self, seq: int) -> None: ...
    def spoil_newest_checkpoint(self) -> None: ...


class MemoryPlace:
    def __init__(self) -> None:
        self.storage = MemoryStorage()

    def ledger(self) -> Ledger:
        return MemoryLedger(self.storage)

    def relabel(self, seq: int, kind: str, version: int) -> None:
        # With valid checksums, as a release that knows this kind would write.
        row = self.storage.rows[seq - 1]
        self.storage.rows[seq - 1] = row._replace(
            kind=kind, version=version, checksum=seal(row, kind, version)
        )

    def flip_a_bit(self, seq: int) -> None:
        row = self.storage.rows[seq - 1]
        self.storage.rows[seq - 1] = row._replace(body=row.body.replace(b"r-", b"s-"))

    def lose(self, seq: int) -> None:
        del self.storage.rows[seq - 1]

    def spoil_newest_checkpoint(self) -> None:
        seq, body, checksum = self.storage.checkpoints[-1]
        self.storage.checkpoints[-1] = (seq, body.replace(b"r-", b"s-"), checksum)


class SqlitePlace:
    def __init__(self, path: Path) -> None:
        self.path = path

    def ledger(self) -> Ledger:
        return StoredLedger(SqliteFacts(self.path))

    def relabel(self, seq: int, kind: str, version: int) -> None:
        connection = sqlite3.connect(self.path)
        row = FactRow._make(
            connection.execute(
                "SELECT seq, at, kind, version, subject, CAST(body AS BLOB), checksum, chain "
                "FROM fact WHERE seq = ?",
                (seq,),
            ).fetchone()
        )
        connection.execute(
            "UPDATE fact SET kind = ?, version = ?, checksum = ? WHERE seq = ?",
            (kind, version, seal(row, kind, version), seq),
        )
        connection.commit()
        connection.close()

    def flip_a_bit(self, seq: int) -> None:
        self._run("UPDATE fact SET body = replace(body, 'r-', 's-') WHERE seq = ?", seq)

    def lose(self, seq: int) -> None:
        self._run("DELETE FROM fact WHERE seq = ?", seq)

    def spoil_newest_checkpoint(self) -> None:
        self._run(
            "UPDATE checkpoint_part SET body = CAST(replace(CAST(body AS TEXT), 'r-', 's-') "
            "AS BLOB) WHERE checkpoint = (SELECT max(number) FROM checkpoint)"
        )

    def _run(self, statement: str, *parameters: int) -> None:
        connection = sqlite3.connect(self.path)
        assert connection.execute(statement, parameters).rowcount > 0
        connection.commit()
        connection.close()


def seal(row: FactRow, kind: str, version: int) -> int:
    return _checksum(row.seq, row.at, kind, version, row.subject, row.body)


class PostgresPlace:
    def __init__(self, server) -> None:
        self.server, self.address = server, server.database()

    def ledger(self) -> Ledger:
        from moorage.storage.postgres.storage import PostgresStorage  # noqa: PLC0415  # An extra.

        return StoredLedger(PostgresStorage(self.address).facts())

    def relabel(self, seq: int, kind: str, version: int) -> None:
        [(*values, body, checksum, chain)] = self._run(
            "SELECT seq, at, kind, version, convert_from(subject, 'UTF8'), body, checksum, chain "
            "FROM moorage.fact WHERE seq = %s",
            seq,
        )
        row = FactRow(*values, body.encode(), checksum, chain)
        self._run(
            "UPDATE moorage.fact SET kind = %s, version = %s, checksum = %s WHERE seq = %s",
            kind,
            version,
            seal(row, kind, version),
            seq,
        )

    def flip_a_bit(self, seq: int) -> None:
        self._run("UPDATE moorage.fact SET body = replace(body, 'r-', 's-') WHERE seq = %s", seq)

    def lose(self, seq: int) -> None:
        self._run("DELETE FROM moorage.fact WHERE seq = %s", seq)

    def spoil_newest_checkpoint(self) -> None:
        self._run(
            "UPDATE moorage.checkpoint_part SET body = convert_to(replace(convert_from(body, "
            "'UTF8'), 'r-', 's-'), 'UTF8') WHERE checkpoint = "
            "(SELECT max(number) FROM moorage.checkpoint)"
        )

    def _run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self.server.execute(statement, self.address.rpartition("/")[2], values)


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=POSTGRES)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        return MemoryPlace()
    if request.param == "postgres":
        return PostgresPlace(request.getfixturevalue("postgres"))
    return SqlitePlace(tmp_path / "data" / "ledger.sqlite")


@pytest.fixture
async def ledger(place: Place) -> AsyncIterator[Ledger]:
    """An open ledger, which is closed after its test."""
    made = place.ledger()
    await made.open()
    yield made
    await made.close()


def grant(number: int) -> Granted:
    return Granted(
        Lease(
            id=RequestId(f"r-{number}"),
            tenant=Tenant("team-a"),
            token_digest="secret",  # noqa: S106  # A test's value.
            policy=PolicyRef("fgd", "0" * 64),
            placement=(Share(ClusterId("north"), NodeId("n1"), ("0", "1")),),
            fencing=number,
            granted_at=NOW,
            expires_at=NOW + 300,
            terms=LeaseTerms(300.0),
            provision=Provision("local", {"command": ["sleep", "1"], "größe": 1.5}),
        )
    )


async def read_remains(place: Place) -> list[Fact]:
    """Open a ledger, read all its facts, and close it."""
    ledger = place.ledger()
    recovery = await ledger.open()
    try:
        return list(recovery.facts)
    finally:
        await ledger.close()


async def test_a_new_ledger_is_empty(place: Place):
    ledger = place.ledger()
    recovery = await ledger.open()
    assert (list(recovery.facts), recovery.last_seq, recovery.checkpoint_seq) == ([], 0, 0)
    assert recovery.warnings == ()
    assert ledger.last_seq == 0
    assert await ledger.read() == []
    assert await ledger.history("r-1") == []
    await ledger.close()


async def test_a_reopened_ledger_returns_its_facts_in_order(ledger: Ledger, place: Place):
    first: list[Fact] = [grant(1), Renewed(RequestId("r-1"), NOW + 600)]
    second: list[Fact] = [Ended(RequestId("r-1"), NOW, "released"), ClusterRemoved(ClusterId("c"))]
    assert await ledger.append(first, NOW) == 2
    assert await ledger.append(second, NOW) == 4
    assert ledger.last_seq == 4
    await ledger.close()
    ledger = place.ledger()
    recovery = await ledger.open()
    assert list(recovery.facts) == first + second
    assert recovery.last_seq == ledger.last_seq == 4
    assert await ledger.append(numbered_facts(5, 5), NOW) == 5
    await ledger.close()


async def test_an_empty_append_waits_for_earlier_appends(ledger: Ledger):
    assert await ledger.append([], NOW) == 0
    earlier = asyncio.ensure_future(ledger.append(numbered_facts(1, 3), NOW))
    await asyncio.sleep(0)
    assert await ledger.append([], NOW) == 3
    assert earlier.done()
    assert await earlier == 3


async def test_concurrent_appends_are_stored_in_the_order_of_the_calls(
    ledger: Ledger, place: Place
):
    sizes = [1 + number * 7 % 5 for number in range(300)]
    calls, last, lasts = [], 0, []
    for size in sizes:
        calls.append(
            asyncio.ensure_future(ledger.append(numbered_facts(last + 1, last + size), NOW))
        )
        last += size
        lasts.append(last)
    assert await asyncio.gather(*calls) == lasts
    assert [entry.fact for entry in await ledger.read()] == numbered_facts(1, last)
    await ledger.close()
    assert await read_remains(place) == numbered_facts(1, last)


async def test_facts_appended_before_close_are_durable(ledger: Ledger, place: Place):
    calls = [asyncio.ensure_future(ledger.append([fact], NOW)) for fact in numbered_facts(1, 50)]
    await asyncio.sleep(0)
    await ledger.close()
    assert await asyncio.gather(*calls) == list(range(1, 51))
    assert await read_remains(place) == numbered_facts(1, 50)


async def test_a_cancelled_append_disturbs_no_other_append(ledger: Ledger):
    calls = [asyncio.ensure_future(ledger.append([fact], NOW)) for fact in numbered_facts(1, 9)]
    await asyncio.sleep(0)
    calls[4].cancel()
    await asyncio.wait(calls)
    assert await ledger.append(numbered_facts(10, 10), NOW) == ledger.last_seq == 10
    assert [entry.fact for entry in await ledger.read()] == numbered_facts(1, 10)


async def test_a_checkpoint_replaces_the_facts_before_it_at_recovery(ledger: Ledger, place: Place):
    await ledger.append(numbered_facts(1, 10), NOW)
    condensed = [grant(number) for number in range(700)]
    await ledger.checkpoint(8, condensed)
    await ledger.append(numbered_facts(11, 12), NOW)
    await ledger.close()
    ledger = place.ledger()
    recovery = await ledger.open()
    assert list(recovery.facts) == [*condensed, *numbered_facts(9, 12)]
    assert (recovery.checkpoint_seq, recovery.last_seq) == (8, 12)
    assert [entry.fact for entry in await ledger.read()] == numbered_facts(1, 12)
    await ledger.close()


async def test_a_checkpoint_without_facts_is_valid(ledger: Ledger, place: Place):
    await ledger.append(numbered_facts(1, 3), NOW)
    await ledger.checkpoint(3, [])
    await ledger.close()
    assert await read_remains(place) == []


async def test_appends_go_on_during_a_checkpoint(ledger: Ledger, place: Place):
    await ledger.append(numbered_facts(1, 5), NOW)
    under_way = asyncio.ensure_future(ledger.checkpoint(5, [grant(n) for n in range(2000)]))
    last = 5
    while not under_way.done():
        last += 1
        assert await ledger.append(numbered_facts(last, last), NOW) == last
    await under_way
    await ledger.close()
    assert (await read_remains(place))[2000:] == numbered_facts(6, last)


async def test_recovery_uses_the_previous_checkpoint_instead_of_a_damaged_one(
    ledger: Ledger, place: Place
):
    for seq in (2, 4, 6):
        await ledger.append(numbered_facts(seq - 1, seq), NOW)
        await ledger.checkpoint(seq, [grant(seq)])
    await ledger.append(numbered_facts(7, 7), NOW)
    await ledger.close()
    assert await read_remains(place) == [grant(6), *numbered_facts(7, 7)]
    place.spoil_newest_checkpoint()
    ledger = place.ledger()
    recovery = await ledger.open()
    assert list(recovery.facts) == [grant(4), *numbered_facts(5, 7)]
    assert recovery.checkpoint_seq == 4
    [warning] = recovery.warnings
    assert "fact 6 is damaged" in warning
    await ledger.close()
    place.spoil_newest_checkpoint()
    assert await read_remains(place) == numbered_facts(1, 7)  # The third was too old.
    ledger = place.ledger()
    await ledger.open()
    await ledger.checkpoint(7, [grant(7)])
    await ledger.close()
    assert await read_remains(place) == [grant(7)]


async def test_a_checkpoint_is_later_than_the_last_checkpoint_and_no_later_than_the_last_fact(
    ledger: Ledger, place: Place
):
    await ledger.append(numbered_facts(1, 5), NOW)
    await ledger.checkpoint(3, [])
    for seq in (2, 6):
        with pytest.raises(LedgerError, match=r"between the last checkpoint's \(3\).*\(5\)"):
            await ledger.checkpoint(seq, [])
    await ledger.checkpoint(3, [grant(1)])
    await ledger.close()
    assert await read_remains(place) == [grant(1), *numbered_facts(4, 5)]


async def test_an_append_with_a_fact_that_cannot_be_encoded_is_refused_and_stores_nothing(
    ledger: Ledger, place: Place
):
    await ledger.append(numbered_facts(1, 1), NOW)
    endless = Renewed(RequestId("r-9"), float("inf"))
    with pytest.raises(FactUnwritable, match="Renewed cannot be stored"):
        await ledger.append([*numbered_facts(2, 2), endless], NOW)
    with pytest.raises(FactUnwritable):
        await ledger.checkpoint(1, [grant(1), endless])
    assert await ledger.append(numbered_facts(2, 2), NOW) == 2
    await ledger.close()
    assert await read_remains(place) == numbered_facts(1, 2)


async def test_history_lists_the_facts_of_one_subject(ledger: Ledger):
    story: list[Fact] = [
        grant(1),
        Renewed(RequestId("r-1"), NOW + 600),
        Ended(RequestId("r-1"), NOW + 1, "released"),
    ]
    await ledger.append([story[0], grant(2)], NOW)
    await ledger.append([story[1], grant(11), story[2]], NOW + 1)
    entries = await ledger.history("r-1")
    assert [entry.fact for entry in entries] == story
    assert [(entry.seq, entry.at) for entry in entries] == [(1, NOW), (3, NOW + 1), (5, NOW + 1)]
    assert [e.seq for e in await ledger.history("r-1", after=1, limit=1)] == [3]
    assert await ledger.history("r") == []


async def test_pages_of_the_history_are_bounded_and_join_without_gaps(ledger: Ledger):
    await ledger.append(numbered_facts(1, 2 * PAGE_FACTS_MAX + 1), NOW)
    sizes, after = [], 0
    while page := await ledger.read(after, limit=10 * PAGE_FACTS_MAX):
        assert page[0].seq == after + 1
        sizes.append(len(page))
        after = page[-1].seq
    assert sizes == [PAGE_FACTS_MAX, PAGE_FACTS_MAX, 1]
    assert [entry.seq for entry in await ledger.read(7, limit=2)] == [8, 9]


async def test_a_page_of_the_history_with_large_facts_ends_early(ledger: Ledger, place: Place):
    large = [Ended(RequestId("r"), NOW, "x" * (PAGE_BYTES_MAX // 4)) for _ in range(6)]
    await ledger.append(large, NOW)
    assert [entry.seq for entry in await ledger.read()] == [1, 2, 3, 4]
    assert [entry.seq for entry in await ledger.history("r", after=4)] == [5, 6]
    await ledger.close()
    assert await read_remains(place) == large


async def test_a_reader_gets_all_facts_without_gaps_while_a_writer_adds_facts(ledger: Ledger):

    async def write() -> None:
        for number in range(1, 201):
            await ledger.append(numbered_facts(number, number), NOW)

    writing = asyncio.ensure_future(write())
    while not writing.done():
        durable = ledger.last_seq
        seen = [entry.fact for entry in await ledger.read()]
        assert len(seen) >= durable
        assert seen == numbered_facts(1, len(seen))
    await writing
    assert len(await ledger.read()) == 200


async def test_recovery_ends_at_the_fact_that_was_the_last_when_the_ledger_was_opened(
    ledger: Ledger, place: Place
):
    await ledger.append(numbered_facts(1, 3), NOW)
    await ledger.close()
    ledger = place.ledger()
    recovery = await ledger.open()
    await ledger.append(numbered_facts(4, 5), NOW)
    assert list(recovery.facts) == numbered_facts(1, 3)
    await ledger.close()


async def test_one_ledger_has_one_writer(ledger: Ledger, place: Place):
    second = place.ledger()
    with pytest.raises(LedgerLocked, match=f"in use by process {os.getpid()}") as caught:
        await second.open()
    assert caught.value.pid == os.getpid()
    with pytest.raises(LedgerError, match="open already"):
        await ledger.open()
    assert await ledger.append(numbered_facts(1, 1), NOW) == 1
    await ledger.close()
    recovery = await second.open()
    assert list(recovery.facts) == numbered_facts(1, 1)
    await second.close()


async def test_a_closed_ledger_refuses_calls_and_can_be_opened_again(place: Place):
    ledger = place.ledger()
    with pytest.raises(LedgerError, match="not open"):
        await ledger.append(numbered_facts(1, 1), NOW)
    await ledger.close()
    await ledger.open()
    await ledger.append(numbered_facts(1, 1), NOW)
    await ledger.close()
    await ledger.close()
    for call in (
        lambda: ledger.append([], NOW),
        lambda: ledger.checkpoint(0, []),
        ledger.read,
        lambda: ledger.history(""),
    ):
        with pytest.raises(LedgerError, match="not open"):
            await call()
    recovery = await ledger.open()
    assert list(recovery.facts) == numbered_facts(1, 1)
    await ledger.close()


@pytest.mark.parametrize(("kind", "version"), [("teleported", 1), ("renewed", 99), ("renewed", 0)])
async def test_a_fact_of_an_unknown_kind_is_never_skipped(
    ledger: Ledger, place: Place, kind: str, version: int
):
    await ledger.append(numbered_facts(1, 3), NOW)
    await ledger.close()
    place.relabel(2, kind, version)
    ledger = place.ledger()
    recovery = await ledger.open()
    said = f"fact 2 of .*'{kind}', version {version}.*Start the release that wrote it"
    with pytest.raises(FactUnknown, match=said):
        list(recovery.facts)
    with pytest.raises(FactUnknown, match=said):
        await ledger.read()
    with pytest.raises(FactUnknown, match=said):
        await ledger.history("r-2")
    assert len(await ledger.history("r-1")) == 1
    await ledger.close()


async def test_a_changed_fact_is_noticed(ledger: Ledger, place: Place):
    await ledger.append(numbered_facts(1, 3), NOW)
    await ledger.close()
    place.flip_a_bit(2)
    with pytest.raises(LedgerCorrupt, match=r"fact 2 does not match its checksum.*from a backup"):
        await read_remains(place)


@pytest.mark.parametrize("seq", [1, 2])
async def test_a_missing_fact_is_noticed(ledger: Ledger, place: Place, seq: int):
    await ledger.append(numbered_facts(1, 3), NOW)
    await ledger.close()
    place.lose(seq)
    with pytest.raises(LedgerCorrupt, match=f"fact {seq} is missing"):
        await read_remains(place)


async def test_a_checkpoint_reveals_facts_lost_from_the_end(ledger: Ledger, place: Place):
    await ledger.append(numbered_facts(1, 3), NOW)
    await ledger.checkpoint(3, [])
    await ledger.close()
    place.lose(3)
    ledger = place.ledger()
    with pytest.raises(
        LedgerCorrupt,
        match=r"as of fact 3, but its facts end with 2|fact 3 was durable and is missing",
    ):
        await ledger.open()
    with pytest.raises(LedgerCorrupt):  # Not LedgerLocked: the first attempt has released the lock.
        await ledger.open()


async def append_and_checkpoint(ledger: Ledger, last: int) -> None:
    """Append facts up to number `last`, a second apart, and take a checkpoint."""
    for number in range(ledger.last_seq + 1, last + 1):
        await ledger.append([grant(number)], NOW + number)
    await ledger.checkpoint(last, numbered_facts(1, 1))


async def prune(ledger: Ledger, before: float, bytes_max: int) -> None:
    while await ledger.prune(before, bytes_max):
        pass


async def test_history_is_pruned_by_age_but_not_beyond_the_older_checkpoint(
    ledger: Ledger, place: Place
):
    await prune(ledger, NOW + 1e9, 0)
    await append_and_checkpoint(ledger, 300)
    await prune(ledger, NOW + 1e9, 0)
    assert (await ledger.read())[0].seq == 1, "a single checkpoint may be damaged"
    assert await ledger.history_start() is None
    await append_and_checkpoint(ledger, 400)
    await prune(ledger, NOW + 150, 1 << 40)
    assert (await ledger.read())[0].seq == 150
    assert await ledger.history_start() == NOW + 150
    assert await ledger.history("r-149") == []
    assert len(await ledger.history("r-150")) == 1
    await prune(ledger, NOW + 1e9, 1 << 40)
    assert (await ledger.read())[0].seq == 300
    await ledger.append(numbered_facts(401, 401), NOW + 401)
    await ledger.close()
    ledger = place.ledger()
    assert list((await ledger.open()).facts) == [*numbered_facts(1, 1), *numbered_facts(401, 401)]
    assert [entry.seq for entry in await ledger.read()] == list(range(300, 402))
    assert await ledger.history_start() == NOW + 300
    await ledger.close()
    place.spoil_newest_checkpoint()
    ledger = place.ledger()
    recovery = await ledger.open()
    assert recovery.checkpoint_seq == 300
    assert len(list(recovery.facts)) == 1 + 101
    await ledger.close()


async def test_history_is_pruned_by_size_regardless_of_age(ledger: Ledger):
    await append_and_checkpoint(ledger, 300)
    await append_and_checkpoint(ledger, 600)
    await prune(ledger, 0.0, 1 << 40)
    assert await ledger.history_start() is None
    await prune(ledger, 0.0, 100_000)
    assert 1 < (await ledger.read())[0].seq <= 300


async def test_pruning_disturbs_neither_appends_nor_readers(ledger: Ledger):
    await append_and_checkpoint(ledger, 400)
    await append_and_checkpoint(ledger, 500)
    pruning = asyncio.ensure_future(prune(ledger, NOW + 1e9, 0))
    while not pruning.done():
        first = await ledger.append([grant(ledger.last_seq + 1)], NOW + 600)
        seen = [entry.seq for entry in await ledger.read(limit=50)]
        assert seen == list(range(seen[0], seen[0] + 50))
        assert first == ledger.last_seq
    await pruning
