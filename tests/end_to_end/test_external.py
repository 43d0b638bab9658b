"""Tests of a daemon that uses services of another daemon, and services that misbehave."""

import sys
import time
from pathlib import Path

import pytest
import served
from served import Server, cluster, kill, policy, read_message, serve_and_kill

from moorage_policies import catalog
from tests.ports import free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "catalog"))  # Lets this test import `faulty`.

from faulty_service import FaultyServiceInThread, answer, drip, flood, silence

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


def serving(data=None, *, options=(), **environment):
    return served.serving(data, options=options, environment=environment)


def until(ask, good):
    """Return the first successful answer, within the time limit."""
    for _ in range(400):
        reply = ask()
        if good(reply):
            return reply
        time.sleep(0.05)  # No event reports that the other side works again.
    raise AssertionError(reply)


def doubts(reply):
    """Return the warnings of a reply."""
    return reply.get("warnings", [])


# One real daemon uses another's services ---------------------------------------------------------


def test_a_daemon_survives_a_kill_of_the_site_whose_services_it_uses(tmp_path):
    port = free_port()
    site_at = {"data": tmp_path / "site", "options": ["--http-port", str(port)]}
    external = dict.fromkeys(PARTS, f"http://127.0.0.1:{port}")
    one = {"resources": {"gpus": 1}, "lease": LEASE}
    with serving(tmp_path / "here", **external, **QUICK) as here:
        assert here.ask(lease=LEASE)["error"]["code"] == "unavailable"
        with serve_and_kill(**site_at) as site:
            fill(site, "east")
            site.publish(catalog.document("first_fit"), READS_METRICS)
            held = [until(lambda: here.ask(**one), lambda reply: reply["success"])["lease"]]
            held += [here.ask(**one)["lease"] for _ in range(7)]
            places = {(s["node_id"], *s["gpus"]) for each in held for s in each["placement"]}
            assert len(places) == 8
            assert here.ask(**one)["error"]["code"] == "no_capacity"
            assert site.ask(**one)["success"], "the daemons share an inventory, not a ledger"
            for free_mib in (5, 6):
                site.http.post("/cluster", json=metrics("east", free_mib)).raise_for_status()
                reply = until(lambda: here.ask("reads:1.0-metrics"), lambda r: not doubts(r))
                assert reply["data"] == {"east": {"gpu": {"totalFreeMem": free_mib}}}
            kill(site)

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
            reply = until(lambda: here.ask("reads:1.0-metrics"), lambda reply: not doubts(reply))
            assert reply["data"] == {"east": {"gpu": {"totalFreeMem": 6}}}
        renew = {"op": "renew", "lease": held[0]["id"], "token": held[0]["token"]}
        assert here.say(renew)[0]["success"]
        assert here.log() == ""


def test_a_restart_without_the_registry_loses_no_lease_and_no_cluster(tmp_path):
    with serving() as site:
        fill(site, "east")
        site.publish(catalog.document("first_fit"))
        external = {PARTS[0]: site.running.http}
        with serving(tmp_path, **external, **QUICK) as here:
            here.publish(catalog.document("first_fit"))
            held = here.ask(resources={"gpus": 1}, lease=LEASE)["lease"]
    with serving(tmp_path, **external, **QUICK) as here:
        refused = here.ask(resources={"gpus": 1}, lease=LEASE)
        assert refused["error"]["code"] == "unavailable"
        assert refused["error"]["url"] == external[PARTS[0]]
        (found,) = here.say({"op": "leases"})[0]["data"]["leases"]
        assert found["id"] == held["id"]
        (row,) = here.say({"op": "fleet"})[0]["data"]["clusters"]
        assert row["gpu_milli_total"] - row["gpu_milli_free"] == 1000
        assert here.log() == ""


# Services that misbehave -------------------------------------------------------------------------


def test_answers_warn_of_failing_examples_of_a_mirrored_policy():
    examples = [
        {"name": "one", "request": {"resources": {"gpus": 1}}},
        {"name": "the second node", "request": {}, "output": {"node_id": "node-2"}},
    ]
    document = policy(FIRST_NODE, "fails:1-x", metadata={"examples": examples})
    with FaultyServiceInThread() as faulty, serving(POLICY_DB_URL=faulty.url) as here:
        faulty.behave = answer({"success": True, "data": document})
        here.register(cluster("east"))
        with here.watching("policies") as news:
            assert here.ask("fails:1-x", clusters=["east"])["data"]["cluster_id"] == "east"
            said = read_message(news)
        assert (said["event"], said["data"]["policy_rule_uri"]) == ("examples_failed", "fails:1-x")
        assert "metadata.examples[1] “the second node” fails" in said["data"]["reason"]
        reply = here.ask("fails:1-x", clusters=["east"])
        assert reply["success"], "other servers use this policy, too"
        (warning,) = reply["warnings"]
        assert "which fails its own examples: metadata.examples[1]" in warning


# `tests/catalog/mirrored` has more wrong answers.
LIES = {
    "silent": silence,
    "dripping": drip,
    "flooding": flood,
    "500": answer("", 500),
    "numbers": answer([1, 2, 3]),
    "other ids": answer({"success": True, "data": [metrics("stranger")]}),
    "deep": answer("[" * 100_000 + "]" * 100_000),  # Python 3.13 still reads 5,000 levels.
    "not a number": answer('[{"id": "east", "clusterId": "east", "cluster": {"a": NaN}}]'),
    "digits": answer('[{"id": "east", "clusterId": "east", "v": ' + "9" * 5_000 + "}]"),
    "half a character": answer('[{"id": "\\ud800"}]'),
    "success as text": answer({"success": "true", "data": []}),
    "a wrong length": answer("[]", content_length="-1"),
    "a header too long": answer([], x_long="a" * 200_000),
    "as before": answer("", 304),
}


@pytest.mark.parametrize("part", [PARTS[0], PARTS[2]])
def test_each_request_gets_a_reply_although_the_registry_or_the_store_lies(part):
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
        assert here.log() == ""
