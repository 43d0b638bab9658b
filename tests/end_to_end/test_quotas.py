"""docs/how-to/quotas.md runs; operators, and only they, set quotas over HTTP."""

import contextlib
import doctest
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server, cluster, serving

from moorage.config.settings import settings
from moorage_client import BlockingClient, RequestRefused

pytestmark = pytest.mark.heavy  # Many daemons: a minute and more in all.

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "quotas.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def served(token: str = "", **environment: str) -> Iterator[Server]:
    with serving(environment=environment, bearer=token) as server:
        server.fill(cluster("east", nodes=1, gpus=4))
        yield server


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    with served() as server:
        binaries = Path(sys.executable).parent
        variables = {
            **os.environ,
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
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
                done = subprocess.run(
                    ["bash", "-c", command],
                    check=False,
                    capture_output=True,
                    text=True,
                    env=variables,
                    timeout=60,
                )
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                shown, wanted = done.stdout + done.stderr, wanted.replace("…", "...")
                assert doctest.OutputChecker().check_output(wanted, shown, flags), (command, shown)
                played += 1
        assert played > 6


def test_operators_change_quotas_over_http_while_it_runs() -> None:
    tokens = {"MOORAGE_TOKENS": "ann:a1,ops:o1", "MOORAGE_OPERATORS": "ops"}
    with served("o1", **tokens) as server, BlockingClient(server.running.ws, "a1") as ann:
        operator, other = {"Authorization": "Bearer o1"}, {"Authorization": "Bearer a1"}
        http, change = server.http, {"nominal": {"gpu_milli": 1000}, "weight": 2}
        asked = {"resources": {"gpus": 2}, "lease": {"ttl_seconds": 60}}
        held = ann.ask("first_fit:1.0-stable", **asked)
        assert held.lease is not None

        def put(path: str, body: object, headers: dict[str, str] = operator, status: int = 200):
            answer = http.put(path, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            return answer.json()

        told = put("/quotas/ann", change)["data"]
        assert (told["tenant"], told["project"], told["weight"]) == ("ann", None, 2.0)
        assert told["resources"]["gpu_milli"]["used"] == 2000, "what is held stays"
        with pytest.raises(RequestRefused) as caught:
            ann.ask("first_fit:1.0-stable", **asked)
        assert caught.value.code == "quota_exceeded"
        assert ann.status(held.lease.id)["state"] in {"granted", "active"}
        put("/quotas/ann?project=night", {"nominal": {"cpu_milli": 5}})
        page = http.get("/quotas", headers=operator, params={"limit": 1}).json()["data"]
        assert [row["project"] for row in page["quotas"]] == [None]
        own = http.get("/quotas", headers=other).json()["data"]["quotas"]
        assert [row["project"] for row in own] == [None, "night"]

        assert put("/quotas/ann", change, other, 403)["error"]["code"] == "unauthorized"
        assert put("/quotas/ann", change, {"Authorization": ""}, 401)
        assert put("/quotas/*?project=x", change, status=400)["error"]["field"] == "project"
        assert put("/quotas/ann", {"wieght": 2}, status=400)["error"]["field"] == "wieght"
        nominal = put("/quotas/ann", {"gpus": 2}, status=400)["error"]["reason"]
        assert nominal.endswith("(did you mean nominal.gpu_milli?)")
        assert put("/quotas/ann", {"op": "flush"}, status=400)["error"]["field"] == "op"
        assert put("/quotas/ann?project=", change, status=400)["error"]["field"] == "project"
        for name in ("nominal", "borrow", "lend", "weight", "notice_seconds"):
            assert put("/quotas/ann", {name: None}, status=400)["error"]["field"] == name
        wrong = {"nominal": {"gpu_milli": -1}}
        assert put("/quotas/ann", wrong, status=400)["error"]["field"] == "nominal.gpu_milli"
        foreign = operator | {"Origin": "https://elsewhere.example"}
        assert put("/quotas/ann", change, foreign, 403)["error"]["code"] == "forbidden"

        for path in ("/quotas/ann?project=night", "/quotas/ann"):
            gone = http.delete(path, headers=operator).json()["data"]
            assert gone["quota"] is None
        assert ann.ask("first_fit:1.0-stable", **asked).lease is not None
