"""Tests of HTTP callers that leave before they have their answer."""

import json
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from served import cluster, policy, serving, until

pytestmark = pytest.mark.heavy  # A daemon.


def test_requests_whose_http_caller_left_are_not_decided() -> None:
    environment = {"MOORAGE_POLICY_DEADLINE_SECONDS": "600"}
    message = {"policy_rule_uri": "slow:1.0-x", "inputs": {}, "resources": {"gpus": 1}}
    body = json.dumps(message | {"lease": {"ttl_seconds": 600}})
    with serving(environment=environment) as server:
        server.fill(cluster("lab", nodes=1, gpus=16))
        server.publish(policy("while True: pass", "slow:1.0-x"))
        callers = [HTTPConnection(urlsplit(server.running.http).netloc) for _ in range(16)]
        for each in callers:
            each.request("POST", "/allocate", body, {"Content-Type": "application/json"})
        until(lambda: server.metric("moorage_undecided") == len(callers))
        for each in callers[1:]:
            each.close()
        until(lambda: server.metric("moorage_undecided") == 1)
        assert server.ask(resources={"gpus": 16}, lease={"ttl_seconds": 9})["success"]
        callers[0].close()
        until(lambda: server.metric("moorage_undecided") == 0)
