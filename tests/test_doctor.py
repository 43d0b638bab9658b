"""What `moored doctor` finds in a data folder and at the ports, without a server."""

import asyncio
import contextlib
import os
import random
import shutil
import socket
import sqlite3
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moorage.commands import access_examination
from moorage.commands.access_examination import examine_access
from moorage.commands.examination import examine_ports
from moorage.commands.folder_examination import examine_folder, examine_modes
from moorage.commands.program import app
from moorage.commands.service_examination import examine_services
from moorage.config.settings import Config
from moorage.core.state.facts import Ended, Granted
from moorage.daemon.access.audit_files import AuditFiles
from moorage.daemon.door_record import DoorRecord, find_network, write_doors
from moorage.ledger.base import LedgerError
from moorage.ledger.stored import StoredLedger
from moorage.model import Lease, LeaseTerms, PolicyRef, RequestId, Tenant
from moorage.records.audit import AuditEntry
from moorage.records.findings import DoctorFinding
from moorage.storage.base import RecordRow, RecordTable, StorageError, TokenRow
from moorage.storage.sqlite.facts import SqliteFacts
from moorage.storage.sqlite.files import check_pages_in_time
from moorage.storage.sqlite.records import SqliteRecords
from moorage.storage.sqlite.storage import SqliteStorage, write_secret
from tests.certificates import certificate, pem_of
from tests.ledger.facts import opened

SOUND = DoctorFinding("ledger", "ok", "sound")


async def start(data: Path) -> None:
    """Read a folder as the start of a server does.

    Raises:
        LedgerError: The ledger is damaged.
        StorageError: The catalog is damaged.
    """
    ledger = StoredLedger(SqliteFacts(data / "ledger.db"))
    recovery = await ledger.open()
    try:
        list(recovery.facts)
    finally:
        await ledger.close()
    records = SqliteRecords(data / "catalog.db")
    records.open()
    records.close()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a server that was stopped: 6,000 facts, one lease and ten records."""
    data = tmp_path_factory.mktemp("stopped")

    async def fill() -> None:
        ledger = await opened(data / "ledger.db")
        name, terms = RequestId("r-1"), LeaseTerms(1.0)
        lease = Lease(name, Tenant("t"), "", PolicyRef("p", "0"), (), 1, 1.0, 2.0, terms)
        await ledger.append([Ended(RequestId("r-0"), 1.0, "x" * 50)] * 6_000, 1.0)
        await ledger.append([Granted(lease)], 1.0)
        await ledger.close()

    asyncio.run(fill())
    records = SqliteRecords(data / "catalog.db")
    records.open()

    def put(table: RecordTable, number: int) -> None:
        table.put("cluster", RecordRow(f"c-{number}", b"{}", b"", 0))

    for number in range(10):
        records.transact(partial(put, number=number), durable=True)
    records.close()
    write_secret(data / "lease_secret", b"x" * 32)
    (data / "audit").mkdir()
    return data


@pytest.fixture
def data(stopped: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder, to be damaged."""
    return Path(shutil.copytree(stopped, tmp_path / "data"))


def remove(pattern: str) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        for file in data.glob(pattern):
            file.unlink()

    return damage


def overwrite(data: Path) -> None:
    with (data / "ledger.db").open("r+b") as file:
        file.seek(40_960)
        file.write(random.Random(1).randbytes(160 << 10))


def test_doctor_finds_no_fault_in_a_sound_folder_or_a_missing_one(data: Path) -> None:
    assert examine_folder(data, SOUND, runs=False) == [SOUND]
    assert examine_folder(data / "none", SOUND, runs=False) == [SOUND]
    assert examine_folder(data, SOUND, runs=True) == [SOUND]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("ledger", remove("ledger.db*")),
        ("ledger", remove("ledger.mark")),
        ("catalog", remove("catalog.db*")),
        ("ledger", overwrite),
    ],
    ids=["no_ledger", "no_mark", "no_catalog", "random_bytes"],
)
@pytest.mark.parametrize("runs", [False, True])
def test_doctor_says_what_a_start_says_of_damage(
    data: Path, name: str, damage: Callable[[Path], None], *, runs: bool
) -> None:
    damage(data)
    broken = [each for each in examine_folder(data, SOUND, runs=runs) if each.state == "broken"]
    assert [each.name for each in broken] == [name], broken
    with pytest.raises((LedgerError, StorageError)) as refused:
        asyncio.run(start(data))
    assert broken[0].detail == str(refused.value)


def examine(data: Path) -> dict[str, DoctorFinding]:
    found = examine_folder(data, SOUND, runs=False)
    found += examine_access(Config.load({"data_dir": data}, {}))
    return {each.name: each for each in found}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def fill_shared(data: Path) -> None:
    """Fill the files of tokens, agents, logins and the audit log, as a server does."""
    storage = SqliteStorage(data)
    with closing(storage.tokens()) as tokens:
        tokens.insert(TokenRow("ci", "d", "client", "ann", 1.25))
    with closing(storage.agents()) as agents, agents.change() as documents:
        documents["agent:a"] = b"{}"
    with closing(storage.logins()) as logins:
        logins.insert("d", b"{}")
    with closing(AuditFiles(data, 1e9, 1 << 30)) as log:
        log.append([AuditEntry(1.0, "lease.granted", "ann", seq=1)], 1.0)


def test_doctor_changes_no_file(data: Path) -> None:
    fill_shared(data)
    for emptied in (False, True):
        if emptied:
            (data / "tokens.mark").unlink()
            for name in ("tokens.db", "agents.db", "logins.db"):
                (data / name).write_bytes(b"")
        before = contents(data)
        assert {each.state for each in examine(data).values()} == {"ok"}
        assert contents(data) == before
    (data / "tokens.db").unlink()
    remove("tokens.mark")(data)
    fill_shared(data)
    remove("tokens.mark")(data)
    examine(data)
    assert not (data / "tokens.mark").exists()


@pytest.mark.parametrize(
    ("file", "name", "state", "said"),
    [
        ("agents.db", "agents", "broken", "move it away"),
        ("logins.db", "console logins", "warning", "move it away"),
        ("ledger.fencing", "ledger marks", "warning", "a start writes it again"),
        ("audit.mark", "audit log", "warning", "put back a copy"),
    ],
)
def test_doctor_names_damage_of_each_file(
    data: Path, file: str, name: str, state: str, said: str
) -> None:
    fill_shared(data)
    (data / file).write_text("garbage")
    found = {each.name: each for each in examine(data).values() if each.state != "ok"}
    assert list(found) == [name], found
    assert (found[name].state, str(data / file) in found[name].detail) == (
        state,
        file != "ledger.fencing",
    )
    assert said in found[name].detail


@pytest.mark.parametrize(
    "file",
    [
        "agents.db",
        "audit.mark",
        "audit/00000001.jsonl",
        "catalog.mark",
        "ledger.fencing",
        "lease_secret",
        "logins.db",
        "tokens.db",
    ],
)
def test_doctor_does_not_wait_for_a_pipe(data: Path, file: str) -> None:
    fill_shared(data)
    (data / file).unlink()
    os.mkfifo(data / file)
    said = [each.detail for each in examine(data).values() if each.state in {"broken", "warning"}]
    assert any("is not a regular file; move it away" in each for each in said), said


def test_doctor_finds_damage_in_pages_that_a_start_does_not_read(data: Path) -> None:
    pages = (data / "catalog.db").stat().st_size // 4_096
    with (data / "catalog.db").open("r+b") as file:
        file.seek((pages - 1) * 4_096)
        file.write(b"\xff" * 4_096)
    (found,) = [each for each in examine_folder(data, SOUND, runs=False) if each != SOUND]
    assert (found.name, found.state) == ("catalog", "broken")
    assert "moored ledger verify" in found.detail


def test_the_check_of_pages_ends_in_time(data: Path) -> None:
    class Endless(sqlite3.Connection):
        """Checks its pages until it is interrupted."""

        def execute(self, *_: object) -> sqlite3.Cursor:
            return super().execute(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT max(i) FROM n"
            )

    with contextlib.closing(sqlite3.connect(data / "ledger.db", factory=Endless)) as connection:
        assert check_pages_in_time(connection, 0.2) == ""


def test_doctor_names_a_catalog_that_is_missing_with_its_mark(data: Path) -> None:
    remove("catalog.*")(data)
    (found,) = [each for each in examine_folder(data, SOUND, runs=False) if each != SOUND]
    assert (found.name, found.state) == ("catalog", "broken")
    assert "clusters, policies, aliases and executors are lost" in found.detail


def test_doctor_misses_the_secret_of_leases(data: Path) -> None:
    (data / "lease_secret").write_bytes(b"x" * 5)
    _, found = examine_folder(data, SOUND, runs=False)
    assert (found.name, found.state) == ("lease secret", "broken")  # No server starts.
    assert "it has 5 bytes" in found.detail
    (data / "lease_secret").unlink()
    _, found = examine_folder(data, SOUND, runs=False)
    assert (found.name, found.state) == ("lease secret", "warning")
    remove("ledger.*")(data)
    remove("catalog.*")(data)
    assert examine_folder(data, SOUND, runs=False) == [SOUND]


@pytest.mark.parametrize("gone", [False, True])
def test_doctor_warns_of_an_emptied_audit_log(data: Path, *, gone: bool) -> None:
    if gone:
        (data / "audit").rmdir()
    found = {each.name: each for each in examine_access(Config.load({"data_dir": data}, {}))}
    assert found["audit log"].state == "warning"
    assert "the log was removed" in found["audit log"].detail


def test_doctor_names_services_that_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as opened:
        closed.bind(("127.0.0.1", 0))  # Bound, but not listening.
        gone, here = (f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, opened))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{gone}")
        config = Config(
            data_dir=tmp_path,
            prometheus_url=f"http://ann:s3cret@{gone}",
            policy_db_url=f"http://{here}/db",
            traces=True,
            policy_code_root=tmp_path / "none",
        )
        found = {each.name: each for each in examine_services(config)}
    states = {name: each.state for name, each in found.items()}
    assert states == {
        "policy_db_url": "ok",
        "prometheus_url": "warning",
        "traces": "warning",
        "policy_code_root": "warning",
    }
    assert "does not answer (Connection refused)" in found["prometheus_url"].detail
    assert "s3cret" not in found["prometheus_url"].detail


def test_doctor_names_secrets_that_others_may_read(data: Path, tmp_path: Path) -> None:
    settings, key = tmp_path / "moored.toml", tmp_path / "server.key"
    settings.write_text('[tokens]\nann = "sesame12"\n')
    key.touch()
    secrets = (data, data / "lease_secret", key, settings)
    flags = {"data_dir": data, "tls_key": key, "tls_cert": key}
    config = Config.load(flags, {}, settings)
    for file in secrets:
        file.chmod(0o700)
    assert examine_modes(config, settings) == []
    for file in secrets:
        file.chmod(0o740)
        (found,) = examine_modes(config, settings)
        assert (found.state, f"to {file} (0740): run" in found.detail) == ("warning", True)
        file.chmod(0o700)
    settings.write_text("port = 1\n")
    settings.chmod(0o644)
    assert examine_modes(config, settings) == []


@contextlib.contextmanager
def tls_server(certificate: Path, key: Path) -> Iterator[int]:
    """Serve TLS handshakes, and nothing else, at a port of 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with contextlib.suppress(OSError):
                        context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("garbage", [False, True])
def test_doctor_says_that_a_server_still_has_the_old_certificate(
    tmp_path: Path, *, garbage: bool
) -> None:
    signer = certificate("an authority")
    for name in ("old", "new"):
        for ending, text in zip(("pem", "key"), pem_of(*certificate(name, signer, 9)), strict=True):
            (tmp_path / f"{name}.{ending}").write_bytes(text)
    if garbage:
        (tmp_path / "new.pem").write_bytes(b"\xff no certificate")
    old = (tmp_path / "old.pem", tmp_path / "old.key")
    with tls_server(*old) as websocket, tls_server(*old) as http:
        flags = {"data_dir": tmp_path, "port": websocket, "http_port": http}

        def look(name: str) -> set[tuple[str, bool]]:
            files = {"tls_cert": tmp_path / f"{name}.pem", "tls_key": tmp_path / f"{name}.key"}
            found = examine_ports(Config.load(flags | files, {}))
            return {(each.state, "still has another certificate" in each.detail) for each in found}

        assert look("new") == {("broken", False)}  # Programs of others.
        record = DoorRecord(("127.0.0.1", websocket), ("127.0.0.1", http), find_network())
        forget = write_doors(tmp_path, record)
        try:
            assert look("new") == {("warning", True)}
            assert look("old") == {("ok", False)}
        finally:
            forget()


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("token list", False),
        ("token revoke ann", False),
        ("audit", False),
        ("audit verify", False),
        ("audit", True),
        ("audit verify", True),
    ],
)
def test_a_folder_without_a_server_has_no_tokens_and_no_audit_log(
    tmp_path: Path, words: str, *, made: bool
) -> None:
    folder = tmp_path / "none"
    if made:
        folder.mkdir()
    done = CliRunner().invoke(app, [*words.split(), "--data", str(folder)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{folder} is not a data folder of a server" in done.stderr
    assert not list(tmp_path.glob("none/*"))


def test_a_folder_of_a_server_may_have_no_tokens_and_no_audit_log(data: Path) -> None:
    for words in ("token list", "audit", "audit verify"):
        done = CliRunner().invoke(app, [*words.split(), "--data", str(data)])
        assert done.exit_code == 0, done.stderr


def test_sentences_of_doctor_end_with_one_mark(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageError("check that it lets this user in.")

    monkeypatch.setattr(access_examination, "read_end", fail)
    found = {each.name: each for each in examine_access(Config.load({"data_dir": data}, {}))}
    assert "lets this user in; see" in found["audit log"].detail
