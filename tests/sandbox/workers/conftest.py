"""A Ray on this machine with a head without processors, and raylets that tests start and kill."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import moorage
from moorage.sandbox.host.sandbox import WorkerSettings
from tests.ray_clusters import RayCluster, raylets, workers
from tests.waiting import async_until

# Lets the tests of this package import `served`, and that `interface`.
sys.path[:0] = [str(Path(__file__).parents[2] / name) for name in ("end_to_end", "web")]

CELLS: Final = 4
CHANGED: Final = 100


class World(RayCluster):
    """The Ray cluster, and the operations of tests on it."""

    connects = False

    def __init__(self) -> None:
        self.said: list[tuple[str, str, bool]] = []
        self.sources: dict[int, Path | None] = {}
        super().__init__()

    def options(self, number: int) -> dict[str, Any]:
        source = self.sources[number]
        return {
            "num_cpus": CELLS,
            "memory": 2 << 30,
            "env_vars": {} if source is None else {"PYTHONPATH": str(source)},
        }

    def have(self, count: int, source: Path | None = None) -> None:
        """Run `count` raylets; with `source`, also one that imports `moorage` from that folder."""
        wanted: dict[int, Path | None] = dict.fromkeys(range(count))
        if source is not None:
            wanted[CHANGED] = source
        for number in self.hosts.keys() - wanted.keys():
            self.kill(number)
        self.sources = wanted
        for number in sorted(wanted.keys() - self.hosts.keys()):
            self.add(number)

    def kill(self, number: int, *, noticed: bool = False) -> None:
        super().kill(number, noticed=noticed)

    def agents(self, number: int) -> list[int]:
        """Return the processes of agents on a raylet."""
        found = workers(raylets(self.hosts[number]))
        return [int(folder.name) for folder, title in found if title.startswith("ray::Agent")]

    def changed(self, file: str, old: str, new: str) -> Path:
        """Return a folder with a copy of `moorage` in which one text is replaced."""
        folder = self.folder / "changed"
        copy = folder / "moorage"
        shutil.copytree(Path(moorage.__file__).parent, copy, dirs_exist_ok=True)
        path = copy / file
        text = path.read_text()
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new))
        return folder

    async def up(self, bench: Any, count: int) -> None:
        """Wait until `count` workers are ready."""
        await async_until(lambda: bench.sandbox.report().workers_up == count)

    def workers(self, cells: int) -> WorkerSettings:
        """Return the settings of a sandbox that uses this cluster."""
        self.said.clear()
        return WorkerSettings(self.address, cells, lambda *each: self.said.append(each))


@pytest.fixture(scope="module")
def world(ray_clusters: None) -> Iterator[World]:
    """The Ray cluster for the files in this folder."""
    with World.shared() as shared:
        yield shared
