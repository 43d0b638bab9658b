"""Many short commands with short leases: nothing ends the daemon, and nothing is left behind."""

import contextlib
import json
import os
import platform
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from served import FIRST_FIT, Server, ask_message, heard, here, is_over, marked, serving, until

pytestmark = pytest.mark.heavy

SECONDS = float(os.environ.get("SHORT_LEASES_SECONDS", "15"))
CLIENTS = 16
COMMANDS = (["true"], ["true"], ["false"], ["sleep", "0.2"], ["sleep", "100"])


class Client(threading.Thread):
    """Asks again and again over one socket, and ends what it gets in one way or another."""

    def __init__(self, server: Server, number: int, stop_at: float) -> None:
        super().__init__()
        self.draw = random.Random(number)
        self.server, self.number, self.stop_at = server, number, stop_at
        self.granted = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self.server.socket() as socket:
                while time.monotonic() < self.stop_at:
                    self.once(socket)
        except Exception as error:  # noqa: BLE001  # The test's own thread says it.
            self.error = error

    def say(self, socket, message: dict) -> dict:
        socket.send(json.dumps(message))
        return heard(socket)

    def once(self, socket) -> None:
        draw = self.draw
        provision = {"backend": "local", "spec": {"command": draw.choice(COMMANDS)}}
        if draw.random() < 0.3:
            provision["keep_warm_seconds"] = draw.choice([1, 60])
        if draw.random() < 0.2:
            provision["on_failure"] = "requeue"
        message = ask_message(
            FIRST_FIT,
            resources={"gpus": 1},
            lease={"ttl_seconds": 1, "wait_seconds": draw.choice([0, 5])},
            provision=provision,
        )
        if draw.random() < 0.2:
            threading.Timer(draw.random() / 5, self.cancel_one).start()
        reply = self.say(socket, message)
        lease = reply.get("lease")
        if lease is None:
            return
        self.granted += 1
        time.sleep(draw.choice([0, 0, 0.05, 0.3]))  # A client that does something.
        if draw.random() < 0.7:
            owned = {"lease": lease["id"], "token": lease["token"]}
            self.say(socket, {"op": draw.choice(["release", "release", "renew"]), **owned})
        if draw.random() < 0.02:
            place = {"cluster": "here", "node": platform.node()}
            self.say(socket, {"op": "drain", **place, "seconds": 0})
            self.say(socket, {"op": "uncordon", **place})

    def cancel_one(self) -> None:
        """Cancel whatever request waits, over another socket."""
        with contextlib.suppress(OSError):
            (queue,) = self.server.say({"op": "queue"})
            for row in queue["data"]["waiting"][:1]:
                self.server.say({"op": "cancel", "request": row["request"]})


def test_short_leases_of_short_commands_end_nothing_else(tmp_path: Path):
    with serving(tmp_path) as server:
        server.fill(here())
        stop_at = time.monotonic() + SECONDS
        clients = [Client(server, number, stop_at) for number in range(CLIENTS)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert [each.error for each in clients if each.error] == []
        assert sum(each.granted for each in clients) > CLIENTS
        server.say({"op": "flush"})

        until(lambda: not server.held(), 90)
        until(lambda: marked(tmp_path) == {}, 30)
        assert "Traceback" not in server.log()
    assert list((tmp_path / "local" / "running").iterdir()) == []


def test_a_stop_amid_many_starts_is_obeyed_in_time(tmp_path: Path):
    """Services that never answer, and ignore SIGTERM: their starts are under way for long."""
    stubborn = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    spec = {"category": "service", "command": stubborn, "stop_seconds": 60, "start_timeout": 600}
    with serving(tmp_path) as server:
        server.fill(here(64))
        with server.socket() as socket:
            for number in range(64):
                message = ask_message(
                    resources={"gpus": 1},
                    lease={"ttl_seconds": 600},
                    provision={"backend": "local", "spec": spec},
                    id=number,
                )
                socket.send(json.dumps(message))
            until(lambda: len(marked(tmp_path)) >= 32, 90)
            os.kill(server.pid, signal.SIGTERM)
            until(lambda: is_over(server.pid), 28)  # As is documented, and a little more.
    for pids in marked(tmp_path).values():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
