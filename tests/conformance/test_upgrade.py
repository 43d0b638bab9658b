"""Folders of earlier releases open completely; a folder of a newer release is refused by name."""

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from moorage.catalog.opening import open_catalog
from moorage.commands.ledger_care import repair, verify
from moorage.commands.program import app
from moorage.core.allocator import Allocator
from moorage.core.state.state import State
from moorage.ledger.base import LedgerError
from moorage.ledger.stored import StoredLedger
from moorage.protocol.faults import ServiceError
from moorage.storage.sqlite.facts import SqliteFacts
from moorage.storage.sqlite.records import SqliteRecords

FOLDERS = Path(__file__).parent / "folders"
RELEASES = sorted(file.name.removesuffix(".tar.gz") for file in FOLDERS.glob("*.tar.gz"))


@pytest.fixture(params=RELEASES)
def folder(request, tmp_path: Path) -> Path:
    with tarfile.open(FOLDERS / f"{request.param}.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    (tmp_path / "said.json").write_bytes((FOLDERS / f"{request.param}.json").read_bytes())
    return tmp_path


def stored_answers(folder: Path) -> dict:
    return json.loads((folder / "said.json").read_text())


async def replay(folder: Path) -> State:
    ledger = StoredLedger(SqliteFacts(folder / "ledger.db"))
    recovery = await ledger.open()
    try:
        allocator = Allocator(1.0, 8)
        allocator.replay(recovery.facts, recovery.fencing)
        assert recovery.checkpoint_seq, "the folder has a checkpoint and later facts"
        assert recovery.last_seq > recovery.checkpoint_seq
        return allocator.state
    finally:
        await ledger.close()


async def test_an_upgrade_keeps_all_leases(folder: Path):
    state, before = await replay(folder), stored_answers(folder)
    assert [
        {
            "id": lease.id,
            "state": lease.state,
            "tenant": lease.tenant,
            "fencing": lease.fencing,
            "policy_rule_uri": lease.policy.uri,
            "placement": json.loads(msgspec.json.encode(lease.placement)),
        }
        for lease in state.leases.values()
    ] == before["leases"]
    assert {lease.state for lease in state.leases.values()} >= {"granted", "active", "warm"}
    assert len(state.ended) > 20
    assert {name: each.ask.tenant for name, each in state.waiting.items()} == before["waiters"]
    assert sorted(state.clusters) == sorted(each["id"] for each in before["clusters"])
    assert {tenant for tenant, _ in state.accounts.quotas} == before["quotas"].keys()
    assert list(state.reserved.by_id) == [each["reservation"] for each in before["reservations"]]
    assert {"/".join(place) for place in state.cordons} == before["cordons"].keys()


async def test_an_upgrade_keeps_all_registered_documents(folder: Path):
    before = stored_answers(folder)
    catalog = await open_catalog(SqliteRecords(folder / "catalog.db"))
    try:
        assert catalog.warnings == []
        memory = catalog.memory
        digests = {uri: each.document["digest"] for uri, each in memory.policies.items()}
        assert digests == before["policies"]
        assert memory.documents(sorted(memory.clusters)) == before["clusters"]
        assert {each.name: each.version for each in catalog.aliases.all()} == before["aliases"]
        assert len(memory.metrics) == 1
        assert len(await catalog.contexts.load()) == 1
    finally:
        await catalog.closing.aclose()


async def test_a_data_folder_of_an_old_release_opens_completely_and_stays_complete(folder: Path):
    assert verify(folder).findings == []
    await replay(folder)
    assert verify(folder).findings == []


def change(database: Path, *statements: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


NEWER = [
    ("ledger.db", "UPDATE meta SET value = 2 WHERE name = 'format'"),
    ("catalog.db", "PRAGMA user_version = 2"),
]


@pytest.mark.parametrize(("name", "statement"), NEWER)
async def test_the_refusal_of_a_newer_format_names_the_release_that_reads_it(
    folder: Path, name: str, statement: str
):
    release = ["CREATE TABLE release(version TEXT)", "INSERT INTO release VALUES ('7.1.0')"]
    change(folder / name, *release, statement)
    named = rf"{name} has format 2, .* reads formats up to 1: start moored 7\.1\.0,"
    with pytest.raises((LedgerError, ServiceError), match=named):
        await (
            replay(folder) if name == "ledger.db" else open_catalog(SqliteRecords(folder / name))
        )
    for accepted in (False, True):
        with pytest.raises(LedgerError, match=named):
            repair(folder, accept_loss=accepted)


def without(*names: str):
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def spoil_mark(folder: Path) -> None:
    (folder / "ledger.mark").write_bytes(b"\0" * 8192)


def exchange_mark(folder: Path) -> None:
    (folder / "ledger.mark").write_bytes((folder / "catalog.mark").read_bytes())


def forget_format(folder: Path) -> None:
    change(folder / "ledger.db", "DROP TABLE meta")


def spoil_checkpoints(folder: Path) -> None:
    change(folder / "ledger.db", "UPDATE checkpoint_part SET body = x'00'")
    without("ledger.mark")(folder)


def spoil_log(folder: Path) -> None:
    for name in ("ledger.db-wal", "catalog.db-wal"):
        content = bytearray((folder / name).read_bytes())
        content[100] ^= 1
        (folder / name).write_bytes(content)


HARMLESS = [
    spoil_log,
    without("ledger.mark"),
    without("ledger.mark", "ledger.fencing", "ledger.db-shm"),
    without("catalog.mark"),
    without("catalog.db", "catalog.db-wal", "catalog.db-shm"),
    spoil_mark,
    exchange_mark,
    forget_format,
    spoil_checkpoints,
]


@pytest.mark.parametrize("damage", HARMLESS)
def test_a_repair_loses_no_lease_that_can_be_read(folder: Path, damage):
    damage(folder)
    announced = repair(folder, accept_loss=False)
    assert announced.damage
    assert [each.split(":")[0] for each in announced.stays][:3] == [
        "5 leases",
        "2 waiting requests",
        "2 clusters",
    ]
    done = repair(folder, accept_loss=True)
    assert done.lost == announced.lost
    found = verify(folder)
    assert found.findings == []
    assert len(found.ledger.rows) == 62


def cut_log(folder: Path) -> None:
    log = folder / "ledger.db-wal"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])


def cut_database(folder: Path) -> None:
    database = folder / "ledger.db"
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])


def lose_a_fact(folder: Path) -> None:
    change(folder / "ledger.db", "DELETE FROM fact WHERE seq = 50")


@pytest.mark.parametrize("damage", [cut_log, cut_database, lose_a_fact])
async def test_a_dry_run_of_pruning_agrees_with_pruning(folder: Path, damage):
    damage(folder)
    announced = repair(folder, accept_loss=False)
    assert any("all later grants and ends" in each for each in announced.lost)
    repair(folder, accept_loss=True)
    ledger = StoredLedger(SqliteFacts(folder / "ledger.db"))
    recovery = await ledger.open()
    allocator = Allocator(1.0, 8)
    allocator.replay(recovery.facts, recovery.fencing)
    await ledger.close()
    counts = [len(allocator.state.leases), len(allocator.state.waiting)]
    counts += [len(allocator.state.clusters)]
    stayed = [int(each.split()[0]) for each in announced.stays if not each.startswith("in the")]
    assert stayed == [count for count in counts if count]


def test_an_unreadable_ledger_is_reported_as_lost(folder: Path):
    without("ledger.mark")(folder)
    (folder / "ledger.db").write_bytes(b"\1" * 8192)
    (folder / "ledger.db-wal").unlink()
    announced = repair(folder, accept_loss=False)
    assert "every lease, waiting request and cluster: no fact can be read." in announced.lost


def test_a_dry_run_of_repair_lists_what_would_be_lost(folder: Path):
    lose_a_fact(folder)
    change(folder / "catalog.db", "DELETE FROM records WHERE kind = 'alias'")
    change(folder / "catalog.db", "UPDATE usage SET records = 2 WHERE kind = 'alias'")
    done = CliRunner().invoke(app, ["ledger", "repair", "--data", str(folder)])
    assert done.exit_code == 1
    for sentence in (
        "A repair would lose:",
        "  3 leases: ",
        "  2 waiting requests: ",
        "  in the catalog: 2 of 2 records of kind alias.",
        "Would stay:",
        "  1 lease: ",
        "  2 clusters: east, west.",
        "  in the catalog: 3 of kind policy.",
    ):
        assert sentence in done.stdout
