"""The addresses of a server's doors, as `moored doctor` reads them from a file."""

import os
from pathlib import Path

from moorage.daemon.door_record import DoorRecord, read_doors, write_doors

RECORD = DoorRecord(("127.0.0.1", 1), ("::1", 2), "net:[1]")


def test_a_record_is_read_until_its_server_removes_it(tmp_path: Path):
    assert read_doors(tmp_path) is None
    remove = write_doors(tmp_path, RECORD)
    assert read_doors(tmp_path) == RECORD
    remove()
    assert list(tmp_path.iterdir()) == []


def test_a_record_without_a_running_server_is_ignored(tmp_path: Path):
    remove = write_doors(tmp_path, RECORD)
    left = (tmp_path / "doors.json").read_bytes()
    remove()
    (tmp_path / "doors.json").write_bytes(left)
    assert read_doors(tmp_path) is None


def test_a_file_that_another_program_changed_is_ignored(tmp_path: Path):
    file = tmp_path / "doors.json"
    remove = write_doors(tmp_path, RECORD)
    os.truncate(file, 1 << 40)
    assert read_doors(tmp_path) is None
    remove()
    os.mkfifo(file)
    assert read_doors(tmp_path) is None
