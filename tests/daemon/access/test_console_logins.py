"""Logins to the console outlast a restart, and each tenant has a bounded number of logins."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from moorage.daemon.access import console_logins
from moorage.daemon.access.console_logins import ConsoleLogins
from moorage.model import Code, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.rights import Caller, Role
from moorage.storage.sqlite.shared_file import SqliteLogins

Open = Callable[..., ConsoleLogins]


def caller(token: str | None) -> Caller | None:
    return Caller(Tenant(token), Role.CLIENT) if token else None


@pytest.fixture
def open_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Return a function that opens the logins of one storage, as another server does."""
    monkeypatch.setattr(console_logins, "LOGINS_OF_TENANT_MAX", 4)
    monkeypatch.setattr(console_logins, "LOGINS_MAX", 12)
    with ExitStack() as stack:

        def open_store(authenticate=caller, lasts_seconds: float = 3600.0) -> ConsoleLogins:
            rows = SqliteLogins(tmp_path / "logins.db")
            stack.callback(rows.close)
            return ConsoleLogins(rows, authenticate, lasts_seconds)

        yield open_store


def cookie(logins: ConsoleLogins, tenant: str) -> str:
    entered = logins.enter(tenant)
    assert entered is not None
    return entered[0]


def test_many_logins_of_one_tenant_end_no_login_of_another_tenant(open_logins: Open) -> None:
    store = open_logins()
    other = cookie(store, "b")
    ours = [cookie(store, "a") for _ in range(13)]
    assert store.find([other]) is not None
    assert [store.find([each]) is not None for each in ours] == [False] * 9 + [True] * 4


def test_when_all_logins_are_taken_the_tenant_with_most_logins_loses_a_login(
    open_logins: Open,
) -> None:
    store = open_logins()
    many = [cookie(store, "a") for _ in range(4)]
    few = [cookie(store, f"t{number}") for number in range(11)]
    assert all(store.find([each]) is not None for each in few)
    assert sum(store.find([each]) is not None for each in many) == 1


def test_another_server_on_the_database_knows_a_login_until_its_logout(open_logins: Open) -> None:
    first, second = open_logins(), open_logins()
    entered = first.enter("ann")
    assert entered is not None
    cookie, login = entered
    assert second.find(["other", cookie]) == login
    assert second.find([cookie[:-1]]) is None
    second.leave([cookie])
    assert (first.find([cookie]), second.find([cookie])) == (None, None)


def test_a_token_that_is_revoked_or_changes_its_role_ends_its_login(open_logins: Open) -> None:
    meaning = "t"
    known = {meaning: Caller(Tenant("ann"), Role.CLIENT)}
    store = open_logins(known.get)
    entered = cookie(store, meaning)
    assert store.find([entered]) is not None
    known[meaning] = Caller(Tenant("ann"), Role.ADMIN)
    assert store.find([entered]) is None
    known.clear()
    assert store.find([entered]) is None


def test_an_expired_login_is_deleted_with_the_next_login(open_logins: Open, tmp_path: Path) -> None:
    over = cookie(open_logins(lasts_seconds=0.0), "ann")
    assert open_logins().find([over]) is None
    cookie(open_logins(), "ann")
    with closing(sqlite3.connect(tmp_path / "logins.db")) as connection:
        assert connection.execute("SELECT count(*) FROM logins").fetchone() == (1,)


def test_stored_logins_cannot_be_used_as_credentials(open_logins: Open, tmp_path: Path) -> None:
    secret = "moor_the_token_of_ann"  # noqa: S105  # Made up.
    store = open_logins(lambda _: caller("ann"))
    entered = store.enter(secret, "moor_the_id_token_of_ann")
    assert entered is not None
    cookie, login = entered
    assert store.find([cookie]) == login
    assert login.id_token == "moor_the_id_token_of_ann"  # noqa: S105  # Made up.
    stored = (tmp_path / "logins.db").read_bytes()
    for each in (secret, cookie, login.csrf, login.id_token):
        assert each.encode() not in stored
    assert (tmp_path / "logins.db").stat().st_mode & 0o077 == 0


def test_a_login_that_cannot_be_stored_is_refused(open_logins: Open, tmp_path: Path) -> None:
    (tmp_path / "logins.db").write_bytes(b"no database " * 100)
    store = open_logins()
    with pytest.raises(ServiceError) as refused:
        store.enter("ann")
    assert refused.value.code is Code.UNAVAILABLE
    assert store.find(["a cookie"]) is None
