"""Messages of a real daemon agree with the AsyncAPI document and schemas that it serves."""

import json

import pytest
from jsonschema import Draft202012Validator
from served import ask_message, here, read_message

NAMES = {"ask": "AllocationRequest", "queue": "QueueListing", "leases": "LeaseListing"} | {
    "fleet": "FleetListing",
    "watch": "WatchTopics",
    "whatif": "WhatIf",
}
RESOURCES = {"gpus": 1}


@pytest.fixture
def session(server):
    """A session that checks each message, reply and event by the schemas that the daemon serves."""
    schemas = {
        name: Draft202012Validator(server.http.get(path).json())
        for name, path in server.http.get("/schemas/").json().items()
    }
    with server.socket() as socket:
        yield Session(socket, schemas)


class Session:
    def __init__(self, socket, schemas):
        self.socket, self.schemas = socket, schemas
        self.news, self.said = [], set()

    def fits(self, name, value):
        problems = [
            f"{e.json_path}: {e.message[:300]}" for e in self.schemas[name].iter_errors(value)
        ]
        assert problems == [], (name, value)

    def say(self, message, *, served=True):
        op = message.get("op", "ask")
        name = NAMES.get(op, op.capitalize())
        self.socket.send(json.dumps(message))
        while "event" in (reply := json.loads(self.socket.recv(30))):
            self.fits("NewsMessage", reply)
            self.news.append(reply["event"])
        assert reply["success"] is served, reply
        if served:
            self.fits(name, message)
            self.said.add(op)
        self.fits(f"{name}Reply" if reply["success"] else "FailureMessage", reply)
        return reply


def test_all_messages_of_a_session_agree_with_the_description_of_the_interface(server, session):
    server.register(here())
    server.publish({"policy_rule_uri": "managed:1-x", "code": MANAGED})
    session.say({"op": "watch", "topics": ["leases", "fleet", "policies"], "id": "w"})
    session.say(ask_message(resources=RESOURCES, explain=True, id=1))
    shell = ["sh", "-c", "echo said; sleep 60"]
    started = ask_message(
        clusters=["here"],
        resources=RESOURCES,
        lease={"ttl_seconds": 60},
        provision={"backend": "local", "spec": {"command": shell}},
    )
    running = session.say(started)["lease"]
    owned = {"lease": running["id"], "token": running["token"]}
    session.say({"op": "status", "lease": running["id"]})
    session.say({"op": "why", "lease": running["id"]})
    for encoding in ("text", "base64"):
        session.say({"op": "logs", **owned, "wait_seconds": 10, "encoding": encoding})
    session.say({"op": "exec", **owned, "command": ["true"]})
    session.say({"op": "renew", **owned, "ttl_seconds": 90})
    for message in (
        {"op": "leases", "limit": 1},
        {"op": "leases", "state": "active"},
        {"op": "fleet"},
        {"op": "fleet", "cluster": "east", "limit": 1},
        {"op": "whatif", "change": {"drain": [{"cluster": "east"}]}},
    ):
        session.say(message)
    session.say({"op": "release", **owned})
    session.say({"op": "flush"})
    session.say({"op": "manage", "policy_rule_uri": "managed:1-x", "action": "count"})
    assert session.said == {
        *("ask", "watch", "status", "why", "logs", "exec", "renew", "leases", "fleet", "release"),
        *("flush", "manage", "whatif"),
    }
    server.http.delete("/clusters/here").raise_for_status()
    assert {"granted", "renewed"} <= set(session.news)


MANAGED = """
class AIOSv1PolicyRule:
    def __init__(self, rule_id, settings, parameters):
        pass

    def eval(self, parameters, input_data, context):
        return None

    def management(self, action, data):
        return {"did": action}
"""


def test_messages_of_waiting_requests_agree_with_the_description_of_the_interface(server, session):
    eight = {"gpus": 4, "nodes": 4}
    held = session.say(ask_message(resources=eight, lease={"ttl_seconds": 60}))
    server.leases = [held["lease"]]
    with server.socket() as other:
        waiting = ask_message(resources=eight, lease={"wait_seconds": 60, "idempotency_key": "k"})
        other.send(json.dumps(waiting))
        while not (rows := session.say({"op": "queue"})["data"]["waiting"]):
            pass
        session.say({"op": "status", "request": rows[0]["request"]})
        session.say({"op": "why", "request": rows[0]["request"], "nodes": True})
        session.say({"op": "cancel", "request": rows[0]["request"]})
    assert session.said >= {"queue", "status", "why", "cancel"}


def test_messages_of_a_resumed_session_agree_with_the_description_of_the_interface(server, session):
    with server.socket() as lost:
        lost.send(json.dumps(ask_message(resources=RESOURCES, lease={"ttl_seconds": 60}, id="m")))
        server.leases = [read_message(lost)["lease"]]
        name = lost.response.headers["Moorage-Session"]
        resumed = session.say({"op": "resume", "session": name})["data"]
        (held,) = resumed["leases"]
        assert held["message"] == "m"
        assert held["lease"] == server.leases[0]


def test_failures_agree_with_the_description_of_the_interface(session):
    for message in (
        {"op": "release", "lease": "none", "token": "t"},
        {"op": "fly"},
        {"op": "release"},
        {"op": "leases", "state": "sunk"},
        {"op": "resume", "session": "s"},
        {"op": "whatif", "change": {"drain": [{"cluster": "none"}]}},
        ask_message("none:1-x", id=2),
        ask_message(resources={"gpus": 900}),
    ):
        if message.get("op") == "fly":
            session.socket.send(json.dumps(message))
            session.fits("FailureMessage", json.loads(session.socket.recv(30)))
        else:
            session.say(message, served=False)


def test_the_index_page_links_to_the_descriptions(server):
    for path in ("/", "/docs"):
        page = server.http.get(path)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "<script" not in page.text
        assert "http://" not in page.text
        assert "https://" not in page.text
        for link in ("/openapi.json", "/asyncapi.json", "/schemas/", "/schemas/Release.json"):
            assert f'href="{link}"' in page.text
            assert server.http.get(link).is_success
    assert "POST /clusters" in page.text
    assert server.http.get("/schemas/None.json").status_code == 404
    rebound = server.http.get("/docs", headers={"host": "evil.example"})
    assert rebound.status_code == 403


def test_the_socket_description_names_the_running_version(server):
    described = server.http.get("/asyncapi.json").json()
    assert described["asyncapi"] == "3.0.0"
    assert (
        described["info"]["version"] == server.http.get("/openapi.json").json()["info"]["version"]
    )
