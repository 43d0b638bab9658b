"""A real Ray of five raylets on this machine: a head, and four hosts that declare devices.

The four hosts are two TPU slices of two, and have two GPUs each, in two racks.
"""

import contextlib
import http.server
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.slices import SlicePoolManager, SliceSettings

with contextlib.suppress(ImportError):  # An extra, which the fast tests do without.
    import ray
    from ray.cluster_utils import Cluster

TYPE: Final = "v4-16"
SECONDS_MAX: Final = 60
HOSTS: Final = 4
# What Ray keeps on each node.
_KEPT: Final = ("IDLE", "Agent")
# A node's death is noticed in seconds rather than in half a minute; processes start when needed.
_SYSTEM: Final = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 20_000,  # A busy machine may hang; what is killed refuses at once.
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Google's server of metadata, as far as one host asks it."""

    def do_GET(self) -> None:  # The library's name.
        server: Any = self.server
        body = b"TRUE" if server.preempted else b"FALSE"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # The library's name.
        """Say nothing."""


@dataclass
class World:
    """The cluster, and what tests do to it."""

    cluster: Any
    folder: Path
    hosts: dict[int, Any] = field(default_factory=dict)
    metadata: dict[int, Any] = field(default_factory=dict)

    def add(self, number: int, *, wait: bool = True) -> None:
        """Start host `number`."""
        group = "ab"[number // 2]
        first = number % 2 == 0
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
        server.preempted = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.metadata[number] = server
        self.hosts[number] = self.cluster.add_node(
            wait=wait,
            num_cpus=2,
            num_gpus=2,
            memory=4 << 30,
            object_store_memory=80 << 20,
            resources={
                "TPU": 4,
                f"tpu-{group}": 1,
                "spare": 1,
                **({f"TPU-{TYPE}-head": 1} if first else {}),
            },
            labels={
                "rack": f"rack-{group}",
                "ray.io/tpu-slice-name": f"tpu-{group}",
                "ray.io/tpu-worker-id": str(number % 2),
                "ray.io/tpu-pod-type": TYPE,
            },
            env_vars={"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"},
        )

    def kill(self, number: int, *, noticed: bool = True) -> None:
        """Kill host `number`, with all that runs there."""
        self._close(number)
        host = self.hosts.pop(number)
        self.cluster.remove_node(host, allow_graceful=False)
        if noticed:
            until(lambda: host.node_id not in {n["NodeID"] for n in ray.nodes() if n["Alive"]})

    def mend(self) -> None:
        """Have all hosts again, none of them being preempted."""
        for server in self.metadata.values():
            server.preempted = False
        alive = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
        for number in [n for n, host in self.hosts.items() if host.node_id not in alive]:
            self.kill(number)  # Ray gave it up.
        for number in range(HOSTS):
            if number not in self.hosts:
                self.add(number)
        until(lambda: sum(each["Alive"] for each in ray.nodes()) == HOSTS + 1)

    def close(self) -> None:
        for number in list(self.metadata):
            self._close(number)

    def _close(self, number: int) -> None:
        server = self.metadata.pop(number)
        server.shutdown()
        server.server_close()

    def node(self, number: int) -> str:
        return self.hosts[number].node_id

    def left(self) -> dict[str, list[str]]:
        """Return what runs or is reserved for slices."""
        groups = ray.util.placement_group_table().values()
        actors = ray._private.state.actors().values()
        return {
            "groups": [each["placement_group_id"] for each in groups if each["state"] != "REMOVED"],
            "actors": [each["ActorClassName"] for each in actors if each["State"] != "DEAD"],
            "processes": self.processes(),
        }

    def processes(self) -> list[str]:
        """Return what the workers of these raylets do that is not idle."""
        raylets = {
            str(each.process.pid)
            for node in self.hosts.values()
            for each in node.all_processes["raylet"]
        }
        busy = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                title = (folder / "cmdline").read_bytes().split(b"\0")[0].decode()
                if parent in raylets and title.startswith("ray::") and not title.endswith(_KEPT):
                    busy.append(title)
        return busy

    def is_clean(self) -> None:
        """Fail unless nothing is left, in a while: Ray ends processes by and by."""
        nothing = {"groups": [], "actors": [], "processes": []}
        deadline = time.monotonic() + SECONDS_MAX
        while (left := self.left()) != nothing:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)  # Nothing tells.


def until(holds: Callable[[], Any], seconds: float = SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "this has not come about"
        time.sleep(0.05)  # Nothing tells.


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The cluster of one file of tests; its functions travel to it by value."""
    ray.cloudpickle.register_pickle_by_value(request.module)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Sockets have short paths.
    (folder / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", str(folder))  # Where a cluster notes its address, in `ray`.
        patch.setenv("RAY_DEDUP_LOGS", "0")
        for name in [each for each in os.environ if each.startswith(("EFORMER_", "TPU_"))]:
            patch.delenv(name)
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
        world = World(cluster, folder)
        try:
            for number in range(HOSTS):
                world.add(number, wait=False)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield world
        finally:
            ray.shutdown()
            cluster.shutdown()
            world.close()
            shutil.rmtree(folder, ignore_errors=True)
            ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def ready(world: World) -> Iterator[World]:
    """The cluster with all of its hosts; what a test leaves there fails it."""
    world.mend()
    yield world
    world.is_clean()


@pytest.fixture
def settings() -> SliceSettings:
    """Bounds for tests: what does not come in a minute does not come."""
    return SliceSettings(
        scale_poll_seconds=1,
        scale_add_seconds_max=SECONDS_MAX,
        slice_start_seconds_max=SECONDS_MAX,
        health_check_seconds_max=20,
        host_health_seconds_max=20,
        scale_retry_seconds=0.5,
        task_cancel_seconds_max=20,
    )


@pytest.fixture
def made(ready: World, settings: SliceSettings) -> Iterator[Callable[..., Any]]:
    """Pools, drained at the end."""
    pools = []

    def make(tpu_type: str | None = None, **options: Any) -> Any:
        options.setdefault("settings", settings)
        pools.append(SlicePoolManager(tpu_type, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.drain_actor_pool()
