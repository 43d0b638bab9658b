"""Tests of starts of the daemon that fail: the error, and no leftovers."""

import asyncio
import os
import socket
import sqlite3
from contextlib import closing

import pytest

from moorage.commands.access_examination import examine_access
from moorage.config.settings import Config
from moorage.daemon.doors import naming
from moorage.daemon.observability.counters import Measures
from moorage.daemon.parts import _limits
from moorage.daemon.start import start
from moorage.sandbox.host.sandbox import Limits
from moorage.storage.base import StorageError, TokenRow
from moorage.storage.sqlite.shared_file import SqliteTokens


@pytest.mark.parametrize("name", ["tokens.db", "agents.db"])
@pytest.mark.parametrize("content", ["newer", "damaged"])
async def test_the_error_of_a_start_names_the_store_that_cannot_be_read(tmp_path, name, content):
    if content == "damaged":
        (tmp_path / name).write_bytes(b"no database" * 100)
    else:
        with closing(sqlite3.connect(tmp_path / name)) as database:
            database.execute("PRAGMA user_version = 99")
    reason = {"newer": "format 99 is of a newer release", "damaged": "not a database"}[content]
    ports = {"port": 0, "http_port": 0, "http_host": "127.0.0.1"}
    config = Config(data_dir=tmp_path, sandbox="unsafe", **ports)
    with pytest.raises(StorageError, match=rf"{name}: .*{reason}"):
        await start(config, Measures())


@pytest.mark.parametrize("loss", ["missing", "empty"])
async def test_a_server_that_lost_its_named_tokens_does_not_start(tmp_path, loss):
    with closing(SqliteTokens(tmp_path / "tokens.db")) as tokens:
        tokens.insert(TokenRow("ci", "d", "client", "ann", 1.0))
    if loss == "missing":
        (tmp_path / "tokens.db").unlink()
    else:
        (tmp_path / "tokens.db").write_bytes(b"")
    ports = {"port": 0, "http_port": 0, "http_host": "127.0.0.1"}
    config = Config(data_dir=tmp_path, sandbox="unsafe", **ports)
    with pytest.raises(StorageError, match=r"tokens.db is missing or has no tokens"):
        await start(config, Measures())
    (finding,) = [each for each in examine_access(config) if each.name == "tokens"]
    assert finding.state == "broken"


async def test_a_failed_start_ends_its_tasks(tmp_path):
    before = asyncio.all_tasks()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(data_dir=tmp_path, http_host="127.0.0.1", http_port=port, sandbox="unsafe")
        with pytest.raises(OSError, match="in use: stop the program that listens there, or set "):
            await start(config, Measures())
    assert asyncio.all_tasks() == before


def test_the_error_of_a_start_on_a_full_disk_first_advises_to_free_space() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    expected = "No space left on device: free disk space, or set data_dir"
    with pytest.raises(OSError, match=expected), naming("set data_dir"):
        os.write(full, b"x")
    os.close(full)


def test_policies_have_the_same_limits_on_a_server_and_in_tests_without_one(tmp_path):
    assert _limits(Config(data_dir=tmp_path)) == Limits()
