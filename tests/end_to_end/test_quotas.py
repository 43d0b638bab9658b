"""docs/how-to/quotas.md runs; operators, and only they, set quotas over HTTP."""

import contextlib
import doctest
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import FIRST_FIT, Server, bearing, cluster, ran, serving

from moorage.config.settings import settings
from moorage_client import BlockingClient, RequestRefused

pytestmark = pytest.mark.heavy  # Many daemons: a minute and more in all.

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "quotas.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def serve_quotas(token: str = "", **environment: str) -> Iterator[Server]:
    with serving(environment=environment, bearer=token) as server:
        server.fill(cluster("east", nodes=1, gpus=4))
        yield server


def test_the_page_works_as_described(tmp_path: Path) -> None:
    with serve_quotas() as server:
        variables = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MOORAGE_URL": server.running.ws,
            "MOORAGE_HTTP_URL": server.running.http,
            "MOORAGE_STATE": str(tmp_path / "leases.json"),
            "NO_COLOR": "1",
        }
        played = 0
        for language, text in BLOCK.findall(PAGE.read_text()):
            if language == "toml":
                known = settings()
                for name, value in tomllib.loads(text).items():
                    known[name].kind.read(value)
            for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, wanted = example.partition("\n")
                done = ran("bash", "-c", command, **variables)
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                shown, wanted = done.stdout + done.stderr, wanted.replace("…", "...")
                assert doctest.OutputChecker().check_output(wanted, shown, flags), (command, shown)
                played += 1
        assert played > 6


def test_operators_change_quotas_over_http_while_it_runs() -> None:
    tokens = {"MOORAGE_TOKENS": "ann:a1,ops:o1", "MOORAGE_OPERATORS": "ops"}
    with serve_quotas("o1", **tokens) as server, BlockingClient(server.running.ws, "a1") as ann:
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
