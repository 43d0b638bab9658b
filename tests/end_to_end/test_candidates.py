"""Filter and search through a real daemon: over the socket, at `/allocate` and at the endpoints."""

import json
import threading

import pytest
from served import FIRST_FIT, Server, ask_message, cluster, policy, serving

from moorage.testing.daemon_process import daemon
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Many daemons.

SEEN = "seen:1.0-x"
CHEAPEST = "cheapest:1.0-x"
DOCUMENTS = {
    "east": cluster("east", 1, 8, regionId="eu-west", tags=["gpu", "eu"], reputation=80),
    "north": cluster("north", 1, 2, regionId="eu-north", tags=["eu"], reputation=90),
    "south": cluster("south", 1, 4, regionId="us-south", tags=["us"], reputation=10),
    "west": cluster("west", 1, 4, regionId="us-west", tags=["us", "gpu"], reputation=50),
    "zzz": cluster("zzz", 1, 16, regionId="eu-west", tags=["eu"], status="draining"),
}
FREE = {"east": 10, "north": 90, "south": 50, "unheard-of": 1000}


@pytest.fixture(scope="module")
def server():
    """A daemon with four live clusters, one that is draining, metrics, and policies."""
    with serving() as server:
        server.register(*DOCUMENTS.values())
        for name, free in FREE.items():
            node = {"id": f"{name}-0", "gpu": {"totalFreeMem": free}, "vcpu": {"load5m": free / 10}}
            answer = server.http.post("/cluster", json={"clusterId": name, "nodes": [node]})
            answer.raise_for_status()
        server.publish(
            catalog.document("first_fit"),
            policy("return {'clusters': sorted(input_data['cluster_data'])}", SEEN),
            policy(
                "key = self.settings.get('by', 'reputation')\n"
                "ranked = sorted(input_data, key=lambda each: each.get(key, 0))\n"
                "if parameters.get('highest'):\n    ranked.reverse()\n"
                "give = parameters.get('give')\n"
                "if give == 'one':\n    return ranked[0]\n"
                "if give == 'ids':\n    return [each['id'] for each in ranked]\n"
                "return give or ranked",
                CHEAPEST,
                policy_parameters={"highest": True},
            ),
        )
        yield server
        assert server.log() == "", "the daemon had something to complain about"


def simple(variable, operator, value) -> dict:
    return {"variable": variable, "operator": operator, "value": value}


def filtering(query=None, metrics=None) -> dict:
    queries = {"clusterQuery": query, "clusterMetricsQuery": metrics}
    given = {name: each for name, each in queries.items() if each is not None}
    return {"matchType": "cluster", "filter": given}


def ranking(uri=None, settings=None, **parameters) -> dict:
    rank = {"policyRuleURI": uri, "settings": settings, "parameters": parameters}
    return {"matchType": "cluster", "rankingPolicyRule": rank}


def enveloped(body) -> dict:
    return {"header": {"templateUri": "x"}, "body": {"values": body}}


def seen(server, **more) -> list[str]:
    reply = server.ask(SEEN, **more)
    assert reply["success"], reply
    return reply["data"]["clusters"]


def found(server, path, body) -> list[str]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["success"] is True
    assert all(document["nodes"] for document in said["data"])
    return [document["id"] for document in said["data"]]


# Filter: what it is, the live clusters of it, and all of it (the draining one is not live) -------

FILTERS = [
    (
        filtering(
            {
                "logicalOperator": "AND",
                "conditions": [
                    simple("tags", "==", "eu"),
                    {"logicalOperator": "NOT", "conditions": [simple("gpus.count", "==", 8)]},
                ],
            }
        ),
        ["north", "zzz"],
    ),
    (
        filtering(simple("gpus.count", ">", 2), simple("cluster.vcpu.load_5m", ">=", "1")),
        ["east", "south"],
    ),
    (filtering(), ["east", "north", "south", "west", "zzz"]),
]


@pytest.mark.parametrize(("body", "ids"), FILTERS, ids=lambda value: json.dumps(value)[:70])
def test_a_filter_finds_the_same_over_every_door(server, body, ids):
    live = [each for each in ids if each != "zzz"]
    for form in (body, enveloped(body)):
        assert seen(server, filter=form) == live
        assert found(server, "/api/filter-data", form) == ids
        assert found(server, "/api/no-ir/filter", form) == ids
    asked = {"policy_rule_uri": SEEN, "inputs": {}, "filter": body}
    answer = server.http.post("/allocate", json=asked)
    assert answer.status_code == 200
    assert answer.json()["data"]["clusters"] == live


def test_documents_are_answered_as_stored(server):
    answer = server.http.post("/api/filter-data", json=filtering(simple("id", "==", "north")))
    assert answer.json() == {"success": True, "data": [server.http.get("/clusters/north").json()]}


def test_clusters_win_over_filter_and_filter_over_search(server):
    eu = filtering(simple("tags", "==", "eu"))
    search = ranking(like="west", **{"return": 1})
    assert seen(server, clusters=["west"], filter=eu, search=search) == ["west"]
    every = server.ask(SEEN, clusters=["west"], filter=eu, search=search)
    assert every["warnings"] == [
        "filter was ignored: clusters was given and wins.",
        "search was ignored: clusters was given and wins.",
    ]
    two = server.ask(SEEN, filter=eu, search=search)
    assert two["warnings"] == ["search was ignored: filter was given and wins."]
    assert seen(server, filter=eu, search=search) == ["east", "north"]
    assert seen(server, filter={}, search=search) == ["south"]
    assert seen(server, filter=None, search={}, clusters=[]) == ["east", "north", "south", "west"]


def test_nothing_found_is_said_and_no_policy_is_asked(server):
    none = filtering(simple("gpus.count", ">", 99))
    asleep = filtering(simple("id", "==", "zzz"))
    metrics = filtering(simple("gpus.count", ">", 1), simple("cluster.gpu.totalFreeMem", ">", 100))
    bodies = [("filter", none, "no cluster"), ("filter", asleep, "none is live")]
    bodies += [("filter", metrics, "no cluster")]
    bodies += [("search", ranking(CHEAPEST, filterRule=none, give="bad"), "no cluster")]
    for field, body, said in bodies:
        reply = server.ask(SEEN, **{field: body})
        assert reply["error"]["code"] == "unknown_clusters", reply
        assert reply["error"]["field"] == field
        assert said in reply["message"]
    assert found(server, "/api/filter-data", none) == []
    assert found(server, "/api/similarity-search", bodies[-1][1]) == []


# Search -----------------------------------------------------------------------------------------


def test_likeness_needs_no_policy(server):
    like = {"gpus": {"count": 4}, "tags": ["us"]}
    path = "/api/similarity-search"
    assert found(server, path, ranking(like=like, weights={"gpus.count": 1, "tags": 1})) == [
        "south", "west", "north", "east", "zzz",
    ]  # fmt: skip
    assert found(server, path, ranking(like="west", weights={"gpus.count": 1}))[0] == "south"
    eu = filtering(simple("tags", "==", "eu"))
    three = ranking(like="east", filterRule=eu, weights={"gpus.count": 1})
    assert found(server, "/api/no-ir/similarity-search", enveloped(three)) == ["north", "zzz"]
    # Of an ask, only live clusters are ranked, so K of them come where there are so many.
    two = ranking(like={"gpus": {"count": 16}}, **{"return": 2})
    assert found(server, path, two) == ["zzz", "east"]
    assert len(seen(server, search=two)) == 2
    assert "east" in seen(server, search=two)


@pytest.mark.parametrize("wrap", [lambda body: body, enveloped])
@pytest.mark.parametrize("values", [False, True])
def test_a_policy_ranks_what_the_filter_rule_finds(server, wrap, values):
    def search(*more, **parameters):
        body = ranking(CHEAPEST, *more, **parameters)
        if values:
            body["rankingPolicyRule"] = {"values": body["rankingPolicyRule"]}
        return wrap(body)

    path = "/api/similarity-search"
    eu = filtering(simple("tags", "==", "eu"))
    # The policy's default says the highest first; the caller's parameters and settings win.
    assert found(server, path, search(filterRule=eu)) == ["north", "east", "zzz"]
    assert found(server, path, search(filterRule=eu, highest=False)) == ["zzz", "east", "north"]
    assert found(server, path, search({"by": "id"}, filterRule={})) == sorted(DOCUMENTS)[::-1]
    for give in ("ids", ""):
        assert found(server, path, search(**{"return": 2}, give=give)) == ["north", "east"]
    assert found(server, path, search(give="one")) == ["north"]
    assert seen(server, search=search(filterRule=eu, **{"return": 1})) == ["north"]
    assert seen(server, search=search(highest=False, **{"return": 2})) == ["south", "west"]


def test_more_than_a_policy_can_be_given_is_refused_and_likeness_still_ranks_it(server):
    big = [cluster(f"big-{n}", status="draining", pad="x" * (9 << 20)) for n in range(2)]
    server.register(*big)
    answer = server.http.post("/api/similarity-search", json=ranking(CHEAPEST))
    assert answer.json()["error"]["code"] == "too_large"
    assert "filterRule" in answer.json()["message"]
    like = ranking(like={"gpus": {"count": 8}}, **{"return": 1})
    assert len(found(server, "/api/similarity-search", like)) == 1
    for each in big:
        server.http.delete(f"/clusters/{each['id']}").raise_for_status()


def test_the_order_of_a_search_is_the_order_of_the_candidates(server):
    server.publish(policy("return {'order': list(input_data['cluster_data'])}", "order:1.0-x"))
    for highest, order in ((True, ["north", "east", "west", "south"]), (False, None)):
        expected = order or ["south", "west", "east", "north"]
        reply = server.ask("order:1.0-x", search=ranking(CHEAPEST, highest=highest))
        assert reply["data"] == {"order": expected}
    lease = {"ttl_seconds": 60}
    taken = server.ask(
        search=ranking(CHEAPEST, **{"return": 1}), resources={"gpus": 1}, lease=lease
    )
    assert taken["lease"]["placement"][0]["cluster_id"] == "north"
    server.leases = [taken["lease"]]


# What is wrong is named ---------------------------------------------------------------------------

BAD_AT = [
    ("filter", {"matchType": "vdag", "filter": {}}, "matchType", "unsupported"),
    ("filter", filtering(simple("a", "~", 1)), "filter.clusterQuery.operator", "bad_message"),
    (
        "filter",
        filtering(None, {"$where": "1"}),
        "filter.clusterMetricsQuery.$where",
        "unsupported",
    ),
    ("search", {"matchType": "cluster"}, "rankingPolicyRule", "bad_message"),
    ("search", ranking(like="none"), "rankingPolicyRule.parameters.like", "bad_message"),
    ("search", ranking("none:1-x"), "rankingPolicyRule.policyRuleURI", "unknown_policy"),
    (
        "search",
        ranking(CHEAPEST, filterRule=filtering(simple("a", "LIKE", 1))),
        "rankingPolicyRule.parameters.filterRule.filter.clusterQuery.value",
        "bad_message",
    ),
    ("search", ranking(CHEAPEST, give=["other"]), None, "policy_bad_output"),
    ("search", ranking(CHEAPEST, give={"error": "x"}), None, "policy_bad_output"),
    ("search", ranking(CHEAPEST, {"by": []}), None, "policy_error"),
]
ROUTES = {"filter": "/api/filter-data", "search": "/api/similarity-search"}


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(("field", "body", "place", "code"), BAD_AT, ids=lambda v: str(v)[:60])
def test_what_is_wrong_is_refused_by_its_place(server, field, body, place, code, wrap):
    place = place or "rankingPolicyRule.policyRuleURI"
    if wrap:
        body, place = enveloped(body), f"body.values.{place}"
    reply, after = server.say(
        ask_message(SEEN, **{field: body}), ask_message(resources={"gpus": 1})
    )
    assert (reply["error"]["code"], reply["error"]["field"]) == (code, f"{field}.{place}")
    assert after["success"]
    answer = server.http.post(ROUTES[field], json=body)
    assert answer.status_code == 400
    said = answer.json()
    assert said["success"] is False
    assert said["message"]
    assert (said["error"]["code"], said["error"]["field"]) == (code, place)


def test_bodies_that_are_no_objects_are_refused(server):
    for path in (*ROUTES.values(), "/api/no-ir/filter", "/api/no-ir/similarity-search"):
        for content in (b"[]", b"", b"{", b"null", b'"x"', b'{"body": {}}', b'{"body": 1}'):
            answer = server.http.post(path, content=content)
            assert answer.status_code == 400
            assert answer.json()["success"] is False


# Among others -------------------------------------------------------------------------------------


def test_a_ranking_that_never_ends_holds_up_no_other(server):
    server.publish(policy("while True: pass", "endless:1.0-x"))
    replies = []

    def ask() -> None:
        replies.append(server.ask(SEEN, search=ranking("endless:1.0-x")))

    endless = threading.Thread(target=ask)
    endless.start()
    assert seen(server, search=ranking(CHEAPEST, **{"return": 1})) == ["north"]
    endless.join(30)
    assert replies[0]["error"]["code"] == "policy_timeout"


def test_a_change_is_found_by_the_next_request(server):
    eu = filtering(simple("regionId", "==", "eu-new"))
    assert found(server, "/api/filter-data", eu) == []
    server.register(cluster("new", regionId="eu-new"))
    assert seen(server, filter=eu) == ["new"]
    server.http.put("/clusters/new", json={"$set": {"status": "gone"}}).raise_for_status()
    assert server.ask(filter=eu)["error"]["code"] == "unknown_clusters"
    server.http.delete("/clusters/new").raise_for_status()
    assert found(server, "/api/filter-data", eu) == []


def test_more_clusters_than_are_considered_are_said(server):
    with serving(environment={"MOORAGE_CANDIDATES_MAX": "2"}) as small:
        small.fill(*(cluster(f"c{number}", gpus=number + 1) for number in range(4)))
        every = small.ask(FIRST_FIT, filter=filtering(), resources={"gpus": 1})
        assert every["success"]
        assert every["warnings"] == ["Only the first 2 of 4 clusters found were considered."]
        none = small.ask(resources={"gpus": 1})
        assert none["warnings"] == [
            (
                "No clusters, filter or search was given:"
                " only the first 2 of 4 live clusters were considered."
            )
        ]
        alike = small.ask(search=ranking(like={"gpus": {"count": 8}}), resources={"gpus": 4})
        assert alike["data"]["cluster_id"] == "c3"


def test_documents_metrics_and_policies_of_other_services_are_searched_here(server):
    parts = ("CLUSTER_SERVICE_URL", "GLOBAL_CLUSTER_METRICS_URL", "POLICY_DB_URL")
    with daemon(environment=dict.fromkeys(parts, server.running.http)) as running:
        outpost = Server(running)
        free = simple("cluster.gpu.totalFreeMem", ">", "20")
        assert seen(outpost, filter=filtering(None, free)) == ["north", "south"]
        eu = filtering(simple("tags", "==", "eu"))
        search = ranking(CHEAPEST, filterRule=eu, **{"return": 1})
        assert seen(outpost, search=search) == ["north"]
        assert found(outpost, "/api/similarity-search", search) == ["north"]
        assert found(outpost, "/api/filter-data", filtering(None, free)) == ["north", "south"]
        unknown = outpost.ask(SEEN, search=ranking("none:1-x"))
        assert unknown["error"]["code"] == "unknown_policy"
        assert running.log.read_text() == ""
        outpost.close()


def test_the_interface_is_described(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    for path in (*ROUTES.values(), "/api/no-ir/filter", "/api/no-ir/similarity-search"):
        described = paths[path]["post"]
        assert "matchType" in described["requestBody"]["description"]
        assert described["tags"] == ["search"]
