"""Zones of nodes, from a cluster's document to a gang: socket, policy in its cell, refusals."""

import pytest
from served import FIRST_FIT, cluster


@pytest.fixture(scope="module")
def zoned(server):
    document = cluster("zoned-gangs", nodes=4, gpus=1, model="L40")
    nodes = document["nodes"]["nodeData"]
    for node, zone in zip(nodes, ("a", "b", "a", ""), strict=True):
        node |= {"zone": zone} if zone else {"labels": {"topology.kubernetes.io/zone": "b"}}
    server.register(document)
    yield
    server.http.delete("/clusters/zoned-gangs")


def ask(server, **resources):
    resources = {"gpus": 1, "models": ["L40"], **resources}
    return server.ask(FIRST_FIT, resources=resources, lease={"ttl_seconds": 60})


def test_a_gang_shares_a_zone_or_is_told_why_not(server, zoned):
    gangs = [ask(server, nodes=2, topology="zone")["lease"] for _ in range(2)]
    places = [{share["node_id"] for share in gang["placement"]} for gang in gangs]
    assert sorted(map(sorted, places)) == [
        ["zoned-gangs-0", "zoned-gangs-2"],
        ["zoned-gangs-1", "zoned-gangs-3"],
    ]
    busy = ask(server, nodes=2, topology="zone")["error"]
    assert (busy["code"], busy["nodes_together"]) == ("no_capacity", 0)
    never = ask(server, nodes=3, topology="zone")["error"]
    assert (never["code"], never["nodes_together"]) == ("never_fits", 2)
    assert "the largest zone that could hold it has 2 of 3 nodes" in never["reason"]
    for lease in gangs:
        server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})
