"""For each law, a history with one defect breaks this law and no other law."""

from collections.abc import Callable

import pytest

from benchmarks.faults.history import (
    LAWS,
    AcknowledgedGrant,
    AcknowledgedRelease,
    FaultHistory,
    longest_pause,
    quantile,
    violations,
)

GPUS = [("east", "n", str(number)) for number in range(3)]


def whole() -> FaultHistory:
    """Return a correct history: server `a` grants two leases, `b` repeats one of these answers."""
    history = FaultHistory(
        sent={"k1": 0.0, "k2": 2.0, "k3": 6.0},
        grants=[
            AcknowledgedGrant("k1", "l1", 1, (GPUS[0],), "a", 0.0, 1.0),
            AcknowledgedGrant("k2", "l2", 2, (GPUS[1],), "a", 2.0, 3.0),
            AcknowledgedGrant("k2", "l2", 2, (GPUS[1],), "b", 4.0, 5.0),
            AcknowledgedGrant("k3", "l3", 9, (GPUS[0],), "b", 6.0, 8.0),
        ],
        released_at={"l1": 6.5},
        releases=[AcknowledgedRelease("l1", "b", 6.5, 7.0)],
        leases={"l2": 2, "l3": 9},
        committed=[1, 2, 9],
    )
    assert not any(violations(history).values())
    return history


def change(history: FaultHistory, number: int, **fields: object) -> None:
    history.grants[number] = history.grants[number]._replace(**fields)


def grant_twice(history: FaultHistory) -> None:
    change(history, 3, gpus=(GPUS[2], GPUS[1]))


def grant_before_the_release(history: FaultHistory) -> None:
    change(history, 3, sent_at=5.5, answered_at=6.4)


def lose(history: FaultHistory) -> None:
    del history.leases["l2"]


def change_a_number(history: FaultHistory) -> None:
    history.leases["l2"] = 3


def refuse_a_release(history: FaultHistory) -> None:
    history.refusals.append("the release of l1: no such lease")


def undo_a_release(history: FaultHistory) -> None:
    history.leases["l1"] = 1


def grant_unseen(history: FaultHistory) -> None:
    history.leases["l4"] = 10


def go_back(history: FaultHistory) -> None:
    change(history, 3, fencing=0)
    history.leases["l3"] = 0


def repeat_a_number(history: FaultHistory) -> None:
    change(history, 3, fencing=2)
    history.leases["l3"] = 2


def commit_in_another_order(history: FaultHistory) -> None:
    history.committed = [1, 9, 2]


def commit_twice(history: FaultHistory) -> None:
    history.committed.append(9)


def forget(history: FaultHistory) -> None:
    history.sent["k4"] = 1.0


def let_wait(history: FaultHistory) -> None:
    history.waiting.append("r1")


def give_one_key_two_leases(history: FaultHistory) -> None:
    change(history, 3, key="k2")
    del history.sent["k3"]


def give_two_keys_one_lease(history: FaultHistory) -> None:
    change(history, 2, key="k4")


def answer_after_takeover(history: FaultHistory) -> None:
    change(history, 3, server="a")
    history.releases[0] = history.releases[0]._replace(server="a")


DEFECTS: list[tuple[str, Callable[[FaultHistory], None]]] = [
    ("GPUs in two leases", grant_twice),
    ("GPUs in two leases", grant_before_the_release),
    ("acknowledged leases lost", lose),
    ("acknowledged leases lost", change_a_number),
    ("acknowledged leases lost", refuse_a_release),
    ("releases undone", undo_a_release),
    ("leases without an answer", grant_unseen),
    ("fencing numbers not above those before", go_back),
    ("fencing numbers not above those before", repeat_a_number),
    ("fencing numbers not in the order of commits", commit_in_another_order),
    ("fencing numbers not in the order of commits", commit_twice),
    ("requests forgotten", forget),
    ("requests forgotten", let_wait),
    ("keys with two leases", give_one_key_two_leases),
    ("keys with two leases", give_two_keys_one_lease),
    ("answers of a deposed server", answer_after_takeover),
]


@pytest.mark.parametrize(("law", "defect"), DEFECTS)
def test_a_history_with_one_defect_breaks_only_the_law_about_this_defect(
    law: str, defect: Callable[[FaultHistory], None]
):
    history = whole()
    defect(history)
    assert [name for name, found in violations(history).items() if found] == [law]


def test_each_law_has_a_history_that_breaks_it():
    assert {law for law, _ in DEFECTS} == LAWS.keys()


def test_concurrent_requests_may_be_granted_in_any_order():
    """Two requests that overlap may be granted in either order, and by either server."""
    history = whole()
    change(history, 3, fencing=3, sent_at=2.5)
    history.leases["l3"] = 3
    history.committed = [1, 2, 3]
    change(history, 1, fencing=2, answered_at=5.5)
    assert not any(violations(history).values())
    history = whole()
    history.grants.append(AcknowledgedGrant("k5", "l5", 10, (GPUS[2],), "a", 4.5, 9.0))
    history.leases["l5"] = 10
    history.committed.append(10)
    assert not any(violations(history).values())


def test_an_answer_of_an_unknown_server_breaks_no_law():
    history = whole()
    change(history, 3, server="")
    assert not any(violations(history).values())


@pytest.mark.parametrize(
    ("begin", "end", "pause"), [(1.5, 1.6, 4.0), (1.0, 6.0, 4.0), (5.0, 5.5, 1.0), (9.0, 10.0, 0)]
)
def test_a_pause_lasts_from_the_last_answer_to_the_next(begin: float, end: float, pause: float):
    assert longest_pause([0.0, 1.0, 5.0, 6.0], begin, end) == pause


def test_quantiles_are_observed_values():
    values = [float(each) for each in range(100, 0, -1)]
    assert [quantile(values, each) for each in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile([3.0], 0.99) == 3.0
