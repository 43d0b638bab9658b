"""`moorage fleet import` and `moorage fleet` against a real server."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from moorage.testing.daemon_process import daemon
from moorage_client.services import Services
from tests.commands import run_moorage

HERE = Path(__file__).parent
HEADER = "sn,cpu_milli,memory_mib,gpu,model\n"


@pytest.fixture(scope="module")
def server():
    with daemon() as running:
        yield running


@pytest.fixture
def moorage(server, tmp_path, monkeypatch):
    """Run `moorage` within this process, which is quicker than a new process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOORAGE_URL", server.ws)
    monkeypatch.setenv("MOORAGE_HTTP_URL", server.http)
    monkeypatch.setenv("COLUMNS", "120")

    def moorage(*arguments, given=""):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
            return run_moorage(arguments)

    return moorage


def table(*rows):
    return HEADER + "".join(f"{row}\n" for row in rows)


def document(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def nodes(moorage, cluster):
    return {row["node_id"]: row for row in document(moorage("fleet", cluster, "--json"))}


def refusal(done):
    return done.returncode, json.loads(done.stdout)["error"]


def test_a_table_becomes_a_cluster_that_the_fleet_shows(moorage):
    source = table("a,64000,262144,2,A100", "b,32000,131072,0,")
    done = moorage("fleet", "import", "-", "--cluster-id", "lab", "--json", given=source)
    counts = {"nodes": 2, "gpus": 2, "vcpus": 96.0, "memory_mib": 393_216}
    assert document(done) == {"clusters": [{"cluster_id": "lab", "action": "created", **counts}]}
    found = nodes(moorage, "lab")
    assert found["a"]["gpus"] == {"0": 1000, "1": 1000}
    assert found["b"]["cpu_milli_free"] == 32_000
    shown = moorage("fleet")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "lab" in shown.stdout
    assert moorage("fleet", "show").stdout == shown.stdout
    assert moorage("fleet", "show", "lab").stdout == moorage("fleet", "lab").stdout


def test_an_existing_cluster_is_changed_only_with_an_option(moorage, server):
    def give(*options, rows):
        words = ("fleet", "import", "-", "--cluster-id=bay", "--json", *options)
        return moorage(*words, given=table(*rows))

    def change(*options, rows):
        (cluster,) = document(give(*options, rows=rows))["clusters"]
        return cluster["action"], cluster["vcpus"]

    assert change(rows=["a,1000,1,0,", "b,1000,1,0,"]) == ("created", 2.0)
    status, error = refusal(give(rows=["c,1000,1,0,"]))
    assert (status, error["code"]) == (3, "already_exists")
    assert "--replace" in error["reason"]
    assert "--merge" in error["reason"]
    assert set(nodes(moorage, "bay")) == {"a", "b"}
    # The total of all nodes, computed again.
    assert change("--merge", rows=["b,2000,1,0,", "c,1000,1,0,"]) == ("merged", 4.0)
    found = {name: row["cpu_milli_free"] for name, row in nodes(moorage, "bay").items()}
    assert found == {"a": 1000, "b": 2000, "c": 1000}
    with httpx.Client(base_url=server.http) as http:
        http.put("/clusters/bay", json={"region": "north"}).raise_for_status()
        assert change("--replace", rows=["d,1000,1,0,"]) == ("replaced", 1.0)
        assert "region" not in http.get("/clusters/bay").json()
    assert set(nodes(moorage, "bay")) == {"d"}


def test_machines_that_join_concurrently_are_all_registered(server):
    names = [f"m{number}" for number in range(16)]

    def join(name):
        node = {"id": name, "vcpus": {"count": 8}, "memory": 1024}
        with Services(server.http) as services:
            return services.add_nodes({"id": "farm", "nodes": {"nodeData": [node]}})

    with ThreadPoolExecutor(8) as several, Services(server.http) as services:
        for name, known in zip(names, several.map(join, names), strict=True):
            assert name in {node["id"] for node in known["nodes"]["nodeData"]}
        (found,) = services.clusters({"id": "farm"})
    assert sorted(node["id"] for node in found["nodes"]["nodeData"]) == sorted(names)


def test_a_dry_run_prints_what_can_be_imported_and_changes_nothing(moorage, tmp_path):
    kubernetes = str(HERE / "kubernetes_nodes.json")
    dry = moorage("fleet", "import", kubernetes, "--cluster-id", "k8s", "--dry-run")
    printed = document(dry)
    assert "cordoned" in dry.stderr
    assert [each["id"] for each in printed["clusters"]] == ["k8s"]
    assert "k8s" not in moorage("fleet").stdout

    done = moorage("fleet", "import", "-", "--json", given=dry.stdout)
    assert document(done)["clusters"][0]["gpus"] == 8 + 9 + 2
    found = nodes(moorage, "k8s")
    assert len(found["gpu-a"]["gpus"]) == 8
    assert "mig-3g.40gb-0" in found["mig-a"]["gpus"]

    more = tmp_path / "more.csv"
    more.write_text(table("extra,1000,1,0,"))
    merged = moorage("fleet", "import", "more.csv", "--cluster-id=k8s", "--merge", "--dry-run")
    rows = document(merged)["clusters"][0]["nodes"]["nodeData"]
    assert [row["id"] for row in rows] == ["gpu-a", "mig-a", "shared-a", "cpu-a", "extra"]
    assert set(nodes(moorage, "k8s")) == set(found)


def test_an_import_stores_clusters_one_by_one_and_its_error_names_the_stored_clusters(
    moorage, tmp_path
):
    good = {"id": "good", "nodes": {"nodeData": []}}
    bad = {"id": "bad", "nodes": {"nodeData": [{"id": "n", "memory": "much"}]}}
    (tmp_path / "both.json").write_text(json.dumps([good, bad]))
    done = moorage("fleet", "import", "both.json", "--json")
    status, error = refusal(done)
    assert (status, error["code"]) == (3, "bad_message")
    assert "nodes.nodeData[0].memory: expected a number" in error["reason"]
    assert done.stderr == "imported before the failure: good\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.csv"], "none.csv: expected a file"),
        (["-"], "stdin, line 2, column cpu_milli: expected a whole number, not 'x'"),
        ([], "Missing argument"),
        (["local", "--replace", "--merge"], "not both"),
        (["ray:http://127.0.0.1:1"], "expected a Ray dashboard at http://127.0.0.1:1"),
    ],
)
def test_an_unreadable_file_is_a_usage_error(moorage, arguments, said):
    given = table("a,x,1,0,")
    done = moorage("fleet", "import", *arguments, "--cluster-id=c", "--json", given=given)
    status, error = refusal(done)
    assert (status, error["code"], done.stderr) == (2, "usage", "")
    assert said in error["reason"]


def test_parts_of_a_fleet_are_taken_out_of_service_and_put_back(moorage):
    source = table("a,64000,65536,2,A100", "b,64000,65536,2,A100")
    assert moorage("fleet", "import", "-", "--cluster-id", "port", given=source).returncode == 0
    first = next(iter(nodes(moorage, "port")))
    done = moorage("fleet", "drain", f"port/{first}", "--reason", "new fans", "--within", "60")
    assert done.returncode == 0, done.stderr
    assert "new fans; no lease is there" in done.stdout
    assert "new fans" in nodes(moorage, "port")[first]["unavailable"]
    assert "in service" in moorage("fleet", "uncordon", f"port/{first}").stdout
    cordoned = document(moorage("fleet", "cordon", "port", "--json"))
    assert (cordoned["node_id"], cordoned["leases"]) == (None, [])
    assert all(node["unavailable"] for node in nodes(moorage, "port").values())
    assert moorage("fleet", "delete", "port").stdout == "port is deleted\n"
    assert "port" not in moorage("fleet").stdout
