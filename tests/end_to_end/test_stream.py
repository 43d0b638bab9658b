"""`stream`: how far a request is, as messages with its id, beside its one reply."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
from served import FIRST_FIT, ask_message, heard, policy, serving, tell, until

from moorage_client.blocking import BlockingClient

pytestmark = pytest.mark.heavy  # Many daemons.

ALL = {"gpus": 4, "models": ["A100"], "nodes": 2}


def lease(server, **more):
    reply = server.ask(FIRST_FIT, resources=ALL, lease={"ttl_seconds": 60, **more})
    assert reply["success"], reply
    return reply["lease"]


def waiting(seconds=30, **more):
    terms = {"ttl_seconds": 60, "wait_seconds": seconds}
    return ask_message(FIRST_FIT, resources=ALL, lease=terms, stream=True, **more)


def test_a_request_that_waits_is_told_its_position_until_it_is_decided(server):
    held = lease(server)
    with server.socket() as first, server.socket() as second:
        said = tell(first, waiting(id="one"))
        assert (said["event"], said["id"]) == ("progress", "one")
        assert (said["data"]["state"], said["data"]["position"]) == ("queued", 1)
        said = tell(second, waiting(id=2))
        assert (said["id"], said["data"]["position"]) == (2, 2)
        server.release(held)
        decided, reply = sorted((heard(first) for _ in range(2)), key=len)
        assert (decided["id"], decided["data"]["state"]) == ("one", "decided")
        assert reply["id"] == "one"
        assert decided["data"]["lease"] == reply["lease"]["id"] == decided["data"]["request"]
        assert decided["data"]["placement"] == reply["lease"]["placement"]
        said = heard(second)
        assert (said["data"]["state"], said["data"]["position"]) == ("queued", 1)
        server.release(reply["lease"])
        replies = [heard(second) for _ in range(2)]
        (reply,) = [each for each in replies if "success" in each]
        server.release(reply["lease"])


def test_an_expected_time_that_moves_is_told_again(server):
    def hold(seconds, **more):
        terms = {"ttl_seconds": seconds, **more}
        return ask_message(FIRST_FIT, resources={"gpus": 4, "models": ["H100"]}, lease=terms)

    with server.socket() as holder, server.socket() as waiter:
        for _ in range(2):
            holder.send(json.dumps(hold(100)))
        held = [heard(holder)["lease"] for _ in range(2)]
        ends = {lease["expires_at"] for lease in held}
        waiter.send(json.dumps({**hold(60, wait_seconds=300), "stream": True, "id": 1}))
        said = heard(waiter)["data"]
        assert (said["position"], said["expected_at"] in ends) == (1, True)
        for lease in held:
            renewal = {"op": "renew", "ttl_seconds": 250}
            assert tell(holder, {**renewal, "lease": lease["id"], "token": lease["token"]})[
                "success"
            ]
        said = heard(waiter)["data"]
        assert (said["state"], said["position"]) == ("queued", 1)
        assert said["expected_at"] > max(ends) + 100
        (reply,) = server.say({"op": "cancel", "request": said["request"]})
        assert reply["success"]
        for lease in held:
            server.release(lease)


def test_the_clients_hand_on_what_is_told(server):
    held, told = lease(server), Queue()

    with BlockingClient(server.running.ws) as client, ThreadPoolExecutor(1) as pool:
        terms = {"ttl_seconds": 60, "wait_seconds": 60}
        asked = pool.submit(client.ask, FIRST_FIT, resources=ALL, lease=terms, on_progress=told.put)
        queued = told.get(timeout=60)
        server.release(held)
        got = asked.result(60).lease
        decided = told.get(timeout=60)  # Before the reply, or after it.
        client.release(got.id, got.token)
    assert (queued["state"], queued["position"]) == ("queued", 1)
    assert (decided["state"], decided["lease"]) == ("decided", got.id)


def test_policy_that_decides_long_is_told_of(server):
    body = "import time; time.sleep(2.5); return {'cluster_id': 'east'}"  # What is being told.
    server.publish({**policy(body, "long:1-x"), "deadline_seconds": 30})
    with server.socket() as socket:
        socket.send(json.dumps(ask_message("long:1-x", id=1, stream=True)))
        said = [heard(socket)]
        while "success" not in said[-1]:
            said.append(heard(socket))
    *told, reply = said
    assert reply["success"], reply
    assert {each["data"]["state"] for each in told} == {"deciding"}
    assert all(1 <= each["data"]["seconds"] < 30 for each in told)


def test_a_refusal_is_the_last_word(server):
    with server.socket() as socket:
        socket.send(json.dumps(ask_message(FIRST_FIT, resources={"gpus": 99}, id=1, stream=True)))
        assert heard(socket)["error"]["code"] == "never_fits"
        socket.send(json.dumps(ask_message(FIRST_FIT, resources={"gpus": 1}, id=2, stream=True)))
        assert heard(socket)["success"]  # Advice is decided at once.


def test_what_a_client_left_behind_waits_until_its_time_is_up(server):
    held = lease(server)
    with server.socket() as socket:
        socket.send(json.dumps(waiting(id=1, seconds=3)))
        assert heard(socket)["data"]["position"] == 1
    with server.socket() as socket:
        socket.send(json.dumps(waiting(id=1)))
        positions = [heard(socket)["data"]["position"]]
        while positions[-1] == 2:  # Told again as the expected time moves.
            positions.append(heard(socket)["data"]["position"])
        assert (positions[0], positions[-1]) == (2, 1)
    server.release(held)


@pytest.mark.heavy
def test_a_workload_is_told_until_it_is_ready(tmp_path):
    with serving(tmp_path, options=["--here"]) as server:
        until(lambda: server.http.get(f"/policy/{FIRST_FIT}").is_success)
        spec = {"command": [sys.executable, "-c", "import time; time.sleep(60)"]}
        provision = {"backend": "local", "spec": spec}
        with server.socket() as socket:
            message = ask_message(
                FIRST_FIT,
                resources={"cpu_milli": 100},
                lease={"ttl_seconds": 60},
                provision=provision,
                stream=True,
                id="w",
            )
            socket.send(json.dumps(message))
            states, reply = [], None
            while "ready" not in states:
                came = heard(socket)
                if "success" in came:
                    reply = came
                    assert reply["success"], reply
                else:
                    assert came["id"] == "w"
                    states.append(came["data"]["state"])
            assert reply is not None
            assert states[0] == "decided"
            assert states[-1] == "ready"
            server.release(reply["lease"])
