"""What docs/how-to/back-up-and-restore.md promises of a copy of the data folder."""

import shutil
from pathlib import Path

import pytest
from served import FIRST_FIT, cluster, moored

from moorage.storage.base import FENCING_SKIP
from moorage.testing.daemon_process import daemon
from moorage_client import BlockingClient, Services
from moorage_policies import catalog

pytestmark = pytest.mark.heavy  # Several daemons.


def test_a_restored_copy_has_its_leases_with_their_tokens(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    resources, lease = {"gpus": 1}, {"ttl_seconds": 600}
    with daemon(data) as running, Services(running.http) as services:
        services.put_cluster(cluster("east"))
        services.publish_policy(catalog.document("first_fit"))
        with BlockingClient(running.ws) as client:
            held = client.ask(FIRST_FIT, resources=resources, lease=lease).lease
    shutil.copytree(data, backup)
    with daemon(data) as running, BlockingClient(running.ws) as client:
        later = client.ask(FIRST_FIT, resources=resources, lease=lease).lease
    assert moored("ledger", "verify", "--data", backup).returncode == 0
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    with daemon(data) as running, BlockingClient(running.ws) as client:
        assert [each.id for each in client.leases()] == [held.id], f"not {later.id}, of later"
        assert client.renew(held.id, held.token).id == held.id
        fresh = client.ask(FIRST_FIT, resources=resources, lease=lease).lease
        assert fresh.fencing > held.fencing


def test_a_copy_of_the_ledger_alone_is_refused(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    with daemon(data):
        pass
    copy.mkdir()
    shutil.copy(data / "ledger.db", copy)
    done = moored("serve", "--port", "0", "--http-port", "0", "--data", copy)
    assert done.returncode == 3, done.stderr


def test_a_backup_of_a_running_server_is_restored(tmp_path: Path) -> None:
    data, backup, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"
    resources, lease = {"gpus": 1}, {"ttl_seconds": 600}
    with daemon(data) as running, Services(running.http) as services:
        services.put_cluster(cluster("east"))
        services.publish_policy(catalog.document("first_fit"))
        with BlockingClient(running.ws) as client:
            held = client.ask(FIRST_FIT, resources=resources, lease=lease).lease
            done = moored("backup", backup, "--data", data)
            assert (done.returncode, "all as they were written" in done.stdout) == (0, True)
            later = client.ask(FIRST_FIT, resources=resources, lease=lease).lease
    again = moored("backup", backup, "--data", data)
    assert (again.returncode, "has something in it" in again.stderr) == (1, True)
    done = moored("restore", backup, "--data", restored)
    assert done.returncode == 0, done.stderr
    assert "are unknown here, and their GPUs may be granted again" in done.stdout
    with daemon(restored) as running, BlockingClient(running.ws) as client:
        assert [each.id for each in client.leases()] == [held.id], f"not {later.id}, of later"
        assert client.renew(held.id, held.token).id == held.id
        fresh = client.ask(FIRST_FIT, resources=resources, lease=lease).lease
        assert fresh.fencing > later.fencing + FENCING_SKIP // 2
    refused = moored("restore", backup, "--data", restored)
    assert (refused.returncode, "has something in it" in refused.stderr) == (1, True)
