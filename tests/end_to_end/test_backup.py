"""Copies of the data folder, as docs/how-to/back-up-and-restore.md describes them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import disks
import pytest
from served import FIRST_FIT, cluster, invoke, ran

from moorage.testing.daemon_process import daemon, serve_command
from moorage_client import BlockingClient, Lease, Services
from moorage_policies import catalog

pytestmark = pytest.mark.heavy


ONE = {"resources": {"gpus": 1}, "lease": {"ttl_seconds": 600}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def grant(client: BlockingClient) -> Lease:
    lease = client.ask(FIRST_FIT, **ONE).lease
    assert lease is not None
    return lease


@contextmanager
def fill(data: Path) -> Iterator[BlockingClient]:
    """Run a daemon with a cluster and a policy."""
    with daemon(data) as running, Services(running.http) as services:
        services.put_cluster(cluster("east"))
        services.publish_policy(catalog.document("first_fit"))
        with BlockingClient(running.ws) as client:
            yield client


def test_a_restored_backup_has_its_leases_with_their_tokens(tmp_path: Path, data: Path) -> None:
    backup = tmp_path / "backup"
    with fill(data) as client:
        held = grant(client)
    shutil.copytree(data, backup)
    with daemon(data) as running, BlockingClient(running.ws) as client:
        later = grant(client)
    assert invoke("ledger", "verify", "--data", backup).returncode == 0
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    with daemon(data) as running, BlockingClient(running.ws) as client:
        assert [each.id for each in client.leases()] == [held.id], f"{later.id} came later"
        assert client.renew(held.id, held.token).id == held.id
        assert grant(client).fencing > held.fencing


def test_a_backup_that_has_only_the_ledger_is_refused(tmp_path: Path, data: Path) -> None:
    copy = tmp_path / "copy"
    with daemon(data):
        pass
    copy.mkdir()
    shutil.copy(data / "ledger.db", copy)
    done = ran(*serve_command(copy))
    assert done.returncode == 3, done.stderr


def test_a_backup_without_facts_names_no_time(tmp_path: Path, data: Path) -> None:
    with daemon(data):
        pass
    assert invoke("backup", tmp_path / "backup", "--data", data).returncode == 0
    done = invoke("restore", tmp_path / "backup", "--data", tmp_path / "new")
    assert (done.returncode, "0 facts" in done.stdout) == (0, True)
    assert "granted after the backup, without facts, are unknown here" in done.stdout
    assert "1970" not in done.stdout


def test_a_restore_from_a_copy_of_the_whole_folder_keeps_the_audit_log(
    tmp_path: Path, data: Path
) -> None:
    with daemon(data):
        pass
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    before = invoke("audit", "--json", "--data", data).stdout
    killed = tmp_path / "new.new"
    (killed / "audit").mkdir(parents=True)  # As a kill of the command leaves the folder.
    for name in ("unfinished", "audit/00000009.jsonl"):
        (killed / name).touch()
    new = tmp_path / "new"
    assert invoke("restore", copy, "--data", new).returncode == 0
    assert before
    assert invoke("audit", "--json", "--data", new).stdout == before
    assert (new / "audit.mark").read_bytes() == (copy / "audit.mark").read_bytes()
    with daemon(new):
        pass
    assert invoke("audit", "verify", "--data", new).returncode == 0
    assert '"audit.cut"' not in invoke("audit", "--json", "--data", new).stdout


def test_an_unfinished_copy_is_not_used_as_a_data_folder(tmp_path: Path, data: Path) -> None:
    with daemon(data):
        pass
    killed, target = tmp_path / "copy.new", tmp_path / "copy"
    shutil.copytree(data, killed, ignore=shutil.ignore_patterns("audit", "local"))
    (killed / "unfinished").touch()  # As a kill of the copying command leaves the folder.
    for folder in (killed, target):  # The target would be empty, though a copy to it has begun.
        done = ran(*serve_command(folder))
        assert (done.returncode, f"{killed} is an unfinished copy" in done.stderr) == (3, True)
    for words in (
        ("backup", tmp_path / "other", "--data", killed),
        ("restore", killed, "--data", tmp_path / "other"),
        ("ledger", "verify", "--data", killed),
        ("token", "list", "--data", killed),
    ):
        done = invoke(*words)
        assert done.returncode != 0, words
        assert f"{killed} is an unfinished copy" in done.stderr, words
    assert not (tmp_path / "other").exists()
    (killed / "local").mkdir()
    done = invoke("backup", target, "--data", data)
    assert (done.returncode, f"{killed} is in the way" in done.stderr) == (1, True)
    (killed / "local").rmdir()
    assert invoke("backup", target, "--data", data).returncode == 0
    assert invoke("ledger", "verify", "--data", target).returncode == 0
    assert not killed.exists()


def test_a_mount_point_cannot_become_a_copy(disk: Path, data: Path) -> None:
    with daemon(data):
        pass
    for words in (("backup", disk, "--data", data), ("restore", data, "--data", disk)):
        done = invoke(*words)
        assert done.returncode == 1
        assert f"{disk} is a mount point, which no folder can replace" in done.stderr


def test_a_copy_inside_its_source_is_refused(tmp_path: Path, data: Path) -> None:
    with daemon(data):
        pass
    (tmp_path / "link").symlink_to(data)
    for target in (data / "sub", data / "sub" / "deeper", tmp_path / "link" / "sub"):
        for words in (("backup", target, "--data", data), ("restore", data, "--data", target)):
            done = invoke(*words)
            assert done.returncode == 1
            assert f"{target} is inside {data}. Give a folder elsewhere." in done.stderr
    assert not (data / "sub").exists()
    assert not (data / "sub.new").exists()


def test_the_error_of_a_backup_names_the_full_disk(disk: Path, data: Path) -> None:
    with fill(data) as client:
        grant(client)
    target = disk / "backup"
    disks.fill(disk / "filler")
    done = invoke("backup", target, "--data", data)
    assert (done.returncode, f"The disk of {target} is full" in done.stderr) == (1, True)
    assert [each.name for each in disk.iterdir()] == ["filler"]
