"""The clients against the real daemon, as a process of its own."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import moorage_client
from moorage_client import (
    BlockingClient,
    Client,
    ClusterClient,
    ConnectionFailed,
    MoorageError,
    NeverFits,
    NoCapacity,
    RequestRefused,
    Services,
)

pytestmark = pytest.mark.heavy

README = Path(moorage_client.__file__).with_name("README.md").read_text()

POLICY = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
        wanted = (input_data["resources"] or {}).get("gpus", 1)
        for cluster_id, cluster in input_data["cluster_data"].items():
            for node_id, free in cluster["capacity"].items():
                gpus = [gpu for gpu, milli in free["gpus"].items() if milli == 1000]
                if len(gpus) >= wanted:
                    return {"cluster_id": cluster_id, "node_id": node_id, "gpus": gpus[:wanted]}
        return {"error": "full"}
"""

GPU = {"modelName": "A100", "memory": 40000}
NODE = {
    "id": "n1",
    "gpus": {"count": 2, "memory": 80000, "gpus": [GPU, GPU]},
    "vcpus": {"count": 8},
    "memory": 64000,
}
CLUSTER = {
    "id": "c0",
    "status": "live",
    "nodes": {"count": 1, "nodeData": [NODE]},
    "config": {"publicHostname": "c0.example"},
}


class Daemon:
    """`moored serve` on free ports, which a restart keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = (0, 0)
        self.start()

    def start(self) -> None:
        port, http_port = map(str, self.ports)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    Path(sys.executable).with_name("moored"),
                    *("serve", "--port", port, "--http-port", http_port),
                    *("--data", str(self.folder / "data"), "--sandbox", "unsafe"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, (self.folder / "log").read_text()
        line = self.process.stdout.readline()
        assert line, (self.folder / "log").read_text()
        said = json.loads(line)
        self.url, self.http_url = said["ws"], said["http"]
        self.ports = tuple(int(url.rpartition(":")[2]) for url in (self.url, self.http_url))

    def kill(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("moored"))
    with Services(daemon.http_url) as services:
        services.put_cluster(CLUSTER)
        services.publish_policy(
            {
                "name": "first",
                "version": "1",
                "release_tag": "x",
                "policy_rule_uri": "first:1-x",
                "type": "python_class_v1",
                "code": POLICY,
            }
        )
    yield daemon
    daemon.kill(signal.SIGTERM)
    assert daemon.process.returncode == 0


@pytest.fixture
def at_daemon(shell, daemon):
    """The command line, pointed at the daemon."""
    shell.environment |= {"MOORAGE_URL": daemon.url, "MOORAGE_HTTP_URL": daemon.http_url}
    return shell


def only_json(done, code=0):
    assert (done.returncode, done.stderr) == (code, "")
    return json.loads(done.stdout)


def test_the_command_line(at_daemon, tmp_path):
    moorage = at_daemon
    (tmp_path / "function.py").write_text(POLICY)
    pushed = only_json(
        moorage("policy", "push", str(tmp_path), "--uri=packed:1-x", "--force", "--json")
    )
    assert pushed == {"policy_rule_uri": "packed:1-x"}
    listed = only_json(moorage("policy", "list", "--json"))
    assert {policy["policy_rule_uri"] for policy in listed} == {"first:1-x", "packed:1-x"}
    assert only_json(moorage("policy", "show", "first:1-x", "--json"))["name"] == "first"
    shipped = only_json(moorage("policy", "push", "spread", "--parameters={}", "--json"))
    assert shipped == {"policy_rule_uri": "spread:1.0-stable"}

    advice = only_json(moorage("ask", "packed:1-x", "--gpus=1", "--json"))
    assert advice["data"]["node_id"] == "n1"
    whole = only_json(moorage("ask", "first:1-x", "--gpus=2", "--ttl=60", "--json"))["lease"]
    assert whole["placement"][0]["gpus"] == ["0", "1"]
    refused = only_json(moorage("ask", "first:1-x", "--gpus=1", "--ttl=60", "--json"), 1)
    assert refused["error"]["code"] == "no_capacity"
    never = only_json(moorage("ask", "first:1-x", "--gpus=9", "--ttl=60", "--json"), 3)
    assert never["error"]["code"] == "never_fits"
    unknown = only_json(moorage("ask", "frist:1-x", "--json"), 5)
    assert "first:1-x" in unknown["message"]

    [lease] = only_json(moorage("leases", "--json"))
    assert lease["id"] == whole["id"]
    assert only_json(moorage("why", whole["id"], "--json"))["state"] == "granted"
    assert only_json(moorage("status", whole["id"], "--json"))["fencing"] == whole["fencing"]
    [cluster] = only_json(moorage("fleet", "--json"))
    assert cluster["gpu_milli_free"] == 0
    assert only_json(moorage("fleet", "c0", "--json"))[0]["gpus"] == {"0": 0, "1": 0}
    assert only_json(moorage("queue", "--json")) == []
    assert only_json(moorage("renew", whole["id"], "--ttl=90", "--json"))["state"] == "granted"
    assert only_json(moorage("release", whole["id"], "--json"))["state"] == "ended"
    assert only_json(moorage("release", whole["id"], "--json"))["state"] == "ended"
    assert only_json(moorage("renew", whole["id"], "--json"), 7)["success"] is False
    for looking in (["leases"], ["fleet"], ["fleet", "c0"], ["why", whole["id"]]):
        assert moorage(*looking).returncode == 0


def test_a_waiter_gets_the_lease_that_another_lets_go(daemon):
    both = {"resources": {"gpus": 2}}
    with BlockingClient(daemon.url) as client:
        first = client.ask("first:1-x", lease={"ttl_seconds": 60}, **both).lease
        with pytest.raises(NoCapacity):
            client.ask("first:1-x", lease={"ttl_seconds": 60}, **both)
        with pytest.raises(NeverFits):
            client.ask("first:1-x", resources={"gpus": 9}, lease={"ttl_seconds": 60})

        async def wait_for_it():
            async with (
                Client(daemon.url) as waiter,
                asyncio.TaskGroup() as group,
            ):
                waiting = group.create_task(
                    waiter.ask("first:1-x", lease={"ttl_seconds": 60, "wait_seconds": 60}, **both)
                )
                async with asyncio.timeout(30):
                    while not await waiter.queue().all():  # noqa: ASYNC110  # On the server.
                        await asyncio.sleep(0.01)  # As above.
                await waiter.release(first.id, first.token)
                second = (await waiting).lease
                assert second.fencing > first.fencing
                await waiter.release(second.id, second.token)

        asyncio.run(wait_for_it())


def test_a_thread_watches(daemon):
    terms = {"ttl_seconds": 60}
    with BlockingClient(daemon.url) as client, client.watch("leases", timeout=0.2) as news:
        assert list(news) == [], "nothing happens, and the loop ends"
        lease = client.ask("first:1-x", resources={"gpus": 1}, lease=terms).lease
        client.release(lease.id, lease.token)
        seen = [(event.event, event.data["id"]) for event in (news.next(60), news.next(60))]
        assert seen == [("granted", lease.id), ("ended", lease.id)], "and the next one goes on"
        assert news.next(0) is None
        with pytest.raises(RequestRefused, match="there is no topic"):
            client.watch("moon")
        more = client.watch("leases", "fleet")
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(list, more), pool.submit(more.next)]
            assert not any(each.done() for each in waiting)
            more.close()
            assert [each.result(60) for each in waiting] == [[], None], "closed by another thread"
        more.close()
        left_open = client.watch("leases")
    assert list(left_open) == list(news) == []
    with pytest.raises(MoorageError, match="not open"):
        client.watch("leases")


async def test_a_client_that_stops_waiting_leaves_the_queue(daemon):
    both = {"resources": {"gpus": 2}}
    terms = {"ttl_seconds": 60, "wait_seconds": 60}
    async with Client(daemon.url) as client:
        first = (await client.ask("first:1-x", lease={"ttl_seconds": 60}, **both)).lease
        waiting = asyncio.create_task(client.ask("first:1-x", lease=terms, **both))
        async with asyncio.timeout(30):
            while not await client.queue().all():  # noqa: ASYNC110  # On the server.
                await asyncio.sleep(0.01)  # As above.
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await client.queue().all() == []
        await client.release(first.id, first.token)
        assert await client.leases().all() == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_held_lease_survives_the_death_of_its_server(daemon, how):
    with (
        BlockingClient(daemon.url) as client,
        client.lease("first:1-x", resources={"gpus": 1}, ttl_seconds=60) as held,
        client.watch("leases") as news,
    ):
        daemon.kill(how)
        with pytest.raises(ConnectionFailed):
            list(news)
        daemon.start()
        assert [lease.id for lease in client.leases()] == [held.id]
        held.check()
        assert client.renew(held.id, held.token).fencing == held.fencing


def test_the_documented_clients_read_the_embedded_services(daemon, monkeypatch):
    monkeypatch.setenv("CLUSTER_SERVICE_URL", daemon.http_url)
    found, document = ClusterClient().read_cluster("c0")
    assert (found, document["id"]) == (True, "c0")
    found, documents = ClusterClient().execute_query({"id": {"$in": ["c0", "c9"]}})
    assert (found, [document["id"] for document in documents]) == (True, ["c0"])
    assert ClusterClient().read_cluster("c9")[0] is False


@pytest.fixture(scope="module")
def pool_address(tmp_path_factory) -> Iterator[str]:
    """A served slot pool of this machine, which has a GPU here."""
    address = f"uds:{tmp_path_factory.mktemp('pool')}/pool.sock"
    moorage = str(Path(sys.executable).parent / "moorage")
    with subprocess.Popen(
        [moorage, "pool", "serve", "-r", "gpus=1", "-r", "cpus=1", "--address", address],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # It answers now.
        yield address
        process.terminate()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_examples_of_the_readme_run(daemon, pool_address, example):
    places = {
        "MOORAGE_POOL_ADDRESS": pool_address,
        "MOORAGE_URL": daemon.url,
        "MOORAGE_HTTP_URL": daemon.http_url,
        "CLUSTER_SERVICE_URL": daemon.http_url,
        "GLOBAL_CLUSTER_METRICS_URL": daemon.http_url,
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("c0" if "moorage_client.pool" not in example else "0") in done.stdout
