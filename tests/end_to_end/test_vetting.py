"""A policy passes its own examples in a cell before it is registered."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from served import bearing, policy, until

from moorage.testing.daemon_process import daemon

ECHO = "return input_data['inputs']['answer']"
ASK_MESSAGE = {
    "request": {"inputs": {"answer": {"cluster_id": "lab", "node_id": "node-1", "gpus": ["0"]}}}
}
"""An example whose `answer` the policy `ECHO` returns: a placement on the default fleet."""


def publish(server, *examples, body=ECHO, **more):
    document = policy(body, "vetted:1-x", metadata={"examples": list(examples)})
    return server.http.post("/policy", json=document | more)


@pytest.fixture(autouse=True)
def _remove_policies(server):
    yield
    server.http.delete("/policy/vetted:1-x")


@pytest.mark.heavy
def test_a_flood_of_uploads_delays_no_other_tenant(tmp_path):
    tokens = {"MOORAGE_TOKENS": "flood:alpha,calm:beta"}
    # Stop the daemon first; otherwise the flood lasts a minute.
    with ThreadPoolExecutor(48) as pool, daemon(tmp_path, environment=tokens) as running:
        stuck = {"policy_rule_uri": "stuck:1-x", "code": "while True: pass\nAIOSv1PolicyRule = 1\n"}

        def upload(document, token):
            url = f"{running.http}/policy"
            return httpx.post(url, json=document, headers=bearing(token), timeout=300)

        flood = [pool.submit(upload, stuck, "alpha") for _ in range(48)]
        # Surplus uploads are refused at once; the others take five seconds each.
        until(lambda: sum(each.done() for each in flood) >= 48 - (3 + 32))
        answer = upload(policy(ECHO, "calm:1-x"), "beta")
        assert answer.status_code == 200, answer.text
        assert sum(each.done() for each in flood) < 48 - 16, "the flood still goes on"
        codes = {each.result().json()["error"]["code"] for each in flood if each.done()}
        assert codes <= {"busy", "bad_policy"}


def test_a_policy_with_passing_examples_is_registered(server):
    good = [
        ASK_MESSAGE,
        {**ASK_MESSAGE, "output": {"gpus": [0]}},
        {"request": {"inputs": {"answer": {"declined": "full"}}}, "output": {"declined": "full"}},
        {"input_data": {"inputs": {"answer": [1]}}, "output": [1]},
    ]
    answer = publish(server, *good)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (
            {**ASK_MESSAGE, "name": "one", "output": {"gpus": ["1"]}},
            'metadata.examples[0] “one” fails: expected output.gpus[0] to be "1"; it is "0"',
        ),
        (
            {"request": {"inputs": {"answer": {"cluster_id": "east"}}}},
            "The policy's proposal is not sound: cluster_id: expected a live cluster",
        ),
        (
            {"request": {**ASK_MESSAGE["request"], "resources": {"gpus": 5}}},
            "metadata.examples[0] fails: It can never fit: of 2 nodes, 2 have too few GPUs",
        ),
        ({"request": {}}, "fails: the policy raised KeyError: 'answer' (function.py, line 5)\n"),
        (
            {"request": {"inputs": {"answer": 1}}, "fleet": [{"id": "x", "status": "off"}]},
            "metadata.examples[0].fleet: expected a cluster that is live",
        ),
    ],
)
def test_a_policy_that_fails_one_of_its_examples_is_refused(server, example, said):
    answer = publish(server, example)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["field"]) == ("bad_policy", "metadata.examples[0]")
    assert said in error["reason"]
    assert server.http.get("/policy/vetted:1-x").status_code == 404


def test_examples_that_a_change_of_a_policy_adds_must_pass(server):
    assert publish(server, ASK_MESSAGE).status_code == 200
    wrong = {**ASK_MESSAGE, "output": {"gpus": [1]}}
    for change in (
        {"metadata": {"examples": [ASK_MESSAGE, wrong]}},
        {"$set": {"metadata.examples": [wrong]}},
    ):
        answer = server.http.put("/policy/vetted:1-x", json=change)
        assert answer.status_code == 400, answer.text
        assert "fails: expected output.gpus[0] to be 1" in answer.text
    answer = server.http.put("/policy/vetted:1-x", json={"metadata": "x"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "metadata")
    stored = server.http.get("/policy/vetted:1-x").json()["data"]["metadata"]
    assert stored == {"examples": [ASK_MESSAGE]}
    good = {"$set": {"metadata.examples": [ASK_MESSAGE, ASK_MESSAGE]}}
    answer = server.http.put("/policy/vetted:1-x", json=good)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]["metadata"]["examples"]) == 2
