"""Only operators set quotas over HTTP."""

import pytest
from served import FIRST_FIT, bearing, cluster, serving

from moorage_client import BlockingClient, RequestRefused

pytestmark = pytest.mark.heavy  # A daemon.


def test_operators_change_quotas_over_http_while_the_server_runs() -> None:
    tokens = {"MOORAGE_TOKENS": "ann:a1,ops:o1", "MOORAGE_OPERATORS": "ops"}
    with (
        serving(environment=tokens, bearer="o1") as server,
        BlockingClient(server.running.ws, "a1") as ann,
    ):
        server.fill(cluster("east", nodes=1, gpus=4))
        other, http = bearing("a1"), server.http
        change = {"nominal": {"gpu_milli": 1000}, "weight": 2}
        one = {"resources": {"gpus": 2}, "lease": {"ttl_seconds": 60}}
        held = ann.ask(FIRST_FIT, **one)
        assert held.lease is not None

        def put(path: str, body: object, status: int = 200, **headers: str) -> dict:
            answer = http.put(path, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            return answer.json()

        def refusal(path: str, body: object, status: int = 400, **headers: str) -> dict:
            return put(path, body, status, **headers)["error"]

        row = put("/quotas/ann", change)["data"]
        assert (row["tenant"], row["project"], row["weight"]) == ("ann", None, 2.0)
        assert row["resources"]["gpu_milli"]["used"] == 2000, "existing leases stay"
        with pytest.raises(RequestRefused) as caught:
            ann.ask(FIRST_FIT, **one)
        assert caught.value.code == "quota_exceeded"
        assert ann.status(held.lease.id)["state"] in {"granted", "active"}
        put("/quotas/ann?project=night", {"nominal": {"cpu_milli": 5}})
        page = http.get("/quotas", params={"limit": 1}).json()["data"]
        assert [row["project"] for row in page["quotas"]] == [None]
        own = http.get("/quotas", headers=other).json()["data"]["quotas"]
        assert [row["project"] for row in own] == [None, "night"]

        assert refusal("/quotas/ann", change, 403, **other)["code"] == "unauthorized"
        put("/quotas/ann", change, 401, Authorization="")
        foreign = {"Origin": "https://elsewhere.example"}
        assert refusal("/quotas/ann", change, 403, **foreign)["code"] == "forbidden"
        assert refusal("/quotas/*?project=x", change)["field"] == "project"
        assert refusal("/quotas/ann?project=", change)["field"] == "project"
        nominal = refusal("/quotas/ann", {"gpus": 2})["reason"]
        assert nominal.endswith("(did you mean nominal.gpu_milli?)")
        names = ("nominal", "borrow", "lend", "weight", "notice_seconds")
        wrong = {"wieght": 2, "op": "flush", **dict.fromkeys(names)}
        for name, value in wrong.items():
            assert refusal("/quotas/ann", {name: value})["field"] == name
        below = {"nominal": {"gpu_milli": -1}}
        assert refusal("/quotas/ann", below)["field"] == "nominal.gpu_milli"

        for path in ("/quotas/ann?project=night", "/quotas/ann"):
            assert http.delete(path).json()["data"]["quota"] is None
        assert ann.ask(FIRST_FIT, **one).lease is not None
