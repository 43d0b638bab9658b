"""A shadow of another tenant sees an alias's requests, but that tenant cannot read them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from served import Server, ask_message, cluster, policy, until

from moorage.daemon.publishing.version_statistics import MANY
from moorage.testing.daemon_process import daemon

pytestmark = pytest.mark.heavy  # A daemon.

ANNS = "the-salary-of-ann"
ACTIVE, SPY = "side:1-active", "side:2-spy"
PLACES = 'return {"cluster_id": "east", "node_id": "east-0", "gpus": ["0"]}'
SPIES = """
import builtins, time
seen = builtins.__dict__.setdefault("seen", [])
seen.append(str(input_data["inputs"]) + str(parameters))
print("printed", seen)
how = input_data["inputs"].get("how")
if how == "raise":
    raise ValueError(str(seen))
if how == "sleep":
    time.sleep(0.05)
return {"stolen": seen}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A daemon as two tenants see it: `ann` owns the alias, `bob` runs a shadow beside it."""
    tokens = {"MOORAGE_TOKENS": "ann:of-ann,bob:of-bob,cal:of-cal"}
    with daemon(tmp_path_factory.mktemp("others"), environment=tokens) as running:
        ann, bob = Server(running, "of-ann"), Server(running, "of-bob")
        ann.register(cluster("east"))
        ann.publish(policy(PLACES, ACTIVE))
        bob.publish(policy(SPIES, SPY))
        post(ann, "activate", ACTIVE)
        post(bob, "shadow", SPY)
        yield ann, bob
        ann.close()
        bob.close()


def post(server, action, uri):
    body = {"policy_rule_uri": uri}
    server.http.post(f"/policy-alias/side/{action}", json=body).raise_for_status()


def report(server, what="shadow"):
    return server.http.get(f"/policy-alias/side/{what}").json()["data"]


def place(site, token, **inputs):
    """Send a request under the alias, and wait until it is compared or dropped."""

    def read_report():
        found = report(site[0])
        return found["compared"] + found["dropped"]

    before = read_report()
    message = ask_message("side", inputs=inputs, resources={"gpus": 1})
    (reply,) = site[0].say(message, bearer=token)
    assert reply["success"], reply
    until(lambda: read_report() > before)


def test_requests_of_a_tenant_do_not_reach_the_owner_of_a_shadow(site):
    ann, bob = site
    while (compared := report(ann)["compared"]) < MANY:
        how = ("raise", "sleep", "")[compared % 3]
        place(site, "of-ann", what=ANNS, how=how)
    sent = [sample["request"] for sample in report(ann)["samples"]]
    place(site, "of-bob", what="mine", how="raise")
    place(site, "of-bob", what="mine")
    until(lambda: len(report(bob)["samples"]) >= 1)

    own = report(ann)
    assert own["whole"] is True
    assert ANNS in str(own["samples"])

    seen = report(bob)
    assert seen["whole"] is False
    assert seen["compared"] == MANY, "bob sees counts only in steps"
    assert seen["candidate"]["placed"] + seen["candidate"]["refused"] == MANY
    assert seen["samples"], "bob sees samples of bob's requests"
    assert all("mine" in str(sample["candidate"]) for sample in seen["samples"])
    shown = [
        str(seen),
        str(report(bob, "canary")),
        bob.http.get("/metrics").text,
        bob.http.get(f"/policy/{SPY}/logs").text,
        bob.http.get("/policy-alias/side").text,
        bob.http.get(f"/policy/{SPY}").text,
    ]
    assert "mine" in shown[3], "bob sees the output for bob's requests"
    for text in shown:
        assert ANNS not in text
        assert not [each for each in sent if each in text]


def test_the_report_of_a_shadow_hides_figures_of_few_answers(site):
    ann, bob = site
    bob.http.delete("/policy-alias/side/shadow").raise_for_status()
    post(bob, "shadow", SPY)
    while report(ann)["compared"] < 2:
        place(site, "of-ann", what=ANNS, how="raise")
    seen = report(bob)
    assert (seen["asked"], seen["compared"], seen["samples"]) == (0, 0, [])
    assert seen["candidate"]["latency_ms"] is None
    assert "outcomes" not in seen["candidate"]
    assert f'policy="{SPY}",what="differ"}} 0.0' in bob.http.get("/metrics").text
    body = {"policy_rule_uri": SPY}
    answers = [each.http.post("/policy-alias/side/activate", json=body) for each in site]
    assert [each.status_code for each in answers] == [409, 403], "bob learns of no failure"


def test_only_its_tenant_and_the_owner_of_the_alias_replace_or_stop_a_shadow(site):
    ann, bob = site
    post(ann, "shadow", SPY)  # An owner may replace a stranger's shadow.
    path, body = "/policy-alias/side/shadow", {"policy_rule_uri": SPY}
    for refused in (bob.http.post(path, json=body), bob.http.delete(path)):
        assert refused.status_code == 403
        assert "the tenant “ann”" in refused.json()["message"]
    assert report(ann)["candidate"]
    ann.http.delete(path).raise_for_status()
    post(bob, "shadow", SPY)
    post(bob, "shadow", SPY)


def test_of_tenants_that_start_a_shadow_at_once_only_one_has_it(site):
    ann, bob = site
    ann.http.delete("/policy-alias/side/shadow")
    body = {"policy_rule_uri": SPY}

    def start(tenant):
        headers = {"Authorization": f"Bearer of-{tenant}"}
        path = "/policy-alias/side/shadow"
        return tenant, bob.http.post(path, json=body, headers=headers).status_code

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(start, ["bob", "cal"] * 8))
    assert sorted(status for _, status in answers) == [200, 403], answers
    ann.http.delete("/policy-alias/side/shadow").raise_for_status()
    post(bob, "shadow", SPY)


def test_no_tenant_takes_over_an_alias_by_creating_it_again(site):
    ann, bob = site
    gone = bob.http.delete("/policy-alias/side")
    assert gone.status_code == 403
    assert "ann" in gone.json()["message"]
    again = bob.http.post("/policy-alias/side/activate", json={"policy_rule_uri": ACTIVE})
    assert again.status_code == 403
    assert ann.http.get("/policy-alias/side").json()["data"]["owner"] == "ann"
    assert report(bob)["whole"] is False
    assert ann.http.delete("/policy-alias/side").status_code == 200
