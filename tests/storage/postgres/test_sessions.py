"""Tests of sessions of PostgreSQL: passwords in addresses, settings of roles, lost sessions."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moorage.storage.base import StorageError, TokenRow

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]
pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from moorage.storage.postgres import connection  # noqa: E402  # After the skip.
from moorage.storage.postgres.storage import PostgresStorage  # noqa: E402  # As above.


@pytest.fixture
def address(postgres) -> str:
    return postgres.database()


@pytest.mark.parametrize(
    "password",
    ["p@hunter2", "hunter2@p", "hunter2/p", "p/hunter2", "1/hunter2@p", "p/hunter2?p", "hunter2%"],
)
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(password: str):
    address = f"postgresql://moorage:{password}@127.0.0.1:1/d"
    for use in (connection.place_of, connection.without_password):
        with pytest.raises(StorageError, match="with %40 for @") as caught:
            use(address)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "password", ["hunter2#x", "?hunter2", "x:hunter2", "hunter2%40%2Fx", "hu'nt\\er"]
)
def test_special_characters_in_a_password_are_accepted(password: str):
    address = f"postgresql://moorage:{password}@127.0.0.1:1/d"
    assert connection.without_password(address) == "user=moorage dbname=d host=127.0.0.1 port=1"
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        connection.connect(address, "ledger")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("statement_timeout", "1000"),
        ("idle_session_timeout", "200"),
        ("client_min_messages", "error"),
    ],
)
def test_the_server_overrides_a_roles_settings(postgres, address: str, setting: str, value: str):
    name = address.rpartition("/")[2]
    postgres.execute(f"CREATE ROLE {setting}_{name} LOGIN SUPERUSER")
    postgres.execute(f"ALTER ROLE {setting}_{name} SET {setting} = {value}")
    with connection.connect(postgres.url(name, f"{setting}_{name}"), "ledger") as session:
        wanted = "warning" if setting == "client_min_messages" else "0"
        assert session.execute(f"SHOW {setting}").fetchone() == (wanted,)


def test_two_servers_can_prepare_an_empty_database_at_the_same_time(postgres):
    """Commands such as `token create` also create the tables, without being the writer."""
    for _ in range(5):
        address = postgres.database()
        barrier = threading.Barrier(6)

        def first_look(address: str = address, barrier: threading.Barrier = barrier) -> object:
            tokens = PostgresStorage(address).tokens()
            barrier.wait()
            try:
                return tokens.rows()
            finally:
                tokens.close()

        with ThreadPoolExecutor(6) as pool:
            assert [each.result() for each in [pool.submit(first_look) for _ in range(6)]] == [
                []
            ] * 6


def test_tokens_can_be_read_after_their_database_session_was_ended(postgres, address: str):
    tokens = PostgresStorage(address).tokens()
    row = TokenRow("ci", "0" * 64, "viewer", "ann", 1.0, None, None)
    tokens.insert(row)
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ %s"
        " AND datname = %s",
        "postgres",
        ("moored tokens ", address.rpartition("/")[2]),
    )
    assert tokens.rows() == [row]
    tokens.close()
