"""A server with all its data in a real PostgreSQL does not need its data folder."""

import json
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served import bearing, cluster, invoke, kill, ran, serve_and_kill, serving, until

from moorage.testing.daemon_process import serve_command

pytestmark = pytest.mark.heavy

HOUR = {"ttl_seconds": 3_600}


def test_with_postgresql_leases_outlast_a_kill_and_the_loss_of_the_data_folder(
    postgres, tmp_path: Path
) -> None:
    data, environment = tmp_path / "data", {"MOORAGE_STORAGE": postgres.database()}
    with serve_and_kill(data, environment=environment) as server:
        server.fill(cluster("east", nodes=2, gpus=8))
        held = [server.ask(resources={"gpus": 1}, lease=HOUR)["lease"] for _ in range(5)]
        kill(server)
    assert list(data.glob("*.db")) == []
    shutil.rmtree(data)
    with serving(data, environment=environment) as server:
        there = json.loads(server.moorage("leases", "--json").stdout)
        assert {each["id"] for each in held} == {each["id"] for each in there}
        # The token depends on the secret, which is also in the database.
        assert server.release(held[0])["success"]
        new = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
        assert new["fencing"] > max(each["fencing"] for each in held)


def test_with_postgresql_tokens_are_stored_in_the_database(postgres, tmp_path: Path) -> None:
    environment = {"MOORAGE_STORAGE": postgres.database(), "MOORAGE_INSECURE_PLAINTEXT": "true"}
    outside = {**environment, "MOORAGE_HOST": "0.0.0.0", "MOORAGE_HTTP_HOST": "0.0.0.0"}  # noqa: S104  # The test checks that this address is refused.
    refused = ran(*serve_command(tmp_path / "data"), **outside)
    assert refused.returncode == 3
    assert "there are no tokens" in refused.stderr
    words = ("token", "create", "ci", "--role", "viewer", "--tenant", "ann", "--json")
    made = json.loads(invoke(*words, **environment).stdout)["token"]
    with serving(tmp_path / "data", environment=outside) as server:
        assert server.http.get("/policy").status_code == 401
        assert server.http.get("/policy", headers=bearing(made)).status_code == 200
        assert invoke("token", "revoke", "ci", **environment).returncode == 0
        until(lambda: server.http.get("/policy", headers=bearing(made)).status_code == 401)


def test_with_postgresql_changes_of_tokens_over_http_take_effect_at_once(
    postgres, tmp_path: Path
) -> None:
    environment = {"MOORAGE_STORAGE": postgres.database()}
    words = ("token", "create", "boss", "--role", "admin", "--tenant", "ops", "--json")
    boss = json.loads(invoke(*words, **environment).stdout)["token"]
    with serving(tmp_path / "data", environment=environment, bearer=boss) as server:
        new = {"name": "ci", "role": "viewer", "tenant": "ann"}
        made = server.http.post("/tokens", json=new).json()["data"]["token"]
        assert server.http.get("/policy", headers=bearing(made)).status_code == 200
        server.http.delete("/tokens/ci").raise_for_status()
        assert server.http.get("/policy", headers=bearing(made)).status_code == 401


def test_commands_for_data_folders_refuse_a_database(postgres) -> None:
    environment = {"MOORAGE_STORAGE": postgres.database()}
    verified = invoke("ledger", "verify", **environment)
    assert (verified.returncode, "keeps its ledger in PostgreSQL" in verified.stderr) == (1, True)
    prepared = invoke("storage", "prepare", **environment)
    assert (prepared.returncode, "has the tables" in prepared.stdout) == (0, True)
    found = json.loads(invoke("doctor", "--json", **environment).stdout)["findings"]
    assert [each["state"] for each in found if each["name"] == "storage: tables"] == ["ok"]


def test_doctor_recognises_a_server_of_another_database(postgres, tmp_path: Path) -> None:
    environment = {"MOORAGE_STORAGE": postgres.database()}
    with serving(tmp_path / "one", environment=environment) as server:
        urls = (server.running.ws, server.running.http)
        ports = [str(urlsplit(each).port) for each in urls]
        at = {"MOORAGE_PORT": ports[0], "MOORAGE_HTTP_PORT": ports[1]}
        other = {**at, "MOORAGE_STORAGE": postgres.database()}
        done = invoke("doctor", "--json", "--data", tmp_path / "other", **other)
        there = invoke("doctor", "--json", "--data", tmp_path / "one", **at, **environment)
    for report, state in ((done, "broken"), (there, "ok")):
        found = {each["name"]: each for each in json.loads(report.stdout)["findings"]}
        for name in ("websocket port", "http port"):
            assert found[name]["state"] == state, found[name]
