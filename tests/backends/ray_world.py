"""A real Ray cluster of two nodes with declared GPUs, and a search for leftovers of workloads."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import ray

from moorage.backends.base import Backend, Order, WorkloadReport
from moorage.backends.ray.backend import RayBackend
from moorage.backends.ray.orders import NAMESPACE
from moorage.backends.ray.specs import RayJobResourceSpec
from moorage.backends.specs import BaseResourceSpec, ProcessResourceSpec, ServiceResourceSpec
from moorage.model import GPU_MILLI, ClusterId, NodeId, Share
from tests.ray_clusters import RayCluster, raylets, until

__all__ = ["RayWorld", "empty", "ray_backend", "ray_world", "share", "until"]

GPUS: Final = 4


@ray.remote(num_cpus=1, num_gpus=1)
class Stranger:
    """An actor of another program, which holds resources of Ray."""

    def devices(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


class RayWorld(RayCluster):
    """A Ray cluster of a head without devices, and nodes with devices."""

    nodes = frozenset({0, 1})

    def __init__(self) -> None:
        self.raylets: set[str] = set()
        super().__init__()

    @property
    def programs(self) -> Path:
        """The folder that comes first in PATH on the cluster's nodes."""
        return self.folder / "bin"

    def variables(self) -> dict[str, str]:
        path = [os.fspath(self.programs), os.fspath(Path(sys.executable).parent)]
        return {
            "PATH": os.pathsep.join([*path, os.environ["PATH"]]),
            "PYTHONPATH": os.fspath(Path(__file__).parent),  # The folder of the users' classes.
        }

    def options(self, number: int) -> dict[str, Any]:
        return {
            "num_cpus": 4,
            "num_gpus": GPUS,
            "memory": 4 << 30,
            "resources": {"accelerator_type:A100": 1},
            "labels": {"rack": f"rack-{number}"},
        }

    def add(self, number: int, *, wait: bool = True) -> None:
        super().add(number, wait=wait)
        self.raylets |= raylets(self.hosts[number])

    def actors(self) -> list[str]:
        """Return the names of all actors of backends."""
        named = ray.util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in named if each["namespace"] == NAMESPACE]

    async def stranger(self, number: int) -> Any:
        """Start an actor of another user, which holds the first GPU of a node."""
        within = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self.node(number), soft=False
        )
        actor = Stranger.options(scheduling_strategy=within).remote()
        assert await asyncio.to_thread(ray.get, actor.devices.remote()) == ["0"]
        return actor

    def workloads(self) -> set[str]:
        """Return the workloads that have a process, actor or group left, as `server/workload`."""
        found = {name.rsplit("/", 3)[0] for name in self.actors()}
        groups = ray.util.placement_group_table().values()
        left = [each["name"] for each in groups if each["state"] != "REMOVED"]
        found |= {name.rsplit("/", 2)[0] for name in left if name.count("/") > 2}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                lines = (folder / "environ").read_text(errors="replace").split("\0")
                known = dict(line.split("=", 1) for line in lines if "=" in line)
                if known.get("RAY_RAYLET_PID") in self.raylets and "MOORAGE_WORKLOAD" in known:
                    found.add(known["MOORAGE_WORKLOAD"])
        return found


@pytest.fixture(scope="module")
def ray_world(ray_clusters: None) -> Iterator[RayWorld]:
    with RayWorld.shared() as world:
        yield world
        assert world.actors() == []
        assert world.groups() == []


def share(world: RayWorld, number: int, *gpus: str, milli: int = GPU_MILLI, **held: int) -> Share:
    """Return a share of a lease: some GPUs of a node."""
    return Share(ClusterId("ray"), NodeId(world.node(number)), gpus, milli, **held)


@pytest.fixture(scope="module")
def ray_backend(
    ray_world: RayWorld, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayBackend]:
    """The backend of a test file, shared by its tests: its process takes a second to start."""
    made = RayBackend(tmp_path_factory.mktemp("ray"), ray_world.address)
    yield made
    made.connection.close()


async def empty(backend: RayBackend) -> None:
    """Stop all workloads that a backend has started."""
    for workload in await backend.discover():
        await backend.stop(workload.id)
    backend.listen(None)


class RayBench:
    """Commands on a real Ray, each of which has a child that hides in its own session."""

    def __init__(self, world: RayWorld, root: Path) -> None:
        self.world = world
        self.root = root

    def backend(self) -> Backend:
        return RayBackend(self.root, self.world.address)

    def spec(self) -> BaseResourceSpec:
        script = "setsid sleep 1000 & echo started; exec sleep 1000"
        return ProcessResourceSpec(command=["sh", "-c", script])

    def slow(self) -> BaseResourceSpec:
        return ServiceResourceSpec(command=["sleep", "1000"])

    def failing(self) -> tuple[BaseResourceSpec, str]:
        script = "sleep 0.1; echo no such model; exit 4"
        return ServiceResourceSpec(command=["sh", "-c", script]), "exit status 4: no such model"

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return ProcessResourceSpec(command=["sh", "-c", "sleep 0.3; exit 3"]), 3

    def limits(self) -> dict[str, Any]:
        return {}

    def writing(self) -> BaseResourceSpec:
        return ProcessResourceSpec(command=["sh", "-c", "seq 300; echo last"])

    def gang(self) -> tuple[Order, Callable[[], Awaitable[str]]] | None:
        placement = tuple(share(self.world, number, cpu_milli=100) for number in (0, 1))

        async def lose() -> str:
            (name,) = [each for each in self.world.actors() if each.endswith("/1")]
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
            return self.world.node(1)

        return Order("a", self.spec(), placement), lose

    async def left(self) -> int:
        return len(self.world.workloads())


class PlacedRayBackend(RayBackend):
    """A backend that places each workload on one node, with a part of a processor."""

    def __init__(self, root: Path, world: RayWorld) -> None:
        super().__init__(root, world.address)
        self.share = share(world, 1, cpu_milli=100)

    async def start(self, order: Order) -> WorkloadReport:
        return await super().start(replace(order, placement=(self.share,)))


class RayJobBench(RayBench):
    """Jobs on a real Ray, each of them with a placement group."""

    def backend(self) -> Backend:
        return PlacedRayBackend(self.root, self.world)

    def writing(self) -> BaseResourceSpec:
        return RayJobResourceSpec(command=["sh", "-c", "seq 300; echo last"])

    def gang(self) -> None:
        return None  # A job has only one actor; `test_ray` tests gangs.

    def spec(self) -> BaseResourceSpec:
        script = "setsid sleep 1000 & echo started; exec sleep 1000"
        return RayJobResourceSpec(command=["sh", "-c", script])

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return RayJobResourceSpec(command=["sh", "-c", "sleep 0.3; exit 3"]), 3
