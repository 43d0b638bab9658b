"""Tests of a daemon that is stopped and resumed, and of a machine whose calendar is set."""

import json
import os
import signal
import struct
import time
from pathlib import Path

import pytest
from served import ask_message, cluster, here, read_message, serving, until, workload_processes

pytestmark = pytest.mark.heavy

HOURS = 7_200.0
SHIFTED = """
import mmap, os, struct, time
file, real = os.open(os.environ["CALENDAR"], os.O_RDONLY), time.time
off = mmap.mmap(file, 8, mmap.MAP_SHARED, mmap.PROT_READ)
time.time = lambda: real() + struct.unpack("d", off)[0]
"""
"""Code that shifts the calendar of a process by the seconds in a file."""


def test_a_daemon_that_resumes_after_a_stop_signal_reads_renewals_sent_before(tmp_path):
    with serving(tmp_path) as server:
        server.fill(here(2))
        provision = {"backend": "local", "spec": {"command": ["sleep", "60"]}}
        term = {"ttl_seconds": 60}
        lease = server.ask(resources={"gpus": 1}, lease=term, provision=provision)["lease"]
        other = server.ask(resources={"gpus": 1}, lease=term)["lease"]
        server.in_state(lease, "active")
        shorter, unheard = (
            {"op": "renew", "lease": each["id"], "token": each["token"], "ttl_seconds": 3}
            for each in (lease, other)
        )
        with server.socket() as waiting, server.socket() as renewing:
            waits = ask_message(resources={"gpus": 2}, lease={**term, "wait_seconds": 3})
            waiting.send(json.dumps(waits))
            until(server.waiting)
            server.say(shorter, unheard)
            os.kill(server.pid, signal.SIGSTOP)
            renewing.send(json.dumps({**shorter, "ttl_seconds": 60}))
            time.sleep(4)  # A stopped daemon reports nothing.
            os.kill(server.pid, signal.SIGCONT)
            renewed = read_message(renewing)
            assert renewed["success"], renewed
            assert server.status(lease)["state"] == "active"
            assert workload_processes(tmp_path).keys() == {lease["id"]}
            # The grace of a restart is 30 s.
            assert 20 < server.status(other)["expires_at"] - time.time() <= 30
            assert server.waiting()
            server.release(lease)
            server.release(other)
            assert read_message(waiting)["success"]


@pytest.fixture
def offset(tmp_path: Path) -> Path:
    """A file with the shift of a daemon's calendar."""
    (tmp_path / "sitecustomize.py").write_text(SHIFTED)
    file = tmp_path / "offset"
    file.write_bytes(struct.pack("d", 0.0))
    return file


def shift(offset: Path, seconds: float) -> None:
    with offset.open("r+b") as file:  # The file is mapped, so it keeps its size.
        file.write(struct.pack("d", seconds))


def clock_variables(offset: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(offset.parent), "CALENDAR": str(offset)}


@pytest.mark.parametrize("first", [0.0, -HOURS])
def test_a_lease_keeps_its_duration_over_a_restart_with_a_changed_clock(tmp_path, offset, first):
    """The machine starts its server with a wrong clock, and corrects the clock later."""
    second = 0.0 if first else -HOURS
    shift(offset, first)
    with serving(tmp_path / "data", environment=clock_variables(offset)) as server:
        server.fill(cluster("east", nodes=2, gpus=1))
        lease = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 600})["lease"]
        hour = time.time() + 2 * HOURS
        reserve = {"op": "reserve", "tenant": "bob", "resources": {"gpus": 1}}
        made = server.say({**reserve, "starts_at": hour, "ends_at": hour + 600})[0]
        assert made["success"], made
    shift(offset, second)
    with serving(tmp_path / "data", environment=clock_variables(offset)) as server:
        assert 400 < server.status(lease)["expires_at"] - (time.time() + second) <= 600
        shift(offset, 0.0)
        until(lambda: abs(server.status(lease)["granted_at"] - time.time()) < 300)
        assert 400 < server.status(lease)["expires_at"] - time.time() <= 600
        (found,) = server.say({"op": "reservations"})[0]["data"]["reservations"]
        assert (found["starts_at"], found["ends_at"]) == (hour, hour + 600)
        server.release(lease)


def test_times_in_replies_follow_a_change_of_the_machines_clock(tmp_path, offset):
    shift(offset, -HOURS)
    with serving(tmp_path / "data", environment=clock_variables(offset)) as server:
        server.fill(cluster("east", nodes=2, gpus=1))
        lease = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 600})["lease"]
        assert abs(lease["expires_at"] - (time.time() - HOURS + 600)) < 60
        hour = time.time() + HOURS + 300
        reserve = {"op": "reserve", "tenant": "bob", "resources": {"gpus": 1}}
        made = server.say({**reserve, "starts_at": hour, "ends_at": hour + 600})[0]
        assert made["success"], made
        shift(offset, 0.0)
        both = server.ask(resources={"gpus": 1, "nodes": 2}, lease={"wait_seconds": 0.5})
        assert both["error"]["code"] == "wait_timeout", "after its own wait, and not hours later"
        until(lambda: abs(server.status(lease)["granted_at"] - time.time()) < 60)
        assert abs(server.status(lease)["expires_at"] - (time.time() + 600)) < 60
        (found,) = server.say({"op": "reservations"})[0]["data"]["reservations"]
        assert (found["starts_at"], found["ends_at"]) == (hour, hour + 600)
        fresh = server.ask(resources={"gpus": 1}, lease={"ttl_seconds": 60})["lease"]
        assert abs(fresh["expires_at"] - (time.time() + 60)) < 30
        server.release(lease)
        server.release(fresh)
