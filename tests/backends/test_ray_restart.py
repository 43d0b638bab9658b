"""The backend `ray` on a cluster that is started again, and through the port of Ray's client."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental import internal_kv

from moorage.backends.base import BackendError, Order, Phase
from moorage.backends.ray import connection
from moorage.backends.ray.backend import RayBackend
from moorage.backends.ray.specs import RayJobResourceSpec
from moorage.backends.specs import ProcessResourceSpec
from moorage.model import ClusterId, NodeId, Share
from tests.ports import free_port
from tests.ray_clusters import RayCluster, give_up_soon, listens, until

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.ray,
    # Ray itself leaves the log of its client's server open in the process that started it.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROGRAM = str(Path(__file__).with_name("moorage_ray_job.py"))
FOREVER = ProcessResourceSpec(command=["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 1000"])


class Restartable(RayCluster):
    """A cluster of one node with a fixed address, whose processes cannot import Moorage."""

    def __init__(self) -> None:
        self.port, self.client_port = free_port(), free_port()
        super().__init__()

    def head(self) -> dict[str, Any]:
        ports = {"gcs_server_port": self.port, "ray_client_server_port": self.client_port}
        return {"num_cpus": 2, "num_gpus": 4, **ports}

    def start(self) -> None:
        package = self.folder / "nothing" / "moorage"
        package.mkdir(parents=True, exist_ok=True)
        broken = "raise ImportError('the nodes need nothing of Moorage')"
        (package / "__init__.py").write_text(broken)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(package.parent))
            super().start()


@pytest.fixture
def restartable() -> Iterator[Restartable]:
    made = Restartable()
    with made.environment():
        yield made
    made.close()


@contextlib.contextmanager
def connect(address: str) -> Iterator[None]:
    ray.init(address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


async def share(backend: RayBackend) -> Share:
    (node,) = (await backend.observe())["nodes"]
    return Share(ClusterId("ray"), NodeId(node["id"]), ("2",))


async def test_after_a_restart_of_the_ray_cluster_workloads_have_failed_and_new_workloads_start(
    restartable, tmp_path
):
    reports = []
    backend = RayBackend(tmp_path, restartable.address)
    backend.listen(reports.append)
    await backend.start(Order("a", FOREVER, (await share(backend),)))
    restartable.cluster.shutdown()
    restartable.start()
    await asyncio.to_thread(until, lambda: any(each.phase.over for each in reports))
    assert reports[-1].phase is Phase.FAILED
    await backend.stop("a")
    assert (await backend.start(Order("b", FOREVER, (await share(backend),)))).phase is Phase.READY
    await backend.stop("b")
    await backend.close()


async def test_after_a_restart_of_the_ray_cluster_a_new_server_names_the_lost_node(
    restartable, tmp_path
):
    before = RayBackend(tmp_path, restartable.address)
    held = await share(before)
    order = Order("a", FOREVER, (held,), resumed=True)
    await before.start(order)
    await before.close()
    restartable.cluster.shutdown()
    restartable.start()
    after = RayBackend(tmp_path, restartable.address)
    found = await after.start(order)
    assert (found.phase, f"on {held.node_id}: its node" in found.detail) == (Phase.FAILED, True)
    await after.stop("a")
    await after.close()


async def test_a_start_that_failed_while_ray_was_away_does_not_end_a_later_start(
    restartable, monkeypatch, tmp_path
):
    backend = RayBackend(tmp_path, restartable.address)
    await backend.start(Order("x", FOREVER))
    restartable.cluster.shutdown()
    with monkeypatch.context() as patch:
        give_up_soon(patch)
        patch.setattr(connection, "SILENCE_SECONDS_MAX", 5.0)
        await asyncio.to_thread(until, lambda: backend.connection.trouble, 120)
        with pytest.raises(BackendError):
            await backend.start(Order("a", FOREVER))
    restartable.start()
    async with asyncio.timeout(120):
        while True:  # Succeeds once the backend finds Ray again.
            with contextlib.suppress(BackendError):
                await backend.start(Order("a", FOREVER, attempt=2))
                break
            await asyncio.sleep(0.1)  # No event reports this.
    driver = backend.connection.pid
    os.kill(driver, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: backend.connection.pid not in {None, driver}, 120)
    await backend.start(Order("b", FOREVER))  # The new driver has now handled all failed starts.
    assert (await backend.status("a")).phase is Phase.READY
    for name in ("x", "a", "b"):
        await backend.stop(name)
    await backend.close()


async def test_workloads_run_through_the_port_of_rays_client(restartable, tmp_path):
    until(lambda: listens(restartable.client_port))  # An earlier client would wait longer.
    backend = RayBackend(tmp_path, f"ray://127.0.0.1:{restartable.client_port}")
    async with asyncio.timeout(240):
        while backend.connection.trouble:  # Ray starts a process for each client, which is slow.
            backend.connection.open()
            await asyncio.sleep(0.1)  # No event reports this.
    await backend.start(Order("a", FOREVER, (await share(backend),)))
    assert (await backend.execute("a", ["echo", "x"])).output == "x\n"
    await backend.request([{"GPU": 2.0}])
    with connect(restartable.address):
        request = internal_kv._internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
    assert json.loads(request) == [{"GPU": 2.0}]
    await backend.stop("a")
    script = f"exec {sys.executable} {PROGRAM} 1 waits"
    job = RayJobResourceSpec(command=["sh", "-c", script], stop_seconds=1)
    await backend.start(Order("j", job, (await share(backend),)))
    async with asyncio.timeout(60):
        while '"tasks"' not in (text := (await backend.logs("j")).text):  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.1)  # As above.
    (line,) = [each for each in text.splitlines() if each.startswith("{")]
    assert [device for _, device in json.loads(line)["tasks"]] == ["2"]
    await backend.stop("j")
    with connect(restartable.address):
        groups = ray.util.placement_group_table().values()
        assert {each["state"] for each in groups} == {"REMOVED"}
    assert list(await backend.discover()) == []
    await backend.close()
