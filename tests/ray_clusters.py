"""Ray clusters on this machine that test files with equal needs share."""

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import pytest

from tests.waiting import until

with contextlib.suppress(ImportError):  # An extra, which the fast tests do without.
    import ray
    from ray.cluster_utils import Cluster

SECONDS_MAX: Final = 60
OBJECT_STORE_BYTES: Final = 80 << 20
# Ray notices a dead node within a second instead of half a minute.
_SYSTEM: Final = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 20_000,  # For hanging nodes; killed ones refuse connections at once.
    "health_check_failure_threshold": 3,
}


def listens(port: int) -> bool:
    with socket.socket() as door:
        return door.connect_ex(("127.0.0.1", port)) == 0


def give_up_soon(patch: pytest.MonkeyPatch) -> None:
    """Make processes that start from now on give up within seconds if Ray does not answer."""
    seconds = ("gcs_rpc_server_connect_timeout_s", "py_gcs_connect_timeout_s")
    for name in ("NUM_REDIS_GET_RETRIES", *seconds):
        patch.setenv(f"RAY_{name}", "1")


class RayCluster:
    """A Ray cluster of a head without processors and numbered nodes, which subclasses define."""

    nodes: ClassVar[frozenset[int]] = frozenset()
    """The numbers of the nodes that exist at the start of each test file."""
    connects: ClassVar = True
    """Whether the test process itself connects to the cluster as a driver."""
    _shared: ClassVar["RayCluster | None"] = None

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # For short socket paths.
        self.folder.chmod(0o755)  # The jail's user reads there.
        (self.folder / "ray").mkdir()
        self.hosts: dict[int, Any] = {}
        with self.environment():
            self.start()

    @classmethod
    @contextlib.contextmanager
    def shared(cls) -> Iterator[Self]:
        """Use the cluster of this class until the block ends; end that of another class first."""
        if type(RayCluster._shared) is not cls:
            RayCluster.end_shared()
            RayCluster._shared = cls()
        cluster = RayCluster._shared
        assert isinstance(cluster, cls)
        with cluster.environment():
            try:
                if cls.connects:
                    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
                    cluster.mend()
                yield cluster
            finally:
                ray.shutdown()

    @staticmethod
    def end_shared() -> None:
        cluster, RayCluster._shared = RayCluster._shared, None
        if cluster is not None:
            cluster.close()

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Set the environment of the cluster's processes and of those that tests start."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            for name in ("enable_worker_prestart", "prestart_worker_first_driver"):
                patch.setenv(f"RAY_{name}", "0")  # Start no worker processes in advance.
            patch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")  # The time to notice a lost node.
            patch.setenv("RAY_TMPDIR", str(self.folder))  # Ray writes its address there, in `ray`.
            for name, value in self.variables().items():
                patch.setenv(name, value)
            # As if only the extra `ray` were installed: then each node's agent starts faster.
            patch.setattr(
                ray._private.utils, "get_dashboard_dependency_error", lambda: ImportError("none")
            )
            yield

    def variables(self) -> dict[str, str]:
        return {}

    def head(self) -> dict[str, Any]:
        """Return the arguments of Ray with which the head starts."""
        return {"num_cpus": 0, "_system_config": _SYSTEM}

    def start(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "include_dashboard": False,
                "include_log_monitor": False,  # No driver of the tests shows logs of workers.
                "memory": 1 << 30,
                "object_store_memory": OBJECT_STORE_BYTES,
                "temp_dir": str(self.folder),
                **self.head(),
            },
        )

    def close(self) -> None:
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        address: str = self.cluster.address
        return address

    def options(self, number: int) -> dict[str, Any]:
        """Return the arguments of Ray with which a node starts."""
        raise NotImplementedError

    def add(self, number: int, *, wait: bool = True) -> None:
        self.hosts[number] = self.cluster.add_node(
            wait=wait, object_store_memory=OBJECT_STORE_BYTES, **self.options(number)
        )

    def kill(self, number: int, *, noticed: bool = True) -> None:
        """Kill a node with all its processes; with `noticed`, wait until Ray has noticed that."""
        host = self.hosts.pop(number)
        self.cluster.remove_node(host, allow_graceful=False)
        if noticed:
            until(lambda: host.node_id not in self.alive())

    def mend(self, *absent: int) -> None:
        """Restore the cluster's nodes, except the given nodes."""
        wanted = self.nodes - set(absent)
        alive = self.alive()
        for number, host in list(self.hosts.items()):
            if number not in wanted or host.node_id not in alive:  # Unwanted, or lost.
                self.kill(number)
        for number in sorted(wanted - self.hosts.keys()):
            self.add(number, wait=False)
        until(lambda: len(self.alive()) == len(wanted) + 1)

    def node(self, number: int) -> str:
        node_id: str = self.hosts[number].node_id
        return node_id

    @staticmethod
    def alive() -> set[str]:
        return {each["NodeID"] for each in ray.nodes() if each["Alive"]}

    @staticmethod
    def groups() -> list[str]:
        """Return the ids of all placement groups that are not removed."""
        groups = ray.util.placement_group_table().values()
        return [each["placement_group_id"] for each in groups if each["state"] != "REMOVED"]


def raylets(host: Any) -> set[str]:
    """Return the process ids of a node's raylet, the parent of its workers."""
    return {str(each.process.pid) for each in host.all_processes["raylet"]}


def workers(parents: Collection[str]) -> Iterator[tuple[Path, str]]:
    """Yield the folder in /proc and the title of each worker of some raylets."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if parent in parents:
                yield folder, (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
