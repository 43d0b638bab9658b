"""Acknowledged facts outlast kill -9 at any moment, and a full disk."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.core.state.facts import Fact, Renewed
from moorage.ledger.stored import StoredLedger
from moorage.model import RequestId
from moorage.storage.sqlite.facts import SqliteFacts
from tests.ledger.facts import opened

APPENDER = Path(__file__).with_name("appender.py")
FILLER = Path(__file__).with_name("filler.py")
CONDENSED = 450
SECONDS_MAX = 60


def fact(seq: int) -> Fact:
    return Renewed(RequestId("fact"), float(seq))


def kill_after(path: Path, acknowledgements: int) -> int:
    """Run the appender, kill it after a number of prints, and return the last printed seq."""
    command = [sys.executable, str(APPENDER), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(acknowledgements)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines(keepends=True)
        assert child.wait(SECONDS_MAX) == -signal.SIGKILL, "it ended by itself; see its stderr"
    return max(int(line) for line in lines if line.endswith(b"\n"))


def fill(path: Path, room_bytes: int) -> tuple[list[int], list[str]]:
    """Run the filler; return the seqs that it printed, and its errors."""
    command = [sys.executable, str(FILLER), str(path), str(room_bytes)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    return [int(line) for line in lines if line.isdigit()], [
        line for line in lines if not line.isdigit()
    ]


@pytest.mark.heavy
async def test_kill_9_loses_no_acknowledged_fact(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    dice = random.Random(20)
    last_seq = checkpoints = 0
    for _ in range(20):
        acknowledged = kill_after(path, dice.randint(1, 300))
        ledger = StoredLedger(SqliteFacts(path))
        recovery = await ledger.open()
        assert last_seq < acknowledged <= recovery.last_seq
        assert recovery.warnings == ()
        last_seq = recovery.last_seq
        condensed = [fact(recovery.checkpoint_seq)] * CONDENSED if recovery.checkpoint_seq else []
        tail = [fact(seq) for seq in range(recovery.checkpoint_seq + 1, last_seq + 1)]
        assert list(recovery.facts) == condensed + tail
        checkpoints += bool(condensed)
        await ledger.close()
    assert checkpoints > 0
    ledger = await opened(path)
    seen = 0
    while page := await ledger.read(seen):
        assert [entry.fact for entry in page] == [
            fact(seq) for seq in range(seen + 1, seen + 1 + len(page))
        ]
        seen = page[-1].seq
    assert seen == last_seq
    await ledger.close()


@pytest.mark.parametrize("room_bytes", [1, 200_000, 6_000_000])
async def test_a_full_disk_fails_the_ledger_without_losing_acknowledged_facts(
    tmp_path: Path, room_bytes: int
):
    path = tmp_path / "ledger.sqlite"
    acknowledged, failures = fill(path, room_bytes)
    assert acknowledged == list(range(10, 10 * len(acknowledged) + 1, 10))
    assert bool(acknowledged) == (room_bytes > 1)
    assert len(failures) == 4, "append, append again, checkpoint and close all have to fail"
    assert all("Make room on the disk" in failure for failure in failures)
    ledger = StoredLedger(SqliteFacts(path))
    recovery = await ledger.open()
    assert recovery.last_seq in {len(acknowledged) * 10, len(acknowledged) * 10 + 10}
    assert len(list(recovery.facts)) == recovery.last_seq
    assert await ledger.append([fact(1)], 1.0) == recovery.last_seq + 1
    await ledger.close()
