"""A damaged catalog is refused, or opens without the damaged record and reports that record."""

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from moorage.catalog.embedded.store import DocumentStore, StoredRow
from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.storage.sqlite.records import SqliteRecords
from moorage_policies import catalog as shipped

NAMES = ("first_fit", "fgd", "cheapest", "gang")


async def open_files(path: Path) -> Catalog:
    return await open_catalog(SqliteRecords(path))


async def kill_writer(path: Path) -> dict[str, dict]:
    """Leave a catalog's files as a kill -9 leaves them; return its policies."""
    alive = path.parent / "alive" / path.name
    alive.parent.mkdir(parents=True)
    catalog = await open_files(alive)
    for name in NAMES:
        await catalog.policies.register(await catalog.policies.prepare(shipped.document(name)))
        await catalog.metrics.put({"clusterId": name, "nodes": []})
    shutil.copytree(alive.parent, path.parent, dirs_exist_ok=True)
    policies = {uri: dict(await catalog.policies.get(uri)) for uri in catalog.memory.policy_uris()}
    await catalog.close()
    shutil.rmtree(alive.parent)
    return policies


async def policies(path: Path) -> tuple[dict[str, dict], list[str]]:
    catalog = await open_files(path)
    try:
        found = {uri: dict(await catalog.policies.get(uri)) for uri in catalog.memory.policy_uris()}
        return found, list(catalog.warnings)
    finally:
        await catalog.close()


def change(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "catalog.db"


async def test_a_catalog_is_intact_after_its_process_is_killed(path: Path):
    stored = await kill_writer(path)
    assert len(stored) == len(NAMES)
    assert await policies(path) == (stored, [])


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.8])
async def test_a_truncated_write_ahead_log_is_noticed_and_left_unchanged(path: Path, keep: float):
    await kill_writer(path)
    log = path.with_name("catalog.db-wal")
    cut(log, keep)
    before = log.stat().st_size
    with pytest.raises(ServiceError, match=r"of \d+ changes that were durable.*ledger repair"):
        await policies(path)
    assert log.stat().st_size == before


@pytest.mark.parametrize("name", ["catalog.db-wal", "catalog.db", "catalog.mark"])
async def test_the_loss_of_a_database_file_is_noticed(path: Path, name: str):
    await kill_writer(path)
    remove(path.parent / name)
    with pytest.raises(ServiceError) as caught:
        await policies(path)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("column", ["document", "files"])
async def test_a_policy_changed_on_disk_is_set_aside_and_may_be_stored_again(
    path: Path, column: str
):
    stored = await kill_writer(path)
    uri = next(iter(stored))
    changed = f"CAST(replace(CAST({column} AS TEXT), 'e', 'f') AS BLOB)"
    change(path, f"UPDATE records SET {column} = {changed} WHERE kind = 'policy' AND id = '{uri}'")  # noqa: S608  # Our own text.
    found, [warning] = await policies(path)
    assert found == {name: policy for name, policy in stored.items() if name != uri}
    assert f"the policy {uri} in" in warning
    assert "does not match its checksum" in warning
    catalog = await open_files(path)
    assert catalog.warnings == []
    name = uri.partition(":")[0]
    await catalog.policies.register(await catalog.policies.prepare(shipped.document(name)))
    await catalog.close()
    assert await policies(path) == (stored, [])


async def test_a_policy_is_checked_against_its_digest_when_it_is_read(path: Path):
    """All checksums may match: only the digest shows which content was registered."""
    stored = await kill_writer(path)
    uri = next(iter(stored))
    store = await DocumentStore.open(SqliteRecords(path))

    def forge(database):
        row = database.get("policy", uri)
        document = row.document.replace(stored[uri]["digest"].encode(), b"0" * 64)
        database.put("policy", StoredRow(uri, document, row.files))

    await store.run(forge)
    await store.close()
    found, [warning] = await policies(path)
    assert uri not in found
    assert "does not match its digest" in warning


async def test_the_loss_of_a_record_is_noticed(path: Path):
    await kill_writer(path)
    change(path, "DROP TRIGGER record_removed")
    change(path, "DELETE FROM records WHERE id = 'fgd' AND kind = 'metrics'")
    with pytest.raises(ServiceError, match=r"records are missing.*metrics"):
        await policies(path)


async def test_an_outdated_record_is_noticed(path: Path):
    await kill_writer(path)
    change(path, "DROP TRIGGER record_changed")
    older = await DocumentStore.open(SqliteRecords(path))
    await older.run(
        lambda db: db.put("metrics", StoredRow("fgd", b'{"clusterId":"fgd","nodes":[]} '))
    )
    await older.close()
    with pytest.raises(ServiceError, match="a metrics is not the version that was stored last"):
        await policies(path)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("catalog.db", 20),
        ("catalog.db-wal", 20),
        ("catalog.mark", 5),
        pytest.param("catalog.db", 200, marks=pytest.mark.heavy),
        pytest.param("catalog.db-wal", 200, marks=pytest.mark.heavy),
        pytest.param("catalog.mark", 200, marks=pytest.mark.heavy),
    ],
)
async def test_each_flipped_bit_is_noticed(path: Path, name: str, places: int):
    stored = await kill_writer(path)
    if name == "catalog.db":
        await policies(path)  # Moves the log's content into the file.
    dice = random.Random(places)
    whole = path.parent.rename(path.parent.with_name("whole"))
    noticed = 0
    for _ in range(places):
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(whole, path.parent)
        flip(path.parent / name, dice.randrange((whole / name).stat().st_size * 8))
        try:
            found, warnings = await policies(path)
        except ServiceError:
            noticed += 1
            continue
        assert found == stored or warnings
        assert {uri: policy for uri, policy in found.items() if stored[uri] != policy} == {}
    assert noticed or name == "catalog.mark"
