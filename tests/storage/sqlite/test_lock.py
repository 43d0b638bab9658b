import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.storage.base import StorageError, StorageLocked
from moorage.storage.sqlite.lock import WriterLock, read_database

HOLDER = """
import subprocess, sys
from pathlib import Path
from moorage.storage.sqlite.lock import WriterLock
WriterLock(Path(sys.argv[1])).acquire()
# A child that outlives its parent must not have inherited the lock.
child = subprocess.Popen([sys.executable, "-c", "input()"], close_fds=False)
print(child.pid, flush=True)
input()
"""


def test_the_lock_of_a_folder_ends_with_the_process_that_holds_it(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) > 0
        lock = WriterLock(path)
        with pytest.raises(StorageLocked, match=f"in use by process {holder.pid}") as caught:
            lock.acquire()
        assert caught.value.pid == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        lock.acquire()
        with pytest.raises(StorageLocked):
            WriterLock(path).acquire()
        lock.release()
        lock.release()
    WriterLock(path).acquire()


def test_a_lock_holder_that_the_file_does_not_name_is_another_process(
    tmp_path: Path,
):
    path = tmp_path / "ledger.sqlite"
    lock = WriterLock(path)
    lock.acquire()
    (tmp_path / "ledger.sqlite.lock").write_text("")
    with pytest.raises(StorageLocked, match="in use by another process") as caught:
        WriterLock(path).acquire()
    assert caught.value.pid is None
    lock.release()


def test_the_error_names_the_lock_file_in_a_missing_directory(tmp_path: Path):
    with pytest.raises(StorageError, match=r"cannot make .*missing/ledger.sqlite.lock"):
        WriterLock(tmp_path / "missing" / "ledger.sqlite").acquire()


def test_removing_the_lock_file_admits_no_other_process(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"")
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for _ in range(2):  # The first attempt has created another file.
            (tmp_path / "ledger.sqlite.lock").unlink()
            with pytest.raises(StorageLocked):
                WriterLock(path).acquire()
        holder.kill()
        holder.wait(60)
    WriterLock(path).acquire()


def test_servers_of_one_database_share_a_data_folder_and_all_others_are_refused(tmp_path: Path):
    path = tmp_path / "ledger.db"
    first, second, other = WriterLock(path), WriterLock(path), WriterLock(path)
    first.share("the database one")
    second.share("the database one")
    assert read_database(path) == "the database one"
    place = f"the data folder {tmp_path} is in use by process {os.getpid()}"
    with pytest.raises(StorageLocked, match=place):
        other.share("the database two")
    with pytest.raises(StorageLocked, match=place):
        other.acquire()
    first.release()
    with pytest.raises(StorageLocked, match=place):
        other.acquire()
    second.release()
    other.share("the database two")
    assert read_database(path) == "the database two"
    other.release()
    other.acquire()
    with pytest.raises(StorageLocked, match=f"the ledger {path} is in use"):
        first.share("the database one")
    assert read_database(path) == ""
    other.release()
