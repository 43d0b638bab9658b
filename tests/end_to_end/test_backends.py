"""Workloads on this machine use their own devices, outlast a crash, and leave nothing behind."""

import os
import platform
from pathlib import Path

import pytest
from served import Server, here, serving, until, workload_processes

LEASE = {"ttl_seconds": 3_600}


def run(server: Server, command: list[str], gpus: int = 1, **more) -> dict:
    spec = {"command": command, **more}
    reply = server.ask(
        resources={"gpus": gpus, "cpu_milli": 1000},
        lease=LEASE,
        provision={"backend": "local", "spec": spec},
    )
    assert reply["success"], reply
    return reply["lease"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data):
    with serving(data) as server:
        server.fill(here())
        yield server
        assert server.log() == ""


def test_a_workload_sees_its_own_devices_and_its_lease(server, data, tmp_path):
    env = tmp_path / "env"
    lease = run(server, ["sh", "-c", f"env > {env}.new; mv {env}.new {env}; sleep 1000"])
    until(env.exists)
    seen = dict(line.split("=", 1) for line in env.read_text().splitlines())
    assert seen["CUDA_VISIBLE_DEVICES"] == ",".join(lease["placement"][0]["gpus"])
    assert seen["MOORAGE_LEASE_ID"] == lease["id"]
    assert seen["MOORAGE_FENCING"] == str(lease["fencing"])
    assert seen["MOORAGE_NODE_ID"] == platform.node()
    assert not any("TOKEN" in name for name in seen)
    server.in_state(lease, "active")
    pids = workload_processes(data)[lease["id"]]
    assert all(len(os.sched_getaffinity(pid)) == 1 for pid in pids), "one processor per process"
    server.release(lease)
    server.in_state(lease, "ended")
    assert lease["id"] not in workload_processes(data)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["sh", "-c", "exit 0"], "it ended by itself with exit status 0"),
        (["sh", "-c", "echo no model; exit 7"], "it ended by itself with exit status 7: no model"),
        (["sh", "-c", "kill -9 $$"], "it was killed by signal 9"),
        (["no-such-program"], "did not start: no-such-program: No such file or directory"),
    ],
)
def test_a_workload_that_ends_by_itself_ends_its_lease_with_an_exit_code(server, command, reason):
    lease = server.in_state(run(server, command, gpus=8), "ended")
    assert reason in lease["reason"]
    again = run(server, ["sleep", "1000"], gpus=8)
    server.release(again)
    server.in_state(again, "ended")


COMMAND = {"command": ["x"]}


@pytest.mark.parametrize(
    ("spec", "code", "field"),
    [
        ({}, "bad_message", "provision.spec.command"),
        ({"category": "pod", "image": "x"}, "unsupported", "provision.spec"),
        ({**COMMAND, "max_global_num": 1}, "unsupported", "provision.spec.max_global_num"),
        ({**COMMAND, "gpus": 2}, "unsupported", "provision.spec.gpus"),
        ({**COMMAND, "gpus": 0}, "unsupported", "provision.spec.gpus"),
        ({**COMMAND, "extra": {"a": 1}}, "unsupported", "provision.spec.extra"),
        (
            {**COMMAND, "category": "container", "image": "x", "gpus": "all"},
            "unsupported",
            "provision.spec",
        ),
    ],
)
def test_a_workload_that_cannot_start_is_refused_before_the_grant(server, spec, code, field):
    provision = {"backend": "local", "spec": spec}
    error = server.ask(resources={"gpus": 1}, lease=LEASE, provision=provision)["error"]
    assert error["code"] == code
    assert error["field"].startswith(field)
    assert server.held(state="granted") == []


def test_a_backend_of_one_machine_refuses_a_gang(server):
    provision = {"backend": "local", "spec": {"command": ["true"]}, "on_failure": "requeue"}
    gang = {"resources": {"gpus": 1, "nodes": 2}, "lease": LEASE}
    error = server.ask(**gang, provision=provision)["error"]
    assert (error["code"], error["field"]) == ("unsupported", "resources.nodes")
    rehearsed = server.ask(**gang, provision={"backend": "memory"})
    assert rehearsed.get("error", {}).get("field") != "resources.nodes"
