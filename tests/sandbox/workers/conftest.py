"""A real Ray on this machine: a head without processors, and raylets that tests start and kill."""

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

import moorage
from moorage.sandbox.host.sandbox import WorkerSettings

# Lets the tests of this package import `served`, and that `interface`; and this `ray_world`.
sys.path[:0] = [str(Path(__file__).parents[2] / each) for each in ("end_to_end", "web", "backends")]

with contextlib.suppress(ImportError):  # An extra, which the fast tests do without.
    from ray_world import ray_cluster

SECONDS_MAX: Final = 90.0
CELLS: Final = 4


@dataclass
class World:
    """The cluster, and what tests do to it."""

    cluster: Any
    folder: Path
    raylets: list[Any] = field(default_factory=list)
    said: list[tuple[str, str, bool]] = field(default_factory=list)

    def have(self, count: int) -> None:
        """Have so many honest raylets, and no other."""
        while len(self.raylets) > count:
            self.kill(self.raylets[-1])
        while len(self.raylets) < count:
            self.add()

    def add(self, source: Path | None = None) -> Any:
        """Start a raylet, on which `moorage` may be another one."""
        raylet = self.cluster.add_node(
            wait=True,
            num_cpus=CELLS,
            memory=2 << 30,
            object_store_memory=80 << 20,
            env_vars={} if source is None else {"PYTHONPATH": str(source)},
        )
        self.raylets.append(raylet)
        return raylet

    def kill(self, raylet: Any) -> None:
        """Kill a raylet, with all that runs there."""
        self.raylets.remove(raylet)
        self.cluster.remove_node(raylet, allow_graceful=False)

    def agents(self, raylet: Any) -> list[int]:
        """Return the processes of agents there."""
        parents = {str(each.process.pid) for each in raylet.all_processes["raylet"]}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                title = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if parent in parents and title.startswith(b"ray::Agent"):
                found.append(int(folder.name))
        return found

    def changed(self, name: str, file: str, old: str, new: str) -> Path:
        """Return a folder with a `moorage` in which one text was replaced."""
        folder = self.folder / name
        copy = folder / "moorage"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(
            Path(moorage.__file__).parent, copy, ignore=ignored, dirs_exist_ok=True
        )  # A second try has the same name.
        path = copy / file
        text = path.read_text()
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new))
        return folder

    @staticmethod
    async def until(holds: Callable[[], Any], seconds: float = SECONDS_MAX) -> Any:
        """Wait until something holds, and return it."""
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < deadline, "this has not come about"
            await asyncio.sleep(0.02)  # Nothing tells.
        return found

    async def up(self, bench: Any, count: int) -> None:
        """Wait until so many workers are up."""
        await self.until(lambda: bench.sandbox.report().workers_up == count)

    def workers(self, cells: int = CELLS) -> WorkerSettings:
        """Return the settings of a sandbox that uses this cluster."""
        self.said.clear()
        return WorkerSettings(self.cluster.address, cells, lambda *each: self.said.append(each))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The cluster of one file of tests."""
    with ray_cluster() as (cluster, folder):
        yield World(cluster, folder)
