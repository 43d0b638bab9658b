"""After many short commands with short leases, the daemon runs, and nothing is left behind."""

import contextlib
import json
import os
import platform
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Server, ask_message, here, is_over, serving, tell, until, workload_processes

pytestmark = pytest.mark.heavy

SECONDS = 6.0
CLIENTS = 16
COMMANDS = (["true"], ["true"], ["false"], ["sleep", "0.2"], ["sleep", "100"])


def flood(server: Server, number: int, stop_at: float) -> int:
    """Send requests over one socket, and end each lease in some way; count the grants."""
    draw = random.Random(number)
    with server.socket() as socket:
        granted = 0
        while time.monotonic() < stop_at:
            granted += send_one(server, socket, draw)
        return granted


def send_one(server: Server, socket, draw: random.Random) -> bool:
    """Send a request, and use its lease in a random way; return whether it was granted."""
    provision = {"backend": "local", "spec": {"command": draw.choice(COMMANDS)}}
    if draw.random() < 0.3:
        provision["keep_warm_seconds"] = draw.choice([1, 60])
    if draw.random() < 0.2:
        provision["on_failure"] = "requeue"
    message = ask_message(
        resources={"gpus": 1},
        lease={"ttl_seconds": 1, "wait_seconds": draw.choice([0, 5])},
        provision=provision,
    )
    if draw.random() < 0.2:
        threading.Timer(draw.random() / 5, cancel_one, [server]).start()
    lease = tell(socket, message).get("lease")
    if lease is None:
        return False
    time.sleep(draw.choice([0, 0, 0.05, 0.3]))  # The client works for a while.
    if draw.random() < 0.7:
        owned = {"lease": lease["id"], "token": lease["token"]}
        tell(socket, {"op": draw.choice(["release", "release", "renew"]), **owned})
    if draw.random() < 0.02:
        place = {"cluster": "here", "node": platform.node()}
        tell(socket, {"op": "drain", **place, "seconds": 0})
        tell(socket, {"op": "uncordon", **place})
    return True


def cancel_one(server: Server) -> None:
    """Cancel all waiting requests, over another socket."""
    with contextlib.suppress(OSError):
        (queue,) = server.say({"op": "queue"})
        for row in queue["data"]["waiting"][:1]:
            server.say({"op": "cancel", "request": row["request"]})


def test_short_leases_of_short_commands_end_nothing_else(tmp_path: Path):
    with serving(tmp_path) as server:
        server.fill(here())
        stop_at = time.monotonic() + SECONDS
        with ThreadPoolExecutor(CLIENTS) as pool:
            granted = pool.map(lambda number: flood(server, number, stop_at), range(CLIENTS))
        assert sum(granted) > CLIENTS
        server.say({"op": "flush"})
        until(lambda: not server.held(), 90)
        until(lambda: workload_processes(tmp_path) == {})
        assert "Traceback" not in server.log()
    assert list((tmp_path / "local" / "running").iterdir()) == []


def test_a_stop_during_many_starts_ends_in_time(tmp_path: Path):
    """Services never answer and ignore SIGTERM, so that their starts take long."""
    stubborn = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    spec = {"category": "service", "command": stubborn, "stop_seconds": 600, "start_timeout": 600}
    with serving(tmp_path) as server:
        server.fill(here(24))
        with server.socket() as socket:
            terms = {"resources": {"gpus": 1}, "lease": {"ttl_seconds": 600}}
            for number in range(24):
                provision = {"backend": "local", "spec": spec}
                socket.send(json.dumps(ask_message(provision=provision, id=number, **terms)))
            until(lambda: len(workload_processes(tmp_path)) >= 12, 90)
            os.kill(server.pid, signal.SIGTERM)
            until(lambda: is_over(server.pid), 120)  # Long before the services would end.
    for pids in workload_processes(tmp_path).values():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
