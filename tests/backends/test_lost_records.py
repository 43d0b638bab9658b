"""Workloads whose records are lost are found, and end before their devices are free."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moorage.backends.base import BackendError, Order, Phase
from moorage.backends.local.backend import LocalBackend
from moorage.backends.specs import ProcessResourceSpec
from tests.waiting import async_until as until

pytestmark = pytest.mark.heavy

SEEN_SECONDS_MAX = 60
FOREVER = ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(tmp_path)
    yield made
    for workload in await made.discover():
        await made.stop(workload.id)
    await made.close()
    await check_gone(tmp_path)


def forever(*command: str, stop_seconds: float = 0.2) -> ProcessResourceSpec:
    return ProcessResourceSpec(command=list(command) or FOREVER, stop_seconds=stop_seconds)


def alive(folder: Path) -> set[int]:
    """Return the workload processes below a folder, and their supervisors."""
    found = set()
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdigit() and b"=%s/" % bytes(folder) in (each / "environ").read_bytes():
                state = (each / "stat").read_text().rpartition(")")[2].split()[0]
                found |= {int(each.name)} if state != "Z" else set()
    return found


def is_supervisor(pid: int) -> bool:
    with contextlib.suppress(OSError):  # The process has ended meanwhile.
        return b"supervisor.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return True


async def check_gone(folder: Path) -> None:
    """Check that no process of a workload is left; its supervisor ends a moment later."""
    assert [pid for pid in alive(folder) if not is_supervisor(pid)] == []
    await until(lambda: not alive(folder))


def without_lock(folder: Path) -> None:
    (folder / "lock").unlink()


def without_order(folder: Path) -> None:
    (folder / "order.json").unlink()


def without_all(folder: Path) -> None:
    shutil.rmtree(folder)


def as_link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/")


def order_as_fifo(folder: Path) -> None:
    (folder / "order.json").unlink()
    os.mkfifo(folder / "order.json")


def order_of_another(folder: Path) -> None:
    (folder / "order.json").write_text('{"id": "b", "attempt": 1}')


LOSSES = [without_lock, without_order, without_all, as_link, order_as_fifo, order_of_another]


async def test_a_workload_that_empties_its_own_folder_still_ends_at_a_stop(engine, tmp_path):
    spec = forever("sh", "-c", "rm -rf ./*; echo gone > /dev/stdout; exec sleep 1000")
    await engine.start(Order("a", spec))
    await until(lambda: len(alive(tmp_path)) == 2)
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        while "gone" not in (await engine.logs("a")).text:  # noqa: ASYNC110  # As above.
            await asyncio.sleep(0.01)  # A file does not report that it has grown.
    assert (await engine.status("a")).phase is Phase.READY, "its records are not in that folder"
    await engine.stop("a")
    await check_gone(tmp_path)
    assert (await engine.logs("a")).text == "gone\n"


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_workload_can_be_stopped_after_its_records_are_damaged(engine, tmp_path, lose):
    everything = float(len(os.sched_getaffinity(0)))
    await engine.start(Order("a", ProcessResourceSpec(command=FOREVER, cpu_count=everything)))
    await until(lambda: len(alive(tmp_path)) == 3)
    lose(tmp_path / "running" / "a")
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        await engine.stop("a")
    await check_gone(tmp_path)
    await engine.start(Order("b", ProcessResourceSpec(command=FOREVER, cpu_count=everything)))


@pytest.mark.parametrize("lose", LOSSES)
async def test_the_daemon_after_a_crash_finds_a_workload_without_records(engine, tmp_path, lose):
    before = LocalBackend(tmp_path)
    await before.start(Order("a", forever()))
    await until(lambda: len(alive(tmp_path)) == 3)
    lose(tmp_path / "running" / "a")
    await before.close()
    after = LocalBackend(tmp_path)
    (found,) = await after.discover()
    assert found.id == "a"
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        await after.stop("a")
    await check_gone(tmp_path)
    assert list(await after.discover()) == []
    await after.close()


async def test_a_start_waits_for_leftovers_of_a_workload_without_records(tmp_path):
    before = LocalBackend(tmp_path)
    await before.start(Order("a", forever()))
    await until(lambda: len(alive(tmp_path)) == 3)
    without_all(tmp_path / "running" / "a")
    await before.close()
    after = LocalBackend(tmp_path)
    await after.discover()
    with pytest.raises(BackendError, match="records"):
        await after.start(Order("a", forever()))
    await check_gone(tmp_path)
    assert (await after.start(Order("a", forever()))).phase is Phase.READY
    await after.stop("a")
    await after.close()


async def test_the_end_of_a_workload_without_records_is_reported(engine, tmp_path):
    reports = []
    engine.listen(reports.append)
    await engine.start(Order("a", forever("sh", "-c", "while ! [ -e go ]; do sleep 0.05; done")))
    pids = alive(tmp_path)
    shutil.rmtree(tmp_path / "running" / "a")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: reports and reports[-1].phase is Phase.FAILED)
    assert "records" in reports[-1].detail
    await engine.stop("a")


async def test_a_paused_supervisor_does_not_prevent_a_stop(engine, tmp_path):
    await engine.start(Order("a", forever()))
    await until(lambda: len(alive(tmp_path)) == 3)
    (supervisor,) = filter(is_supervisor, alive(tmp_path))
    os.kill(supervisor, signal.SIGSTOP)
    async with asyncio.timeout(SEEN_SECONDS_MAX):
        await engine.stop("a")
    await check_gone(tmp_path)
