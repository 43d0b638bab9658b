"""A tenant's version beside another tenant's alias: what it is asked stays with those who asked."""

import pytest
from served import Server, ask_message, cluster, policy, tell, until

from moorage.daemon.publishing.version_statistics import MANY
from moorage.testing.daemon_process import daemon

pytestmark = pytest.mark.heavy  # Many daemons, restarts and kills: minutes in all.

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
    tokens = {"MOORAGE_TOKENS": "ann:of-ann,bob:of-bob"}
    with daemon(tmp_path_factory.mktemp("others"), environment=tokens) as running:
        ann, bob = Server(running), Server(running)
        for server, token in ((ann, "of-ann"), (bob, "of-bob")):
            server.http.headers["Authorization"] = f"Bearer {token}"
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


def ask(server, token, whole, **inputs):
    """Ask under the alias, and wait until that was compared, or was not asked."""
    before = whole()
    with server.socket({"Authorization": f"Bearer {token}"}) as socket:
        reply = tell(socket, ask_message("side", inputs=inputs, resources={"gpus": 1}))
    assert reply["success"], reply
    until(lambda: whole() > before)


def test_nothing_of_what_a_tenant_asked_reaches_the_owner_of_a_shadow(site):
    ann, bob = site

    def whole():
        found = report(ann)
        return found["compared"] + found["dropped"]

    while (compared := report(ann)["compared"]) < MANY:
        how = ("raise", "sleep", "")[compared % 3]
        ask(ann, "of-ann", whole, what=ANNS, how=how)
    asked = [sample["request"] for sample in report(ann)["samples"]]
    ask(bob, "of-bob", whole, what="mine", how="raise")
    ask(bob, "of-bob", whole, what="mine")
    until(lambda: len(report(bob)["samples"]) >= 1)

    own = report(ann)
    assert own["whole"] is True
    assert ANNS in str(own["samples"])

    seen = report(bob)
    assert seen["whole"] is False
    assert seen["compared"] == MANY, "figures of many, in steps"
    assert seen["candidate"]["placed"] + seen["candidate"]["refused"] == MANY
    assert seen["samples"], "one's own requests are shown"
    assert all("mine" in str(sample["candidate"]) for sample in seen["samples"])
    shown = [
        str(seen),
        str(report(bob, "canary")),
        bob.http.get("/metrics").text,
        bob.http.get(f"/policy/{SPY}/logs").text,
        bob.http.get("/policy-alias/side").text,
        bob.http.get(f"/policy/{SPY}").text,
    ]
    assert "mine" in shown[3], "what it printed at one's own requests is shown"
    for text in shown:
        assert ANNS not in text
        assert not [each for each in asked if each in text]


def test_few_answers_are_no_figures(site):
    ann, bob = site
    bob.http.delete("/policy-alias/side/shadow").raise_for_status()
    post(bob, "shadow", SPY)

    def whole():
        found = report(ann)
        return found["compared"] + found["dropped"]

    while report(ann)["compared"] < 2:
        ask(ann, "of-ann", whole, what=ANNS, how="raise")
    seen = report(bob)
    assert (seen["asked"], seen["compared"], seen["samples"]) == (0, 0, [])
    assert seen["candidate"]["latency_ms"] is None
    assert "outcomes" not in seen["candidate"]
    assert f'policy="{SPY}",what="differ"}} 0.0' in bob.http.get("/metrics").text
    told = [
        server.http.post("/policy-alias/side/activate", json={"policy_rule_uri": SPY})
        for server in (ann, bob)
    ]
    assert [each.status_code for each in told] == [409, 403], "of others' failures nothing is said"


def test_no_tenant_becomes_the_owner_of_an_alias_by_making_it_again(site):
    ann, bob = site
    gone = bob.http.delete("/policy-alias/side")
    assert gone.status_code == 409
    assert "ann" in gone.json()["message"]
    again = bob.http.post("/policy-alias/side/activate", json={"policy_rule_uri": ACTIVE})
    assert again.status_code == 403
    assert ann.http.get("/policy-alias/side").json()["data"]["owner"] == "ann"
    assert report(bob)["whole"] is False
    assert ann.http.delete("/policy-alias/side").status_code == 200
