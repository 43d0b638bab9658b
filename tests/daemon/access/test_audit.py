"""Tests of the audit log: its hash chain reveals changes, with several writers and bounds."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from moorage.core.state.facts import (
    ClusterRemoved,
    Cordoned,
    Fact,
    Refusal,
    Reserved,
    Uncordoned,
    Unreserved,
)
from moorage.core.state.reserved import NodeReservation
from moorage.core.turns.effects import Address, Respond
from moorage.core.turns.events import Tick
from moorage.core.turns.turn import Turn
from moorage.daemon.access import audit_files, audit_log
from moorage.daemon.access.audit_chain import ChainEnd, ChainError
from moorage.daemon.access.audit_files import (
    AuditFiles,
    is_begin_known,
    read_end,
    read_lines,
    verify,
)
from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.audit_mark import AuditMark, write_mark
from moorage.daemon.access.audit_recovery import recover
from moorage.daemon.access.audit_trail import NODES_MAX, AuditTrail, Standing
from moorage.ledger.memory import MemoryLedger
from moorage.model import ClusterId, Code, Demand, NodeId, RequestId, SessionId, Tenant
from moorage.records.audit import AuditEntry

DAY = 86_400.0
ANN = Tenant("ann")


def files(folder: Path, keep_seconds: float = DAY, keep_bytes: int = 1 << 30) -> AuditFiles:
    return AuditFiles(folder, keep_seconds, keep_bytes)


def entry(number: int, **more: str) -> AuditEntry:
    return AuditEntry(1e9 + number, "lease.granted", "ann", about={"lease": f"l{number}"}, **more)


def log_files(folder: Path) -> list[Path]:
    return sorted((folder / "audit").glob("*.jsonl"))


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    """A data folder with five audit entries, by two writers in turn."""
    one, other = files(tmp_path), files(tmp_path)
    one.append([entry(1), entry(2)], 0)
    other.append([entry(3, why='quotes " and ,"hash":"')], 0)
    one.append([entry(4), entry(5)], 0)
    return tmp_path


def test_entries_of_several_writers_are_numbered_and_chained(log_folder: Path) -> None:
    lines = list(read_lines(log_folder))
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["about"]["lease"] for line in lines] == ["l1", "l2", "l3", "l4", "l5"]
    assert verify(log_folder) == (1, ChainEnd(5, lines[-1]["hash"]))
    assert [line["number"] for line in read_lines(log_folder, after=3)] == [4, 5]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        *[("edit", place) for place in range(5)],
        *[("hash", place) for place in range(5)],
        *[("drop", place) for place in range(1, 4)],
        *[("swap", place) for place in range(1, 5)],
    ],
)
def test_a_change_of_any_line_of_the_audit_log_is_found(
    log_folder: Path, place: int, change: str
) -> None:
    (path,) = log_files(log_folder)
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "edit":
        lines[place] = lines[place].replace(b'"ann"', b'"bob"')
    elif change == "hash":
        lines[place] = lines[place].replace(b'"hash":"', b'"hash":"0', 1)
    elif change == "drop":
        del lines[place]
    else:
        lines[place - 1], lines[place] = lines[place], lines[place - 1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ChainError, match=path.name):
        verify(log_folder)


def test_a_change_of_any_byte_of_the_audit_log_is_found(log_folder: Path) -> None:
    (path,) = log_files(log_folder)
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        path.write_bytes(whole[:place] + bytes([byte ^ 1]) + whole[place + 1 :])
        with pytest.raises(ChainError, match=path.name):
            verify(log_folder)


def test_a_torn_line_of_the_audit_log_is_cut_off_and_the_chain_continues(log_folder: Path) -> None:
    (path,) = log_files(log_folder)
    with path.open("ab") as file:
        file.write(b'{"number":6,"at"')
    assert len(list(read_lines(log_folder))) == 5
    files(log_folder).append([entry(6)], 0)
    assert verify(log_folder)[1].number == 6


def write_three_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Write a log of three files with one entry each."""
    monkeypatch.setattr(audit_files, "FILE_BYTES_MAX", 1)
    writer = files(folder)
    for number in range(1, 4):
        writer.append([entry(number)], 0)
    return log_files(folder)


def test_a_change_after_a_truncated_file_of_the_audit_log_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = write_three_files(tmp_path, monkeypatch)
    first.write_bytes(first.read_bytes().removesuffix(b"\n"))
    second.write_bytes(second.read_bytes().replace(b'"ann"', b'"bob"'))
    with pytest.raises(ChainError, match=f"{first.name}:1: the line has no newline"):
        verify(tmp_path)
    with pytest.raises(ChainError, match=f"{first.name}:1"):
        list(read_lines(tmp_path))


def test_a_reader_that_follows_the_audit_log_does_not_read_a_full_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = write_three_files(tmp_path, monkeypatch)
    first.write_text("garbage\n")
    assert [line["number"] for line in read_lines(tmp_path, after=1)] == [2, 3]
    second.write_text("garbage\n")
    assert [line["number"] for line in read_lines(tmp_path, after=2)] == [3]
    with pytest.raises(ChainError, match="not an audit entry"):
        list(read_lines(tmp_path, after=1))


@pytest.mark.parametrize("left", [0, 2])
def test_the_next_entry_of_a_truncated_log_reports_the_loss(tmp_path: Path, left: int) -> None:
    writer = files(tmp_path)
    writer.append([entry(number) for number in range(1, 5)], 0)
    end = verify(tmp_path)[1]
    (path,) = log_files(tmp_path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:left]))
    writer.append([entry(5)], 7.0)
    *_, cut, last = read_lines(tmp_path)
    assert (cut["what"], cut["at"]) == ("audit.cut", 7.0)
    assert cut["about"] == {"last": left, "noted": 4, "noted_hash": end.hash}
    assert last["about"] == {"lease": "l5"}
    writer.append([entry(6)], 8.0)
    assert [each["what"] for each in read_lines(tmp_path)].count("audit.cut") == 1
    with pytest.raises(ChainError, match=rf"as entry {left + 1} \(audit.cut\) says") as caught:
        verify(tmp_path)
    assert str(caught.value).startswith(f"former entries {left + 1} to 4 are missing")
    assert str(caught.value).endswith(f"; entries 1 to {left + 3} are unchanged")
    assert read_end(tmp_path).number == left + 3


def test_a_caller_cannot_forge_an_entry_about_a_cut(tmp_path: Path) -> None:
    about = {"what": "audit.cut", "noted": 9}
    files(tmp_path).append([AuditEntry(1.0, "right.refused", about=about)], 0)
    assert verify(tmp_path)[1].number == 1


def keep_lines(folder: Path, begin: int, end: int | None = None) -> None:
    """Remove all lines before `begin` and from `end` on; both count from 0."""
    (path,) = log_files(folder)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[begin:end]))


def test_lines_removed_at_the_beginning_of_the_audit_log_are_found(log_folder: Path) -> None:
    keep_lines(log_folder, 2)
    for _ in range(2):  # A further start of a server changes nothing.
        with pytest.raises(ChainError, match="begins at entry 3: entries 1 to 2 are missing"):
            verify(log_folder)
        files(log_folder).append([entry(6)], 1e9)


def fill_beyond_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AuditFiles:
    """Append more entries than the log may have, so that its oldest files are deleted."""
    monkeypatch.setattr(audit_files, "FILE_BYTES_MAX", 1000)
    writer = files(folder, keep_bytes=5000)
    for number in range(100):
        writer.append([entry(number)], 0)
    return writer


def test_lines_removed_after_a_deletion_of_old_files_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_beyond_bounds(tmp_path, monkeypatch)
    first, _ = verify(tmp_path)
    assert first > 1
    assert is_begin_known(tmp_path)
    log_files(tmp_path)[0].unlink()
    with pytest.raises(ChainError, match=f": entries {first} to [0-9]+ are missing; entries"):
        verify(tmp_path)


def test_a_log_can_be_read_while_the_server_deletes_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fill_beyond_bounds(tmp_path, monkeypatch)
    list_files = audit_files._files

    def list_then_delete(folder: Path) -> list[Path]:
        found = list_files(folder)
        monkeypatch.setattr(audit_files, "_files", list_files)
        for number in range(10):
            writer.append([entry(number)], 0)
        assert not found[0].exists()
        return found

    monkeypatch.setattr(audit_files, "_files", list_then_delete)
    assert verify(tmp_path)[0] > 1
    monkeypatch.setattr(audit_files, "_files", list_then_delete)
    assert [each["number"] for each in read_lines(tmp_path)]


def test_a_log_of_an_older_release_is_taken_as_it_begins(log_folder: Path) -> None:
    keep_lines(log_folder, 2)
    (log_folder / "audit.mark").unlink()
    assert verify(log_folder)[0] == 3
    assert not is_begin_known(log_folder)
    files(log_folder).append([entry(6)], 1e9)
    assert is_begin_known(log_folder)
    assert verify(log_folder)[0] == 3
    keep_lines(log_folder, 1)
    with pytest.raises(ChainError, match="begins at entry 4: entry 3 is missing"):
        verify(log_folder)


@pytest.mark.parametrize("damage", ["removed", "emptied", "cut"])
def test_an_audit_log_cut_while_the_server_is_stopped_is_found(tmp_path: Path, damage: str) -> None:
    writer = files(tmp_path)
    for number in range(1, 6):
        writer.append([entry(number)], 0)
    end = verify(tmp_path)[1]
    writer.close()
    left = 3 if damage == "cut" else 0
    if damage == "removed":
        shutil.rmtree(tmp_path / "audit")
    else:
        keep_lines(tmp_path, 0, left)
    lost = f"although entry 5 was written: entries {left + 1} to 5 are missing"
    with pytest.raises(ChainError, match=lost):
        verify(tmp_path)
    for number in (6, 7):  # Two starts.
        writer = files(tmp_path)
        writer.append([entry(number)], 0)
        writer.close()
    (cut,) = [each for each in read_lines(tmp_path) if each["what"] == "audit.cut"]
    assert cut["about"] == {"last": left, "noted": 5, "noted_hash": end.hash}
    with pytest.raises(ChainError, match=f"former entries {left + 1} to 5 are missing"):
        verify(tmp_path)


def test_an_audit_log_rewritten_before_its_last_entry_is_found(log_folder: Path) -> None:
    end = verify(log_folder)[1]
    mark = AuditMark(ChainEnd(), ChainEnd(3, end.hash))
    write_mark(log_folder, mark)
    with pytest.raises(ChainError, match="entry 3 is not the one that was written first"):
        verify(log_folder)


def test_a_damaged_mark_of_the_audit_log_is_reported_and_replaced(log_folder: Path) -> None:
    (log_folder / "audit.mark").write_text("{")
    with pytest.raises(ChainError, match=r"audit\.mark is damaged.*put back a copy"):
        verify(log_folder)
    for number in (7, 8):
        writer = files(log_folder)
        writer.append([entry(number)], 1e9)
        assert verify(log_folder)[1].number == number
    (log_folder / "audit.mark").write_text("")  # While the server runs.
    for number in range(9, 12):
        writer.append([entry(number)], 1e9 + 60 * (number - 8))
    whats = [line["what"] for line in read_lines(log_folder)]
    assert [place for place, what in enumerate(whats, 1) if what == "audit.mark_lost"] == [6, 10]
    assert verify(log_folder)[1].number == 12


def test_the_end_of_an_audit_log_is_before_a_torn_line(log_folder: Path) -> None:
    (path,) = log_files(log_folder)
    with path.open("ab") as file:
        file.write(b'{"number":6,"at"')
    assert read_end(log_folder).number == 5
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ValueError, match=f"{path}: the last line is not an audit entry: "):
        read_end(log_folder)


def test_a_hash_noted_elsewhere_reveals_a_truncated_or_rewritten_audit_log(
    log_folder: Path, tmp_path: Path
) -> None:
    ends = [ChainEnd(line["number"], line["hash"]) for line in read_lines(log_folder)]
    for noted in (*ends, None):
        assert verify(log_folder, noted)[1] == ends[-1]
    with pytest.raises(ChainError, match="entry 2 is not the one that you noted"):
        verify(log_folder, ChainEnd(2, ends[2].hash))
    with pytest.raises(ChainError, match="the log ends at entry 5, before the noted entry 9"):
        verify(log_folder, ChainEnd(9, ends[2].hash))
    (path,) = log_files(tmp_path)
    path.rename(path.with_name("00000002.jsonl"))
    path.with_name("00000002.jsonl").write_bytes(
        b"".join(path.with_name("00000002.jsonl").read_bytes().splitlines(keepends=True)[3:])
    )
    with pytest.raises(ChainError, match="the log begins at entry 4, after the noted entry 2"):
        verify(log_folder, ends[1])


def test_files_of_the_audit_log_are_bounded_in_size_and_the_oldest_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fill_beyond_bounds(tmp_path, monkeypatch)
    assert sum(path.stat().st_size for path in log_files(tmp_path)) < 7000
    first, end = verify(tmp_path)
    assert first > 1
    assert end.number == 100
    old = log_files(tmp_path)[-1].stat().st_mtime + 2 * DAY
    writer.append([entry(100)], old)
    assert len(log_files(tmp_path)) <= 2
    assert verify(tmp_path)[1].number == 101


def test_processes_that_write_the_audit_log_simultaneously_make_one_chain(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from moorage.daemon.access.audit_files import AuditFiles\n"
        "from moorage.records.audit import AuditEntry\n"
        "files = AuditFiles(pathlib.Path(sys.argv[1]), 1e9, 1 << 30)\n"
        "for n in range(50):\n"
        "    files.append([AuditEntry(0.0, 'x', sys.argv[2])] * 3, 0)\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path, name], env={**os.environ})
        for name in "abc"
    ]
    assert [each.wait(60) for each in running] == [0, 0, 0]
    assert verify(tmp_path)[1].number == 450


def test_closing_the_audit_log_writes_all_accepted_entries(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 1, 32)
    for number in range(1000):
        log.note(entry(number))
    log.close()
    assert verify(tmp_path)[1].number == 1000


async def test_flush_returns_once_audit_entries_are_on_the_disk(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 1, 32)
    for number in range(1, 4):
        log.note(entry(number))
        await log.flush()
        assert verify(tmp_path)[1].number == number
    (tmp_path / "audit").rename(tmp_path / "aside")
    (tmp_path / "audit").write_text("no folder")
    log.note(entry(4))
    await log.flush()  # Returns even if the disk fails.
    (tmp_path / "audit").unlink()
    log.close()


async def test_under_load_audit_entries_are_gathered_unless_a_caller_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "GATHER_SECONDS_MAX", 1e6)
    log = AuditLog(tmp_path, 1, 32)
    log.note_all([entry(number) for number in range(100)])
    await log.flush()
    log.note(entry(100))
    await asyncio.sleep(20 * audit_log.GATHER_SECONDS)  # Nothing must happen meanwhile.
    assert verify(tmp_path)[1].number == 100
    await log.flush()
    assert verify(tmp_path)[1].number == 101
    log.close()


@pytest.mark.parametrize("days", [0, 1])
async def test_at_a_start_the_server_adds_entries_for_facts_that_the_audit_log_lacks(
    tmp_path: Path, days: int
) -> None:
    ledger = MemoryLedger()
    await ledger.open()
    cordons = [Cordoned(ClusterId("east"), NodeId(f"n{each}"), 5.0, ANN) for each in range(2500)]
    await ledger.append(cordons, 7.0)
    files(tmp_path).append([AuditEntry(1.0, "x", seq=40), entry(1, why='"seq":9')], 0)
    for _ in range(2):  # The second start must find no missing entries.
        log = AuditLog(tmp_path, days, 32)
        nothing = lambda _: None  # noqa: E731  # A stand-in for functions that this test does not need.
        trail = AuditTrail(log, lambda _: (None, ""), nothing, nothing, Standing())
        await recover(log, trail, ledger)
        log.close()
    _, _, *lines = read_lines(tmp_path)
    if not days:
        assert lines == []
        return
    *again, started, second = lines
    assert [each["seq"] for each in again] == list(range(41, 2501))
    assert {(each["what"], each["who"], each["at"]) for each in again} == {
        ("fleet.cordoned", "ann", 7.0)
    }
    assert all(each["recovered"] for each in again)
    assert [each["what"] for each in (started, second)] == ["server.started"] * 2
    assert verify(tmp_path)[1].number == second["number"]


async def test_audit_entries_during_recovery_follow_the_recovered_entries(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 1, 32)
    log.hold()
    log.note(AuditEntry(3.0, "new", seq=9))
    waits = asyncio.create_task(log.flush())
    log.let_go([AuditEntry(1.0, "old", seq=8)], 8)
    await waits
    log.close()
    assert [each["what"] for each in read_lines(tmp_path)] == ["old", "server.started", "new"]


def test_the_next_start_recovers_audit_entries_of_a_failed_start(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 1, 32)
    log.hold()
    log.note_all([AuditEntry(3.0, "lease.granted", seq=9), AuditEntry(3.0, "right.refused")])
    log.close()
    assert [each["what"] for each in read_lines(tmp_path)] == ["right.refused"]


def test_an_audit_entry_that_is_not_unicode_text_stops_no_other_entry(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 1, 32)
    log.note_all([entry(1, why="half a \ud800 pair"), entry(2)])
    log.note(AuditEntry(1.0, "x", about={"number": 1 << 70}))
    log.close()
    first, _, large = read_lines(tmp_path)
    assert first["why"] == "half a ? pair"
    assert large["about"] == {"number": 1 << 70}
    assert verify(tmp_path)[1].number == 3


def test_a_flood_of_wrong_tokens_is_counted_and_not_logged_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "FAILED_A_MINUTE_MAX", 3)
    log = AuditLog(tmp_path, 1, 32)
    for _ in range(10):
        log.note_failed_login("10.0.0.1", "http", "no token")
    log.note_failed_login("10.0.0.2", "http", "no token")
    monkeypatch.setattr(audit_log, "MINUTE_SECONDS", 0.0)
    log.note_failed_login("10.0.0.2", "http", "no token")
    log.close()
    assert log.failed_logins == {"websocket": 0, "http": 12, "console": 0}
    seen = [(line["remote"], line["about"].get("more")) for line in read_lines(tmp_path)]
    assert seen == [
        *[("10.0.0.1", None)] * 3,
        ("10.0.0.2", None),
        ("10.0.0.1", 7),
        ("10.0.0.2", None),
    ]


async def test_the_end_of_the_minute_or_a_stop_notes_the_number_of_more_failed_logins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "FAILED_A_MINUTE_MAX", 3)
    monkeypatch.setattr(audit_log, "MINUTE_SECONDS", 0.05)
    log = AuditLog(tmp_path, 1, 32)
    for more in (7, 2):
        for _ in range(3 + more):
            log.note_failed_login("10.0.0.1", "http", "no token")
        if more == 7:
            monkeypatch.setattr(audit_log, "MINUTE_SECONDS", 60.0)
            await asyncio.sleep(0.1)  # The minute has ended.
    log.close()
    seen = [line["about"].get("more") for line in read_lines(tmp_path)]
    assert seen == [None, None, None, 7, None, None, None, 2]


def test_audit_entries_wait_for_a_failing_disk_and_dropped_entries_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(audit_log, "PENDING_MAX", 5)
    (tmp_path / "audit").write_text("no folder")
    log = AuditLog(tmp_path, 1, 32)
    for number in range(50):
        log.note(entry(number))
    while not log.lost:
        log.note(entry(0))
    (tmp_path / "audit").unlink()
    log.close()
    whats = [line["what"] for line in read_lines(tmp_path)]
    assert "lease.granted" in whats
    assert "audit.dropped" in whats


def test_entries_that_a_stop_cannot_write_are_counted_and_the_next_start_notes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "RETRY_SECONDS", 0.01)
    files(tmp_path).append([entry(1)], 0)
    (path,) = log_files(tmp_path)
    intact = path.read_bytes()
    path.write_bytes(intact + b"garbage\n")
    log = AuditLog(tmp_path, 1, 32)
    assert log.waiting_seconds() == 0
    with capture_logs() as lines:
        for number in range(2, 5):
            log.note(entry(number))
        log.note(replace(entry(5), seq=7))  # The next start restores the entry of a fact.
        while not log.waiting_seconds():
            time.sleep(0.01)  # The thread announces nothing.
        log.close()
    assert (lines[-1]["event"], lines[-1]["entries"]) == ("audit_lost", 3)
    assert "delete the damaged lines at its end" in lines[0]["reason"]
    path.write_bytes(intact)
    for whats in (["audit.dropped", "server.started"], ["server.started"]):
        log = AuditLog(tmp_path, 1, 32)
        assert log.lost == (3 if "audit.dropped" in whats else 0)
        log.note_server("started")
        log.close()
        found = list(read_lines(tmp_path))[-len(whats) :]
        assert sorted(line["what"] for line in found) == whats
    assert {line["about"].get("entries") for line in read_lines(tmp_path)} == {None, 3}


def test_the_audit_log_has_the_former_values_of_changes_by_operators(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 1, 32)
    nothing = lambda _: None  # noqa: E731  # A stand-in for functions that this test does not need.
    trail = AuditTrail(log, lambda _: (None, ""), nothing, nothing, Standing())
    east, node = ClusterId("east"), NodeId("n")
    places = tuple(("east", f"n{number}") for number in range(NODES_MAX + 5))
    made = NodeReservation(RequestId("r1"), ANN, places, Demand(), 10.0, 20.0)
    steps: list[list[Fact]] = [
        [Cordoned(east, node, 5.0, ANN, "new fans")],
        [
            Cordoned(east, node, 6.0, ANN, "x" * 10_000, drains=True, until=9.0),
            Cordoned(east, NodeId(""), 7.0, ANN),
        ],
        [Uncordoned(east, node, 8.0, ANN)],
        [ClusterRemoved(east), Cordoned(east, NodeId(""), 9.0, ANN)],
        [Reserved(made), Reserved(replace(made, used=True))],
        [Unreserved(made.id, 11.0, "its time is up")],
    ]
    last = 100
    for facts in steps:
        trail.observe_step(Tick(), Turn(facts))
    for facts in steps:
        last += len(facts)
        trail.observe_commit(facts, last)
    log.close()
    lines = list(read_lines(tmp_path))
    assert [each["seq"] for each in lines] == [101, 102, 103, 104, 106, 107, 108, 109]
    fans = {"who": "ann", "reason": "new fans", "drains": False, "until": 0.0}
    drain = {"who": "ann", "reason": "x" * 200, "drains": True, "until": 9.0}
    none = fans | {"reason": ""}
    assert [(each.get("before"), each.get("after")) for each in lines[:5]] == [
        (None, fans),
        (fans, drain),
        (None, none),
        (drain, None),
        (None, none),  # The previous cordon ended with its cluster.
    ]
    reserved, used, ended = lines[5:]
    whats = [each["what"] for each in (reserved, used, ended)]
    assert whats == [f"reservation.{each}" for each in ("made", "changed", "ended")]
    assert reserved["after"] == used["before"]
    assert used["after"] == ended["before"] == reserved["after"] | {"used": True}
    assert (len(ended["before"]["nodes"]), ended["before"]["more"]) == (NODES_MAX, 5)


def test_with_audit_days_0_no_log_is_written(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 0, 32)
    log.note(entry(1))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_with_audit_days_0_no_entries_are_made(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, 0, 32)

    def never(*_: object) -> None:
        pytest.fail("it looked for who is behind")

    trail = AuditTrail(log, never, never, never, Standing())  # type: ignore[arg-type]  # They never return.
    fact = Cordoned(ClusterId("east"), NodeId("n"), 5.0, ANN)
    refusal = Respond(Address(SessionId("s"), 1), Refusal(Code.QUOTA_EXCEEDED, "no"))
    trail.observe_step(Tick(), Turn([fact], [refusal]))
    trail.observe_commit([fact], 1)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_stored_lines_of_the_audit_log_are_valid_json(log_folder: Path) -> None:
    (path,) = log_files(log_folder)
    for line in path.read_text().splitlines():
        assert json.loads(line)["who"] == "ann"
