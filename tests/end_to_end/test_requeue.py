"""A workload that fails is started again, as its request demands: real processes and kills."""

import contextlib
import platform
import random
import time

import pytest
from served import (
    Server,
    here,
    kill,
    read_message,
    serve_and_kill,
    serving,
    until,
)

pytestmark = pytest.mark.heavy

ONCE = 'test -e "$0" && exec sleep 1000; touch "$0"; echo no such model; exit 7'
"""Fails the first time and works the second; its argument names the file that says which."""
PAUSE = "MOORAGE_REQUEUE_PAUSE_SECONDS"


def run(server: Server, command: list[str], ttl: float = 3600) -> dict:
    provision = {"backend": "local", "spec": {"command": command}, "on_failure": "requeue"}
    provision["attempts_max"] = 3
    lease = {"ttl_seconds": ttl}
    reply = server.ask(lease=lease, provision=provision, resources={"gpus": 1})
    assert reply["success"], reply
    return reply["lease"]


def renew(server: Server, lease: dict) -> dict:
    message = {"op": "renew", "lease": lease["id"], "token": lease["token"]}
    return server.say(message)[0]["lease"]


@pytest.fixture(scope="module", autouse=True)
def short_pauses():
    """Every daemon here retries after hundredths of a second, unless a test sets another pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PAUSE, "0.02")
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.fill(here(2))
        yield server
        assert server.log() == ""


def test_a_failed_workload_starts_again_and_watchers_see_it(server, tmp_path):
    tried = ["finished", "requeued", "paused", "resumed", "granted", "started"]
    with server.watching("leases") as watching:
        lease = run(server, ["sh", "-c", ONCE, str(tmp_path / "once")])
        assert lease["workload"]["attempt"] == 1
        assert lease["workload"]["attempts_max"] == 3
        news = []
        while [each["event"] for each in news][-1:] != ["started"] or len(news) < len(tried):
            one = read_message(watching)
            news += [one] if one["event"] != "workload" else []
    names = [each["event"] for each in news]
    assert names[: -len(tried)] in (["granted"], ["granted", "started"])  # It ends at once.
    assert names[-len(tried) :] == tried
    assert {each["data"]["id"] for each in news} == {lease["id"]}
    data = {each["event"]: each["data"] for each in news}
    finished, requeued = data["finished"]["outcome"], data["requeued"]
    assert requeued["state"] == "queued"
    assert "attempt 1 of 3 failed: it ended by itself with exit status 7" in requeued["reason"]
    assert finished["log_tail"] == ["no such model"]
    assert finished["exit_code"] == 7
    assert finished["nodes"] == [{"cluster_id": "here", "node_id": platform.node()}]
    again = server.status(lease)
    assert again["state"] == "active"
    assert again["fencing"] > lease["fencing"]
    assert again["workload"]["phase"] == "ready"
    assert again["workload"]["attempt"] == 2
    assert again["workload"]["outcome"]["attempt"] == 1
    assert renew(server, lease)["workload"]["attempt"] == 2
    server.release(lease)
    ended = server.in_state(lease, "ended")
    assert ended["workload"]["phase"] == "stopped"


def test_random_kills_and_failures_start_no_workload_twice(tmp_path):
    """Each grant starts its workload once, however often the daemon dies, and each lease runs."""
    draw = random.Random(7)
    starts = tmp_path / "starts"
    starts.mkdir()
    script = 'echo $MOORAGE_FENCING >> "$0/$MOORAGE_LEASE_ID"; sleep 0.0$(($$ % 10)); '
    script += 'test $(wc -l < "$0/$MOORAGE_LEASE_ID") -lt 3 && exit 7; exec sleep 1000'
    command = ["sh", "-c", script, str(starts)]
    held: dict[str, dict] = {}
    for number in range(3):
        with serve_and_kill(tmp_path / "data") as server:
            if number == 0:
                server.fill(here(4))
            stop_at = time.monotonic() + draw.random() / 2
            with contextlib.suppress(Exception):  # The daemon may be killed in any call.
                while time.monotonic() < stop_at:
                    if len(held) < 4:
                        lease = run(server, command)
                        held[lease["id"]] = lease
                    else:
                        name = draw.choice(sorted(held))
                        if server.release(held[name])["success"]:
                            del held[name]
            kill(server)
    with serving(tmp_path / "data") as server:
        for lease in held.values():
            until(lambda lease=lease: server.status(lease)["workload"]["attempt"] == 3)
            server.in_state(lease, "active")
            server.release(lease)
            server.in_state(lease, "ended")
    for each in starts.iterdir():
        fencings = each.read_text().split()
        assert len(fencings) == len(set(fencings)) <= 3, "a grant is started once"
