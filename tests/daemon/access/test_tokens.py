"""Tests of tokens in the settings, and of named tokens in the data folder."""

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moorage.commands.token import token
from moorage.daemon.access.audit_files import read_lines
from moorage.daemon.access.token_store import TokenStore, TokenStoreError
from moorage.daemon.access.tokens import FOLLOW_SECONDS, Tokens
from moorage.records.rights import Role
from moorage.storage.sqlite.storage import SqliteStorage


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TokenStore]:
    """The token store of a server."""
    with contextlib.closing(TokenStore(SqliteStorage(tmp_path).tokens())) as store:
        yield store


def create(folder: Path, name: str, role: Role = Role.CLIENT) -> str:
    """Make a token as another process does."""
    with contextlib.closing(TokenStore(SqliteStorage(folder).tokens())) as other:
        return other.create(name, role, "ann", time.time(), None)


def revoke(folder: Path, name: str) -> bool:
    """Revoke a token as another process does."""
    with contextlib.closing(TokenStore(SqliteStorage(folder).tokens())) as other:
        return other.revoke(name, time.time())


def test_without_tokens_every_caller_is_an_admin_of_the_tenant_local(
    tmp_path: Path, store: TokenStore
) -> None:
    caller = Tokens({}, store=store).caller(None)
    assert caller is not None
    assert (caller.tenant, caller.role) == ("local", Role.ADMIN)
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_settings_have_the_role_author_and_those_of_operators_admin() -> None:
    tokens = Tokens({"t-ann": "ann", "t-ops": "ops"}, ["ops"])
    callers = [tokens.caller(each) for each in ("t-ann", "t-ops", "other", None)]
    assert [each and each.role for each in callers] == [Role.AUTHOR, Role.ADMIN, None, None]


def test_a_change_of_the_settings_names_the_tenants_of_added_and_removed_tokens() -> None:
    tokens = Tokens({"t-ann": "ann", "t-bob": "bob", "moves": "ann"})
    changed = tokens.change({"t-ann": "ann", "t-eve": "eve", "moves": "bob"})
    assert changed == (["bob", "eve"], ["ann", "bob"])


def test_the_reason_of_a_refusal_names_a_token_that_ended(
    tmp_path: Path, store: TokenStore
) -> None:
    tokens, made = Tokens({}, store=store), create(tmp_path, "ci")
    old = store.create("old", Role.CLIENT, "ann", 0.0, 1.0)
    revoke(tmp_path, "ci")
    assert [tokens.why_refused(each) for each in (None, "other", old, made)] == [
        "no token",
        "the token is unknown",
        "the token “old” has expired",
        "the token “ci” was revoked",
    ]


def test_the_audit_entry_of_a_revocation_has_the_role_and_the_tenant(tmp_path: Path) -> None:
    create(tmp_path, "ci")
    done = CliRunner().invoke(token, ["revoke", "ci", "--data", str(tmp_path)])
    assert done.exit_code == 0
    (entry,) = read_lines(tmp_path)
    assert entry["before"] == {"role": "client", "tenant": "ann", "expires_at": None}


def test_after_the_first_named_token_every_caller_needs_a_token(
    tmp_path: Path, store: TokenStore
) -> None:
    tokens = Tokens({}, store=store)
    assert not tokens.required
    assert tokens.caller("x") is not None
    made = create(tmp_path, "ci", Role.VIEWER)
    assert tokens.required
    assert tokens.caller(None) is tokens.caller("x") is None
    caller = tokens.caller(made)
    assert caller is not None
    assert (caller.tenant, caller.role, caller.token_name) == ("ann", Role.VIEWER, "ci")


def test_after_the_last_token_is_revoked_every_caller_is_refused(
    tmp_path: Path, store: TokenStore
) -> None:
    tokens = Tokens({}, store=store)
    made = create(tmp_path, "ci")
    assert tokens.caller(made) is not None
    assert revoke(tmp_path, "ci")
    assert tokens.caller(made) is None
    assert tokens.caller(None) is None
    assert not revoke(tmp_path, "ci")


def test_a_revocation_in_a_file_that_replaces_the_open_token_file_counts(
    tmp_path: Path, store: TokenStore
) -> None:
    tokens, path = Tokens({}, store=store), tmp_path / "tokens.db"
    made = create(tmp_path, "ci")
    assert tokens.caller(made) is not None
    shutil.copy(path, tmp_path / "copy")
    path.unlink()
    assert tokens.caller(made) is None  # Without the file, no command could revoke it.
    (tmp_path / "copy").rename(path)
    assert tokens.caller(made) is not None
    assert revoke(tmp_path, "ci")
    assert tokens.caller(made) is None


def test_an_expired_token_is_refused(store: TokenStore) -> None:
    made = store.create("ci", Role.CLIENT, "ann", 0.0, 1.0)
    assert Tokens({}, store=store).caller(made) is None
    assert [each.state(time.time()) for each in store.tokens().values()] == ["expired"]


async def test_a_removed_token_ends_sessions_and_an_added_token_does_not(
    tmp_path: Path, store: TokenStore
) -> None:
    create(tmp_path, "first")
    tokens = Tokens({}, store=store)
    expelled = asyncio.Event()
    following = asyncio.ensure_future(tokens.follow(expelled.set))
    await asyncio.sleep(0)
    create(tmp_path, "second")
    await asyncio.sleep(FOLLOW_SECONDS * 1.5)  # One check has passed; nothing must happen.
    assert not expelled.is_set()
    create(tmp_path, "third")
    revoke(tmp_path, "third")  # Between two checks.
    async with asyncio.timeout(30):
        await expelled.wait()
    following.cancel()


async def test_a_revocation_takes_effect_at_once_although_other_tokens_expire_later(
    tmp_path: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path, "first")
    tokens = Tokens({}, store=store)
    expelled = asyncio.Event()
    following = asyncio.ensure_future(tokens.follow(expelled.set))
    await asyncio.sleep(FOLLOW_SECONDS / 2)  # The first check has passed.
    monkeypatch.setattr("moorage.daemon.access.tokens.FOLLOW_SECONDS", 1e6)
    await asyncio.sleep(FOLLOW_SECONDS)  # A check that was already due has also passed.
    revoke(tmp_path, "first")
    async with asyncio.timeout(30):
        await expelled.wait()
    following.cancel()


async def test_an_unreadable_token_store_ends_no_session(tmp_path: Path, store: TokenStore) -> None:
    """The database may be restarting; admitted sessions continue."""
    create(tmp_path, "first")
    tokens = Tokens({}, store=store)
    expelled = asyncio.Event()
    following = asyncio.ensure_future(tokens.follow(expelled.set))
    await asyncio.sleep(0)
    revoke(tmp_path, "first")
    path = tmp_path / "tokens.db"
    whole = path.read_bytes()
    path.write_bytes(b"garbage " * 1000)
    await asyncio.sleep(FOLLOW_SECONDS * 1.5)  # One check has passed; nothing must happen.
    assert not expelled.is_set()
    path.write_bytes(whole)
    async with asyncio.timeout(30):
        await expelled.wait()
    following.cancel()


def test_only_digests_of_tokens_are_stored_in_a_file_that_only_its_owner_can_read(
    tmp_path: Path,
) -> None:
    made = create(tmp_path, "ci")
    paths = {each.name: each for each in tmp_path.iterdir()}
    assert paths.keys() == {"tokens.db", "tokens.mark"}
    for path in paths.values():
        assert made.encode() not in path.read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR


@pytest.mark.parametrize("loss", ["missing", "empty", "without tokens"])
def test_a_server_that_lost_its_tokens_stays_closed(tmp_path: Path, loss: str) -> None:
    made = create(tmp_path, "ci")
    path = tmp_path / "tokens.db"
    copy = path.read_bytes()
    if loss == "missing":
        path.unlink()
    elif loss == "empty":
        path.write_bytes(b"")
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM tokens")
    with contextlib.closing(TokenStore(SqliteStorage(tmp_path).tokens())) as store:
        for _ in range(2):
            with pytest.raises(TokenStoreError, match=r"put back a copy .* `moored token create`"):
                store.tokens()
        tokens = Tokens({}, store=store)
        assert tokens.required
        assert tokens.caller(made) is tokens.caller(None) is None
        other = create(tmp_path, "other")
        assert tokens.caller(other) is not None
        assert tokens.caller(made) is None
    path.write_bytes(copy)
    with contextlib.closing(TokenStore(SqliteStorage(tmp_path).tokens())) as store:
        assert Tokens({}, store=store).caller(made) is not None


def test_tokens_of_an_older_release_are_marked_at_the_first_look(tmp_path: Path) -> None:
    made = create(tmp_path, "ci")
    (tmp_path / "tokens.mark").unlink()
    with contextlib.closing(TokenStore(SqliteStorage(tmp_path).tokens())) as store:
        assert Tokens({}, store=store).caller(made) is not None
    assert (tmp_path / "tokens.mark").exists()


@pytest.mark.parametrize("tenant", ["(server)", "moored", "*"])
def test_no_token_is_created_for_a_tenant_with_a_name_of_the_server(
    tmp_path: Path, tenant: str
) -> None:
    words = ["create", "ci", "--role", "author", "--tenant", tenant, "--data", str(tmp_path)]
    done = CliRunner().invoke(token, words)
    assert done.exit_code == 2
    assert f"the server itself uses `{tenant}`" in " ".join(done.output.split())
    assert not (tmp_path / "tokens.db").exists()


@pytest.mark.parametrize("damage", ["garbage", "lock"])
def test_a_damaged_audit_log_hides_no_token_and_prevents_no_revocation(
    tmp_path: Path, damage: str
) -> None:
    (tmp_path / "audit").mkdir()
    if damage == "garbage":
        (tmp_path / "audit" / "00000001.jsonl").write_text("garbage\n")
    else:
        (tmp_path / "audit" / "lock").mkdir()
    data = ["--data", str(tmp_path)]
    words = ["create", "ci", "--role", "author", "--tenant", "ann", *data]
    made = CliRunner().invoke(token, words)
    assert (made.exit_code, made.stdout[:5]) == (0, "moor_")
    revoked = CliRunner().invoke(token, ["revoke", "ci", *data])
    assert (revoked.exit_code, revoked.stdout) == (0, "Token “ci” is revoked.\n")
    for done, what in ((made, "token.created"), (revoked, "token.revoked")):
        assert f"the audit log has no entry {what} of this change: {tmp_path}" in done.stderr


def test_tokens_on_a_read_only_disk_are_listed_and_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path, "ci")
    opened, connect = os.open, sqlite3.connect

    def open_read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, mode)

    def connect_read_only(path: Path, **more: Any) -> sqlite3.Connection:
        return connect(f"{path.as_uri()}?mode=ro", uri=True, **more)  # SQLite does so by itself.

    monkeypatch.setattr(os, "open", open_read_only)
    monkeypatch.setattr(sqlite3, "connect", connect_read_only)
    listed = CliRunner().invoke(token, ["list", "--data", str(tmp_path)])
    assert (listed.exit_code, listed.stdout[:10]) == (0, "ci: valid,")
    revoked = CliRunner().invoke(token, ["revoke", "ci", "--data", str(tmp_path)])
    assert (revoked.exit_code, "readonly database" in revoked.stderr) == (1, True)


def test_token_names_are_unique_and_unknown_names_are_refused(tmp_path: Path) -> None:
    create(tmp_path, "ci")
    with pytest.raises(TokenStoreError, match="“ci” exists"):
        create(tmp_path, "ci")
    with pytest.raises(TokenStoreError, match="no token is named “cd”"):
        revoke(tmp_path, "cd")


@pytest.mark.parametrize("damage", ["newer", "garbage"])
def test_an_unreadable_token_store_admits_no_caller(
    tmp_path: Path, store: TokenStore, damage: str
) -> None:
    made = create(tmp_path, "ci")
    path = tmp_path / "tokens.db"
    if damage == "newer":
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99")
        connection.close()
    else:
        path.write_bytes(b"no database" * 1000)
    tokens = Tokens({}, store=store)
    assert tokens.required
    assert tokens.caller(made) is tokens.caller(None) is None
    waiting = tokens.pending(made)
    assert waiting is not None
    assert asyncio.run(waiting_for(waiting)) is False, "it may be valid"
    with pytest.raises(TokenStoreError, match=r"newer release|not a database"):
        store.tokens()


async def waiting_for(waiting: Awaitable[bool]) -> bool:
    return await waiting


def test_concurrent_creators_lose_no_token(tmp_path: Path, store: TokenStore) -> None:
    program = (
        "import sys, pathlib\n"
        "from moorage.daemon.access.token_store import TokenStore\n"
        "from moorage.records.rights import Role\n"
        "from moorage.storage.sqlite.storage import SqliteStorage\n"
        "store = TokenStore(SqliteStorage(pathlib.Path(sys.argv[1])).tokens())\n"
        "for n in range(20):\n"
        "    store.create(f'{sys.argv[2]}-{n}', Role.CLIENT, 'ann', 0.0, None)\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path, name], env={**os.environ})
        for name in "abcd"
    ]
    assert [each.wait(60) for each in running] == [0] * 4
    assert len(store.tokens()) == 80
