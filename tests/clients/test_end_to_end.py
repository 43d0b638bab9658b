"""Tests of the clients against a real daemon in a separate process."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import moorage_client
from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import Running, daemon
from moorage_client import (
    BlockingClient,
    Client,
    ConnectionFailed,
    MoorageError,
    RequestRefused,
    Services,
)
from moorage_policies import catalog
from tests.clients.pools import serving

pytestmark = pytest.mark.heavy

README = Path(moorage_client.__file__).with_name("README.md").read_text()

POLICY = catalog.document("first_fit")["code"]
FIRST = "first:1-x"
GPU = {"modelName": "A100", "memory": 40000}
NODE = {"id": "n1", "gpus": {"count": 2, "gpus": [GPU, GPU]}, "vcpus": {"count": 8}}
CLUSTER = {"id": "c0", "nodes": {"nodeData": [NODE | {"memory": 64000}]}} | {
    "config": {"publicHostname": "c0.example"}
}


def fill(running: Running) -> None:
    with Services(running.http) as services:
        services.put_cluster(CLUSTER)
        identity = {"name": "first", "version": "1", "release_tag": "x", "policy_rule_uri": FIRST}
        services.publish_policy(catalog.document("first_fit") | identity)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with daemon() as running:
        fill(running)
        yield running


@pytest.fixture
def at_daemon(shell, server):
    """The command line, pointed at the daemon."""
    shell.environment |= {"MOORAGE_URL": server.ws, "MOORAGE_HTTP_URL": server.http}
    return shell


def only_json(done, code=0):
    assert (done.returncode, done.stderr) == (code, "")
    return json.loads(done.stdout)


def test_commands_publish_ask_and_release_at_a_real_daemon(at_daemon, tmp_path):
    def moorage(*words, code=0):
        return only_json(at_daemon(*words, "--json"), code)

    (tmp_path / "function.py").write_text(POLICY)
    pushed = moorage("policy", "push", str(tmp_path), "--uri=packed:1-x", "--force")
    assert pushed == {"policy_rule_uri": "packed:1-x"}
    listed = moorage("policy", "list")
    assert {policy["policy_rule_uri"] for policy in listed} == {FIRST, "packed:1-x"}
    assert moorage("policy", "show", FIRST)["name"] == "first"
    shipped = moorage("policy", "push", "spread", "--parameters={}")
    assert shipped == {"policy_rule_uri": "spread:1.0-stable"}

    assert moorage("ask", "packed:1-x", "--gpus=1")["data"]["node_id"] == "n1"
    whole = moorage("ask", FIRST, "--gpus=2", "--ttl=60")["lease"]
    assert whole["placement"][0]["gpus"] == ["0", "1"]
    refused = moorage("ask", FIRST, "--gpus=1", "--ttl=60", code=1)
    assert refused["error"]["code"] == "no_capacity"
    never = moorage("ask", FIRST, "--gpus=9", "--ttl=60", code=3)
    assert never["error"]["code"] == "never_fits"
    assert FIRST in moorage("ask", "frist:1-x", code=5)["message"]

    [lease] = moorage("leases")
    assert lease["id"] == whole["id"]
    assert moorage("why", whole["id"])["state"] == "granted"
    assert moorage("status", whole["id"])["fencing"] == whole["fencing"]
    assert moorage("fleet")[0]["gpu_milli_free"] == 0
    assert moorage("fleet", "c0")[0]["gpus"] == {"0": 0, "1": 0}
    assert moorage("queue") == []
    assert moorage("renew", whole["id"], "--ttl=90")["state"] == "granted"
    for _ in range(2):
        assert moorage("release", whole["id"])["state"] == "ended"
    assert moorage("renew", whole["id"], code=7)["success"] is False
    for looking in (["leases"], ["fleet"], ["fleet", "c0"], ["why", whole["id"]]):
        assert at_daemon(*looking).returncode == 0


def test_the_blocking_client_watches_from_a_thread(server):
    terms = {"ttl_seconds": 60}
    with BlockingClient(server.ws) as client, client.watch("leases", timeout=0.2) as news:
        assert list(news) == [], "without events, the loop ends"
        lease = client.ask(FIRST, resources={"gpus": 1}, lease=terms).lease
        client.release(lease.id, lease.token)
        seen = [(event.event, event.data["id"]) for event in (news.next(60), news.next(60))]
        assert seen == [("granted", lease.id), ("ended", lease.id)], "the next loop continues"
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


async def test_a_client_that_stops_waiting_leaves_the_queue(server):
    both = {"resources": {"gpus": 2}}
    terms = {"ttl_seconds": 60, "wait_seconds": 60}
    async with Client(server.ws) as client:
        first = (await client.ask(FIRST, lease={"ttl_seconds": 60}, **both)).lease
        waiting = asyncio.create_task(client.ask(FIRST, lease=terms, **both))
        async with asyncio.timeout(30):
            while not await client.queue().all():  # noqa: ASYNC110  # No event reports this.
                await asyncio.sleep(0.01)  # As above.
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await client.queue().all() == []
        await client.release(first.id, first.token)
        assert await client.leases().all() == []


def test_a_held_lease_survives_the_death_of_its_server(tmp_path):
    with contextlib.ExitStack() as held_open:
        with contextlib.suppress(CommandError), daemon(tmp_path) as first:
            fill(first)
            client = held_open.enter_context(BlockingClient(first.ws))
            taking = client.lease(FIRST, resources={"gpus": 1}, ttl_seconds=60)
            held = held_open.enter_context(taking)
            news = held_open.enter_context(client.watch("leases"))
            os.kill(first.pid, signal.SIGKILL)
            with pytest.raises(ConnectionFailed):
                list(news)
        ports = [url.rpartition(":")[2] for url in (first.ws, first.http)]
        with daemon(tmp_path, options=("--port", ports[0], "--http-port", ports[1])):
            assert [lease.id for lease in client.leases()] == [held.id]
            held.check()
            assert client.renew(held.id, held.token).fencing == held.fencing
            held_open.close()


@pytest.fixture(scope="module")
def pool_address(tmp_path_factory) -> Iterator[str]:
    """The address of a served slot pool of this machine, with a GPU."""
    where = f"uds:{tmp_path_factory.mktemp('pool')}/pool.sock"
    with serving("-r", "gpus=1", "-r", "cpus=1", "--address", where) as (address, _):
        yield address


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_examples_of_the_readme_run(server, pool_address, example):
    places = {
        "MOORAGE_POOL_ADDRESS": pool_address,
        "MOORAGE_URL": server.ws,
        "MOORAGE_HTTP_URL": server.http,
        "CLUSTER_SERVICE_URL": server.http,
        "GLOBAL_CLUSTER_METRICS_URL": server.http,
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
