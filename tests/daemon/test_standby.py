"""A standby measures how far it lags, and for how long no server has led."""

import asyncio

from prometheus_client.metrics_core import Metric

from moorage.daemon import standby as module
from moorage.daemon.standby import Reading, Standby, role_metrics
from moorage.daemon.tasks import Tasks
from moorage.storage.base import Leader, Seat

SEAT = Seat("me", "ws://me", "http://me")
OTHER = Leader(Seat("other", "ws://other", "http://other"), 1, 0.0)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class OneElection:
    """An election whose leader leaves after the first look; this server wins the third."""

    def __init__(self, clock: Clock) -> None:
        self.leader: Leader | None = OTHER
        self._clock, self._looks = clock, 0

    def stand(self, seat: Seat) -> bool:
        del seat
        self._looks += 1
        self.leader = OTHER if self._looks == 1 else None
        self._clock.now += 2.0
        return self._looks == 3


class Following:
    """A follower that only has the time of its last read."""

    known_at = 90.0


def value(found: list[Metric], name: str) -> list[float]:
    (metric,) = [each for each in found if each.name == name]
    return [each.value for each in metric.samples]


async def test_the_seconds_without_a_leader_count_from_the_first_look_that_found_none(
    monkeypatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    standby = Standby(OneElection(clock), None, Tasks())
    assert standby.vacant_seconds() == 0.0
    await standby.wait(SEAT, asyncio.Event())
    assert standby.leads
    clock.now += 1.5
    assert standby.vacant_seconds() == 3.5
    assert value(list(standby.metrics()), "moorage_standby_behind_seconds") == []
    assert value(list(standby.metrics()), "moorage_server_role") == [1.0, 0.0]


async def test_a_standby_that_follows_no_leader_still_says_by_how_much_it_lags(
    monkeypatch,
) -> None:
    clock, name = Clock(), "moorage_standby_behind_seconds"
    monkeypatch.setattr(module, "time", clock)
    standby = Standby(OneElection(clock), None, Tasks())
    clock.now = 107.0
    assert value(list(standby.metrics()), name) == [7.0]
    standby.read(Reading(Following(), None))
    assert value(list(standby.metrics()), name) == [17.0]
    standby.read(None)
    assert value(list(standby.metrics()), name) == [17.0]
    clock.now += 3.0
    standby.read(None)
    assert value(list(standby.metrics()), name) == [20.0]


def test_a_server_without_an_election_leads() -> None:
    assert value(list(role_metrics("writer")), "moorage_server_role") == [1.0, 0.0]
