"""Labels of nodes, from a cluster's document to a lease: socket, policy in its cell, refusals."""

import pytest
from served import FIRST_FIT, cluster

pytestmark = pytest.mark.heavy

ZONE = "topology.kubernetes.io/zone"


@pytest.fixture(scope="module")
def zoned(server):
    document = cluster("zoned", nodes=3, gpus=1, model="L4")
    for node, zone in zip(document["nodes"]["nodeData"], ("a", "b", "b"), strict=True):
        node["labels"] = {ZONE: zone}
    server.register(document)
    yield
    server.http.delete("/clusters/zoned")


def ask(server, *where: dict, **terms):
    resources = {"gpus": 1, "models": ["L4"], "where": list(where)}
    return server.ask(FIRST_FIT, resources=resources, lease={"ttl_seconds": 60, **terms})


def test_leases_are_where_their_labels_are(server, zoned):
    in_b = {"key": ZONE, "operator": "In", "values": ["b"]}
    replies = [ask(server, in_b) for _ in range(3)]
    granted = [reply["lease"] for reply in replies[:2]]
    places = {lease["placement"][0]["node_id"] for lease in granted}
    assert places == {"zoned-1", "zoned-2"}
    error = replies[2]["error"]
    assert error["code"] == "no_capacity"
    assert error["misfits"]["labels"] >= 1
    elsewhere = ask(server, {"key": ZONE, "operator": "NotIn", "values": ["b"]})["lease"]
    assert elsewhere["placement"][0]["node_id"] == "zoned-0"
    for lease in (*granted, elsewhere):
        server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})


def test_a_node_is_named_by_its_id(server, zoned):
    reply = ask(server, {"key": "moorage/node", "operator": "In", "values": ["zoned-2"]})
    lease = reply["lease"]
    assert lease["placement"][0]["node_id"] == "zoned-2"
    server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})


def test_labels_that_no_node_has_are_never_met(server, zoned):
    error = ask(server, {"key": ZONE, "operator": "In", "values": ["c"]}, wait_seconds=60)["error"]
    assert (error["code"], error["verdict"]) == ("never_fits", "never")
    asked = {"field": "resources.where", "asked": [ZONE], "fits": ""}
    assert asked in error["fits_if"]


@pytest.mark.parametrize(
    ("where", "field"),
    [
        ({"key": "a", "operator": "In"}, "resources.where[0]"),
        ({"key": "a", "operator": "Exists", "values": ["b"]}, "resources.where[0]"),
        ({"key": "a", "operator": "Gt", "values": ["1"]}, "resources.where[0].operator"),
        ({"key": "a"}, "resources.where.operator"),
    ],
)
def test_what_is_no_requirement_is_refused_with_its_field(server, where, field):
    assert ask(server, where)["error"]["field"] == field
