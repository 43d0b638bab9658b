"""A Ray of five raylets on this machine: a head, and four hosts that declare devices.

Hosts 0 and 1 are a TPU slice in one rack; hosts 2 and 3 are another slice in another rack. Each
host has two GPUs.
"""

import contextlib
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from moorage.slices import SlicePoolManager, SliceSettings
from tests.ray_clusters import SECONDS_MAX, RayCluster, raylets, workers
from tests.waiting import until

with contextlib.suppress(ImportError):  # An extra, which the fast tests do without.
    import ray

TYPE: Final = "v4-16"
# Ends of titles of processes that Ray leaves on each node.
_STAYS: Final = ("IDLE", "Agent")


class _Metadata(http.server.BaseHTTPRequestHandler):
    """A server that answers the metadata requests of one host, like Google's."""

    def do_GET(self) -> None:  # The library's name.
        server: Any = self.server
        body = b"TRUE" if server.preempted else b"FALSE"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # The library's name.
        """Write no log."""


class World(RayCluster):
    """The Ray cluster, and the operations of tests on it."""

    nodes = frozenset(range(4))

    def __init__(self) -> None:
        self.metadata: dict[int, Any] = {}
        super().__init__()

    def variables(self) -> dict[str, str]:
        return {"RAY_DEDUP_LOGS": "0"}

    def options(self, number: int) -> dict[str, Any]:
        group = "ab"[number // 2]
        head = {f"TPU-{TYPE}-head": 1} if number % 2 == 0 else {}
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
        server.preempted = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.metadata[number] = server
        return {
            "num_cpus": 2,
            "num_gpus": 2,
            "memory": 4 << 30,
            "resources": {"TPU": 4, f"tpu-{group}": 1, "spare": 1, **head},
            "labels": {
                "rack": f"rack-{group}",
                "ray.io/tpu-slice-name": f"tpu-{group}",
                "ray.io/tpu-worker-id": str(number % 2),
                "ray.io/tpu-pod-type": TYPE,
            },
            "env_vars": {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"},
        }

    def kill(self, number: int, *, noticed: bool = True) -> None:
        self._close(number)
        super().kill(number, noticed=noticed)

    def mend(self, *absent: int) -> None:
        for server in self.metadata.values():
            server.preempted = False
        super().mend(*absent)

    def close(self) -> None:
        super().close()
        for number in list(self.metadata):
            self._close(number)

    def _close(self, number: int) -> None:
        server = self.metadata.pop(number)
        server.shutdown()
        server.server_close()

    def left(self) -> dict[str, list[str]]:
        """Return the actors and reservations of slices that exist."""
        actors = ray._private.state.actors().values()
        parents = {each for host in self.hosts.values() for each in raylets(host)}
        titles = [title for _, title in workers(parents) if title.startswith("ray::")]
        return {
            "groups": self.groups(),
            "actors": [each["ActorClassName"] for each in actors if each["State"] != "DEAD"],
            "processes": [each for each in titles if not each.endswith(_STAYS)],
        }

    def is_clean(self) -> None:
        """Wait until all leftovers are gone, as Ray ends processes slowly; fail after a while."""
        until(lambda: not any(self.left().values()))


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, ray_clusters: None) -> Iterator[World]:
    """The Ray cluster, to which functions of the test files are sent by value."""
    ray.cloudpickle.register_pickle_by_value(request.module)
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.startswith(("EFORMER_", "TPU_"))]:
            patch.delenv(name)
        with World.shared() as shared:
            yield shared
    ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def ready(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """The cluster with all hosts, or without the hosts in a parameter; checks for leftovers."""
    world.mend(*getattr(request, "param", ()))
    yield world
    world.is_clean()


@pytest.fixture
def settings() -> SliceSettings:
    """Time limits for tests: one minute."""
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
def make_pool(ready: World, settings: SliceSettings) -> Iterator[Callable[..., Any]]:
    """Return a function that makes pools, which are drained at the end."""
    pools = []

    def make(tpu_type: str | None = None, **options: Any) -> Any:
        options.setdefault("settings", settings)
        pools.append(SlicePoolManager(tpu_type, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.drain_actor_pool()
