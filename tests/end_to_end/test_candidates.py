"""Tests of filter and search at a daemon: over the socket, and over HTTP."""

import json

import pytest
from served import FIRST_FIT, ask_message, cluster, policy, read_message, serving

from moorage_policies import catalog

pytestmark = pytest.mark.heavy

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
        assert server.log() == "", "the daemon logged a warning or an error"


def simple(variable, operator, value) -> dict:
    return {"variable": variable, "operator": operator, "value": value}


def filtering(query=None, metrics=None) -> dict:
    queries = {"clusterQuery": query, "clusterMetricsQuery": metrics}
    given = {name: each for name, each in queries.items() if each is not None}
    return {"matchType": "cluster", "filter": given}


def ranking(uri=None, settings=None, **parameters) -> dict:
    rank = {"policyRuleURI": uri, "settings": settings, "parameters": parameters}
    return {"matchType": "cluster", "rankingPolicyRule": rank}


SEARCH = "/api/similarity-search"
EU = filtering(simple("tags", "==", "eu"))


def envelope(body) -> dict:
    return {"header": {"templateUri": "x"}, "body": {"values": body}}


def candidates_seen(server, **more) -> list[str]:
    reply = server.ask(SEEN, **more)
    assert reply["success"], reply
    return reply["data"]["clusters"]


def search_ids(server, path, body) -> list[str]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
    assert all(document["nodes"] for document in answer.json()["data"])
    return [document["id"] for document in answer.json()["data"]]


BOTH = filtering(simple("gpus.count", ">", 2), simple("cluster.vcpu.load_5m", ">=", "1"))


def test_a_filter_finds_the_same_clusters_over_socket_and_http(server):
    for form in (BOTH, envelope(BOTH)):
        assert candidates_seen(server, filter=form) == ["east", "south"]
        assert search_ids(server, "/api/filter-data", form) == ["east", "south"]
        assert search_ids(server, "/api/no-ir/filter", form) == ["east", "south"]
    body = {"policy_rule_uri": SEEN, "inputs": {}, "filter": BOTH}
    answer = server.http.post("/allocate", json=body).json()
    assert answer["data"]["clusters"] == ["east", "south"]
    # The draining cluster is found, but is no candidate.
    assert search_ids(server, "/api/filter-data", filtering()) == sorted(DOCUMENTS)
    assert candidates_seen(server, filter=filtering()) == ["east", "north", "south", "west"]


def test_a_request_with_clusters_ignores_the_fields_filter_and_search(server):
    search = ranking(like="west", **{"return": 1})
    every = server.ask(SEEN, clusters=["west"], filter=EU, search=search)
    assert every["data"]["clusters"] == ["west"]
    assert every["warnings"] == [
        "filter was ignored: clusters was given and wins.",
        "search was ignored: clusters was given and wins.",
    ]
    two = server.ask(SEEN, filter=EU, search=search)
    assert two["data"]["clusters"] == ["east", "north"]
    assert two["warnings"] == ["search was ignored: filter was given and wins."]
    assert candidates_seen(server, filter={}, search=search) == ["south"]
    assert candidates_seen(server, filter=None, search={}, clusters=[]) == [
        "east",
        "north",
        "south",
        "west",
    ]


def test_without_candidates_no_policy_is_evaluated(server):
    none = filtering(simple("gpus.count", ">", 99))
    asleep = filtering(simple("id", "==", "zzz"))
    metrics = filtering(simple("gpus.count", ">", 1), simple("cluster.gpu.totalFreeMem", ">", 100))
    ranked = ranking(CHEAPEST, filterRule=none, give="bad")
    for field, body, reason in [
        ("filter", none, "no cluster"),
        ("filter", asleep, "none is live"),
        ("filter", metrics, "no cluster"),
        ("search", ranked, "no cluster"),
    ]:
        reply = server.ask(SEEN, **{field: body})
        assert reply["error"]["code"] == "unknown_clusters", reply
        assert reply["error"]["field"] == field
        assert reason in reply["message"]
    assert search_ids(server, "/api/filter-data", none) == []
    assert search_ids(server, SEARCH, ranked) == []


@pytest.mark.parametrize("wrap", [False, True])
def test_a_policy_ranks_the_clusters_that_the_filter_rule_finds(server, wrap):
    def search(*more, **parameters):
        body = ranking(CHEAPEST, *more, **parameters)
        if wrap:
            body["rankingPolicyRule"] = {"values": body["rankingPolicyRule"]}
        return envelope(body) if wrap else body

    # By default the highest comes first; the caller's parameters and settings override that.
    assert search_ids(server, SEARCH, search(filterRule=EU)) == ["north", "east", "zzz"]
    assert search_ids(server, SEARCH, search(filterRule=EU, highest=False)) == [
        "zzz",
        "east",
        "north",
    ]
    assert (
        search_ids(server, SEARCH, search({"by": "id"}, filterRule={})) == sorted(DOCUMENTS)[::-1]
    )
    for give in ("ids", ""):
        assert search_ids(server, SEARCH, search(**{"return": 2}, give=give)) == ["north", "east"]
    assert search_ids(server, SEARCH, search(give="one")) == ["north"]
    assert candidates_seen(server, search=search(filterRule=EU, **{"return": 1})) == ["north"]
    assert candidates_seen(server, search=search(highest=False, **{"return": 2})) == [
        "south",
        "west",
    ]


def test_too_many_documents_for_a_ranking_policy_are_refused_but_can_be_ranked_by_similarity(
    server,
):
    big = [cluster(f"big-{n}", status="draining", pad="x" * (9 << 20)) for n in range(2)]
    server.register(*big)
    answer = server.http.post(SEARCH, json=ranking(CHEAPEST)).json()
    assert answer["error"]["code"] == "too_large"
    assert "filterRule" in answer["message"]
    assert (
        len(search_ids(server, SEARCH, ranking(like={"gpus": {"count": 8}}, **{"return": 1}))) == 1
    )
    for each in big:
        server.http.delete(f"/clusters/{each['id']}").raise_for_status()


def test_the_order_of_a_search_is_the_order_of_the_candidates(server):
    server.publish(policy("return {'order': list(input_data['cluster_data'])}", "order:1.0-x"))
    order = ["north", "east", "west", "south"]
    for highest, expected in ((True, order), (False, order[::-1])):
        reply = server.ask("order:1.0-x", search=ranking(CHEAPEST, highest=highest))
        assert reply["data"] == {"order": expected}
    first = ranking(CHEAPEST, **{"return": 1})
    taken = server.ask(search=first, resources={"gpus": 1}, lease={"ttl_seconds": 60})["lease"]
    assert taken["placement"][0]["cluster_id"] == "north"
    server.leases = [taken]


OPERATOR = "filter.clusterQuery.operator"
RULE = "rankingPolicyRule.policyRuleURI"
BAD_AT = [
    ("filter", {"matchType": "vdag", "filter": {}}, "matchType", "unsupported"),
    ("filter", envelope(filtering(simple("a", "~", 1))), f"body.values.{OPERATOR}", "bad_message"),
    ("search", {"matchType": "cluster"}, "rankingPolicyRule", "bad_message"),
    ("search", envelope(ranking("none:1-x")), f"body.values.{RULE}", "unknown_policy"),
    ("search", ranking(CHEAPEST, give=["other"]), RULE, "policy_bad_output"),
    ("search", ranking(CHEAPEST, give={"error": "x"}), RULE, "policy_bad_output"),
    ("search", ranking(CHEAPEST, {"by": []}), RULE, "policy_error"),
]


@pytest.mark.parametrize(("field", "body", "place", "code"), BAD_AT, ids=lambda v: str(v)[:60])
def test_a_refusal_names_the_wrong_field(server, field, body, place, code):
    error = server.ask(SEEN, **{field: body})["error"]
    assert (error["code"], error["field"]) == (code, f"{field}.{place}")
    answer = server.http.post("/api/filter-data" if field == "filter" else SEARCH, json=body)
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    error = answer.json()["error"]
    assert (error["code"], error["field"]) == (code, place)


def test_a_ranking_policy_that_never_ends_delays_no_other_request(server):
    server.publish(policy("while True: pass", "endless:1.0-x"))
    with server.socket() as socket:
        socket.send(json.dumps(ask_message(SEEN, search=ranking("endless:1.0-x"))))
        assert candidates_seen(server, search=ranking(CHEAPEST, **{"return": 1})) == ["north"]
        assert read_message(socket)["error"]["code"] == "policy_timeout"


def test_clusters_beyond_the_limit_yield_a_warning():
    with serving(environment={"MOORAGE_CANDIDATES_MAX": "2"}) as small:
        small.fill(*(cluster(f"c{number}", gpus=number + 1) for number in range(4)))
        every = small.ask(FIRST_FIT, filter=filtering(), resources={"gpus": 1})
        assert every["warnings"] == ["Only the first 2 of 4 clusters found were considered."]
        (warning,) = small.ask(resources={"gpus": 1})["warnings"]
        assert warning.startswith("No clusters, filter or search was given: only the first 2 of 4")
        alike = small.ask(search=ranking(like={"gpus": {"count": 8}}), resources={"gpus": 4})
        assert alike["data"]["cluster_id"] == "c3"
