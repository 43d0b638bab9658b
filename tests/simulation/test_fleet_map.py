"""The console's map of the fleet agrees with the core in many simulated worlds."""

import random

import pytest
from simulated.world import play

from moorage.core.state.state import State, apply
from moorage.daemon.news.fleet_map import COLUMNS, FREE, HELD, FleetMap

AHEAD = 7


def make_map(state: State) -> FleetMap:
    shown = FleetMap(state)
    for lease in state.leases.values():
        shown.put(lease)
    shown.take_changes()
    return shown


def rows(shown: FleetMap, viewer=None) -> list[tuple]:
    """Return the state of each slot, with names of tenants instead of their numbers."""
    sent = shown.snapshot(viewer)
    columns = [sent[name].tolist() for name in COLUMNS]
    columns[2] = [sent["tenants"][number] for number in columns[2]]
    return list(zip(*columns, strict=True))


def is_true(shown: FleetMap, state: State) -> None:
    """Check that the map agrees with the state, by the fleet's own columns."""
    fleet = state.fleet
    sent = iter(rows(shown))
    for row, devices in enumerate(fleet.gpu_ids):
        for column, _ in enumerate(devices):
            kind, milli, tenant, ends = next(sent)
            if not fleet.closed[row]:
                assert milli == fleet.gpu_total[row, column] - fleet.gpu_free[row, column]
            assert (tenant == "") == (milli == 0) == (ends == 0)
            assert (kind == FREE) == (milli == 0 and not fleet.closed[row])
    assert next(sent, None) is None


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(6, 24))]
)
def test_the_fleet_map_agrees_with_the_state_after_each_fact(seed):
    chance, state = random.Random(seed), State()
    shown, seen, known = make_map(state), rows(make_map(state)), 1
    for fact in play(seed).ledger:
        apply(state, fact)
        shown.apply(fact)
        if shown.is_outdated:
            shown = make_map(state)
            seen, known = rows(shown), len(shown.tenants)
            continue
        changed = shown.take_changes()
        before, seen = seen, rows(shown)
        assert {n for n, (a, b) in enumerate(zip(before, seen, strict=True)) if a != b} <= {
            *changed
        }
        delta = shown.delta(changed, None)
        assert delta.get("tenants", []) == shown.tenants[known:]
        known = len(shown.tenants)
        if chance.random() < 0.1:
            is_true(shown, state)
            fresh = make_map(state)
            assert seen == rows(fresh)
            for viewer in {lease.tenant for lease in state.leases.values()}:
                assert rows(shown, viewer) == rows(fresh, viewer)


@pytest.mark.parametrize("seed", range(8))
def test_repeated_facts_do_not_change_the_map_of_the_fleet(seed):
    facts, state = play(seed).ledger, State()
    for number, fact in enumerate(facts):
        apply(state, fact)
        if number % AHEAD == 0 and number > AHEAD:
            shown = make_map(state)
            for again in facts[number - AHEAD : number + 1]:
                shown.apply(again)
            shown.take_changes()
            assert rows(shown) == rows(make_map(state))


@pytest.mark.parametrize("seed", range(8))
def test_in_the_map_a_tenant_sees_slots_of_other_tenants_only_as_busy(seed):
    world, state = play(seed), State()
    for fact in world.ledger:
        apply(state, fact)
        if len(state.leases) > 3:
            break
    shown = make_map(state)
    for viewer in world.tenants:
        delta = shown.delta(list(range(len(shown))), viewer)
        mine = rows(shown, viewer)
        assert list(zip(*(delta[name] for name in COLUMNS), strict=True)) == [
            (kind, milli, ("", "yours", "busy").index(tenant), ends)
            for kind, milli, tenant, ends in mine
        ]
        owned = {
            (share.cluster_id, share.node_id, gpu)
            for lease in state.leases.values()
            for share in lease.placement
            for gpu in share.gpus
            if lease.tenant == viewer
        }
        places = [
            (*place, gpu)
            for place, gpus in zip(state.fleet.node_ids, state.fleet.gpu_ids, strict=True)
            for gpu in gpus
        ]
        for place, (kind, _, tenant, ends) in zip(places, mine, strict=True):
            assert (tenant == "yours") == (place in owned)
            if tenant == "busy":
                assert (kind, ends) == (HELD, 0)
