"""Of several servers, one leads at a time; another server takes over from a silent leader."""

import threading
from collections.abc import Iterator

import pytest

from moorage.storage.base import LEAD_SECONDS, Deposed, Seat, StorageFailed

pytestmark = [pytest.mark.heavy, pytest.mark.postgres]
psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")

from moorage.storage.postgres.leadership import (  # noqa: E402  # After the skip.
    Leadership,
    ask_to_resign,
    look_around,
)

A, B = Seat("a 1", "ws://a:1", "http://a:2"), Seat("b 2", "ws://b:1", "http://b:2")


@pytest.fixture
def address(postgres) -> str:
    return postgres.database()


@pytest.fixture
def two(address: str) -> Iterator[tuple[Leadership, Leadership]]:
    """Two servers on a database, of which the first one leads."""
    first, second = Leadership(address), Leadership(address)
    assert first.stand(A)
    yield first, second
    first.resign()
    second.resign()


def stand(server: Leadership, seat: Seat) -> None:
    """Try to become the leader until the server leads."""
    never = threading.Event()
    while not server.stand(seat):
        never.wait(0.02)  # The database sends no event about the election.


def test_one_server_leads_and_the_other_servers_know_the_leader(
    address: str, two: tuple[Leadership, Leadership]
):
    first, second = two
    assert not second.stand(B)
    assert second.leader is not None
    assert (second.leader.seat, second.leader.epoch) == (A, first.epoch)
    assert not first.beat()
    assert first.standbys
    leader, standbys = look_around(address)
    assert leader is not None
    assert (leader.seat, standbys) == (A, [B])


def test_a_leader_that_resigns_is_replaced_at_once(
    address: str, two: tuple[Leadership, Leadership]
):
    first, second = two
    assert not second.stand(B)
    assert ask_to_resign(address)
    assert first.beat()
    first.resign()
    assert second.stand(B)
    assert second.epoch == first.epoch + 1
    assert not second.beat()  # The request to resign was for another server.
    leader, standbys = look_around(address)
    assert leader is not None
    assert (leader.seat, standbys) == (B, [])


def test_a_leader_that_is_about_to_resign_is_not_named(two: tuple[Leadership, Leadership]):
    first, second = two
    assert not second.stand(B)
    assert second.leader is not None
    first.announce()
    assert not second.stand(B)
    assert second.leader is None
    assert not second.stand(B)
    assert second.leader is None  # Although its last heartbeat is still valid.
    first.resign()
    assert second.stand(B)


def test_a_silent_leader_is_replaced_and_notices_the_replacement(
    postgres, address: str, two: tuple[Leadership, Leadership]
):
    first, second = two
    assert not second.stand(B)
    postgres.execute(
        "UPDATE moorage.leader SET at = at - make_interval(secs => %s)",
        address.rpartition("/")[2],
        (LEAD_SECONDS + 1,),
    )
    stand(second, B)
    with pytest.raises(Deposed, match="another server has written to"):
        first.beat()
    assert first.is_deposed
    assert not second.is_deposed


def test_a_leader_stopped_during_a_commit_delays_no_successor(
    postgres, address: str, two: tuple[Leadership, Leadership]
):
    first, second = two
    writer = first.open_writer("ledger")
    writer.execute("BEGIN")
    writer.execute("SELECT 1 FROM epoch WHERE id = 1 FOR SHARE")
    first.resign()
    stand(second, B)
    with pytest.raises(psycopg.errors.AdminShutdown):
        writer.execute("COMMIT")
    writer.close()


def test_a_server_does_not_lead_while_a_command_holds_the_lock(address: str):
    command, server = Leadership(address), Leadership(address)
    assert server.stand(A)
    server.resign()
    command.take()
    again = Leadership(address)
    for _ in range(3):
        assert not again.stand(B)
        assert again.leader is None
    command.look()
    command.release()
    stand(again, B)
    again.resign()


def test_a_standby_survives_the_end_of_its_database_session(
    postgres, address: str, two: tuple[Leadership, Leadership]
):
    _, second = two
    assert not second.stand(B)
    postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        " AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')",
        "postgres",
        (address.rpartition("/")[2],),
    )
    with pytest.raises(StorageFailed):
        second.stand(B)
    assert not second.stand(B)
    assert second.leader is not None
