"""Sites with services of their own: one real daemon uses another's, and some that misbehave."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from served import FIRST_FIT, Server, ask_message, cluster, policy

from moorage.benchmarks.daemon_process import daemon
from moorage.lab.errors import CommandError
from moorage_policies import catalog

sys.path.insert(0, str(Path(__file__).parents[1] / "catalog"))  # Lets this test import `faulty`.

from faulty_service import (
    FaultyServiceInThread,
    answer,
    drip,
    flood,
    hang_up,
    nonsense,
    silence,
    stop_halfway,
)

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

FIRST_NODE = """
name, cluster = min(input_data["cluster_data"].items())
node, free = min(cluster["capacity"].items())
return {"cluster_id": name, "node_id": node, "gpus": sorted(free["gpus"])[:1]}
"""
LEASE = {"ttl_seconds": 600}
READS_METRICS = policy(
    "return {name: each['cluster_metrics'] and each['cluster_metrics']['cluster']"
    " for name, each in input_data['cluster_data'].items()}",
    "reads:1.0-metrics",
)
QUICK = {
    "MOORAGE_EXTERNAL_TIMEOUT_SECONDS": "0.5",
    "MOORAGE_METRICS_FRESH_SECONDS": "0",
    "MOORAGE_CLUSTER_REFRESH_SECONDS": "0.2",
    "MOORAGE_POLICY_FRESH_SECONDS": "0",
}
PARTS = ("CLUSTER_SERVICE_URL", "GLOBAL_CLUSTER_METRICS_URL", "POLICY_DB_URL")


def metrics(name: str, free: int = 5) -> dict:
    node = {"id": f"{name}-0", "gpu": {"totalFreeMem": free}}
    return {"clusterId": name, "nodes": [node]}


def fill(server: Server, *names: str) -> None:
    server.register(*(cluster(name) for name in names))
    for name in names:
        server.http.post("/cluster", json=metrics(name)).raise_for_status()


@contextlib.contextmanager
def serving(data=None, *, options=(), **environment):
    with daemon(data, options=options, environment=environment) as running:
        server = Server(running)
        try:
            yield server
        finally:
            server.close()


def until(ask, good):
    """Return the first good answer, which must come in time."""
    for _ in range(400):
        reply = ask()
        if good(reply):
            return reply
        time.sleep(0.05)  # The other side of a socket does not report when it has healed.
    raise AssertionError(reply)


def doubts(reply):
    """Return the warnings of a reply."""
    return reply.get("warnings", [])


# One real daemon uses another's services ---------------------------------------------------------


@pytest.fixture(scope="module")
def site():
    with serving() as site:
        fill(site, "east", "west")
        site.publish(catalog.document("first_fit"), READS_METRICS)
        yield site


@pytest.fixture(scope="module")
def outpost(site):
    with serving(**dict.fromkeys(PARTS, site.running.http), **QUICK) as outpost:
        yield outpost
        assert outpost.running.log.read_text() == ""


def test_leases_on_clusters_of_another_registry_by_policies_of_another_store(site, outpost):
    taken = set()
    for _ in range(8):
        reply = outpost.ask(clusters=["east"], resources={"gpus": 1}, lease=LEASE)
        assert reply["success"], reply
        (share,) = reply["lease"]["placement"]
        taken.add((share["node_id"], *share["gpus"]))
    assert len(taken) == 8
    full = outpost.ask(clusters=["east"], resources={"gpus": 1}, lease=LEASE)
    assert full["error"]["code"] == "no_capacity"
    # The two daemons share an inventory, not a ledger.
    assert site.ask(clusters=["east"], resources={"gpus": 1})["success"]


def test_metrics_of_another_service_reach_the_policy(outpost, site):
    reply = outpost.ask("reads:1.0-metrics", clusters=["west"])
    assert reply["data"] == {"west": {"gpu": {"totalFreeMem": 5}}}
    site.http.post("/cluster", json=metrics("west", 6)).raise_for_status()
    reply = outpost.ask("reads:1.0-metrics", clusters=["west"])
    assert reply["data"] == {"west": {"gpu": {"totalFreeMem": 6}}}
    assert "warnings" not in reply


def test_what_is_new_there_can_be_asked_for_here_at_once(outpost, site):
    fill(site, "new")
    site.publish(policy("return {'cluster_id': 'new'}", "new:1.0-x"))
    asked = {"clusters": ["new", "none", "../x"], "lease": LEASE, "resources": {"gpus": 1}}
    reply = outpost.ask("new:1.0-x", **asked)
    assert reply["lease"]["placement"][0]["cluster_id"] == "new"
    # A policy and a cluster never seen take both requests: the metrics come with the next ask.
    of_metrics, of_clusters = reply["warnings"]
    assert of_metrics.startswith("The metrics of 1 clusters were not read and are null: new.")
    assert "at most 2 requests" in of_metrics
    assert of_clusters == "Unknown clusters were left out: none, ../x."
    site.http.delete("/clusters/new").raise_for_status()
    gone = until(lambda: outpost.ask(FIRST_FIT, clusters=["new"]), lambda r: not r["success"])
    assert gone["error"]["code"] == "unknown_clusters"


def test_a_policy_that_is_not_there_and_one_that_does_not_load(outpost, site):
    unknown = outpost.ask("nobody:1.0-x")
    assert unknown["error"]["code"] == "unknown_policy"
    assert site.running.http in unknown["message"]
    twin = outpost.http.post("/allocate", json=ask_message("nobody:1.0-x"))
    assert (twin.status_code, twin.json()["error"]["code"]) == (500, "unknown_policy")
    (managed,) = outpost.say(
        {"op": "manage", "policy_rule_uri": "nobody:1.0-x", "action": "x", "data": {}}
    )
    assert managed["error"]["code"] == "unknown_policy"


def test_writing_is_for_the_service_that_keeps_it(outpost, site):
    for path, body in (
        ("/clusters", cluster("x")),
        ("/cluster", metrics("x")),
        ("/policy", catalog.document("best_fit")),
    ):
        refused = outpost.http.post(path, json=body)
        assert refused.status_code == 400
        assert site.running.http in refused.text
    assert [each["id"] for each in outpost.http.get("/clusters/east").json()["nodes"]["nodeData"]]


# Death and return ---------------------------------------------------------------------------------


def test_a_site_is_killed_and_comes_back(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    site_at = {"data": tmp_path / "site", "options": ["--http-port", str(port)]}
    external = dict.fromkeys(PARTS, f"http://127.0.0.1:{port}")
    with serving(tmp_path / "here", **external, **QUICK) as here:
        assert here.ask(lease=LEASE)["error"]["code"] == "unavailable"

        # The trial ends where its daemon is killed, so the kill is the last of several statements.
        with pytest.raises(CommandError, match="-9"), serving(**site_at) as site:  # noqa: PT012  # As said.
            fill(site, "east")
            site.publish(catalog.document("first_fit"), READS_METRICS)
            asked = {"resources": {"gpus": 1}, "lease": LEASE}
            kept = until(lambda: here.ask(**asked), lambda reply: reply["success"])["lease"]
            until(lambda: here.ask("reads:1.0-metrics"), lambda reply: not doubts(reply))
            os.kill(site.running.pid, signal.SIGKILL)

        # Known clusters and policies are served, with warnings; metrics are null.
        reply = until(lambda: here.ask("reads:1.0-metrics"), lambda reply: len(doubts(reply)) == 3)
        assert reply["data"] == {"east": None}
        of_policy, of_clusters, of_metrics = doubts(reply)
        assert of_policy.startswith(f"The policy store at http://127.0.0.1:{port} ")
        assert of_clusters.startswith(f"The cluster registry at http://127.0.0.1:{port} ")
        assert of_metrics.startswith("The metrics of 1 clusters could not be read and are null")
        stranger = here.ask(clusters=["stranger"])
        assert stranger["error"]["code"] == "unavailable"
        assert stranger["error"]["service"] == "cluster registry"
        assert here.ask("other:1.0-x")["error"]["code"] == "unavailable"

        with serving(**site_at):
            until(
                lambda: here.ask("reads:1.0-metrics"),
                lambda reply: (
                    not doubts(reply) and reply["data"] == {"east": {"gpu": {"totalFreeMem": 5}}}
                ),
            )
        renewed = here.say({"op": "renew", "lease": kept["id"], "token": kept["token"]})[0]
        assert renewed["success"]
        assert here.running.log.read_text() == ""


def test_a_restart_without_the_registry_forgets_no_lease_and_no_cluster(tmp_path):
    with serving() as site:
        fill(site, "east")
        site.publish(catalog.document("first_fit"))
        external = {PARTS[0]: site.running.http}
        with serving(tmp_path, **external, **QUICK) as here:
            here.publish(catalog.document("first_fit"))
            kept = here.ask(resources={"gpus": 1}, lease=LEASE)["lease"]
    with serving(tmp_path, **external, **QUICK) as here:
        refused = here.ask(resources={"gpus": 1}, lease=LEASE)
        assert refused["error"]["code"] == "unavailable"
        assert refused["error"]["url"] == external[PARTS[0]]
        (found,) = here.say({"op": "leases"})[0]["data"]["leases"]
        assert found["id"] == kept["id"]
        (row,) = here.say({"op": "fleet"})[0]["data"]["clusters"]
        assert row["gpu_milli_total"] - row["gpu_milli_free"] == 1000
        assert here.running.log.read_text() == ""


# Services that misbehave -------------------------------------------------------------------------


def truth(names):
    """Answer as the registry, the metrics service and the search service of a small site."""

    async def behave(asked, writer):
        if asked.path == "/clusters/query":
            wanted = asked.body["query"].get("id", {}).get("$in", names)
            await answer([cluster(n, nodes=1) for n in wanted if n in names])(asked, writer)
        elif asked.path == "/cluster/query":
            wanted = asked.body["clusterId"]["$in"]
            found = [metrics(name) for name in wanted if name in names]
            await answer({"success": True, "data": found})(asked, writer)
        elif asked.path.startswith("/policy/"):
            uri = asked.path.removeprefix("/policy/")
            document = READS_METRICS | {"policy_rule_uri": uri}
            await answer({"success": True, "data": document})(asked, writer)
        else:
            await answer({"success": True, "data": [{"id": names[-1]}]})(asked, writer)

    return behave


def test_two_requests_for_any_number_of_candidates_and_none_for_the_next(tmp_path):
    names = [f"c{number:03}" for number in range(200)]
    with FaultyServiceInThread() as faulty:
        faulty.behave = truth(names)
        slow = {"MOORAGE_METRICS_FRESH_SECONDS": "600", "MOORAGE_CLUSTER_REFRESH_SECONDS": "600"}
        services = (*PARTS, "SEARCH_SERVER_API_URL")
        with serving(**dict.fromkeys(services, faulty.url), **slow) as here:
            faulty.asked.clear()
            assert len(here.ask("reads:1.0-metrics", clusters=names)["data"]) == 200
            assert [each.path for each in faulty.asked] == [
                "/policy/reads:1.0-metrics",
                "/cluster/query",
            ]
            faulty.asked.clear()
            assert len(here.ask("reads:1.0-metrics")["data"]) == 200
            assert faulty.asked == []
            for action in ("filter", "search"):
                found = here.ask("reads:1.0-metrics", **{action: {"matchType": "cluster"}})
                assert list(found["data"]) == [names[-1]]
            assert [each.path for each in faulty.asked] == [
                "/api/no-ir/filter",
                "/api/no-ir/similarity-search",
            ]


@pytest.mark.parametrize(("status", "code"), [(404, "unavailable"), (400, "bad_message")])
def test_a_search_service_without_the_endpoint_is_no_fault_of_the_body(status, code):
    with FaultyServiceInThread() as faulty:
        faulty.behave = answer({"success": False, "message": "no such thing"}, status)
        with serving(SEARCH_SERVER_API_URL=faulty.url) as here:
            here.register(cluster("east"))
            here.publish(policy(FIRST_NODE, "first:1-x"))
            found = here.ask("first:1-x", filter={"matchType": "cluster", "filter": {}})
            assert found["error"]["code"] == code
            assert "no such thing" in found["message"]


def test_the_examples_of_a_mirrored_policy_run_and_what_fails_is_said_with_each_answer(tmp_path):
    examples = [
        {"name": "one", "request": {"resources": {"gpus": 1}}},
        {"name": "the second node", "request": {}, "output": {"node_id": "node-2"}},
    ]
    documents = {
        "fails:1-x": policy(FIRST_NODE, "fails:1-x", metadata={"examples": examples}),
        "passes:1-x": policy(FIRST_NODE, "passes:1-x", metadata={"examples": examples[:1]}),
        "other:1-x": policy(FIRST_NODE, "other:1-x", metadata={"examples": "see the wiki"}),
    }

    async def store(asked, writer):
        found = documents[asked.path.removeprefix("/policy/")]
        await answer({"success": True, "data": found})(asked, writer)

    with FaultyServiceInThread() as faulty:
        faulty.behave = store
        with serving(POLICY_DB_URL=faulty.url) as here, here.socket() as socket:
            here.register(cluster("east"))
            socket.send(json.dumps({"op": "watch", "topics": ["policies"]}))
            assert json.loads(socket.recv(30))["success"]
            for uri in documents:
                assert here.ask(uri, clusters=["east"])["data"]["cluster_id"] == "east"
            news = json.loads(socket.recv(30))
            assert (news["event"], news["data"]["policy_rule_uri"]) == (
                "examples_failed",
                "fails:1-x",
            )
            assert "metadata.examples[1] “the second node” fails" in news["data"]["reason"]
            reply = here.ask("fails:1-x", clusters=["east"])
            assert reply["success"], "other servers rely on it"
            (warning,) = reply["warnings"]
            assert "which fails its own examples: metadata.examples[1]" in warning
            for uri in ("passes:1-x", "other:1-x"):
                assert "warnings" not in here.ask(uri, clusters=["east"])


NEVER_OLD = {
    "MOORAGE_METRICS_FRESH_SECONDS": "3600",
    "MOORAGE_POLICY_FRESH_SECONDS": "3600",
    "MOORAGE_CLUSTER_REFRESH_SECONDS": "3600",
}
ALWAYS_OLD = NEVER_OLD | {
    "MOORAGE_METRICS_FRESH_SECONDS": "0",
    "MOORAGE_POLICY_FRESH_SECONDS": "0",
}


@pytest.mark.parametrize("age", [NEVER_OLD, ALWAYS_OLD], ids=["never old", "always old"])
@pytest.mark.parametrize("search", [True, False], ids=["search too", "search here"])
def test_no_ask_makes_more_than_two_requests(age, search):
    names = [f"c{number:03}" for number in range(50)]
    with FaultyServiceInThread() as faulty:
        faulty.behave = truth(names)
        services = (*PARTS, "SEARCH_SERVER_API_URL") if search else PARTS
        with serving(**dict.fromkeys(services, faulty.url), **age) as here:
            policies, late = iter(range(1000)), iter(range(1000))

            def candidates(kind):
                """Return what names the candidates; new clusters are ones that came just now."""
                if kind == "new":
                    fresh = [f"late{next(late)}" for _ in range(20)]
                    names.extend(fresh)
                    return {"clusters": [*names[:5], *fresh]}
                like = {"parameters": {"like": {"gpus": {"count": 4}}}}
                bodies = {"filter": {"filter": {}}, "search": {"rankingPolicyRule": like}}
                return {kind: {"matchType": "cluster", **bodies[kind]}} if kind in bodies else {}

            for kind in ("all", "new", "filter", "search"):
                new_policy = f"reads:1.{next(policies)}-metrics"
                for uri in (new_policy, new_policy, new_policy):
                    asked = candidates(kind)
                    before = len(faulty.asked)
                    reply = here.ask(uri, **asked)
                    requests = faulty.asked[before:]
                    assert reply["success"], reply
                    assert len(requests) <= 2, [each.path for each in requests]
                    unread = [each for each in reply.get("warnings", []) if "not read" in each]
                    # Whatever was not read is said.
                    assert bool(unread) == (None in reply["data"].values())
                if age is NEVER_OLD and kind != "new":
                    assert not unread


def test_a_policy_in_use_is_read_again_in_the_background_and_costs_no_ask(tmp_path):
    with FaultyServiceInThread() as faulty:
        faulty.behave = truth(["east"])
        age = NEVER_OLD | {"MOORAGE_POLICY_FRESH_SECONDS": "4"}
        with serving(**dict.fromkeys(PARTS, faulty.url), **age) as here:

            def read():
                return faulty.count("/policy/")

            assert here.ask("reads:1.0-metrics")["success"]
            assert read() == 1
            for times in (1, 2, 3):
                assert here.ask("reads:1.0-metrics")["success"]
                assert read() == times  # It was read just now, and that costs no ask,
                until(read, lambda count, times=times: count == times + 1)  # nor does it need one.


LIES = {
    "silent": silence,
    "dripping": drip,
    "hanging up": hang_up,
    "half closed": stop_halfway,
    "flooding": flood,
    "no HTTP": nonsense,
    "HTML": answer("<html></html>"),
    "500": answer("", 500),
    "elsewhere": answer("", 302, location="http://169.254.169.254/"),
    "success false": answer({"success": False, "message": "no"}),
    "inner error": answer({"success": True, "data": [False, "no"]}),
    "numbers": answer([1, 2, 3]),
    "other ids": answer({"success": True, "data": [metrics("stranger")]}),
    "deep": answer("[" * 100_000 + "]" * 100_000),  # Python 3.13 still reads 5,000.
    "not a number": answer('[{"id": "east", "clusterId": "east", "cluster": {"a": NaN}}]'),
    "digits": answer('[{"id": "east", "clusterId": "east", "v": ' + "9" * 5_000 + "}]"),
    "half a character": answer('[{"id": "\\ud800"}]'),
    "success as text": answer({"success": "true", "data": []}),
    "packed": answer("x", content_encoding="gzip"),
    "in circles": answer("", 307, location="/cluster/query"),
    "a wrong length": answer("[]", content_length="-1"),
    "a header too long": answer([], x_long="a" * 200_000),
    "as before": answer("", 304),
}


@pytest.fixture(scope="module")
def lied_to():
    """A daemon whose registry is honest, and whose other services are a liar's."""
    with FaultyServiceInThread() as faulty, FaultyServiceInThread() as registry:
        registry.behave = truth(["east"])
        urls = {PARTS[0]: registry.url, PARTS[1]: faulty.url, "SEARCH_SERVER_API_URL": faulty.url}
        with serving(**urls, **QUICK) as here:
            here.publish(READS_METRICS)
            yield here, faulty
            assert here.running.log.read_text() == ""


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_costs_more_than_its_part_of_the_answer(lied_to, lie):
    here, faulty = lied_to
    faulty.behave = truth(["east"])
    honest = {"east": {"gpu": {"totalFreeMem": 5}}}
    until(lambda: here.ask("reads:1.0-metrics"), lambda r: r["data"] == honest)
    faulty.behave = LIES[lie]
    reply = here.ask("reads:1.0-metrics")
    assert reply["success"], reply
    assert reply["data"] == {"east": None}
    if lie not in {
        "other ids",
        "numbers",
        "half a character",
        "digits",
    }:  # Nothing is known of it there: that is no failure.
        assert "are null: east" in reply["warnings"][0]
    found = here.ask("reads:1.0-metrics", filter={"matchType": "cluster"})
    assert not found["success"]
    assert found["error"]["code"] in {"unavailable", "bad_message", "unknown_clusters"}


@pytest.mark.parametrize("part", [PARTS[0], PARTS[2]])
def test_a_registry_or_a_store_that_lies_gets_every_ask_a_reply(part):
    with FaultyServiceInThread() as faulty, serving(**{part: faulty.url}, **QUICK) as here:
        if part == PARTS[0]:
            here.publish(catalog.document("first_fit"))
        else:
            here.register(cluster("east"))
        for lie, behave in {**LIES, "twins": answer([cluster("east")] * 3)}.items():
            faulty.behave = behave
            for named in ({}, {"clusters": ["east"]}, {"clusters": ["late"]}):
                reply = here.ask(resources={"gpus": 1}, **named)
                assert reply["success"] or reply["error"]["code"] != "internal", (lie, reply)
                assert reply["success"] or reply["message"], lie
        assert here.running.log.read_text() == ""


def test_replies_stay_in_order_where_some_have_to_wait(lied_to):
    here, faulty = lied_to
    faulty.behave = truth(["east"])
    until(lambda: here.ask("reads:1.0-metrics"), lambda r: not doubts(r))
    with here.socket() as client:
        for number in range(20):
            uri = "reads:1.0-metrics" if number % 2 else f"none:1.0-x{number}"
            client.send(json.dumps(ask_message(uri)))
        verdicts = [json.loads(client.recv(30))["success"] for _ in range(20)]
    assert verdicts == [False, True] * 10
