"""Tests of the core's clock while the machine's clocks are set or stopped."""

from pathlib import Path

import pytest

from moorage.daemon.clock import (
    BEAT_SECONDS,
    CALENDAR,
    DRIFT_SECONDS_MAX,
    STALL_SECONDS_MIN,
    CalendarRecord,
    Clock,
)


class Machine:
    """A simulated machine with a calendar and a monotonic clock."""

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
def test_only_follow_calendar_sets_the_clock_to_a_changed_calendar(machine, clock, hours):
    machine.run(10.0)
    assert clock.now() == machine.date == 1_000_010.0
    machine.date += hours * 3_600.0
    machine.run(1.0)
    assert clock.now() == 1_000_011.0
    assert clock.drift_seconds == hours * 3_600.0
    assert clock.follow_calendar() == hours * 3_600.0
    assert clock.now() == machine.date
    assert clock.drift_seconds == clock.follow_calendar() == 0.0


def test_small_clock_drifts_are_ignored_until_they_add_up(machine, clock):
    machine.date += DRIFT_SECONDS_MAX / 2
    assert clock.drift_seconds == clock.follow_calendar() == 0.0
    machine.date += DRIFT_SECONDS_MAX / 2
    assert clock.follow_calendar() == DRIFT_SECONDS_MAX


def test_a_late_tick_of_the_loop_shows_that_the_loop_stalled(machine, clock):
    for _ in range(100):
        machine.run(BEAT_SECONDS)
        assert clock.stood_still_seconds == 0.0
        clock.beat()
    machine.run(BEAT_SECONDS + STALL_SECONDS_MIN)
    assert clock.stood_still_seconds == BEAT_SECONDS + STALL_SECONDS_MIN
    clock.beat()
    assert clock.stood_still_seconds == 0.0


def test_sleep_of_the_machine_shifts_the_date_and_is_not_a_stall(machine, clock):
    machine.date += 8 * 3_600.0  # As on Linux, whose monotonic clock stops during sleep.
    machine.run(BEAT_SECONDS)
    assert clock.stood_still_seconds == 0.0
    assert clock.follow_calendar() == 8 * 3_600.0


@pytest.fixture
def record(machine: Machine, tmp_path: Path) -> CalendarRecord:
    made = CalendarRecord(tmp_path, lambda: machine.date, lambda: machine.uptime)
    made.write()
    return made


@pytest.mark.parametrize("hours", [2.0, -2.0])
def test_a_calendar_set_while_no_server_ran_is_detected(machine, record, hours):
    last_at = machine.date
    machine.run(600.0)
    assert record.calendar_shift(last_at) == 0.0
    machine.date += hours * 3_600.0
    assert record.calendar_shift(last_at) == hours * 3_600.0
    record.write()
    assert record.calendar_shift(machine.date) == 0.0


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"boot": "another", "started_at": 0}'])
def test_after_a_restart_of_the_machine_a_calendar_earlier_than_the_ledger_is_detected(
    machine, record, tmp_path, text
):
    (tmp_path / CALENDAR).write_text(text)
    last_at = machine.date
    machine.run(60.0)
    assert record.calendar_shift(last_at) == 0.0, "the machine may have been off"
    machine.date -= 7_200.0
    assert record.calendar_shift(last_at) == 60.0 - 7_200.0


def test_without_a_folder_only_a_calendar_behind_the_last_fact_is_detected(machine):
    elsewhere = CalendarRecord(None, lambda: machine.date, lambda: machine.uptime)
    elsewhere.write()
    machine.run(60.0)
    assert elsewhere.calendar_shift(machine.date + 30.0) == -30.0
    machine.date += 7_200.0
    assert elsewhere.calendar_shift(machine.date) == 0.0


def test_a_calendar_that_cannot_be_recorded_stops_no_server(machine, tmp_path):
    nowhere = CalendarRecord(tmp_path / "gone", lambda: machine.date, lambda: machine.uptime)
    nowhere.write()
    assert nowhere.calendar_shift(machine.date) == 0.0


def test_only_the_owner_may_read_the_record_of_the_calendar(record, tmp_path):
    record.write()
    assert (tmp_path / CALENDAR).stat().st_mode & 0o077 == 0
