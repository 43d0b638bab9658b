"""A backup of a data folder in use is complete, durable and private."""

import signal
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Self

import pytest

from moorage.catalog.embedded.integrity import checksum
from moorage.commands.folder_copies import back_up, restore_folder
from moorage.core.state.facts import ClusterRemoved
from moorage.ledger.codec import seal
from moorage.model import ClusterId
from moorage.storage.base import (
    FENCING_BLOCK,
    FENCING_SKIP,
    RecordRow,
    StorageError,
    TokenRow,
)
from moorage.storage.sqlite.backup import UNFINISHED, refuse_unfinished, stage
from moorage.storage.sqlite.facts import looking
from moorage.storage.sqlite.records import looking as looking_at_records
from moorage.storage.sqlite.storage import SqliteStorage

NOW = 1_763_647_000.125
STAGING = """
import sys
from pathlib import Path
from moorage.storage.sqlite.backup import stage
with stage(Path(sys.argv[1])) as new:
    (new / "ledger.db").write_bytes(b"half")
    print("half", flush=True)
    input()
"""


class Writing:
    """A server that repeatedly registers a cluster and then appends a fact about it.

    Args:
        folder: The server's data folder.
    """

    def __init__(self, folder: Path) -> None:
        self.storage = SqliteStorage(folder)
        self.storage.secret()
        self.written = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.written.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        facts, records = self.storage.facts(), self.storage.records()
        facts.open()
        records.open()
        seq = chain = 0
        while not self._stop.is_set():
            seq += 1
            name = f"c-{seq}"
            row = RecordRow(name, b"{}", b"", checksum("cluster", name, b"{}", b""))
            records.transact(lambda table, row=row: table.put("cluster", row), durable=True)
            fact = seal(seq, NOW + seq, ClusterRemoved(ClusterId(name)), chain)
            chain = fact.chain
            facts.commit([fact], seq, [])
            self.written.set()
        facts.end_writing(clean=False)
        facts.close()
        records.close()


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    with Writing(folder):
        pass
    return folder


def test_a_backup_of_a_folder_in_use_is_complete(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with Writing(data) as server:
        with closing(server.storage.tokens()) as tokens:
            tokens.insert(TokenRow("ci", "d", "client", "ann", 1.0))
        counts = []
        for number in range(5):
            copy = tmp_path / f"copy-{number}"
            made = back_up(data, copy)
            with (
                looking(copy / "ledger.db") as facts,
                looking_at_records(copy / "catalog.db") as records,
            ):
                last = facts.page(facts.last_seq() - 1, 1, 1)[0]
                assert records.has("cluster", last.subject), "each cluster is in the catalog"
            assert (made.facts, made.newest_at) == (last.seq, NOW + last.seq)
            assert last.seq <= made.fencing <= last.seq + FENCING_BLOCK + 1
            assert SqliteStorage(copy).secret() == server.storage.secret()
            counts.append(made.facts)
    assert counts == sorted(counts)
    with closing(SqliteStorage(copy).tokens()) as tokens:
        assert [each.name for each in tokens.rows()] == ["ci"]
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in copy.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert not {"ledger.db-wal", UNFINISHED} & modes.keys()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700


def test_a_restored_folder_that_lost_its_tokens_is_refused(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    with closing(SqliteStorage(data).tokens()) as tokens:
        tokens.insert(TokenRow("ci", "d", "client", "ann", 1.0))
    back_up(data, tmp_path / "copy")
    restore_folder(tmp_path / "copy", tmp_path / "restored")
    (tmp_path / "restored" / "tokens.db").unlink()
    with (
        closing(SqliteStorage(tmp_path / "restored").tokens()) as tokens,
        pytest.raises(StorageError, match="put back a copy"),
    ):
        tokens.version()
    with pytest.raises(StorageError, match=r"restored/tokens.db is missing or has no tokens"):
        back_up(tmp_path / "restored", tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_a_restored_folder_uses_no_fencing_number_twice(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    made = back_up(data, tmp_path / "copy")
    restored = restore_folder(tmp_path / "copy", tmp_path / "new")
    assert restored.fencing == made.fencing + FENCING_SKIP
    facts = SqliteStorage(tmp_path / "new").facts()
    assert facts.open().fencing == restored.fencing
    facts.end_writing(clean=True)
    facts.close()
    again = restore_folder(tmp_path / "new", tmp_path / "newer")
    assert again.fencing == restored.fencing + FENCING_SKIP


def test_a_backup_does_not_overwrite_an_existing_target(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data")
    with pytest.raises(StorageError, match="data is not empty"):
        back_up(data, data)
    (tmp_path / "copy.new").mkdir()
    (tmp_path / "copy.new" / "mine").touch()
    with pytest.raises(StorageError, match=r"copy\.new is in the way"):
        back_up(data, tmp_path / "copy")
    assert (tmp_path / "copy.new" / "mine").exists()
    (tmp_path / "empty").mkdir()
    assert back_up(data, tmp_path / "empty").facts


@pytest.mark.parametrize("name", ["ledger.db", "catalog.mark", "ledger.fencing", "lease_secret"])
def test_a_damaged_folder_is_refused_and_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    back_up(write_folder(tmp_path / "data"), copy)
    (copy / name).write_bytes(b"x" * 10)
    with pytest.raises(StorageError, match=name):
        restore_folder(copy, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.new").exists()


def test_a_backup_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    target, half = tmp_path / "copy", tmp_path / "copy.new" / "ledger.db"
    command = [sys.executable, "-c", STAGING, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"half\n"
        with (
            pytest.raises(StorageError, match="is being written by another process"),
            stage(target),
        ):
            pass
        assert half.exists()
        other.send_signal(signal.SIGKILL)
        other.wait(60)
    assert half.exists()
    with stage(target) as new:
        assert [each.name for each in new.iterdir()] == [UNFINISHED]
    assert target.is_dir()
    assert not half.parent.exists()


def test_a_folder_of_a_killed_copy_names_all_commands_that_fill_folders(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).touch()
    with pytest.raises(StorageError, match="`moored restore` or `moored storage copy` is still"):
        refuse_unfinished(tmp_path)
