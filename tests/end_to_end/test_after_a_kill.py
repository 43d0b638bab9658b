"""Operators' reservations, cordons and quotas, and waiting requests, outlast kill -9."""

import json
import time
from pathlib import Path

import pytest
from served import FIRST_FIT, ask_message, cluster, kill, serve_and_kill, serving, until

from moorage.model import Demand
from moorage_client import BlockingClient

pytestmark = pytest.mark.heavy

CONFIGURED = {
    "MOORAGE_QUOTAS": "bob gpus=1 borrow_gpus=2, ann/one memory_mib=5",
    "MOORAGE_USAGE_HALF_LIFE_SECONDS": "60",
}


def of(model: str, gpus: int = 1) -> dict:
    return {"gpus": gpus, "models": [model]}


def test_reservations_cordons_quotas_and_alternatives_outlast_a_kill(tmp_path: Path) -> None:
    now, short = time.time(), {"ttl_seconds": 60}
    terms = {"ttl_seconds": 300.0, "wait_seconds": 300.0, "idempotency_key": "elastic"}
    some = [of("A100", number) for number in (4, 3, 2)]
    wants = {"resources": some[0], "alternatives": some[1:], "lease": terms}
    times = {"starts_at": now + 3600, "ends_at": now + 7200}
    with serve_and_kill(tmp_path) as server:
        server.fill(
            cluster("one", nodes=1, gpus=4),
            cluster("two", nodes=1, gpus=1, model="H100"),
            cluster("out", nodes=2, gpus=1, model="L4"),
        )
        with BlockingClient(server.running.ws) as client, server.socket() as waiting:
            reserved = client.call({"op": "reserve", "resources": of("H100"), **times})
            quota = {"op": "set_quota", "tenant": "ann", "nominal": {"gpu_milli": 2000}}
            assert client.call(quota)["resources"]["gpu_milli"]["room"] == 2000
            client.cordon("out", reason="power")
            big = client.ask(FIRST_FIT, resources=some[1], lease={"ttl_seconds": 300.0}).lease
            assert big is not None
            waiting.send(json.dumps(ask_message(FIRST_FIT, **wants)))
            until(client.queue)
            kill(server)
    with (
        serving(tmp_path, environment=CONFIGURED) as server,
        BlockingClient(server.running.ws) as client,
    ):
        assert client.call({"op": "reservations"})["reservations"] == [reserved]
        server.http.put("/clusters/out", json=cluster("out", 3, 1, "L4")).raise_for_status()
        assert not server.ask(resources=of("L4"), lease=short)["success"]
        assert client.uncordon("out")["unavailable"] is None
        assert server.ask(resources=of("L4"), lease=short)["success"]

        rows = client.call({"op": "quotas"})["quotas"]
        names = [(row["tenant"], row["project"]) for row in rows]
        assert names == [("ann", None), ("ann", "one"), ("bob", None)]
        assert rows[0]["resources"]["gpu_milli"]["quota"] == 2000
        assert rows[2]["quota"]["borrow"] == {"gpu_milli": 2000}
        (row,) = client.call({"op": "quotas", "filters": {"tenant": "bob"}})["quotas"]
        assert row["resources"]["gpu_milli"]["quota"] == 1000

        (row,) = client.queue()
        assert [each["gpus"] for each in row["alternatives"]] == [4, 3, 2]
        client.release(big.id, big.token)
        wants["resources"] = Demand(gpus=4, models=("A100",))  # An equal demand.
        lease = client.ask(FIRST_FIT, **wants).lease
        assert lease is not None
        assert lease.choice == 0
