"""A real Ray of two nodes with declared GPUs, and what is left on it, for tests of the backend."""

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
import ray
from ray.cluster_utils import Cluster

from moorage.backends.base import Backend, Order, WorkloadReport
from moorage.backends.ray.backend import RayBackend
from moorage.backends.ray.orders import NAMESPACE
from moorage.backends.ray.specs import RayJobResourceSpec
from moorage.backends.specs import BaseResourceSpec, ProcessResourceSpec, ServiceResourceSpec
from moorage.model import GPU_MILLI, ClusterId, NodeId, Share

SECONDS_MAX: Final = 60
GPUS: Final = 4
# A node's death is noticed in seconds rather than in half a minute; processes start when needed.
_SYSTEM: Final = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 20_000,  # A busy machine may hang; what is killed refuses at once.
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


def until(holds: Callable[[], Any], seconds: float = SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "this has not come about"
        time.sleep(0.05)  # Nothing tells.


@dataclass
class RayWorld:
    """The cluster: a head without devices, and nodes with some."""

    cluster: Any
    folder: Path
    hosts: dict[int, Any] = field(default_factory=dict)
    raylets: set[str] = field(default_factory=set)

    @property
    def address(self) -> str:
        address: str = self.cluster.address
        return address

    def add(self, number: int) -> None:
        self.hosts[number] = self.cluster.add_node(
            wait=False,
            num_cpus=4,
            num_gpus=GPUS,
            memory=4 << 30,
            object_store_memory=80 << 20,
            resources={"accelerator_type:A100": 1},
            labels={"rack": f"rack-{number}"},
        )
        raylets = self.hosts[number].all_processes["raylet"]
        self.raylets |= {str(each.process.pid) for each in raylets}

    def node(self, number: int) -> str:
        node_id: str = self.hosts[number].node_id
        return node_id

    def kill(self, number: int) -> None:
        host = self.hosts.pop(number)
        self.cluster.remove_node(host, allow_graceful=False)
        until(lambda: host.node_id not in {n["NodeID"] for n in ray.nodes() if n["Alive"]})

    def mend(self) -> None:
        """Have its two first nodes again, and no others."""
        for number in self.hosts.keys() - {0, 1}:
            self.kill(number)
        for number in {0, 1} - self.hosts.keys():
            self.add(number)

    def actors(self) -> list[str]:
        """Return the names of all actors of backends."""
        named = ray.util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in named if each["namespace"] == NAMESPACE]

    def groups(self) -> list[str]:
        groups = ray.util.placement_group_table().values()
        return [each["placement_group_id"] for each in groups if each["state"] != "REMOVED"]

    def workloads(self) -> set[str]:
        """Return all of which a process, actor or group is left, as `server/workload`."""
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


@contextlib.contextmanager
def ray_cluster(**variables: str) -> Iterator[tuple[Any, Path]]:
    """Run a head without processors until the block ends; yield the cluster, and its folder."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Sockets have short paths.
    (folder / "ray").mkdir()
    folder.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", str(folder))  # Where a cluster notes its address, in `ray`.
        for name, value in variables.items():
            patch.setenv(name, value)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "memory": 1 << 30,
                "object_store_memory": 80 << 20,
                "temp_dir": str(folder),
                "_system_config": _SYSTEM,
            },
        )
        try:
            yield cluster, folder
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_world() -> Iterator[RayWorld]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = os.fspath(Path(__file__).parent)  # What users' classes are imported from over there.
    with ray_cluster(PATH=path, PYTHONPATH=here) as (cluster, folder):
        world = RayWorld(cluster, folder)
        try:
            for number in range(2):
                world.add(number)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield world
            assert world.actors() == []
            assert world.groups() == []
        finally:
            ray.shutdown()


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
        nodes = self.world.node(0), self.world.node(1)
        placement = tuple(
            Share(ClusterId("ray"), NodeId(each), (), GPU_MILLI, cpu_milli=100) for each in nodes
        )

        async def lose() -> str:
            (name,) = [each for each in self.world.actors() if each.endswith("/1")]
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
            return nodes[1]

        return Order("a", self.spec(), placement), lose

    async def left(self) -> int:
        return len(self.world.workloads())


class PlacedRayBackend(RayBackend):
    """Starts all that is given to it on one node, with a part of a processor."""

    def __init__(self, root: Path, address: str, node: str) -> None:
        super().__init__(root, address)
        self.share = Share(ClusterId("ray"), NodeId(node), (), GPU_MILLI, cpu_milli=100)

    async def start(self, order: Order) -> WorkloadReport:
        return await super().start(replace(order, placement=(self.share,)))


class RayJobBench(RayBench):
    """Jobs on a real Ray, each of them with a placement group."""

    def backend(self) -> Backend:
        return PlacedRayBackend(self.root, self.world.address, self.world.node(1))

    def writing(self) -> BaseResourceSpec:
        return RayJobResourceSpec(command=["sh", "-c", "seq 300; echo last"])

    def gang(self) -> None:
        return None  # A job has one actor; `test_ray` takes its other node away.

    def spec(self) -> BaseResourceSpec:
        script = "setsid sleep 1000 & echo started; exec sleep 1000"
        return RayJobResourceSpec(command=["sh", "-c", script])

    def dying(self) -> tuple[BaseResourceSpec, int]:
        return RayJobResourceSpec(command=["sh", "-c", "sleep 0.3; exit 3"]), 3
