"""Tests of the time for which a server trusts the last heartbeat of its election."""

import asyncio

import pytest

from moorage.daemon.trust import Trust
from moorage.ledger.base import LedgerFailed
from moorage.storage.base import Deposed, Leader, Seat


class Beats:
    """An election that one server has won, and that another server may end."""

    def __init__(self) -> None:
        self.beats = 0
        self.leader: Leader | None = None
        self.standbys = self.is_deposed = self.wanted = False

    def stand(self, seat: Seat) -> bool:
        return bool(seat.name)

    def beat(self) -> bool:
        self.beats += 1
        if self.is_deposed:
            raise Deposed("another server leads")
        return self.wanted

    def resign(self) -> None:
        self.is_deposed = True


def test_a_server_on_files_needs_no_heartbeat():
    trust = Trust(None, pytest.fail)
    trust.begin()
    trust.check()


def test_a_standby_sends_no_heartbeat_and_a_leader_sends_few():
    election = Beats()
    trust = Trust(election, pytest.fail)
    assert trust.holds()
    assert election.beats == 0
    trust.begin()
    assert all(trust.holds() for _ in range(1_000))
    assert election.beats == 1


def test_a_server_that_slept_checks_its_election_before_it_answers():
    election, failures = Beats(), list[BaseException]()
    trust = Trust(election, failures.append)
    trust.begin()
    assert trust.holds()
    election.resign()
    trust.begin()  # As if the last heartbeat were too old.
    assert not trust.holds()
    with pytest.raises(LedgerFailed, match="no longer leads"):
        trust.check()
    assert [type(each) for each in failures] == [Deposed]
    assert election.beats == 2, "one more heartbeat is enough"


async def test_a_heartbeat_returns_an_operators_request_to_resign():
    election = Beats()
    trust = Trust(election, pytest.fail)
    trust.begin()
    election.wanted = True
    beating = asyncio.ensure_future(trust.run())
    await asyncio.wait_for(trust.wanted.wait(), 30)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
