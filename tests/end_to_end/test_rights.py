"""Only operators may change shared objects and leases of others, over both ports."""

import json
from collections.abc import Iterator

import pytest
from served import Server, ask_message, bearing, cluster, serving

pytestmark = pytest.mark.heavy  # A daemon.

TOKENS = {"MOORAGE_TOKENS": "ann:a1,bob:b1,ops:o1", "MOORAGE_OPERATORS": "ops"}
ANN, BOB, OPS = "a1", "b1", "o1"


@pytest.fixture(scope="module")
def rights_server() -> Iterator[Server]:
    """A daemon with three users: ann, who holds leases on `east`, bob, and the operator ops."""
    with serving(environment=TOKENS, bearer=BOB) as server:
        server.fill(cluster("east", nodes=2, gpus=4), cluster("idle", nodes=1, gpus=1))
        yield server


@pytest.fixture
def lease(rights_server: Server) -> Iterator[dict]:
    """A lease of ann on the cluster `east`."""
    lease = lease_on(rights_server, "east")
    yield lease
    say(rights_server, OPS, {"op": "uncordon", "cluster": "east"})
    release(rights_server, lease)


def say(server: Server, token: str, message: dict) -> dict:
    return server.say(message, bearer=token)[0]


def lease_on(server: Server, cluster: str) -> dict:
    terms = {"resources": {"gpus": 1}, "lease": {"ttl_seconds": 600}, "clusters": [cluster]}
    lease: dict = say(server, ANN, ask_message(**terms))["lease"]
    return lease


def release(server: Server, lease: dict) -> None:
    say(server, ANN, {"op": "release", "lease": lease["id"], "token": lease["token"]})


def send(server: Server, token: str, method: str, path: str, body: object = None):
    return server.http.request(method, path, json=body, headers=bearing(token))


def is_refused(error: dict, text: str) -> bool:
    """Return whether the refusal says that only an operator may do this."""
    says = "MOORAGE_OPERATORS" in text and "operator" in error["expected"]
    return error["code"] == "unauthorized" and error["verdict"] == "not_you" and says


@pytest.mark.parametrize("op", ["cordon", "drain", "uncordon"])
def test_a_dry_run_counts_the_leases_of_other_tenants(
    rights_server: Server, lease: dict, op: str
) -> None:
    message = {"op": op, "cluster": "east", "dry_run": True}
    own = say(rights_server, ANN, message)["data"]
    assert (own["leases"], own["others"]) == ([lease["id"]], {"leases": 0, "tenants": 0})
    reply = say(rights_server, BOB, message)
    assert (reply["data"]["leases"], reply["data"]["others"]) == ([], {"leases": 1, "tenants": 1})
    assert lease["id"] not in json.dumps(reply)
    assert "ann" not in json.dumps(reply)
    everything = say(rights_server, OPS, message)["data"]
    assert everything["leases"] == [lease["id"]]
    assert "others" not in everything


def test_a_what_if_counts_the_leases_of_other_tenants(rights_server: Server, lease: dict) -> None:
    message = {"op": "whatif", "change": {"drain": [{"cluster": "east"}]}}
    reply = say(rights_server, BOB, message)
    seen = reply["data"]
    assert (seen["drained"], seen["others"], seen["other_tenants"]) == ([], {"drained": 1}, 1)
    assert lease["id"] not in json.dumps(reply)
    seen = say(rights_server, OPS, message)["data"]
    assert ([row["lease"] for row in seen["drained"]], seen["other_tenants"]) == ([lease["id"]], 0)


CHANGES = [
    ("PUT", cluster("east", nodes=1, gpus=4)),
    ("PUT", {"$set": {"unavailable": "mine"}}),
    ("PUT", {"nodes.nodeData": []}),
    ("DELETE", None),
]


@pytest.mark.parametrize(("method", "body"), CHANGES)
def test_only_an_operator_changes_a_cluster_with_leases_of_other_tenants(
    rights_server: Server, lease: dict, method: str, body: object
) -> None:
    before = send(rights_server, BOB, "GET", "/clusters/east").json()
    answer = send(rights_server, BOB, method, "/clusters/east", body)
    assert answer.status_code == 403
    assert is_refused(answer.json()["details"], answer.json()["error"]), answer.text
    assert lease["id"] not in answer.text
    assert "ann" not in answer.text
    assert send(rights_server, BOB, "GET", "/clusters/east").json() == before


def test_a_tenant_changes_a_cluster_that_has_only_its_own_leases(rights_server: Server) -> None:
    mine = send(rights_server, ANN, "POST", "/clusters", cluster("mine", nodes=1, gpus=1))
    assert mine.status_code == 201
    own = lease_on(rights_server, "mine")
    document = send(rights_server, ANN, "GET", "/clusters/mine").json()
    assert send(rights_server, ANN, "PUT", "/clusters/mine", document).status_code == 200
    release(rights_server, own)
    document = send(rights_server, ANN, "GET", "/clusters/east").json()
    assert send(rights_server, OPS, "PUT", "/clusters/east", document).status_code == 200
    change = {"reputation": 3}
    assert send(rights_server, BOB, "PUT", "/clusters/idle", change).status_code == 200
    assert send(rights_server, BOB, "DELETE", "/clusters/idle").status_code == 200
    answer = send(rights_server, BOB, "POST", "/clusters", cluster("idle", nodes=1, gpus=1))
    assert answer.status_code == 201, "any tenant may register a new cluster"
    again = send(rights_server, BOB, "POST", "/clusters", document)
    assert again.status_code == 409


def test_no_other_tenant_takes_the_name_of_a_deleted_cluster_with_leases(
    rights_server: Server,
) -> None:
    rights_server.register(cluster("gone", nodes=1, gpus=1))
    lease = lease_on(rights_server, "gone")
    assert send(rights_server, OPS, "DELETE", "/clusters/gone").status_code == 200
    document = cluster("gone", nodes=1, gpus=8)
    assert send(rights_server, BOB, "POST", "/clusters", document).status_code == 403
    assert send(rights_server, ANN, "POST", "/clusters", document).status_code == 201
    release(rights_server, lease)
    assert send(rights_server, BOB, "DELETE", "/clusters/gone").status_code == 403, (
        "the name belongs to ann now"
    )
    assert send(rights_server, ANN, "DELETE", "/clusters/gone").status_code == 200


def test_a_reservation_of_another_tenant_counts_as_a_lease(rights_server: Server) -> None:
    rights_server.register(cluster("later", nodes=1, gpus=1))
    times = {"starts_at": 4e9, "ends_at": 4e9 + 60}
    message = {"op": "reserve", "resources": {"gpus": 1}, "tenant": "ann", "clusters": ["later"]}
    made = say(rights_server, OPS, message | times)["data"]
    assert send(rights_server, BOB, "DELETE", "/clusters/later").status_code == 403
    say(rights_server, OPS, {"op": "unreserve", "reservation": made["reservation"]})
    assert send(rights_server, BOB, "DELETE", "/clusters/later").status_code == 200


def test_the_refusal_of_an_operators_command_names_the_setting(
    rights_server: Server, lease: dict
) -> None:
    for word in ("drain", "delete"):
        done = rights_server.moorage("fleet", word, "east", MOORAGE_TOKEN=BOB)
        assert done.returncode != 0
        assert "MOORAGE_OPERATORS" in done.stderr
        assert "Say who you are" not in done.stderr, "the caller is already authenticated"
    assert say(rights_server, ANN, {"op": "status", "lease": lease["id"]})["success"]


def test_only_the_owner_of_a_document_may_change_the_document(rights_server: Server) -> None:
    made = [
        ("/blocks", {"id": "anns"}),
        ("/block", {"blockId": "anns"}),
        ("/executor", {"executor_id": "anns"}),
        ("/cluster", {"clusterId": "anns"}),
    ]
    for path, body in made:
        assert send(rights_server, ANN, "POST", path, body).is_success
    for path, body in reversed(made):
        for method, change in (("PUT", body), ("DELETE", None)):
            answer = send(rights_server, BOB, method, f"{path}/anns", change)
            assert (answer.status_code, "MOORAGE_OPERATORS" in answer.text) == (403, True)
        assert send(rights_server, OPS, "DELETE", f"{path}/anns").is_success
