"""Tests of graphs whose nodes hold leases of a real daemon, also over crashes of the program."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import httpx
import pytest

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import Running, daemon
from moorage_client import BlockingClient, LeaseLost, NeverFits, NoCapacity
from moorage_client.workflow import (
    ExecutionCallbacks,
    JournalError,
    LeasedPool,
    ResourceAwareExecutor,
    ResourceError,
    ResourcePool,
    ResourceRequirements,
    RunJournal,
    WorkflowError,
    current_node,
)
from moorage_client.workflow.leased import demand_of
from moorage_policies import catalog
from tests.clients.workflow.graphs import both, execute, gpu, graph

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

POLICY = "first_fit:1.0-stable"
WAIT = 30


def furnish(running: Running) -> None:
    """Register a cluster with a node of two GPUs, and publish the shipped first_fit."""
    gpus = [{"modelName": "A100", "memory": 81_920}] * 2
    node = {"id": "n0", "gpus": {"count": 2, "gpus": gpus}, "vcpus": {"count": 8}, "memory": 4096}
    document = {"id": "lab", "nodes": {"count": 1, "nodeData": [node]}}
    httpx.post(f"{running.http}/clusters", json=document).raise_for_status()
    httpx.post(f"{running.http}/policy", json=catalog.document("first_fit")).raise_for_status()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with daemon() as running:
        furnish(running)
        yield running


@pytest.fixture
def client(server) -> Iterator[BlockingClient]:
    with BlockingClient(server.ws) as client:
        yield client
        assert held_leases(client) == [], "a test left leases behind"


def held_leases(client) -> list[str]:
    return [lease.id for lease in client.leases() if lease.state not in {"ending", "ended"}]


@both
def test_each_node_holds_a_lease_and_knows_its_placement(kind, server, client):
    dag = graph("a", "b", "c", "free", edges="a>c b>c")
    needs = {
        "a": ResourceRequirements({"gpu": 2, "cpu": 2, "memory_mb": 100}),
        "b": gpu(0.5),
        "c": ResourceRequirements.cpu(1),
    }
    most = []

    def task():
        node = current_node()
        (share,) = node.placement
        most.append(len(held_leases(client)))
        return (share.node_id, len(share.gpus), share.gpu_milli, dict(node.environment))

    with LeasedPool(POLICY, server.ws) as pool:
        assert pool.capacities == {"gpu": 2, "cpu": 8, "memory_mb": 4096}
        tasks = {**dict.fromkeys("abc", task), "free": lambda: "free"}
        result = execute(kind(dag, pool, needs), tasks)
        assert pool.allocated == {"gpu": 0, "cpu": 0, "memory_mb": 0}
    assert result.succeeded == 4, [each.error for each in result.node_results.values()]
    assert result["a"].result[:3] == ("n0", 2, 1000)
    assert result["b"].result[:3] == ("n0", 1, 500)
    assert result["c"].result[:2] == ("n0", 0)
    assert result["a"].placement[0].gpus == ("0", "1")
    variables = result["a"].result[3]
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (variables["MOORAGE_CLUSTER_ID"], variables["MOORAGE_NODE_ID"]) == ("lab", "n0")
    assert int(variables["MOORAGE_FENCING"]) > 0
    assert max(most) == 1, "a and b do not fit together"
    assert pool.timeline.peak_allocated()["gpu"] == 2
    assert pool.problems == []


def test_a_lease_is_renewed_while_its_node_runs(server, client):
    def long():
        lease = current_node().environment["MOORAGE_LEASE_ID"]
        first = client.status(lease)["expires_at"]
        while client.status(lease)["expires_at"] == first:
            current_node().check()

    with LeasedPool(POLICY, server.ws, ttl_seconds=3) as pool:
        result = ResourceAwareExecutor(graph("a"), pool, {"a": gpu(1)}).execute({"a": long})
    assert result.succeeded == 1, result["a"].error


@both
def test_a_node_that_loses_its_lease_is_retried_with_another_lease(kind, server, client):
    lost = []

    def work():
        node = current_node()
        if node.attempt == 1:
            lease = client.status(node.environment["MOORAGE_LEASE_ID"])
            lost.append(lease["id"])
            client.release(lease["id"], node.grant.held.lease.token)
            assert node.wait_stopped(WAIT)
            node.check()
        return node.environment["MOORAGE_LEASE_ID"]

    with LeasedPool(POLICY, server.ws, ttl_seconds=3) as pool:
        once = execute(kind(graph("a"), pool, {"a": gpu(1)}), {"a": work})
        again = execute(kind(graph("a"), pool, {"a": gpu(1)}, retries=1), {"a": work})
    assert isinstance(once["a"].error, LeaseLost)
    assert again["a"].result not in lost
    assert (again["a"].attempts, len(lost)) == (2, 2)


@both
def test_a_refused_lease_fails_the_node(kind, server, client):
    dag = graph("wide", "late", "after", edges="wide>after")
    needs = {"wide": ResourceRequirements({"gpu": 2, "cpu": 0.5}), "late": gpu(1)}
    with (
        client.lease(POLICY, resources={"gpus": 2}),
        LeasedPool(POLICY, server.ws, wait_seconds=0.2) as pool,
    ):
        result = execute(kind(dag, pool, needs), dict.fromkeys(dag, lambda: 1))
    assert [result[name].status for name in dag] == ["failed", "failed", "skipped"]
    assert isinstance(result["late"].error, NoCapacity)
    with LeasedPool(POLICY, server.ws, clusters=["lab"]) as pool:
        pool._capacities["gpu"] *= 10  # As with many nodes: enough in total, too little on each.
        result = execute(kind(dag, pool, {"wide": gpu(3)}), dict.fromkeys(dag, lambda: 1))
    assert isinstance(result["wide"].error, NeverFits)


@both
def test_sys_exit_in_a_callback_releases_the_lease(kind, server, client):
    dag, callbacks = graph("a"), ExecutionCallbacks(on_start=sys.exit)
    with LeasedPool(POLICY, server.ws) as pool, pytest.raises(SystemExit):
        execute(kind(dag, pool, {"a": gpu(1)}, callbacks=callbacks), {"a": list})
    assert held_leases(client) == []


def test_an_impossible_need_is_refused_before_anything_runs(server, client):
    with LeasedPool(POLICY, server.ws) as pool:
        for need, why in [
            (gpu(3), "pool capacity"),
            (gpu(1.5), "whole number"),
            (ResourceRequirements({"licence": 1}), "has no licence"),
        ]:
            with pytest.raises(ResourceError, match=why):
                ResourceAwareExecutor(graph("a"), pool, {"a": need}).execute({"a": lambda: 1})
    with pytest.raises(WorkflowError, match="open"), pool:
        pass
    with pytest.raises(TypeError, match="dry_run"):
        LeasedPool(POLICY, dry_run=True)
    with pytest.raises(WorkflowError, match="claims_max is 0"):
        LeasedPool(POLICY, claims_max=0)
    assert demand_of(ResourceRequirements({"gpu": 0.25, "cpu_slots": 1})).gpu_milli == 250


@both
@pytest.mark.parametrize("journalled", [False, True])
def test_a_cancelled_run_leaves_the_servers_queue_and_holds_nothing(
    kind, journalled, server, client, tmp_path
):
    names = [str(number) for number in range(6)]

    def work():
        threading.Timer(0.1, executor.cancel).start()
        current_node().wait_stopped(WAIT)
        current_node().check()

    journal = RunJournal(tmp_path / "journal") if journalled else None
    with LeasedPool(POLICY, server.ws) as pool:
        executor = kind(graph(*names), pool, dict.fromkeys(names, gpu(1)), journal=journal)
        result = execute(executor, dict.fromkeys(names, work))
    if journal is not None:
        journal.close()
    assert result.cancelled == 6
    assert client.queue() == []
    assert held_leases(client) == []


def test_a_run_survives_a_kill_of_the_server(tmp_path):
    """Running nodes keep their leases; waiting nodes keep their places."""
    names, let_go, began = ["runs", *map(str, range(4))], threading.Event(), threading.Event()
    tasks = dict.fromkeys(names, lambda: 1)

    def runs():
        began.set()
        assert let_go.wait(WAIT)
        current_node().check()

    tasks["runs"] = runs
    with contextlib.suppress(CommandError), daemon(tmp_path) as first:
        furnish(first)
        ports = [url.rpartition(":")[2] for url in (first.ws, first.http)]
        pool = LeasedPool(POLICY, first.ws, ttl_seconds=30).__enter__()
        executor = ResourceAwareExecutor(
            graph(*names), pool, dict.fromkeys(names, gpu(2)), {"runs": 9}
        )
        results = []
        run = threading.Thread(target=lambda: results.append(executor.execute(tasks)))
        run.start()
        assert began.wait(WAIT)
        os.kill(first.pid, signal.SIGKILL)
    options = ("--port", ports[0], "--http-port", ports[1])
    with daemon(tmp_path, options=options) as second:
        let_go.set()
        run.join(WAIT)
        pool.close()
        with BlockingClient(second.ws) as client:
            assert held_leases(client) == []
    assert results[0].succeeded == 5, [each.error for each in results[0].node_results.values()]


def test_processes_of_a_task_find_its_gpus(server, client):

    with (
        LeasedPool(POLICY, server.ws) as pool,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes,
    ):
        executor = ResourceAwareExecutor(graph("a"), pool, {"a": gpu(2)}, run_in=processes)
        task = partial(os.getenv, "CUDA_VISIBLE_DEVICES")
        assert executor.execute({"a": task})["a"].result == "0,1"


PROGRAM = """
import pathlib, sys, time
from moorage_client.workflow import *

url, folder = sys.argv[1], pathlib.Path(sys.argv[2])
dag = DAG()
dag.add_nodes(list("abcdef"))
dag.add_edges([("a", each) for each in "def"])

def work():
    node = current_node()
    with (folder / "ran").open("a") as ran:
        print(node.name, node.environment["MOORAGE_LEASE_ID"], file=ran, flush=True)
    if node.name == "b" and not (folder / "go").exists():
        time.sleep(600)
    time.sleep(0.03)
    return node.name

with LeasedPool("first_fit:1.0-stable", url, ttl_seconds=600) as pool:
    with RunJournal(folder / "journal") as journal:
        needs = dict.fromkeys(dag, ResourceRequirements.gpu(1))
        executor = ResourceAwareExecutor(dag, pool, needs, journal=journal)
        result = executor.execute(dict.fromkeys(dag, work))
print({name: result[name].status.value for name in dag}, flush=True)
assert result.succeeded == 6
assert all(result[name].result == name for name in dag)
"""


def program(server, folder) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), server.ws, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def runs(folder) -> list[tuple[str, str]]:
    ran = folder / "ran"
    return [tuple(line.split()) for line in ran.read_text().splitlines()] if ran.exists() else []


def test_a_restarted_program_continues_under_its_existing_leases(server, client, tmp_path):
    first = program(server, tmp_path)
    give_up_at = time.monotonic() + WAIT
    # Until a and c have ended, and b runs beside others.
    while len(runs(tmp_path)) < 6 and time.monotonic() < give_up_at:
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)  # No event of another process.
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = dict(runs(tmp_path))
    survivors = held_leases(client)
    assert before["b"] in survivors, "the lease outlives the program"
    (tmp_path / "go").touch()
    second = program(server, tmp_path)
    output, _ = second.communicate(timeout=WAIT)
    assert second.returncode == 0, output
    after = runs(tmp_path)
    assert after.count(("b", before["b"])) == 2, "b ran again with its existing lease"
    assert [name for name, _ in after].count("a") == 1, "a had completed, so it did not run again"
    assert "'a': 'cache_hit'" in output
    assert held_leases(client) == []


def test_a_killed_and_restarted_program_gets_no_second_lease(server, client, tmp_path):
    """Leases last ten minutes in this test, so a second grant would still be visible."""
    (tmp_path / "go").touch()
    chance, journal = random.Random(6), tmp_path / "journal"

    def count_lines() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    for _ in range(5):
        running, enough = program(server, tmp_path), count_lines() + chance.randint(1, 4)
        give_up_at = time.monotonic() + WAIT
        while count_lines() < enough and running.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.0005)  # No event of another process.
        running.send_signal(signal.SIGKILL)
        running.communicate()
        assert len(held_leases(client)) <= 2
    last = program(server, tmp_path)
    output, _ = last.communicate(timeout=WAIT)
    assert last.returncode == 0, output
    ran = set(runs(tmp_path))
    assert {name for name, _ in ran} == set("abcdef")
    assert len({lease for _, lease in ran}) == len(ran), "each node has its own lease"
    assert held_leases(client) == []


def test_a_journal_of_another_graph_or_of_another_program_is_refused(tmp_path):

    path = tmp_path / "journal"
    with RunJournal(path) as journal:
        executor = ResourceAwareExecutor(graph("a"), ResourcePool({}), journal=journal)
        assert executor.execute({"a": lambda: {"x": [1]}}).succeeded == 1
        with pytest.raises(JournalError, match="open already"):
            RunJournal(path)
        other = ResourceAwareExecutor(graph("b"), ResourcePool({}), journal=journal)
        with pytest.raises(JournalError, match="another graph"):
            other.execute({"b": lambda: 1})
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as file:
        file.write(b'{"event": "completed", "no')
    with RunJournal(path) as journal:
        executor = ResourceAwareExecutor(graph("a"), ResourcePool({}), journal=journal)
        result = executor.execute({"a": lambda: 1 / 0})
        assert (result["a"].status, result["a"].result) == ("cache_hit", {"x": [1]})
        assert result.succeeded == 1
    assert path.read_bytes().endswith(b"\n")
    path.write_text(path.read_text() + '{"event": "sang"}\n')
    with pytest.raises(JournalError, match="line 3"):
        RunJournal(path)
    with pytest.raises(JournalError, match="No such file"):
        RunJournal(tmp_path / "nowhere" / "journal")
    assert json.loads(path.read_text().splitlines()[0])["event"] == "run"
