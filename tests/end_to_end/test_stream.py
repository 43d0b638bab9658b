"""A request with `stream` gets its progress as messages with its id, before its reply."""

import json
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
from served import FIRST_FIT, ask_message, cluster, here, policy, read_message, serving, tell

from moorage_client.blocking import BlockingClient

pytestmark = pytest.mark.heavy  # A daemon.

ALL = {"gpus": 4, "models": ["A100"], "nodes": 2}


def lease(server, **more):
    reply = server.ask(FIRST_FIT, resources=ALL, lease={"ttl_seconds": 60, **more})
    assert reply["success"], reply
    return reply["lease"]


def waiting(seconds=30, **more):
    terms = {"ttl_seconds": 60, "wait_seconds": seconds}
    return ask_message(FIRST_FIT, resources=ALL, lease=terms, stream=True, **more)


def test_a_waiting_request_with_stream_gets_its_position_until_the_decision(server):
    held = lease(server)
    with server.socket() as first, server.socket() as second:
        came = tell(first, waiting(id="one"))
        assert (came["event"], came["id"]) == ("progress", "one")
        assert (came["data"]["state"], came["data"]["position"]) == ("queued", 1)
        came = tell(second, waiting(id=2))
        assert (came["id"], came["data"]["position"]) == (2, 2)
        server.release(held)
        decided, reply = sorted((read_message(first) for _ in range(2)), key=len)
        assert (decided["id"], decided["data"]["state"]) == ("one", "decided")
        assert reply["id"] == "one"
        assert decided["data"]["lease"] == reply["lease"]["id"] == decided["data"]["request"]
        assert decided["data"]["placement"] == reply["lease"]["placement"]
        came = read_message(second)
        assert (came["data"]["state"], came["data"]["position"]) == ("queued", 1)
        server.release(reply["lease"])
        replies = [read_message(second) for _ in range(2)]
        (reply,) = [each for each in replies if "success" in each]
        server.release(reply["lease"])


def test_a_repeated_request_with_stream_gets_the_progress_too(server):
    held = lease(server)
    message = waiting(id="again")
    message["lease"]["idempotency_key"] = "streamed"
    leases = []
    with server.socket() as first, server.socket() as second:
        told = [tell(socket, message) for socket in (first, second)]
        assert told[0] == told[1]
        assert (told[0]["event"], told[0]["id"]) == ("progress", "again")
        assert (told[0]["data"]["state"], told[0]["data"]["position"]) == ("queued", 1)
        server.release(held)
        for socket in (first, second):
            decided, reply = sorted((read_message(socket) for _ in range(2)), key=len)
            assert (decided["id"], decided["data"]["state"]) == ("again", "decided")
            assert decided["data"]["lease"] == told[0]["data"]["request"]
            leases.append(reply["lease"])
        assert (leases[0]["id"], leases[0]["token"]) == (leases[1]["id"], leases[1]["token"])
        server.release(leases[0])


def test_a_request_repeated_after_a_restart_gets_its_position(tmp_path):
    message = waiting(id="again")
    message["lease"]["idempotency_key"] = "streamed"
    with serving(tmp_path) as server:
        server.fill(cluster("east"))
        held = lease(server)
        with server.socket() as socket:
            before = tell(socket, message)
    with serving(tmp_path) as server, server.socket() as socket:
        after = tell(socket, message)
        assert (after["id"], after["data"]["position"]) == ("again", 1)
        assert after["data"]["request"] == before["data"]["request"]
        server.release(held)


def test_the_stream_sends_a_changed_expected_time_again(server):
    def hold(seconds, **more):
        terms = {"ttl_seconds": seconds, **more}
        return ask_message(FIRST_FIT, resources={"gpus": 4, "models": ["H100"]}, lease=terms)

    with server.socket() as holder, server.socket() as waiter:
        for _ in range(2):
            holder.send(json.dumps(hold(100)))
        held = [read_message(holder)["lease"] for _ in range(2)]
        ends = {lease["expires_at"] for lease in held}
        waiter.send(json.dumps({**hold(60, wait_seconds=300), "stream": True, "id": 1}))
        data = read_message(waiter)["data"]
        assert (data["position"], data["expected_at"] in ends) == (1, True)
        for lease in held:
            renewal = {"op": "renew", "lease": lease["id"], "token": lease["token"]}
            assert tell(holder, {**renewal, "ttl_seconds": 250})["success"]
        data = read_message(waiter)["data"]
        assert (data["state"], data["position"]) == ("queued", 1)
        assert data["expected_at"] > max(ends) + 100
        assert server.say({"op": "cancel", "request": data["request"]})[0]["success"]
        for lease in held:
            server.release(lease)


def test_the_client_passes_progress_on_to_its_callback(server):
    held, progress = lease(server), Queue()
    with BlockingClient(server.running.ws) as client, ThreadPoolExecutor(1) as pool:
        terms = {"ttl_seconds": 60, "wait_seconds": 60}
        more = {"resources": ALL, "lease": terms, "on_progress": progress.put}
        answer = pool.submit(client.ask, FIRST_FIT, **more)
        queued = progress.get(timeout=60)
        server.release(held)
        got = answer.result(60).lease
        decided = progress.get(timeout=60)  # It may come before or after the reply.
        client.release(got.id, got.token)
    assert (queued["state"], queued["position"]) == ("queued", 1)
    assert (decided["state"], decided["lease"]) == ("decided", got.id)


def test_the_stream_reports_a_long_decision(server):
    body = "import time; time.sleep(2.5); return {'cluster_id': 'east'}"  # Time for progress.
    server.publish({**policy(body, "long:1-x"), "deadline_seconds": 30})
    with server.socket() as socket:
        socket.send(json.dumps(ask_message("long:1-x", id=1, stream=True)))
        came = [read_message(socket)]
        while "success" not in came[-1]:
            came.append(read_message(socket))
    *progress, reply = came
    assert reply["success"], reply
    assert {each["data"]["state"] for each in progress} == {"deciding"}
    assert all(1 <= each["data"]["seconds"] < 30 for each in progress)


def test_a_refusal_ends_the_stream_of_progress(server):
    with server.socket() as socket:
        socket.send(json.dumps(ask_message(FIRST_FIT, resources={"gpus": 99}, id=1, stream=True)))
        assert read_message(socket)["error"]["code"] == "never_fits"
        socket.send(json.dumps(ask_message(FIRST_FIT, resources={"gpus": 1}, id=2, stream=True)))
        assert read_message(socket)["success"]  # Advice is decided at once.


def test_the_request_of_a_client_that_disconnected_waits_until_its_time_is_up(server):
    held = lease(server)
    with server.socket() as socket:
        socket.send(json.dumps(waiting(id=1, seconds=2)))
        assert read_message(socket)["data"]["position"] == 1
    with server.socket() as socket:
        socket.send(json.dumps(waiting(id=1)))
        positions = [read_message(socket)["data"]["position"]]
        while positions[-1] == 2:  # The same position is sent again with a new expected time.
            positions.append(read_message(socket)["data"]["position"])
        assert (positions[0], positions[-1]) == (2, 1)
    server.release(held)


def test_progress_of_a_workload_ends_when_the_workload_is_ready(server):
    server.register(here(gpus=0))
    message = ask_message(
        resources={"cpu_milli": 100},
        clusters=["here"],
        lease={"ttl_seconds": 60},
        provision={"backend": "local", "spec": {"command": ["sleep", "60"]}},
        stream=True,
        id="w",
    )
    with server.socket() as socket:
        socket.send(json.dumps(message))
        states, reply = [], None
        while "ready" not in states:
            came = read_message(socket)
            if "success" in came:
                reply = came
                assert reply["success"], reply
            else:
                assert came["id"] == "w"
                states.append(came["data"]["state"])
    assert reply is not None
    assert (states[0], states[-1]) == ("decided", "ready")
    server.release(reply["lease"])
    server.in_state(reply["lease"], "ended")
    server.http.delete("/clusters/here").raise_for_status()
