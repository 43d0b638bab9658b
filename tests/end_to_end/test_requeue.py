"""A workload that fails is started again, as its request demands: real processes and kills."""

import platform

import pytest
from served import Server, here, read_message, serving

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
