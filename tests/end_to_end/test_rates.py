"""A server refuses requests beyond a tenant's rate, and serves other tenants."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from served import Server, ask_message, bearing, cluster, policy, read_message, serving, tell, until

from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # A daemon.

ENVIRONMENT = {
    "MOORAGE_TOKENS": "ann:a1,bob:b1,cal:c1,dan:d1,ops:o1",
    "MOORAGE_OPERATORS": "ops",
    "MOORAGE_TENANT_REQUESTS_PER_SECOND": "20",
    "MOORAGE_TENANT_UPLOADS_PER_MINUTE": "1",
    "MOORAGE_TENANT_WATCHERS_MAX": "2",
    "MOORAGE_TENANT_EVALUATION_SECONDS_PER_MINUTE": "1",
    "MOORAGE_POLICY_DEADLINE_SECONDS": "30",
}
FLOOD = 200
"""Number of messages in the flood; some of those within ten seconds must be refused."""


@pytest.fixture(scope="module")
def rates_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("rates")
    with serving(data, environment=ENVIRONMENT, bearer="o1") as server:
        server.fill(cluster("lab", nodes=1, gpus=4))
        yield server


def refusals(server: Server, tenant: str) -> list[dict]:
    """Return the audit entries of requests of a tenant beyond its rates."""
    assert server.data is not None
    logged = (file.read_text().splitlines() for file in server.data.glob("audit/*.jsonl"))
    rows = [json.loads(line) for each in logged for line in each]
    return [each for each in rows if (each["what"], each["who"]) == ("rate.refused", tenant)]


def test_a_flood_of_requests_is_refused_and_another_tenant_is_served(rates_server: Server) -> None:
    with rates_server.socket(bearer="a1") as ann, rates_server.socket(bearer="b1") as bob:
        lease = ask_message(resources={"gpus": 1}, lease={"ttl_seconds": 600})
        held = tell(ann, lease)["lease"]
        for number in range(FLOOD):
            ann.send(json.dumps({"op": "status", "lease": held["id"], "id": number}))
        renew = {"op": "renew", "lease": held["id"], "token": held["token"], "id": "renew"}
        ann.send(json.dumps(renew))
        assert tell(bob, lease)["success"]
        replies = [read_message(ann) for _ in range(FLOOD + 1)]
        refused = [each["error"] for each in replies if not each["success"]]
        assert 0 < len(refused) < 0.75 * FLOOD, "after a refusal, the next message waits"
        assert {each["code"] for each in refused} == {"busy"}
        assert "tenant_requests_per_second" in refused[0]["reason"]
        assert 0 < refused[0]["retry_after_seconds"] <= 1
        assert next(each for each in replies if each["id"] == "renew")["success"]


def test_an_upload_beyond_the_rate_is_answered_429(rates_server: Server) -> None:
    document = catalog.document("best_fit")
    first, second = (
        rates_server.http.post("/policy", json=document, headers=bearing("b1")) for _ in range(2)
    )
    assert first.status_code == 200
    assert second.status_code == 429
    assert int(second.headers["retry-after"]) > 30
    assert "tenant_uploads_per_minute" in second.json()["error"]["reason"]
    until(lambda: refusals(rates_server, "bob"))
    (entry,) = refusals(rates_server, "bob")
    assert entry["about"]["setting"] == "tenant_uploads_per_minute"
    assert entry["remote"].startswith("127.0.0.1:")


def test_a_watcher_beyond_the_limit_is_refused(rates_server: Server) -> None:
    watch = {"op": "watch", "topics": ["leases"]}
    with rates_server.socket(bearer="b1") as one, rates_server.socket(bearer="b1") as two:
        for socket in (one, two, one):  # A repeated watch does not count again.
            assert tell(socket, watch)["success"]
        with rates_server.socket(bearer="b1") as three:
            error = tell(three, watch)["error"]
        assert (error["code"], error["field"]) == ("busy", "topics")
        assert rates_server.say(watch)[0]["success"]


def test_a_tenant_that_used_too_much_cpu_is_refused_over_both_ports(rates_server: Server) -> None:
    burns = """
import time
end = time.process_time() + 0.4
while time.process_time() < end:
    pass
return {"burnt": 0.4}
"""
    document = policy(burns, "burns:1.0-stable")
    answer = rates_server.http.post("/policy", json=document, headers=bearing("c1"))
    assert answer.status_code == 200
    message = {"policy_rule_uri": "burns:1.0-stable", "adhoc": True, "inputs": {}, "id": 1}
    with rates_server.socket(bearer="c1") as cal:
        replies = [tell(cal, message)]
        while replies[-1]["success"] and len(replies) < 6:
            replies.append(tell(cal, message))
    error = replies[-1]["error"]
    assert len(replies) >= 3, replies
    assert error["code"] == "busy"
    assert "tenant_evaluation_seconds_per_minute" in error["reason"]
    assert error["retry_after_seconds"] > 0
    answer = rates_server.http.post("/allocate", json=message, headers=bearing("c1"))
    assert answer.status_code == 429
    assert "tenant_evaluation_seconds_per_minute" in answer.text
    assert rates_server.say(message, bearer="b1")[0]["success"], "another tenant has its own limit"


def test_refused_requests_beyond_a_rate_have_one_audit_entry_a_minute_and_a_metric(
    rates_server: Server,
) -> None:
    message = {"policy_rule_uri": "first_fit:1.0-stable", "inputs": {}, "resources": {"gpus": 1}}

    def allocate(_: int) -> httpx.Response:
        return rates_server.http.post("/allocate", json=message, headers=bearing("d1"))

    with ThreadPoolExecutor(
        16
    ) as pool:  # One after the other, a busy machine stays below the rate.
        answers = list(pool.map(allocate, range(80)))
    refused = [each for each in answers if each.status_code == 429]
    assert refused
    assert all(each.headers["retry-after"] == "1" for each in refused)
    counted = 'moorage_rate_refusals_total{setting="tenant_requests_per_second"} '
    text = rates_server.http.get("/metrics").text
    count = float(text.partition(counted)[2].partition("\n")[0])
    assert count >= len(refused)
    until(lambda: refusals(rates_server, "dan"))
    found = refusals(rates_server, "dan")
    assert [each["about"] for each in found if "requests" in each["about"]["setting"]] == [
        {"setting": "tenant_requests_per_second"}
    ]
