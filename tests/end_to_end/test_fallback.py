"""The last good version replaces a version that fails repeatedly, durably, and with news."""

from collections.abc import Iterator

import pytest
from served import Server, ask_message, cluster, policy, read_message, serving, tell, until

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

PLACES = 'return {"cluster_id": "east", "node_id": "east-0"}'
GOOD, ALSO_GOOD = "steady:1-a", "steady:2-b"
RAISES, OVERRUNS, LIES = "steady:3-raises", "steady:4-overruns", "steady:5-lies"
FAILURES = 4
REQUESTS_MAX = 40
FAILS_ON_DEMAND = f"if input_data['inputs'].get('fail'): raise ValueError('so said')\n{PLACES}"
SETTINGS = {
    "MOORAGE_TOKENS": "one:alpha,two:beta",
    "MOORAGE_OPERATORS": "one",
    "MOORAGE_POLICY_FALLBACK_FAILURES": str(FAILURES),
    "MOORAGE_POLICY_DEADLINE_SECONDS": "10",
}
BAD = {
    RAISES: "raise ValueError('no')",
    OVERRUNS: "while True: pass",
    LIES: 'return {"cluster_id": "east", "node_id": "nowhere"}',
}
QUICK = {OVERRUNS: {"deadline_seconds": 0.2}}


@pytest.fixture(scope="module")
def harbour() -> Iterator[Server]:
    with serving(environment=SETTINGS, bearer="alpha") as server:
        server.register(cluster("east"))
        server.publish(policy(PLACES, GOOD), policy(PLACES, ALSO_GOOD))
        server.publish(*(policy(body, uri, **QUICK.get(uri, {})) for uri, body in BAD.items()))
        yield server


@pytest.fixture
def steady(harbour) -> Iterator[Server]:
    """An alias that has had two good versions."""
    for uri in (GOOD, ALSO_GOOD):
        activate(harbour, uri)
        assert harbour.ask("steady", resources={})["policy_rule_uri"] == uri
    yield harbour
    harbour.http.delete("/policy-alias/steady")


def activate(server: Server, uri: str, alias: str = "steady") -> None:
    body = {"policy_rule_uri": uri}
    server.http.post(f"/policy-alias/{alias}/activate", json=body).raise_for_status()


def active(server: Server, alias: str = "steady") -> str:
    return server.http.get(f"/policy-alias/{alias}").json()["data"]["policy_rule_uri"]


def fail(server: Server, times: int, alias: str = "steady") -> None:
    for _ in range(times):
        assert not server.ask(alias, resources={})["success"]


@pytest.mark.parametrize("bad", [RAISES, OVERRUNS, LIES])
def test_after_some_failures_in_a_row_the_alias_points_at_the_last_good_version(steady, bad):
    activate(steady, bad)
    fail(steady, FAILURES - 1)
    assert active(steady) == bad
    fail(steady, 1)
    until(lambda: active(steady) == ALSO_GOOD)
    assert steady.ask("steady", resources={})["policy_rule_uri"] == ALSO_GOOD
    change = steady.http.get("/policy-alias/steady").json()["data"]["history"][-1]
    assert (change["what"], change["who"]) == ("fell_back", "moored")
    assert change["former_standing"] == "failing"
    assert f"{FAILURES} requests in a row failed with {bad}" in change["reason"]
    assert "of the only tenant that used it" in change["reason"]
    rolled_back = steady.http.post("/policy-alias/steady/rollback")
    assert rolled_back.status_code == 409
    assert f"fell back from {bad}" in rolled_back.json()["message"]
    assert active(steady) == ALSO_GOOD


def test_the_start_of_a_canary_does_not_forget_the_failures_of_the_active_version(steady):
    activate(steady, RAISES)
    fail(steady, FAILURES - 1)
    few = {"policy_rule_uri": GOOD, "percent": 0.01, "by": "tenant"}  # No request of this tenant.
    steady.http.post("/policy-alias/steady/canary", json=few).raise_for_status()
    report = steady.http.get("/policy-alias/steady/canary").json()["data"]["active"]
    assert (report["asked"], report["consecutive_faults"]) == (0, FAILURES - 1)
    fail(steady, 1)
    until(lambda: active(steady) == ALSO_GOOD)
    change = steady.http.get("/policy-alias/steady").json()["data"]["history"][-1]
    assert change["what"] == "fell_back"
    assert f"{FAILURES} requests in a row failed with {RAISES}" in change["reason"]


def test_a_version_stays_good_when_a_canary_starts(steady):
    canary = {"policy_rule_uri": GOOD, "percent": 0.01, "by": "tenant"}
    steady.http.post("/policy-alias/steady/canary", json=canary).raise_for_status()
    activate(steady, RAISES)
    change = steady.http.get("/policy-alias/steady").json()["data"]["history"][-1]
    assert (change["former"], change["former_standing"]) == (ALSO_GOOD, "good")


def test_after_a_good_answer_the_reason_of_the_last_fault_stays_known(steady):
    hasty = "steady:7-hasty"
    steady.publish(policy(FAILS_ON_DEMAND, hasty))
    activate(steady, hasty)
    bad = ask_message("steady", inputs={"fail": True})
    replies = steady.say(*[bad] * FAILURES, ask_message("steady"), ask_message("steady"))
    assert [reply["success"] for reply in replies] == [False] * FAILURES + [True, True]
    until(lambda: active(steady) == ALSO_GOOD)
    reason = steady.http.get("/policy-alias/steady").json()["data"]["history"][-1]["reason"]
    said = (
        f"{FAILURES} requests in a row failed with {hasty} ({FAILURES} policy_error), of the only"
    )
    assert reason.startswith(said), reason


def test_tenants_see_only_their_own_leases_and_affect_no_alias_of_other_tenants(harbour):
    picky = "picky:2-b"
    harbour.publish(policy(PLACES, "picky:1-a"), policy(FAILS_ON_DEMAND, picky))
    activate(harbour, "picky:1-a", "picky")

    def ask(who: str, *, fail: bool, times: int = 1) -> None:
        for _ in range(times):
            harbour.say(ask_message("picky", inputs={"fail": fail}), bearer=who)

    with harbour.watching("leases", bearer="beta") as news:
        for who in ("alpha", "beta"):
            harbour.say(ask_message(GOOD, lease={"ttl_seconds": 600}), bearer=who)
        assert read_message(news)["data"]["tenant"] == "two"
    with harbour.watching("policies", bearer="beta") as news:
        ask("alpha", fail=False)
        activate(harbour, picky, "picky")
        assert read_message(news)["event"] == "activated"
        ask("beta", fail=False)
        ask("alpha", fail=True, times=2 * FAILURES)
        stays = read_message(news)
        assert active(harbour, "picky") == picky
        ask("beta", fail=True)
        falls = read_message(news)
    assert (stays["event"], falls["event"]) == ("no_fallback", "fell_back")
    assert stays["data"]["finding"] == "it fails, but not for all tenants that use it"
    assert "of 1 of the 2 tenants that used it" in stays["data"]["reason"]
    assert "of all 2 tenants that used it" in falls["data"]["reason"]
    assert active(harbour, "picky") == "picky:1-a"


def test_without_a_fallback_a_failing_version_stays_active_and_the_failure_is_reported(harbour):
    with harbour.watching("policies") as news:
        harbour.publish(policy("raise ValueError('no')", "lone:1-x"))
        activate(harbour, "lone:1-x", "lone")
        activated = read_message(news)
        for _ in range(FAILURES):
            harbour.ask("lone")
        nothing = read_message(news)
    assert (activated["topic"], activated["event"]) == ("policies", "activated")
    assert (nothing["event"], nothing["data"]["policy_rule_uri"]) == ("no_fallback", "lone:1-x")
    assert active(harbour, "lone") == "lone:1-x"
    harbour.http.delete("/policy-alias/lone")


def test_other_code_under_the_uri_of_a_good_version_does_not_take_over(harbour):
    first, second, bad = "urn:1-a", "urn:2-b", "urn:3-bad"
    harbour.publish(policy(PLACES, first), policy(PLACES, second), policy(BAD[RAISES], bad))
    for uri in (first, second, bad):
        activate(harbour, uri, "urn")
        assert harbour.ask("urn", resources={})["success"] is (uri != bad)
    harbour.http.delete(f"/policy/{second}", params={"force": "true"}).raise_for_status()
    harbour.publish(policy(f"print('never tried')\n{PLACES}", second))
    fail(harbour, FAILURES - 1, "urn")
    until(lambda: active(harbour, "urn") == first)

    activate(harbour, bad, "urn")
    harbour.http.delete(f"/policy/{first}", params={"force": "true"}).raise_for_status()
    with harbour.watching("policies") as news:
        fail(harbour, FAILURES, "urn")
        nothing = read_message(news)
    assert nothing["event"] == "no_fallback"
    assert f"{first} cannot take over: no policy" in nothing["data"]["finding"]
    assert active(harbour, "urn") == bad
    harbour.http.delete("/policy-alias/urn")


def test_a_failing_canary_is_ended(steady):
    body = {"policy_rule_uri": RAISES, "percent": 100}
    steady.http.post("/policy-alias/steady/canary", json=body).raise_for_status()
    fail(steady, FAILURES)
    until(lambda: steady.ask("steady", resources={})["success"])
    shown = steady.http.get("/policy-alias/steady").json()["data"]
    assert (shown["canary"], shown["policy_rule_uri"]) == (None, ALSO_GOOD)
    assert shown["history"][-1]["who"] == "moored"


def test_metrics_count_changes_and_faults(steady):
    activate(steady, RAISES)
    fail(steady, 1)
    text = steady.http.get("/metrics").text
    assert f'moorage_alias{{alias="steady:stable",policy="{RAISES}",what="faults"}} 1.0' in text
    counted = [line for line in text.splitlines() if line.startswith("moorage_policy_changes_")]
    assert any('what="activated"' in line for line in counted)
    assert 'moorage_watchers{topic="policies"} 0.0' in text


def test_a_version_that_overruns_repeatedly_is_paused_until_activation(harbour):
    uri = "rests:1-loop"
    harbour.publish(policy("while True: pass", uri, deadline_seconds=0.2))
    with harbour.watching("policies") as watching:
        errors = [harbour.ask(uri)["error"]]
        while errors[-1]["code"] != "busy" and len(errors) < REQUESTS_MAX:
            errors.append(harbour.ask(uri)["error"])
        error = errors[-1]
        assert f"{uri} is not called for another" in error["reason"]
        assert error["retry_after_seconds"] > 0
        news = read_message(watching)
        assert (news["topic"], news["event"]) == ("policies", "rests")
        assert news["data"]["policy_rule_uri"] == uri
        assert set(news["data"]) == {"policy_rule_uri", "overruns", "seconds"}
    text = harbour.http.get("/metrics").text
    assert 'moorage_sandbox{what="circuits_opened"}' in text
    assert "moorage_policies_circuit_open" in text
    activate(harbour, uri, "rests")
    assert harbour.http.get(f"/policy/{uri}/logs").json()["data"]["rests"] is None
    assert harbour.ask(uri)["error"]["code"] == "policy_timeout"
    harbour.http.delete("/policy-alias/rests")


def test_news_of_policies_leases_and_fleet_come_in_order(steady):
    with steady.socket() as socket:
        reply = tell(socket, {"op": "watch", "topics": ["leases", "policies", "fleet"], "id": 1})
        assert reply["data"] == {"topics": ["policies", "leases", "fleet"]}
        activate(steady, GOOD)
        held = steady.ask("steady", lease={"ttl_seconds": 60})["lease"]
        steady.say({"op": "renew", "lease": held["id"], "token": held["token"]})
        steady.release(held)
        steady.register(cluster("north"))
        steady.http.delete("/clusters/north").raise_for_status()
        news = [read_message(socket) for _ in range(6)]
    assert [(each["topic"], each["event"]) for each in news] == [
        ("policies", "activated"),
        ("leases", "granted"),
        ("leases", "renewed"),
        ("leases", "ended"),
        ("fleet", "cluster_set"),
        ("fleet", "cluster_removed"),
    ]
    assert {each["data"]["id"] for each in news[1:4]} == {held["id"]}
    assert "token" not in news[1]["data"]
    assert news[4]["data"] == {"cluster_id": "north", "nodes": 2}
