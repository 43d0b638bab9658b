"""docs/how-to/quotas.md runs; quotas outlast kill -9; only operators set them."""

import contextlib
import doctest
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server, cluster

from moorage.benchmarks.daemon_process import child, daemon, serve_command, serve_variables
from moorage.config.settings import settings
from moorage_client import BlockingClient, RequestRefused
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Many daemons: a minute and more in all.

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "quotas.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def served(data: Path, **environment: str) -> Iterator[Server]:
    with daemon(data, environment=environment) as running:
        server = Server(running)
        try:
            yield server
        finally:
            server.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with served(tmp_path) as server:
        server.register(cluster("east", nodes=1, gpus=4))
        server.publish(catalog.document("first_fit"))
    return tmp_path


def test_the_page_does_what_it_says(data: Path, tmp_path: Path) -> None:
    with served(data) as server:
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


@pytest.mark.heavy
def test_a_quota_outlasts_a_kill_and_the_configuration_sets_its_own(
    data: Path, tmp_path: Path
) -> None:
    command, log = serve_command(data), tmp_path / "stderr.log"
    with child(command, log, serve_variables()) as (process, ready):
        with BlockingClient(ready["ws"]) as client:
            wanted = {"op": "set_quota", "tenant": "ann", "nominal": {"gpu_milli": 2000}}
            assert client.call(wanted)["resources"]["gpu_milli"]["room"] == 2000
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    configured = "bob gpus=1 borrow_gpus=2, ann/one memory_mib=5"
    with served(data, MOORAGE_QUOTAS=configured, MOORAGE_USAGE_HALF_LIFE_SECONDS="60") as server:
        (told,) = server.say({"op": "quotas"})
        rows = told["data"]["quotas"]
        names = [(row["tenant"], row["project"]) for row in rows]
        assert names == [("ann", None), ("ann", "one"), ("bob", None)]
        assert rows[2]["quota"]["borrow"] == {"gpu_milli": 2000}
        (told,) = server.say({"op": "quotas", "filters": {"tenant": "bob"}})
        (row,) = told["data"]["quotas"]
        assert row["resources"]["gpu_milli"]["quota"] == 1000


def test_a_refusal_has_the_numbers_and_only_operators_change_them(data: Path) -> None:
    tokens = {"MOORAGE_TOKENS": "ann:a1,ops:o1", "MOORAGE_OPERATORS": "ops"}
    with served(data, **tokens) as server:
        url = server.running.ws
        change = {"op": "set_quota", "tenant": "ann", "nominal": {"gpu_milli": 1000}}
        with BlockingClient(url, "a1") as ann, BlockingClient(url, "o1") as ops:
            with pytest.raises(RequestRefused) as caught:
                ann.call(change)
            assert caught.value.code == "unauthorized"
            ops.call(change)
            with pytest.raises(RequestRefused) as caught:
                ops.call({"op": "set_quota", "tenant": "*", "project": "x"})
            assert caught.value.field == "project"
            wanted = {"resources": {"gpus": 2}, "lease": {"ttl_seconds": 60}}
            with pytest.raises(RequestRefused) as caught:
                ann.ask("first_fit:1.0-stable", **wanted)
            assert caught.value.code == "quota_exceeded"
            told = caught.value.details
            assert (told["used"], told["quota"], told["borrowed"]) == (0, 1000, 0)
            ops.call({"op": "remove_quota", "tenant": "ann"})
            assert ann.ask("first_fit:1.0-stable", **wanted).lease is not None


def test_operators_change_quotas_over_http_while_it_runs(data: Path) -> None:
    tokens = {"MOORAGE_TOKENS": "ann:a1,ops:o1", "MOORAGE_OPERATORS": "ops"}
    with served(data, **tokens) as server, BlockingClient(server.running.ws, "a1") as ann:
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
        assert http.put("/quotas/ann", json=change).status_code == 401
        assert put("/quotas/*?project=x", change, status=400)["error"]["field"] == "project"
        assert put("/quotas/ann", {"wieght": 2}, status=400)["error"]["field"] == "wieght"
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
