"""Processes of this machine: what the conformance suite does not ask of every backend."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.engines.base import Order, Phase
from moorage.engines.local import supervisor
from moorage.engines.local.engine import LocalEngine
from moorage.engines.specs import ProcessResourceSpec

SEEN_SECONDS_MAX = 20


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[LocalEngine]:
    made = LocalEngine(tmp_path)
    yield made
    for workload in await made.discover():
        await made.stop(workload.id)
    await made.close()


def noting(folder: Path, then: str = "true") -> ProcessResourceSpec:
    """Return a command that notes down that it runs."""
    return ProcessResourceSpec(command=["sh", "-c", f"echo $$ >> {folder}/starts; {then}"])


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().split() if (folder / "starts").exists() else []


async def started(folder: Path, times: int) -> list[str]:
    """Wait until so many starts were noted down; return the processes."""
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while len(starts(folder)) < times:  # noqa: ASYNC110  # Another process is waited for.
            await asyncio.sleep(0.02)  # A file tells nobody that it has grown.
    return starts(folder)


def supervise(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Have a supervisor do what is ordered in a folder, to its end."""
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(folder), "1"]
    return subprocess.run(command, check=False, capture_output=True, timeout=SEEN_SECONDS_MAX)


async def over(engine: LocalEngine, workload: str) -> None:
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while not (await engine.status(workload)).phase.over:  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.02)  # A process tells nobody here that it has ended.


async def test_a_supervisor_that_comes_when_all_is_over_starts_nothing(engine, tmp_path):
    """A daemon killed after it had started one has another one started by the next daemon."""
    await engine.start(Order("a", noting(tmp_path)))
    await over(engine, "a")
    late = supervise(tmp_path / "running" / "a")
    assert late.returncode == 1
    assert json.loads(late.stdout) == {"begun": True}
    assert len(starts(tmp_path)) == 1


async def test_a_supervisor_that_comes_after_the_stop_starts_nothing(engine, tmp_path):
    await engine.start(Order("a", noting(tmp_path)))
    await over(engine, "a")
    folder = tmp_path / "running" / "a"
    for name in ("process.json", "exit.json"):
        (folder / name).unlink()
    (folder / "stop").touch()
    assert supervise(folder).returncode == 1
    await engine.stop("a")
    assert supervise(folder).returncode == 1, "its folder is gone"
    assert len(starts(tmp_path)) == 1


async def test_an_order_that_was_written_and_not_begun_is_begun_as_it_was_written(engine, tmp_path):
    """Its daemon was killed in between; a supervisor may be on its way with what it had read."""
    await engine.start(Order("a", noting(tmp_path)))
    await over(engine, "a")
    folder = tmp_path / "running" / "a"
    for name in ("process.json", "exit.json", "ready.json"):
        (folder / name).unlink(missing_ok=True)
    before = (folder / "order.json").read_bytes()
    after = LocalEngine(tmp_path)
    await after.start(Order("a", noting(tmp_path)))
    await over(after, "a")
    assert (folder / "order.json").read_bytes() == before
    assert len(starts(tmp_path)) == 2
    await after.close()


async def test_a_stop_that_was_cut_short_is_finished_before_the_next_start(engine, tmp_path):
    await engine.start(Order("a", noting(tmp_path, "exec sleep 1000")))
    (first,) = await started(tmp_path, 1)
    (tmp_path / "running" / "a" / "stop").touch()
    again = await engine.start(Order("a", noting(tmp_path, "exec sleep 1000")))
    assert again.phase is Phase.READY
    _, second = await started(tmp_path, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)
    os.kill(int(second), 0)
