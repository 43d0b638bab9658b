"""A shadow gets the requests of the active version; only the report shows its answers."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import Server, ask_message, cluster, policy, serving, until

from moorage.daemon.publishing.version_statistics import MANY

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

FIRST, LAST, RAISES, LIES, SLEEPS = (f"side:{n}-x" for n in range(1, 6))
PICKS = """
found = []
for cluster_id, cluster in input_data["cluster_data"].items():
    for node_id, free in cluster["capacity"].items():
        gpus = [g for g, milli in free["gpus"].items() if milli == 1000]
        if len(gpus) >= (input_data["resources"] or {{"gpus": 0}})["gpus"]:
            found.append((cluster_id, node_id, gpus))
cluster_id, node_id, gpus = sorted(found)[{0}]
gpus = gpus[:input_data["resources"]["gpus"]]
return {{"cluster_id": cluster_id, "node_id": node_id, "gpus": gpus}}
"""


@pytest.fixture(scope="module")
def harbour(tmp_path_factory) -> Iterator[Server]:
    settings = {"MOORAGE_POLICY_DEADLINE_SECONDS": "10"}
    with serving(tmp_path_factory.mktemp("shadows"), environment=settings) as server:
        server.register(cluster("east"))
        server.publish(
            policy(PICKS.format(0), FIRST),
            policy(PICKS.format(-1), LAST),
            policy("raise ValueError('no')", RAISES),
            policy('return {"cluster_id": "east", "node_id": "nowhere", "gpus": ["0"]}', LIES),
            policy("while True: pass", SLEEPS, deadline_seconds=0.5),
        )
        yield server


@pytest.fixture
def side(harbour) -> Iterator[Server]:
    post(harbour, "activate", FIRST)
    yield harbour
    for lease in harbour.leases:
        harbour.say({"op": "release", "lease": lease["id"], "token": lease["token"]})
    harbour.leases = []
    harbour.http.delete("/policy-alias/side")


def post(server: Server, action: str, uri: str) -> None:
    body = {"policy_rule_uri": uri}
    server.http.post(f"/policy-alias/side/{action}", json=body).raise_for_status()


def begin(server: Server, uri: str) -> None:
    """Start a shadow, and wait until its cell is ready, since earlier requests are dropped."""
    post(server, "shadow", uri)
    server.ask("side", resources={"gpus": 1})
    until(lambda: report(server)["compared"] + report(server)["dropped"] == 1)
    server.http.delete("/policy-alias/side/shadow").raise_for_status()
    post(server, "shadow", uri)


def report(server: Server) -> dict:
    return server.http.get("/policy-alias/side/shadow").json()["data"]


def wait_comparisons(server: Server, count: int) -> dict:
    """Return the report as soon as the given number of pairs was compared."""
    until(lambda: report(server)["compared"] + report(server)["dropped"] >= count)
    return report(server)


def lease(server: Server, gpus: int = 1) -> dict:
    reply = server.ask("side", resources={"gpus": gpus}, lease={"ttl_seconds": 60})
    assert reply["success"], reply
    server.leases.append(reply["lease"])
    return reply


def test_the_report_of_a_shadow_shows_a_difference_with_its_cost(side):
    """The active version chooses the used node, and the shadow an idle node."""
    lease(side)
    begin(side, LAST)
    reply = lease(side)
    found = wait_comparisons(side, 1)
    assert (found["asked"], found["same"], found["differ"], found["differ_alone"]) == (1, 0, 1, 1)
    (sample,) = found["samples"]
    assert (sample["request"], sample["alone"]) == (reply["request"], True)
    assert sample["active"]["placement"][0]["node_id"] == "east-0" == reply["data"]["node_id"]
    assert sample["candidate"]["placement"][0]["node_id"] == "east-1"
    active, candidate = found["active"], found["candidate"]
    assert active["latency_ms"]["p50"] > 0 < candidate["latency_ms"]["p50"]
    assert (active["nodes_opened"], candidate["nodes_opened"]) == (0, 1)
    assert (active["gpus_opened"], candidate["gpus_opened"]) == (1, 1)
    assert found["cost"] == {"refused": 0, "gpus_opened": 0, "nodes_opened": 1}


def test_inputs_of_a_shadow_are_checked_by_its_own_schemas(side):
    taken = "int(input_data['inputs']['take'])"
    body = PICKS.format(0).replace('gpus[:input_data["resources"]["gpus"]]', f"gpus[:{taken}]")
    schema = {"take": {"type": "number", "max": 2, "default": 1}}
    side.publish(policy(body, "side:6-schemas", policy_input_schema=schema))
    begin(side, "side:6-schemas")
    for inputs in ({}, {"take": 3}):
        assert side.ask("side", inputs=inputs, resources={"gpus": 1})["success"]
    found = wait_comparisons(side, 2)
    assert (found["asked"], found["same"], found["differ"]) == (2, 1, 1)
    (sample,) = found["samples"]
    assert sample["candidate"]["error"]["code"] == "bad_message"
    assert "inputs.take" in sample["candidate"]["error"]["reason"]


@pytest.mark.parametrize(
    ("candidate", "code"),
    [(RAISES, "policy_error"), (LIES, "policy_unsound"), (SLEEPS, "policy_timeout")],
)
def test_a_broken_shadow_changes_no_answer_and_is_reported(side, candidate, code):
    begin(side, candidate)
    replies = [lease(side) for _ in range(3)]
    assert {reply["policy_rule_uri"] for reply in replies} == {FIRST}
    found = wait_comparisons(side, 3)
    assert set(found["candidate"]["outcomes"]) == {code}
    assert found["cost"]["refused"] == found["compared"] > 0
    assert found["samples"][-1]["candidate"]["error"]["code"] == code
    assert side.http.get("/policy-alias/side").json()["data"]["policy_rule_uri"] == FIRST


def activate(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `moorage policy activate --no-test` with these arguments."""
    return server.moorage("policy", "activate", "--no-test", *arguments)


def test_a_version_that_failed_as_a_shadow_needs_force_to_be_activated(side):
    begin(side, RAISES)
    assert activate(side, RAISES).stdout == f"side:stable -> {RAISES}\n", "it has no failure yet"
    post(side, "activate", FIRST)
    begin(side, RAISES)
    for _ in range(3):
        lease(side)
    failed = wait_comparisons(side, 3)["compared"]
    refused = activate(side, RAISES)
    assert refused.returncode == 1
    assert f"{RAISES} fails as the shadow of side:stable: {failed} policy_error" in refused.stderr
    assert "--force" in refused.stderr
    assert side.http.get("/policy-alias/side").json()["data"]["policy_rule_uri"] == FIRST
    assert activate(side, RAISES, "--alias", "other").returncode == 0, "that alias has no shadow"
    side.http.delete("/policy-alias/side:other").raise_for_status()
    assert activate(side, RAISES, "--force").stdout == f"side:stable -> {RAISES}\n"


def test_a_shadow_that_declined_can_be_activated_without_force(side):
    side.publish(policy("return {'declined': True, 'why': None}", "side:8-no"))
    begin(side, "side:8-no")
    for _ in range(3):
        lease(side)
    found = wait_comparisons(side, 3)
    assert json.loads(found["samples"][-1]["candidate"]["data"]) == {"declined": True, "why": None}
    assert activate(side, "side:8-no").returncode == 0


def test_a_slow_shadow_delays_no_request_and_skipped_requests_are_counted(side):
    """The candidate has one cell and takes half a second; the active version is far quicker."""
    begin(side, SLEEPS)
    replies = side.say(*[ask_message("side", resources={"gpus": 1})] * 150)
    assert all(reply["success"] for reply in replies)
    found = report(side)
    assert found["asked"] <= 64 + found["compared"]
    assert found["dropped"] == 150 - found["asked"] > 0, "no request waited for the candidate"
    begin(side, LAST)
    assert report(side)["asked"] == 0, "the counts of another candidate start at 0"


def test_a_shadow_is_in_metrics_and_alias_until_it_ends(side):
    begin(side, LAST)
    for number in range(MANY):  # One by one, so that the candidate's cell is free for each.
        side.ask("side", resources={"gpus": 1})
        assert wait_comparisons(side, number + 1)["compared"] == number + 1
    text = side.http.get("/metrics").text
    assert f'moorage_shadow{{alias="side:stable",policy="{LAST}",what="differ"}} {MANY}.0' in text
    shown = side.http.get("/policy-alias/side").json()["data"]
    assert shown["shadow"] == LAST
    side.http.delete("/policy-alias/side/shadow").raise_for_status()
    assert side.http.get("/policy-alias/side/shadow").status_code == 404
    assert side.http.delete("/policy-alias/side/shadow").status_code == 404
    body = {"policy_rule_uri": FIRST}
    assert side.http.post("/policy-alias/side/shadow", json=body).status_code == 400


def test_a_shadow_under_load_counts_each_request_once(side):
    """Four sockets send, send again and leave; every request is in the report exactly once."""
    begin(side, LAST)

    def send(_: int) -> None:
        with side.socket() as socket:
            for number in range(50):
                socket.send(json.dumps(ask_message("side", resources={"gpus": 1}) | {"id": number}))
            for _ in range(40):
                socket.recv(30)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))

    def is_balanced() -> bool:
        found = report(side)
        return found["asked"] == found["compared"] + found["abandoned"] and found["compared"] > 0

    until(is_balanced)
    found = report(side)
    assert found["asked"] + found["dropped"] <= 4 * 50
