"""After damage to the disk, leases hold, or the daemon names the lost leases."""

import json
import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from served import Server, cluster, invoke, kill, ran, serve_and_kill, serving, until

from moorage.testing.daemon_process import serve_command

pytestmark = pytest.mark.heavy  # Many daemons.

LEASE = {"ttl_seconds": 3_600}
LEASES = 40
FEW = {"MOORAGE_CHECKPOINT_EVERY_FACTS": "100"}


def refusal(data: Path) -> str:
    """Start a daemon that must refuse to start; return its error."""
    done = ran(*serve_command(data))
    assert (done.returncode, done.stdout) == (3, "")
    return done.stderr


@pytest.fixture(scope="module")
def remains(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Return the folder of a killed daemon, and its acknowledged leases."""
    data = tmp_path_factory.mktemp("killed") / "data"
    with serve_and_kill(data, environment=FEW) as server:
        server.fill(cluster("east", nodes=8, gpus=8))
        granted = [
            server.ask(resources={"gpus": 1, "gpu_milli": 100}, lease=LEASE)["lease"]
            for _ in range(LEASES)
        ]
        kill(server)
    return data, granted


@pytest.fixture
def damaged_copy(remains, tmp_path) -> tuple[Path, list[dict]]:
    """Return a copy of the folder, to be damaged."""
    data, granted = remains
    return shutil.copytree(data, tmp_path / "data"), granted


def leases_by_id(server: Server) -> dict[str, dict]:
    leases = server.say({"op": "leases", "limit": 1000})[0]["data"]["leases"]
    return {lease["id"]: lease for lease in leases}


def test_a_query_that_reads_a_damaged_fact_does_not_end_the_daemon(tmp_path):
    with serving(tmp_path) as server:
        server.fill(cluster("east", nodes=1, gpus=8))
        server.ask(resources={"gpus": 8}, lease=LEASE)
        # After a restart, only the history knows requests that waited without success.
        waited = [
            server.ask(resources={"gpus": 1}, lease={**LEASE, "wait_seconds": 0.05})["request"]
            for _ in range(2)
        ]
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        statement = "UPDATE fact SET body = replace(body, 'local', 'lacol') WHERE subject = ?"
        assert connection.execute(statement, (waited[0],)).rowcount > 0
        connection.commit()
    with serving(tmp_path) as server:
        said, fine = server.say(*({"op": "why", "request": each} for each in waited))
        assert (said["success"], said["error"]["code"]) == (False, "unavailable")
        assert "does not match its checksum" in said["error"]["reason"]
        assert fine["success"], fine
        assert server.ask(resources={"gpus": 1})["error"]["code"] != "unavailable"
        until(lambda: "does not match its checksum" in server.log())


def care(word: str, data: Path, *flags: str) -> tuple[int, str]:
    """Run `moored ledger verify` or `repair`; return its exit code and output."""
    done = invoke("ledger", word, "--data", data, *flags)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_backup_of_a_sound_folder_is_reported_and_private(tmp_path):
    old = os.umask(0o002)
    try:
        with serving(tmp_path) as server:
            server.fill(cluster("east", nodes=8, gpus=8))
            server.ask(resources={"gpus": 1}, lease=LEASE)
            modes = {
                file.name: oct(stat.S_IMODE(file.stat().st_mode))
                for file in tmp_path.iterdir()
                if file.name.startswith(("ledger", "catalog"))
            }
            code, said = care("verify", tmp_path)
            assert (code, "all undamaged" in said) == (0, True), said
    finally:
        os.umask(old)
    assert {"catalog.db", "catalog.db-wal", "ledger.db", "ledger.db-wal"} <= set(modes)
    assert {name: mode for name, mode in modes.items() if mode != "0o600"} == {}
    assert care("repair", tmp_path) == (0, f"{tmp_path}: nothing is damaged\n")
    code, said = care("verify", tmp_path, "--json")
    assert json.loads(said)["findings"] == []


def test_only_the_repair_command_accepts_a_loss_and_no_device_is_granted_twice(damaged_copy):
    data, granted = damaged_copy
    log = data / "ledger.db-wal"
    content = bytearray(log.read_bytes())
    for place in range(len(content) // 2, len(content), 4_096):  # In each frame from there on.
        content[place] ^= 1
    log.write_bytes(content)
    said = refusal(data)
    assert "cannot start: the ledger" in said
    assert "were durable and are missing" in said
    (data / "catalog.db-wal").unlink()
    code, said = care("verify", data)
    assert (code, "ledger.db-wal: frame" in said) == (1, True)
    code, said = care("repair", data)
    assert (code, "A repair would lose:" in said) == (1, True)
    assert "are missing" in refusal(data), "a refused start changes nothing"
    code, said = care("repair", data, "--accept-loss")
    assert code == 0
    assert "all later grants and ends of leases" in said
    assert "  catalog.db has seen" in said
    assert "in the catalog: the last" in said
    (copy,) = data.glob("damaged-*")
    assert (copy / "ledger.db-wal").read_bytes() == content
    assert care("verify", data)[0] == 0
    with serving(data) as server:
        server.fill(cluster("east", nodes=8, gpus=8))
        found = leases_by_id(server)
        by_id = {lease["id"]: lease for lease in granted}
        assert 0 < len(found) < len(granted)
        assert all(by_id[name]["fencing"] == lease["fencing"] for name, lease in found.items())
        later = server.ask(resources={"gpus": 1, "gpu_milli": 100}, lease=LEASE)["lease"]
        assert later["fencing"] > 10_000
        assert server.log() == ""


def test_the_error_of_why_names_the_start_of_the_history(tmp_path):
    days = {"MOORAGE_HISTORY_DAYS": "0", **FEW}
    with serving(tmp_path, environment=days) as server:
        server.fill(cluster("east", nodes=1, gpus=8))
        waited = {"ttl_seconds": 60, "wait_seconds": 0.05}
        server.ask(resources={"gpus": 8}, lease=LEASE)
        gone = server.ask(resources={"gpus": 1}, lease=waited)["request"]
    # Each stop writes a checkpoint, and each start removes facts that it makes unnecessary.
    with serving(tmp_path, environment=days) as server:
        server.register(cluster("west", nodes=1))
    with serving(tmp_path, environment=days) as server:

        def reason() -> str:
            return server.say({"op": "why", "request": gone})[0].get("error", {}).get("reason", "")

        until(lambda: "was pruned" in reason())
        assert "History before 2" in reason()
        assert len(leases_by_id(server)) == 1
        assert care("verify", tmp_path)[0] == 0


def test_a_missing_catalog_is_noticed(damaged_copy):
    data, granted = damaged_copy
    for each in data.glob("catalog*"):
        each.unlink()
    with serving(data) as server:
        assert "catalog.db is missing beside the ledger" in server.log()
        assert leases_by_id(server).keys() == {lease["id"] for lease in granted}
