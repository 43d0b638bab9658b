"""A whole server on a real PostgreSQL: nothing that matters is in its folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from served import Server, cluster, until

from moorage.testing.daemon_process import Running, child, daemon, serve_command, serve_variables
from moorage_policies import catalog

pytestmark = pytest.mark.heavy

HOUR = {"ttl_seconds": 3_600}


def failed(data: Path, environment: dict[str, str]) -> str:
    """Return what a server says that does not start."""
    done = subprocess.run(
        serve_command(data),
        env={**serve_variables(), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    return done.stderr


def moored(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "moorage", *arguments],
        env={**serve_variables(), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_leases_outlast_a_kill_and_the_folder(postgres, tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "stderr.log"
    environment = {"MOORAGE_STORAGE": postgres.database()}
    variables = {**serve_variables(), **environment}
    with child(serve_command(data), log, variables) as (process, ready):
        server = Server(Running(ready["ws"], ready["http"], process.pid, log))
        server.register(cluster("east", nodes=2, gpus=8))
        server.publish(catalog.document("first_fit"))
        held = [server.ask(resources={"gpus": 1}, lease=HOUR)["lease"] for _ in range(5)]
        server.close()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert list(data.glob("*.db")) == []
    shutil.rmtree(data)
    with daemon(data, environment=environment) as running, closing(Server(running)) as server:
        there = json.loads(server.moorage("leases", "--json").stdout)
        assert {each["id"] for each in held} == {each["id"] for each in there}
        # The token is made of the secret, which is in the database, too.
        assert server.release(held[0])["success"]
        new = server.ask(resources={"gpus": 1}, lease=HOUR)["lease"]
        assert new["fencing"] > max(each["fencing"] for each in held)


def test_a_database_that_goes_away_ends_the_server(postgres, tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "stderr.log"
    address = postgres.database()
    variables = {**serve_variables(), "MOORAGE_STORAGE": address}
    with child(serve_command(data), log, variables) as (process, _):
        postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
            values=(address.rpartition("/")[2],),
        )
        until(lambda: process.poll() is not None)
    assert process.returncode == 70
    assert "moored: ended, so that no answer is wrong" in log.read_text()


def test_tokens_are_in_the_database(postgres, tmp_path: Path) -> None:
    environment = {"MOORAGE_STORAGE": postgres.database(), "MOORAGE_INSECURE_PLAINTEXT": "true"}
    outside = {**environment, "MOORAGE_HOST": "0.0.0.0", "MOORAGE_HTTP_HOST": "0.0.0.0"}  # noqa: S104  # Every address is what it refuses.
    assert "no tokens are in the database" in failed(tmp_path / "data", outside)
    arguments = ("token", "create", "ci", "--role", "viewer", "--tenant", "ann", "--json")
    made = json.loads(moored(*arguments, environment=environment).stdout)["token"]
    with (
        daemon(tmp_path / "data", environment=outside) as running,
        closing(Server(running)) as server,
    ):
        assert server.http.get("/policy").status_code == 401
        shown = {"Authorization": f"Bearer {made}"}
        assert server.http.get("/policy", headers=shown).status_code == 200
        assert moored("token", "revoke", "ci", environment=environment).returncode == 0
        until(lambda: server.http.get("/policy", headers=shown).status_code == 401)


def test_commands_say_what_is_of_files_alone(postgres) -> None:
    environment = {"MOORAGE_STORAGE": postgres.database()}
    verified = moored("ledger", "verify", environment=environment)
    assert (verified.returncode, "keeps its ledger in PostgreSQL" in verified.stderr) == (1, True)
    prepared = moored("storage", "prepare", environment=environment)
    assert (prepared.returncode, "has the tables" in prepared.stdout) == (0, True)
    found = json.loads(moored("doctor", "--json", environment=environment).stdout)["findings"]
    assert [each["state"] for each in found if each["name"] == "storage: tables"] == ["ok"]
