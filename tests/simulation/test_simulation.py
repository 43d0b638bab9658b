"""In worlds with faults, for many seeds, every turn of the core obeys all laws."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from simulated.witness import replay, same_state
from simulated.world import (
    AGREED,
    APART,
    ELASTIC,
    EVENTS,
    LABELLED,
    OVERTAKING,
    REBUILT,
    STALLED,
    Crashed,
    World,
    play,
    run,
)

from moorage.core.lifecycle.warm_reuse import EVICTED
from moorage.core.queue.exclusions import shortest_ttl
from moorage.core.state.facts import ClockMoved, Ending, Granted, Moved, WaitExtended
from moorage.core.turns.events import Asked

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "1500"))
"""Number of plain worlds; each other kind has a quarter as many: over a million events in all."""
CHUNK = 10
BATCH = 183
"""Number of seeds in one heavy test: with fewer, some kinds of events would not occur."""
PLAY = Path(__file__).with_name("play.py")


def seeds(first: int, many: int = SEEDS // 4, quick: int = CHUNK) -> pytest.MarkDecorator:
    """Play `many` seeds: the first `quick` in the fast tests, the other seeds in batches."""
    chunks = [first] if quick else []
    chunks += range(first + quick, first + many, BATCH)
    ends = [*chunks[1:], first + many]
    marked = (
        pytest.param(at, end, marks=pytest.mark.heavy if at >= first + quick else ())
        for at, end in zip(chunks, ends, strict=True)
    )
    return pytest.mark.parametrize(("first", "end"), list(marked))


@seeds(0, SEEDS)
def test_the_laws_hold_in_plain_worlds(first: int, end: int) -> None:
    for seed in range(first, end):
        if end <= CHUNK:  # Other tests use these worlds, too.
            play(seed)
        else:
            run(seed, EVENTS)


@seeds(LABELLED)
def test_the_laws_hold_with_labels(first: int, end: int) -> None:
    found = 0
    for seed in range(first, end):
        world = run(seed, EVENTS)
        asks = [event.ask for _, event in world.trace if isinstance(event, Asked)]
        where = {ask.id for ask in asks if ask.demand is not None and ask.demand.where}
        found += sum(isinstance(f, Granted) and f.lease.id in where for f in world.ledger)
    assert found, "some requests with labels are granted"


@seeds(ELASTIC)
def test_the_laws_hold_with_alternatives(first: int, end: int) -> None:
    choices = set[int | None]()
    for seed in range(first, end):
        choices |= {f.lease.choice for f in run(seed, EVENTS).ledger if isinstance(f, Granted)}
    assert choices >= {None, 0, 1}, "each alternative is granted sometimes"


@seeds(AGREED, quick=0)  # A few seeds shorten no lease.
def test_the_laws_hold_with_shorter_leases(first: int, end: int) -> None:
    shorter = 0
    for seed in range(first, end):
        leases = [f.lease for f in run(seed, EVENTS).ledger if isinstance(f, Granted)]
        shorter += sum(shortest_ttl(lease) is not None for lease in leases)
    assert shorter, "some leases are shortened"


@seeds(APART)
def test_the_laws_hold_with_zones_and_anti_affinity(first: int, end: int) -> None:
    gangs = apart = 0
    for seed in range(first, end):
        world = run(seed, EVENTS)
        asks = [event.ask for _, event in world.trace if isinstance(event, Asked)]
        zoned = {ask.id for ask in asks if ask.demand and ask.demand.topology == "zone"}
        leases = [f.lease for f in world.ledger if isinstance(f, Granted)]
        gangs += sum(lease.id in zoned for lease in leases)
        apart += sum(lease.terms.anti_affinity is not None for lease in leases)
    assert gangs, "some gangs share a zone"
    assert apart, "some leases keep apart"


@seeds(OVERTAKING)
def test_the_laws_hold_if_waiters_are_overtaken_only_a_few_times(first: int, end: int) -> None:
    overdue = 0
    for seed in range(first, end):
        world = run(seed, EVENTS)
        times = Counter(f.overtakes for f in world.ledger if isinstance(f, Granted))
        overdue += sum(times[name] == world.overtaken_max for name in times.keys() - {None})
    assert overdue, "some waiters are overtaken as often as allowed"


@seeds(REBUILT)
def test_the_laws_hold_while_gpus_come_and_go(first: int, end: int) -> None:
    moved, lost = 0, 0
    for seed in range(first, end):
        facts = [f for f in run(seed, EVENTS).ledger if isinstance(f, Moved)]
        moved += sum(not fact.lost for fact in facts)
        lost += sum(bool(fact.lost) for fact in facts)
    assert moved, "some devices get another name"
    assert lost, "some devices are lost"


@seeds(STALLED)
def test_the_laws_hold_while_clocks_go_wrong(first: int, end: int) -> None:
    extended, set_back, on = 0, 0, 0
    for seed in range(first, end):
        facts = run(seed, EVENTS).ledger
        extended += sum(isinstance(fact, WaitExtended) for fact in facts)
        set_back += sum(isinstance(fact, ClockMoved) and fact.seconds < 0 for fact in facts)
        on += sum(isinstance(fact, ClockMoved) and fact.seconds > 0 for fact in facts)
    assert extended, "some waiters wait longer"
    assert set_back, "some clocks are fast"
    assert on, "some clocks are slow"


def test_the_simulated_world_has_every_kind_of_fault() -> None:
    """A law about crashes would prove nothing in a world without crashes."""
    worlds = [play(seed) for seed in (*range(13), 24, 34, 35)]  # Some have a takeover.
    kinds = {type(event).__name__ for world in worlds for _, event in world.trace}
    facts = {type(fact).__name__ for world in worlds for fact in world.ledger}
    assert facts >= {"Paused", "Resumed", "Cordoned", "Uncordoned"}
    assert facts >= {"QuotaSet", "HalfLifeSet", "Preempted", "Spared", "Reserved", "Unreserved"}
    assert sum(isinstance(e, Crashed) for world in worlds for _, e in world.trace) > 10
    assert kinds >= {"Proposed", "ConsultFailed", "SessionLost", "WorkloadFailed", "ClusterGone"}
    assert facts >= {"Granted", "Queued", "Dequeued", "Renewed", "Started", "Ending", "Ended"}
    again = [f.lease for w in worlds for f in w.ledger if isinstance(f, Granted)]
    assert max(lease.attempt for lease in again) > 1, "some workloads fail and are started again"
    assert any(lease.inherited for lease in again), "some workloads stay warm and are taken over"
    ends = [f.reason for w in worlds for f in w.ledger if isinstance(f, Ending)]
    assert EVICTED in ends, "some warm leases are evicted"
    assert any(world.checkpoint is not None for world in worlds)
    assert {world.honest for world in worlds} == {True, False}


def test_a_seed_gives_the_same_facts_in_any_process() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, PLAY, "3:6", "--digest"]
        played = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        digests.add(played.stdout)
    assert len(digests) == 1


def test_a_checkpoint_in_the_middle_of_a_history_changes_no_later_fact() -> None:
    """A checkpoint and the facts after it give the same state as all facts."""
    world = next(w for w in map(play, range(30)) if w.checkpoint is not None)
    seq, body = world.checkpoint or (0, [])
    assert 0 < seq <= len(world.ledger)
    same_state(replay(body + world.ledger[seq:]), replay(world.ledger))


def test_the_error_of_a_failing_seed_says_how_to_play_it_again() -> None:
    class Doomed(World):
        def settle(self) -> None:
            raise AssertionError("doomed")

    with pytest.raises(AssertionError) as caught:
        run(5, 10, Doomed)
    assert "python tests/simulation/play.py 5" in caught.value.__notes__[0]
