import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moorage.core.state.facts import Counted
from moorage.ledger import writer
from moorage.ledger.base import LedgerFailed
from moorage.ledger.codec import seal
from moorage.ledger.writer import QUICK_SECONDS, GroupCommit, WriteJob
from moorage.storage.sqlite.fact_tables import FactTables
from moorage.storage.sqlite.facts import SqliteFacts

SECONDS_MAX = 30


class Gate:
    """The work of a job that reports its start, and continues when the test allows it."""

    def __init__(self, statement: str) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.statement = statement

    def __call__(self, facts: FactTables) -> object:
        self.begun.set()
        assert self.go_on.wait(SECONDS_MAX)
        return facts._execute(self.statement).fetchone()


class Groups:
    """The reports of a writer: the jobs of each transaction, and failures."""

    def __init__(self, path: Path) -> None:
        self.seen: list[tuple[int, bool]] = []
        self.store = SqliteFacts(path)
        self.store.open()
        self.writer = GroupCommit(self.store, self.settled)

    async def stop(self) -> None:
        await self.writer.stop()
        self.store.close()

    def settled(self, jobs: Sequence[WriteJob], failure: LedgerFailed | None) -> None:
        self.seen.append((len(jobs), failure is not None))

    def facts(self) -> list[int]:
        with self.store.reading() as facts:
            return [row.seq for row in facts.page(0, 100, 1 << 20)]


def job(*seqs: int, work: Callable[[FactTables], object] | None = None) -> WriteJob:
    rows = [seal(seq, 1.0, Counted(seq), 0) for seq in seqs]
    return WriteJob(asyncio.get_running_loop().create_future(), rows, work=work)


async def test_jobs_of_the_writer_that_wait_share_the_next_transaction(tmp_path: Path):
    groups = Groups(tmp_path / "ledger.sqlite")
    gate = Gate("SELECT 7")
    first, others = job(1, work=gate), [job(seq) for seq in range(2, 9)]
    groups.writer.submit(first)
    assert await asyncio.to_thread(gate.begun.wait, SECONDS_MAX)
    for other in others:
        groups.writer.submit(other)
    assert groups.facts() == []
    gate.go_on.set()
    assert await first.done == (7,)
    await asyncio.gather(*(other.done for other in others))
    assert groups.facts() == list(range(1, 9))
    await groups.stop()
    assert groups.seen[:2] == [(1, False), (7, False)]


async def test_the_writer_writes_nothing_after_a_failure(tmp_path: Path):
    groups = Groups(tmp_path / "ledger.sqlite")
    gate = Gate("INSERT INTO nowhere VALUES (1)")
    failing, later = job(1, work=gate), job(2)
    groups.writer.submit(failing)
    assert await asyncio.to_thread(gate.begun.wait, SECONDS_MAX)
    groups.writer.submit(later)
    gate.go_on.set()
    for waiting in (failing, later):
        with pytest.raises(LedgerFailed, match="no such table: nowhere"):
            await waiting.done
    assert groups.facts() == [], "the first job was rolled back; the second would leave a gap"
    await groups.stop()
    assert groups.seen[:2] == [(1, True), (1, True)]


async def test_a_stop_of_the_writer_settles_submitted_jobs(tmp_path: Path):
    groups = Groups(tmp_path / "ledger.sqlite")
    jobs = [job(seq) for seq in range(1, 30)]
    for submitted in jobs:
        groups.writer.submit(submitted)
    await groups.writer.stop()
    assert all(submitted.done.done() for submitted in jobs)
    assert groups.facts() == list(range(1, 30))
    groups.store.close()


async def test_a_lone_job_of_the_writer_is_durable_before_the_call_returns(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(writer, "QUICK_SECONDS", SECONDS_MAX)  # Also on a busy machine.
    groups = Groups(tmp_path / "ledger.sqlite")
    lone = job(1)
    assert groups.writer.commit_at_once(lone)
    assert lone.done.result() is None
    assert (groups.facts(), groups.seen) == ([1], [(1, False)])
    await groups.stop()


async def test_no_job_of_the_writer_overtakes_submitted_jobs(tmp_path: Path):
    groups = Groups(tmp_path / "ledger.sqlite")
    gate = Gate("SELECT 7")
    first, second = job(1, work=gate), job(2)
    groups.writer.submit(first)
    assert not groups.writer.commit_at_once(second)
    gate.go_on.set()
    await first.done
    assert groups.facts() == [1], "the second job was left to the caller"
    await groups.stop()


async def test_after_a_slow_commit_the_event_loop_leaves_the_next_commit_to_the_thread(
    tmp_path: Path,
):
    groups = Groups(tmp_path / "ledger.sqlite")
    slow = job(1, work=lambda _: time.sleep(2 * QUICK_SECONDS))  # As on a slow disk.
    groups.writer.submit(slow)
    await slow.done
    assert not groups.writer.commit_at_once(job(2))
    await groups.stop()


async def test_the_writer_writes_nothing_after_a_failure_in_the_event_loop(tmp_path: Path):
    groups = Groups(tmp_path / "ledger.sqlite")
    gate = Gate("INSERT INTO nowhere VALUES (1)")
    gate.go_on.set()
    failing, later = job(1, work=gate), job(2)
    assert groups.writer.commit_at_once(failing)
    groups.writer.submit(later)
    for waiting in (failing, later):
        with pytest.raises(LedgerFailed, match="no such table: nowhere"):
            await waiting.done
    assert groups.facts() == []
    await groups.stop()


async def test_a_hanging_disk_holds_up_the_event_loop_for_a_moment_only(tmp_path: Path):
    groups = Groups(tmp_path / "ledger.sqlite")
    gate = Gate("SELECT 7")
    hanging, later = job(1, work=gate), job(2)
    assert groups.writer.commit_at_once(hanging)
    assert not hanging.done.done()
    assert not groups.writer.commit_at_once(later)
    assert await asyncio.to_thread(gate.begun.wait, SECONDS_MAX)
    await asyncio.sleep(2 * QUICK_SECONDS)  # The disk hangs for this time.
    gate.go_on.set()
    assert await hanging.done == (7,)
    assert groups.writer.commit_at_once(later) is False, "the next commit may be as slow"
    await groups.stop()
    assert groups.seen[0] == (1, False)
