"""The policy `expected_fill` agrees with a slow copy of its definition, with and without caches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import ask, fleet_with, give, new_policy, node, options, play, steps_of, take

from moorage.model import Cluster, Demand, Gpu, Node
from moorage.policy import (
    Fleet,
    FleetView,
    MixLearner,
    RequestKind,
    RequestStreams,
    read_typical,
    streams,
)
from moorage_policies import expected_fill

MILLI = st.sampled_from([100, 300, 460, 500, 700, 810, 1000])
KINDS = st.builds(
    lambda cores, gpus, milli, models, gib, weight: {
        "cpu_milli": 1000 * cores,
        "gpus": gpus,
        "gpu_milli": milli if gpus == 1 else 1000,
        "memory_mib": 1024 * gib,
        "models": models,
        "weight": weight,
    },
    st.integers(0, 40),
    st.sampled_from([0, 1, 1, 1, 2, 4]),
    MILLI,
    st.sampled_from([[], [], ["A"], ["A", "B"]]),
    st.sampled_from([0, 0, 48]),
    st.integers(1, 9),
)
DEMANDS = st.builds(
    lambda cores, gpus, milli, models, gib: Demand(
        gpus, milli, models, cpu_milli=1000 * cores, memory_mib=1024 * gib
    ),
    st.integers(0, 12),
    st.sampled_from([0, 1, 1, 1, 2, 4]),
    MILLI,
    st.sampled_from([(), (), ("B",)]),
    st.sampled_from([0, 0, 40]),
)
NODES = st.tuples(st.sampled_from([4, 16, 64]), st.integers(0, 4), st.sampled_from("AB"))


def fleet_of(nodes):
    return fleet_with(
        *(
            node(f"n{number}", cpu=1000 * cores, models=[model] * gpus, gpus=gpus)
            for number, (cores, gpus, model) in enumerate(nodes)
        )
    )


# The definition --------------------------------------------------------------------------------


def walk(stream, cpu, gpus):
    """Return the GPU milli that a node takes from one stream of kinds."""
    gpus, placed = list(gpus), 0
    for kind in stream:
        if kind.cpu_milli > cpu:
            continue
        if kind.gpus == 1:
            fitting = [free for free in gpus if free >= kind.gpu_milli]
            if not fitting:
                continue
            gpus[gpus.index(min(fitting))] -= kind.gpu_milli
        elif kind.gpus:
            if gpus.count(1000) < kind.gpus:
                continue
            for _ in range(kind.gpus):
                gpus[gpus.index(1000)] = 0
        cpu -= kind.cpu_milli
        placed += kind.milli
    return placed


def streams_of(kinds, weights, length, seed):
    """Return balanced streams: one draw from each of `length` equal parts, shuffled."""
    chance = np.random.default_rng(seed)
    parts = np.arange(length)[:, None] + chance.random((length, streams.STREAMS))
    edges = np.cumsum(weights)
    drawn = np.searchsorted(edges, parts / length * edges[-1], side="right")
    shuffled = chance.permuted(drawn.clip(0, len(weights) - 1), axis=0)
    return [[kinds[number] for number in stream] for stream in shuffled.T]


class Definition:
    """Computes V slowly, by the definition in the policy's docstring."""

    def __init__(self, typical, fleet, seed=1, *, prices=False):
        self.kinds, self.fleet, self.seed = read_typical(typical), fleet, seed
        self.prices = prices
        self.nodes = [
            (
                fleet.models[fleet.gpu_model[row, 0]] if fleet.gpu_ids[row] else "",
                len(fleet.gpu_ids[row]),
                int(fleet.cpu_total[row]),
                int(fleet.memory_total[row]),
            )
            for row in range(len(fleet))
        ]
        self.gpus = sum(gpus for _, gpus, _, _ in self.nodes)
        covered, self.frequent = 0.0, []
        for kind in self.kinds:
            if covered < 0.95:
                self.frequent.append(kind)
            covered += kind.weight
        self.streams = {}

    def accepts(self, kind, model):
        return not kind.gpus or not kind.models or model in kind.models

    def weight(self, kind, model):
        if not kind.gpus:
            return kind.weight / 2
        if not self.accepts(kind, model):
            return 0.0
        served = sum(gpus for name, gpus, _, _ in self.nodes if self.accepts(kind, name))
        return kind.weight * self.gpus / max(1, served)

    def fill(self, model, cpu, gpus):
        if model not in self.streams:
            weights = [self.weight(kind, model) for kind in self.frequent]
            if not any(weights):
                weights = [1.0] * len(weights)
            length = max(40, 5 * self.fleet.gpu_total.shape[1])
            self.streams[model] = streams_of(self.frequent, weights, length, self.seed)
        walks = [walk(stream, cpu, gpus) for stream in self.streams[model]]
        return sum(walks) / len(walks)

    def protection(self, model, cpu, memory, gpus):
        total = 0.0
        for kind in self.kinds:
            home = sum(
                count
                for name, count, cores, room in self.nodes
                if self.accepts(kind, name)
                and (count, cores, room) >= (kind.gpus, 0, 0)
                and cores >= kind.cpu_milli
                and room >= kind.memory_mib
            )
            if not kind.gpus or not home or not self.accepts(kind, model):
                continue
            if kind.gpus > 1:
                copies = gpus.count(1000) // kind.gpus if memory >= kind.memory_mib else 0
            else:
                copies = sum(free // kind.gpu_milli for free in gpus)
            if kind.cpu_milli:
                copies = min(copies, cpu // kind.cpu_milli)
            scarcity = self.gpus / home - (kind.gpus == 1)
            total += kind.weight * scarcity * copies * kind.milli
        return total

    def copies(self, kind, model, cpu, gpus):
        if not kind.gpus or not self.accepts(kind, model):
            return 0
        several = gpus.count(1000) // kind.gpus
        copies = sum(free // kind.gpu_milli for free in gpus) if kind.gpus == 1 else several
        return min(copies, cpu // kind.cpu_milli) if kind.cpu_milli else copies

    def price_kinds(self):
        """Return the price of each kind of request on the present fleet."""
        found = []
        for kind in self.kinds:
            room = 0
            for row, (model, count, _, _) in enumerate(self.nodes):
                cpu, _, gpus = self.fleet.capacity(row)
                room += self.copies(kind, model, cpu, gpus[:count])
            found.append(kind.weight * kind.milli / (1 + room / max(1, self.gpus / 600)) ** 2)
        return found

    def value(self, row, cpu, memory, gpus):
        model = self.nodes[row][0]
        gpus = list(gpus)
        value = self.fill(model, cpu, gpus) + self.protection(model, cpu, memory, gpus)
        if not self.prices:
            return value
        places = zip(self.kinds, self.price_kinds(), strict=True)
        return 0.003 * value + sum(
            price * self.copies(kind, model, cpu, gpus) for kind, price in places
        )

    def scores(self, demand):
        """Return {(row, device columns): V after - V before} of all possible placements."""
        found, before = {}, {}
        for row, _, (cpu, memory, gpus), columns, after in options(self.fleet, demand):
            if row not in before:
                before[row] = self.value(row, cpu, memory, gpus)
            left = cpu - demand.cpu_milli, memory - demand.memory_mib
            found[row, tuple(columns)] = self.value(row, *left, after) - before[row]
        return found


@settings(max_examples=40)
@given(
    typical=st.lists(KINDS, min_size=1, max_size=24),
    nodes=st.lists(NODES, min_size=1, max_size=4),
    demands=st.lists(DEMANDS, min_size=1, max_size=8),
    seed=st.integers(0, 3),
    prices=st.booleans(),
)
def test_the_decisions_of_the_policy_agree_with_its_definition(
    typical, nodes, demands, seed, prices
):
    fleet, policy = fleet_of(nodes), new_policy("expected_fill")
    definition = Definition(typical, fleet, seed, prices=prices)
    parameters = {"typical": typical, "stream_seed": seed, "prices": prices}
    for demand in demands:
        value, scores = ask(policy, fleet, demand, parameters=parameters), definition.scores(demand)
        if not scores:
            assert "declined" in value
            continue
        row = fleet.row("c", value["node_id"])
        chosen = scores[row, tuple(map(int, value["gpus"]))]
        assert chosen == pytest.approx(max(scores.values()), abs=1e-7 if prices else 1e-5)
        take(fleet, value, demand)


def test_the_first_of_equal_nodes_and_the_first_of_equal_gpus_are_taken():
    fleet, policy = fleet_of([(64, 4, "A")] * 3), new_policy("expected_fill")
    value = ask(policy, fleet, Demand(1, 500), parameters={"typical": [{"gpus": 1}]})
    assert (value["node_id"], value["gpus"]) == ("n0", ["0"])


def test_on_a_node_of_mixed_gpus_the_first_suitable_gpu_is_taken():
    fleet = fleet_with(node("n0", models=["A", "A", "B", "B"]))
    demand = Demand(1, 300, ("B",))
    assert ask(new_policy("expected_fill"), fleet, demand)["gpus"] == ["2"]


def test_more_kinds_than_levels_stay_distinct():
    kinds = [
        RequestKind(1000 * number, 1 + (number % 5 == 0), 1000 - 20 * number * (number % 5 > 0))
        for number in range(3 * streams.LEVELS_MAX)
    ]
    walked = RequestStreams(kinds, np.ones((1, len(kinds))), 4, 7)
    (drawn,) = [streams_of(kinds, np.ones(len(kinds)), 40, 7)]
    chance = np.random.default_rng(3)
    cpu = chance.integers(0, 99, 50) * 1000
    gpus = chance.choice([0, 130, 500, 1000], (50, 4))
    slowly = [
        sum(walk(stream, c, g) for stream in drawn) / len(drawn)
        for c, g in zip(cpu, gpus.tolist(), strict=True)
    ]
    assert walked.fill(np.zeros(50, np.int64), cpu, gpus).tolist() == slowly


@pytest.mark.parametrize("width", [1, 32, 33, 64])
def test_nodes_with_any_number_of_gpus_are_filled(width):
    kinds = [RequestKind(0, 1, 500)]
    walked = RequestStreams(kinds, np.ones((1, 1)), width, 1)
    gpus = np.full((1, width), 1000)
    gpus[0, 0] = 400
    (filled,) = walked.fill(np.zeros(1, np.int64), np.array([0]), gpus)
    assert filled == 1000 * (width - 1)


def test_many_states_computed_together_have_the_values_of_each_state_computed_alone():
    kinds = read_typical([{"gpus": 1, "gpu_milli": 300, "cpu_milli": 1000}, {"gpus": 2}])
    walked = RequestStreams(kinds, np.ones((1, 2)), 8, 1)
    chance = np.random.default_rng(1)
    cpu, gpus = chance.integers(0, 40, 90) * 1000, chance.choice([0, 1000, 700], (90, 8))
    types = np.zeros(90, np.int64)
    together = walked.fill(types, cpu, gpus)
    alone = [walked.fill(types[:1], cpu[n : n + 1], gpus[n : n + 1])[0] for n in range(90)]
    assert together.tolist() == alone


# Purpose ---------------------------------------------------------------------------------------


def test_a_share_goes_where_the_remainder_is_still_usable():
    # n0 has 700 left, n1 a whole GPU. A policy that expects requests for 700 keeps the 700.
    fleet, policy = fleet_of([(64, 1, "A"), (64, 1, "A")]), new_policy("expected_fill")
    fleet.set_capacity(0, 64_000, 65_536, [700])
    usual = {"typical": [{"gpus": 1, "gpu_milli": 700}]}
    assert ask(policy, fleet, Demand(1, 300), parameters=usual)["node_id"] == "n1"
    whole = {"typical": [{"gpus": 1}]}
    assert ask(policy, fleet, Demand(1, 300), parameters=whole)["node_id"] == "n0"


def test_cpu_is_taken_where_all_gpus_stay_usable():
    fleet = fleet_of([(8, 2, "A"), (64, 2, "A"), (8, 0, "A")])
    typical = {"typical": [{"gpus": 1, "cpu_milli": 4000}]}
    policy, demand = new_policy("expected_fill"), Demand(cpu_milli=8000)
    chosen = []
    for _ in range(3):
        value = ask(policy, fleet, demand, parameters=typical)
        chosen.append(value["node_id"])
        take(fleet, value, demand)
    assert chosen == ["n1", "n1", "n1"]


def test_rare_kinds_of_nodes_remain_for_requests_that_need_them():
    # Only n0 serves requests for B, although it serves all other requests as well.
    fleet, policy = fleet_of([(64, 4, "B"), *[(64, 4, "A")] * 3]), new_policy("expected_fill")
    typical = [{"gpus": 1, "weight": 9}, {"gpus": 1, "models": ["B"]}]
    for _ in range(12):
        value = ask(policy, fleet, Demand(1), parameters={"typical": typical})
        assert value["node_id"] != "n0"
        take(fleet, value, Demand(1))
    assert ask(policy, fleet, Demand(1), parameters={"typical": typical})["node_id"] == "n0"


def test_whole_nodes_remain_for_large_requests():
    fleet, policy = fleet_of([(64, 4, "A")] * 2), new_policy("expected_fill")
    fleet.set_capacity(1, 64_000, 65_536, [1000, 1000, 1000, 0])
    typical = [{"gpus": 1, "weight": 9}, {"gpus": 4}]
    assert ask(policy, fleet, Demand(1), parameters={"typical": typical})["node_id"] == "n1"


def test_shares_ignore_gpus_that_are_only_taken_whole():
    fleet = Fleet()
    shared, alone = Gpu("0", "A"), Gpu("0", "A", exclusive=True)
    fleet.install([Cluster("c", (Node("n0", 8000, 0, (shared,)), Node("n1", 8000, 0, (alone,))))])
    halves = {"typical": [{"gpus": 1, "gpu_milli": 500}]}
    assert ask(new_policy("expected_fill"), fleet, Demand(1), parameters=halves)["node_id"] == "n1"


def test_gpus_that_a_replica_counts_as_taken_twice_count_as_full():
    fleet = fleet_of([(8, 3, "A"), (8, 3, "A")])
    fleet.set_capacity(0, -1000, 1, [-1000, 1000, 700])
    fleet.set_capacity(1, 8000, 1, [-1000, -1000, 700])
    typical = {"typical": [{"gpus": 1, "gpu_milli": milli} for milli in (300, 700, 1000)]}
    value = ask(new_policy("expected_fill"), fleet, Demand(1, 700), parameters=typical)
    assert (value["node_id"], value["gpus"]) == ("n1", ["2"])


# The caches ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    typical=st.lists(KINDS, max_size=4),
    nodes=st.lists(NODES, min_size=2, max_size=5),
    steps=steps_of(DEMANDS, 16),
)
def test_a_running_instance_of_the_policy_answers_like_a_new_instance(typical, nodes, steps):
    play("expected_fill", typical, fleet_of, nodes, steps)


def test_a_running_policy_notices_changed_parameters():
    fleet, policy = fleet_of([(64, 1, "A"), (64, 1, "A")]), new_policy("expected_fill")
    for milli, seed, prices in ((700, 1, True), (1000, 1, True), (1000, 2, True), (1000, 2, False)):
        typical = [{"gpus": 1, "gpu_milli": milli}]
        parameters = {"typical": typical, "stream_seed": seed, "prices": prices}
        ask(policy, fleet, Demand(1), parameters=parameters)
        assert policy._typical == (typical, seed, prices)


def test_the_numbers_of_stored_demands_and_values_are_bounded():
    fleet, policy = fleet_of([(1000, 4, "A")]), new_policy("expected_fill")
    for cpu in range(expected_fill.DEMANDS_MAX + 10):
        ask(policy, fleet, Demand(1, cpu_milli=cpu), parameters={"typical": [{"gpus": 1}]})
    assert len(policy._scored) == expected_fill.DEMANDS_MAX
    # Values by numbers of states are computed again, since the numbers now mean other states.
    values, full = policy._values, policy._values.states_max
    states = np.zeros((full, 4), np.int64)
    values.numbers(states[:, 0], np.arange(full), states[:, 0], states)
    assert len(values) > full
    demand, parameters = Demand(1, 300), {"typical": [{"gpus": 1}]}
    warm = ask(policy, fleet, demand, parameters=parameters)
    assert warm == ask(new_policy("expected_fill"), fleet, demand, parameters=parameters)
    assert len(values) < 9
    assert list(policy._scored) == [demand]


def test_a_large_fleet_is_scored_step_by_step():
    rows = expected_fill.ROWS_MAX
    fleet, policy, share = (
        fleet_of([(8, 1, "A")] * (rows + 5)),
        new_policy("expected_fill"),
        Demand(1, 200),
    )
    parameters = {"typical": [{"gpus": 1, "gpu_milli": 900}]}
    fleet.set_capacity(rows + 4, 8000, 65_536, [300])
    best = fleet.node_ids[rows + 4][1]
    assert ask(policy, fleet, share, parameters=parameters)["node_id"] != best
    assert policy._scored[share].later.tolist() == list(range(rows, rows + 5))
    assert ask(policy, fleet, share, parameters=parameters)["node_id"] == best
    assert not len(policy._scored[share].later)


def test_a_node_without_a_value_is_proposed_if_all_other_nodes_are_reserved():
    rows = expected_fill.ROWS_MAX
    fleet, policy = fleet_of([(8, 2, "A")] * (rows + 1)), new_policy("expected_fill")
    fleet.set_capacity(rows, 8000, 65_536, [0, 1000])
    last = fleet.node_ids[rows][1]
    view = FleetView(
        fleet, Demand(1), reserved=[("c", node_id) for _, node_id in fleet.node_ids[:rows]]
    )
    value = policy.eval({}, {"fleet": view, "inputs": {}, "seed": 1}, {})
    assert (value["node_id"], value["gpus"]) == (last, ["1"])


# Prices ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    typical=st.lists(KINDS, min_size=1, max_size=4),
    nodes=st.lists(NODES, min_size=12, max_size=12),
    demands=st.lists(DEMANDS, min_size=6, max_size=14),
    given_back=st.lists(st.integers(0, 9), max_size=9),
)
def test_prices_follow_the_fleet_in_steps_of_a_sixth_of_its_nodes(
    typical, nodes, demands, given_back
):
    fleet, policy, held = fleet_of(nodes), new_policy("expected_fill"), []
    for number, demand in enumerate(demands):
        answer = ask(policy, fleet, demand, parameters={"typical": typical})
        fresh = new_policy("expected_fill")
        from_now = ask(fresh, fleet, demand, parameters={"typical": typical})
        if number % 2 == 0:  # Prices are due.
            assert answer == from_now
            expected = fresh._values._prices.prices
            assert policy._values._prices.prices.tolist() == expected.tolist()
        assert ("declined" in answer) == ("declined" in from_now)
        if "declined" not in answer:
            take(fleet, answer, demand)
            held.append((answer, demand))
        if number < len(given_back) and given_back[number] < len(held):
            give(fleet, *held.pop(given_back[number]))


def test_scarce_whole_gpus_stay_whole():
    # One node still fits a request of four GPUs; many nodes fit one of one GPU.
    fleet = fleet_of([(64, 4, "A"), *[(64, 4, "A")] * 5])
    for row in range(1, 6):
        fleet.set_capacity(row, 64_000, 65_536, [1000, 1000, 1000, 0])
    typical = [{"gpus": 1, "weight": 40}, {"gpus": 4, "weight": 1}]
    policy = new_policy("expected_fill")
    for _ in range(15):
        value = ask(policy, fleet, Demand(1), parameters={"typical": typical})
        assert value["node_id"] != "n0"
        take(fleet, value, Demand(1))


# Learning --------------------------------------------------------------------------------------


def test_the_learnt_mix_of_requests_changes_the_placement():
    fleet, context = fleet_of([(64, 1, "A"), (64, 1, "A")]), {}
    policy, small, usual = new_policy("expected_fill"), Demand(1, 300), Demand(1, 700)
    fleet.set_capacity(0, 64_000, 65_536, [700])
    for _ in range(16 * MixLearner.BATCH):
        ask(policy, fleet, usual, context=context)
    assert ask(policy, fleet, small, context=context)["node_id"] == "n1"
    # A new instance continues with the context.
    assert ask(new_policy("expected_fill"), fleet, small, context=context)["node_id"] == "n1"
    assert ask(new_policy("expected_fill"), fleet, small)["node_id"] == "n0"


def test_fleets_without_gpus_or_without_nodes_cause_no_error():
    view = FleetView(fleet_of([(8, 0, "A")]), Demand(cpu_milli=1000))
    value = new_policy("expected_fill").eval({}, {"fleet": view, "inputs": {}, "seed": 1}, {})
    assert value == {"cluster_id": "c", "node_id": "n0", "gpus": []}
    assert "declined" in ask(new_policy("expected_fill"), Fleet(), Demand(1))
