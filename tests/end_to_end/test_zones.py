"""Zones, gangs in one and leases that keep apart: document, socket, policy, refusals."""

import json

import pytest
from served import FIRST_FIT, ask_message, cluster, until
from websockets.sync.client import connect

from moorage.model import AntiAffinity, LeaseTerms
from moorage_client import BlockingClient, NoCapacity

pytestmark = pytest.mark.heavy


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


def test_leases_of_a_group_keep_apart(server, zoned):
    one = {"resources": {"gpus": 1, "models": ["L40"]}}
    apart = {"ttl_seconds": 60, "anti_affinity": {"group": "web", "topology": "zone"}}
    with BlockingClient(server.running.ws) as client:
        first, second = (client.ask(FIRST_FIT, **one, lease=apart).lease for _ in range(2))
        assert {first.placement[0].node_id, second.placement[0].node_id} == {
            "zoned-gangs-0",
            "zoned-gangs-1",
        }
        with pytest.raises(NoCapacity, match="too near to leases of your group “web”") as told:
            client.ask(FIRST_FIT, **one, lease=apart)
        assert told.value.details["anti_affinity"]["nodes"] == 4
        assert set(told.value.details["anti_affinity"]["leases"]) == {first.id, second.id}
        other = AntiAffinity("db", "zone")
        elsewhere = client.ask(FIRST_FIT, **one, lease=LeaseTerms(60.0, anti_affinity=other)).lease
        assert elsewhere.placement[0].node_id == "zoned-gangs-2"
        client.release(elsewhere.id, elsewhere.token)
        waiting = ask_message(FIRST_FIT, **one, lease={**apart, "wait_seconds": 60}, id=1)
        with connect(server.running.ws) as socket:
            socket.send(json.dumps(waiting))
            until(lambda: server.say({"op": "queue"}))
            client.release(first.id, first.token)
            lease = json.loads(socket.recv(timeout=20))["lease"]
        assert lease["placement"][0]["node_id"] in {"zoned-gangs-0", "zoned-gangs-2"}
        client.release(second.id, second.token)
        server.say({"op": "release", "lease": lease["id"], "token": lease["token"]})


def test_a_topology_that_is_none_is_refused(server, zoned):
    wrong = {"ttl_seconds": 60, "anti_affinity": {"group": "web", "topology": "planet"}}
    error = server.ask(FIRST_FIT, resources={"gpus": 1}, lease=wrong)["error"]
    assert error["field"] == "lease.anti_affinity.topology"
