"""Rates of one tenant, at a real server: what is too fast is answered, others are not held up."""

import json
from collections.abc import Iterator

import pytest
from served import Server, ask_message, cluster, heard, policy, serving, tell

from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # A daemon.

ENVIRONMENT = {
    "MOORAGE_TOKENS": "ann:a1,bob:b1,ops:o1",
    "MOORAGE_OPERATORS": "ops",
    "MOORAGE_TENANT_REQUESTS_PER_SECOND": "20",
    "MOORAGE_TENANT_UPLOADS_PER_MINUTE": "1",
    "MOORAGE_TENANT_WATCHERS_MAX": "2",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with serving(environment=ENVIRONMENT) as server:
        server.http.headers["Authorization"] = "Bearer o1"
        server.fill(cluster("lab", nodes=1, gpus=4))
        yield server


def headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_a_flood_is_refused_and_another_tenant_is_served(served: Server) -> None:
    with served.socket(headers("a1")) as ann, served.socket(headers("b1")) as bob:
        lease = ask_message(resources={"gpus": 1}, lease={"ttl_seconds": 600})
        ann.send(json.dumps(lease))
        held = heard(ann)["lease"]
        for number in range(60):
            ann.send(json.dumps({"op": "status", "lease": held["id"], "id": number}))
        renew = {"op": "renew", "lease": held["id"], "token": held["token"], "id": "renew"}
        ann.send(json.dumps(renew))
        assert tell(bob, lease)["success"]
        replies = [heard(ann) for _ in range(61)]
        refused = [each["error"] for each in replies if not each["success"]]
        assert refused
        assert {each["code"] for each in refused} == {"busy"}
        assert "tenant_requests_per_second" in refused[0]["reason"]
        assert 0 < refused[0]["retry_after_seconds"] <= 1
        assert next(each for each in replies if each["id"] == "renew")["success"]


def test_an_upload_too_many_is_answered_429(served: Server) -> None:
    document = catalog.document("best_fit")
    first = served.http.post("/policy", json=document, headers=headers("b1"))
    assert first.status_code == 200
    second = served.http.post("/policy", json=document, headers=headers("b1"))
    assert second.status_code == 429
    assert "tenant_uploads_per_minute" in second.json()["error"]["reason"]


def test_a_watcher_too_many_is_refused(served: Server) -> None:
    watch = json.dumps({"op": "watch", "topics": ["leases"]})
    with served.socket(headers("b1")) as one, served.socket(headers("b1")) as two:
        for socket in (one, two, one):  # Again is not one more.
            socket.send(watch)
            assert heard(socket)["success"]
        with served.socket(headers("b1")) as three:
            three.send(watch)
            error = heard(three)["error"]
        assert (error["code"], error["field"]) == ("busy", "topics")
        with served.socket(headers("o1")) as other:
            other.send(watch)
            assert heard(other)["success"]


def test_who_burnt_too_much_is_refused_over_both_doors() -> None:
    burns = """
import time
end = time.process_time() + 0.4
while time.process_time() < end:
    pass
return {"burnt": 0.4}
"""
    limit = {
        "MOORAGE_TENANT_EVALUATION_SECONDS_PER_MINUTE": "1",
        "MOORAGE_POLICY_DEADLINE_SECONDS": "30",
    }
    tokens = {name: ENVIRONMENT[name] for name in ("MOORAGE_TOKENS", "MOORAGE_OPERATORS")}
    with serving(environment=tokens | limit) as server:
        server.http.headers["Authorization"] = "Bearer o1"
        server.fill(cluster("lab", nodes=1, gpus=4))
        document = policy(burns, "burns:1.0-stable")
        assert server.http.post("/policy", json=document).status_code == 200
        message = {"policy_rule_uri": "burns:1.0-stable", "adhoc": True, "inputs": {}, "id": 1}
        with server.socket(headers("a1")) as ann, server.socket(headers("b1")) as bob:
            replies = []
            for _ in range(6):
                ann.send(json.dumps(message))
                replies.append(heard(ann))
                if not replies[-1]["success"]:
                    break
            error = replies[-1]["error"]
            assert len(replies) >= 3, replies
            assert error["code"] == "busy"
            assert "tenant_evaluation_seconds_per_minute" in error["reason"]
            assert error["retry_after_seconds"] > 0
            bob.send(json.dumps(message))
            assert heard(bob)["success"], "it is not his"
        answer = server.http.post("/allocate", json=message, headers=headers("a1"))
        assert answer.status_code == 429
        assert "tenant_evaluation_seconds_per_minute" in answer.text
