"""The core's clock, over clocks that are set, stop, and stand still."""

import pytest

from moorage.daemon.clock import BEAT_SECONDS, DRIFT_SECONDS_MAX, STALL_SECONDS_MIN, Clock


class Machine:
    """A machine's two clocks."""

    def __init__(self) -> None:
        self.uptime, self.date = 500.0, 1_000_000.0

    def run(self, seconds: float) -> None:
        self.uptime += seconds
        self.date += seconds


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def clock(machine: Machine) -> Clock:
    return Clock(lambda: machine.uptime, lambda: machine.date)


@pytest.mark.parametrize("hours", [2.0, -2.0, 8.0])
def test_a_calendar_that_is_set_is_followed_on_demand(machine, clock, hours):
    machine.run(10.0)
    assert clock.now() == machine.date == 1_000_010.0
    machine.date += hours * 3_600.0
    machine.run(1.0)
    assert clock.now() == 1_000_011.0
    assert clock.drift_seconds == hours * 3_600.0
    assert clock.follow_calendar() == hours * 3_600.0
    assert clock.now() == machine.date
    assert clock.drift_seconds == clock.follow_calendar() == 0.0


def test_clocks_that_are_adjusted_slowly_are_as_good_as_the_same(machine, clock):
    machine.date += DRIFT_SECONDS_MAX / 2
    assert clock.drift_seconds == clock.follow_calendar() == 0.0
    machine.date += DRIFT_SECONDS_MAX / 2
    assert clock.follow_calendar() == DRIFT_SECONDS_MAX


def test_a_loop_without_beats_stood_still(machine, clock):
    for _ in range(100):
        machine.run(BEAT_SECONDS)
        assert clock.stood_still_seconds == 0.0
        clock.beat()
    machine.run(BEAT_SECONDS + STALL_SECONDS_MIN)
    assert clock.stood_still_seconds == BEAT_SECONDS + STALL_SECONDS_MIN
    clock.beat()
    assert clock.stood_still_seconds == 0.0


def test_a_machine_that_slept_has_another_date_and_did_not_stand_still(machine, clock):
    machine.date += 8 * 3_600.0  # As on Linux: the monotonic clock stops while it sleeps.
    machine.run(BEAT_SECONDS)
    assert clock.stood_still_seconds == 0.0
    assert clock.follow_calendar() == 8 * 3_600.0
