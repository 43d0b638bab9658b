"""The policy `fgd` agrees with a slow copy of its definition, with and without caches."""

from functools import partial
from math import exp

import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st
from small import fleet_with, node, options, play, steps_of, take

from moorage.model import Cluster, Demand, Gpu, Node
from moorage.policy import Fleet, FleetView
from moorage_policies import fgd


def fleet_of(nodes):
    """Build a fleet of (cores, [model of each GPU]) nodes."""
    return fleet_with(
        *(
            node(f"n{n}", gpus=len(gpus), cpu=1000 * cores, memory=1 << 20, models=list(gpus))
            for n, (cores, gpus) in enumerate(nodes)
        )
    )


def ask(policy, fleet, demand, typical=(), context=None):
    return small.ask(policy, fleet, demand, parameters={"typical": list(typical)}, context=context)


new_policy = partial(small.new_policy, "fgd")


# The definition --------------------------------------------------------------------------------


def fragmentation(typical, model, cpu, gpus):
    """Return F(node) times the sum of the weights, in whole numbers."""
    result = 0
    for kind in typical:
        large = [free for free in gpus if free >= kind["gpu_milli"]]
        cannot = (
            not kind["gpus"]
            or cpu < kind["cpu_milli"]
            or len(large) < kind["gpus"]
            or (kind["models"] and model not in kind["models"])
        )
        useless = sum(gpus) if cannot else sum(gpus) - sum(large)
        result += kind["weight"] * useless
    return result


def choose(typical, fleet, demand):
    """Return the (row, device columns) that steps 4 to 6 of the protocol choose, or None."""
    best, chosen = -1, None
    weights = sum(kind["weight"] for kind in typical)
    for row, model, (cpu, _, gpus), columns, after in options(fleet, demand):
        gain = fragmentation(typical, model, cpu, gpus) - fragmentation(
            typical, model, cpu - demand.cpu_milli, after
        )
        score = int(100 / (1 + exp(-gain / (weights * 1000))))
        if score > best:
            best, chosen = score, (row, columns)
    return chosen


MILLI = st.sampled_from([100, 300, 500, 700, 1000])
TYPICAL = st.builds(
    lambda cores, gpus, milli, models, weight: {
        "cpu_milli": 1000 * cores,
        "gpus": gpus,
        "gpu_milli": milli if gpus == 1 else 1000,
        "models": models,
        "weight": weight,
    },
    st.integers(0, 6),
    st.sampled_from([0, 1, 1, 1, 2, 4]),
    MILLI,
    st.sampled_from([[], [], ["A"], ["A", "B"]]),
    st.integers(1, 9),
)
DEMANDS = st.builds(
    lambda cores, gpus, milli, models: Demand(gpus, milli, models, cpu_milli=1000 * cores),
    st.integers(0, 6),
    st.sampled_from([0, 1, 1, 1, 2, 4]),
    MILLI,
    st.sampled_from([(), (), ("B",)]),
)
# The protocol's nodes have GPUs of one model.
NODES = st.tuples(st.integers(0, 16), st.integers(0, 4), st.sampled_from("AB")).map(
    lambda drawn: (drawn[0], [drawn[2]] * drawn[1])
)


@settings(max_examples=200)
@given(
    typical=st.lists(TYPICAL, min_size=1, max_size=6),
    nodes=st.lists(NODES, min_size=1, max_size=5),
    demands=st.lists(DEMANDS, min_size=1, max_size=14),
)
def test_the_decisions_of_the_policy_agree_with_its_definition(typical, nodes, demands):
    fleet, policy = fleet_of(nodes), new_policy()
    for demand in demands:
        chosen, value = choose(typical, fleet, demand), ask(policy, fleet, demand, typical)
        if chosen is None:
            assert "declined" in value
            continue
        row, columns = chosen
        assert value["node_id"] == fleet.node_ids[row][1]
        assert value["gpus"] == [str(column) for column in columns]
        take(fleet, value, demand)


# The caches ------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    typical=st.lists(TYPICAL, min_size=1, max_size=3),
    nodes=st.lists(NODES, min_size=2, max_size=5),
    steps=steps_of(DEMANDS, 20),
)
def test_a_running_instance_of_the_policy_answers_like_a_new_instance(typical, nodes, steps):
    play("fgd", typical, fleet_of, nodes, steps)


def test_only_changed_nodes_are_scored_again():
    policy, fleet, demand = new_policy(), fleet_of([(8, "A"), (8, "A")]), Demand(1)
    for _ in range(2):
        take(fleet, ask(policy, fleet, demand), demand)
        assert len(fleet.changed_since(policy._scored[demand].version)) == 1


def test_a_running_policy_notices_another_fleet_of_equal_size():
    policy, demand = new_policy(), Demand(1)
    typical = [{"cpu_milli": 0, "gpus": 1, "gpu_milli": 1000, "models": [], "weight": 1}]
    first, second = fleet_of([(4, "A"), (4, "A")]), fleet_of([(4, "A"), (4, "A")])
    assert ask(policy, first, demand, typical)["node_id"] == "n0"
    take(second, ask(policy, second, demand, typical), demand)
    assert ask(policy, second, demand, typical)["node_id"] == "n1"
    assert ask(policy, first, demand, typical)["node_id"] == "n0"


def test_a_running_policy_notices_other_typical_requests():
    policy, demand = new_policy(), Demand(1, gpu_milli=500)
    # n0 has half a GPU left, n1 a whole one: if halves are typical, neither becomes useless.
    fleet = fleet_of([(4, "A"), (4, "A")])
    take(fleet, {"cluster_id": "c", "node_id": "n1", "gpus": ["0"]}, demand)
    whole = [{"gpus": 1, "gpu_milli": 1000, "weight": 1}]
    assert ask(policy, fleet, demand, whole)["node_id"] == "n1"
    halves = [{"gpus": 1, "gpu_milli": 500, "weight": 1}]
    assert ask(policy, fleet, demand, halves)["node_id"] == "n0"


def test_the_caches_of_the_policy_are_bounded():
    policy, fleet = new_policy(), fleet_of([(1000, "A" * 4)])
    for cpu in range(fgd.DEMANDS_MAX + 10):
        ask(policy, fleet, Demand(1, cpu_milli=cpu), [{"gpus": 1}])
    assert len(policy._scored) == fgd.DEMANDS_MAX


def test_gpus_that_a_replica_counts_as_taken_twice_count_as_full():
    fleet = fleet_of([(8, "AAA"), (8, "AAA")])
    fleet.set_capacity(0, -1000, 1, [-1000, 1000, 700])
    fleet.set_capacity(1, 8000, 1, [-1000, -1000, 700])
    typical = [{"gpus": 1, "gpu_milli": milli, "weight": 1} for milli in (300, 700, 1000)]
    value = ask(new_policy(), fleet, Demand(1, gpu_milli=700), typical)
    assert (value["node_id"], value["gpus"]) == ("n1", ["2"])
    assert "declined" in ask(new_policy(), fleet, Demand(2, gpu_milli=100), typical)


def test_requests_are_placed_with_more_sorts_of_gpus_than_the_limit():
    models = [f"M{number}" for number in range(fgd.KINDS_MAX + 6)]
    fleet, policy = fleet_of([(8, [model]) for model in models]), new_policy()
    typical = [{"gpus": 1, "models": [model]} for model in models]
    for model in models:
        demand = Demand(1, models=(model,))
        assert "node_id" in ask(policy, fleet, demand, typical)


def test_shares_ignore_gpus_that_are_only_taken_whole():
    fleet = Fleet()
    shared, alone = Gpu("0", "A"), Gpu("0", "A", exclusive=True)
    fleet.install([Cluster("c", (Node("n0", 8000, 0, (shared,)), Node("n1", 8000, 0, (alone,))))])
    halves = [{"gpus": 1, "gpu_milli": 500}]
    assert ask(new_policy(), fleet, Demand(1), halves)["node_id"] == "n1"
    assert ask(new_policy(), fleet, Demand(1, gpu_milli=500), halves)["node_id"] == "n0"


def test_several_shares_of_a_request_go_to_the_fullest_gpus_that_fit():
    fleet = fleet_of([(8, "AA"), (8, "AAA")])
    fleet.set_capacity(0, 8000, 0, [1000, 400, 0])
    fleet.set_capacity(1, 8000, 0, [1000, 400, 300])
    value = ask(new_policy(), fleet, Demand(2, gpu_milli=300), [{"gpus": 1}])
    assert (value["node_id"], value["gpus"]) == ("n1", ["1", "2"])


# Parameters and learning -----------------------------------------------------------------------


def test_typical_requests_accept_num_gpu_and_defaults():
    (kind,) = fgd.read_typical([{"num_gpu": 2}])
    assert kind == fgd.Typical(0, 2, 1000, (), 1.0)
    assert fgd.read_typical([{"gpus": 1, "weight": 0}]) == []


def test_only_the_heaviest_of_too_many_typical_requests_count():
    kinds = fgd.read_typical([{"cpu_milli": n, "gpus": 1, "weight": n} for n in range(1, 400)])
    assert len(kinds) == fgd.TYPICAL_MAX
    assert kinds[0].cpu_milli == 399


@pytest.mark.parametrize("weights", [(1, 2), (0.1, 0.2), (10**12, 2 * 10**12)])
def test_only_the_ratio_of_weights_matters(weights):
    typical = [
        {"gpus": 1, "gpu_milli": milli, "weight": weight}
        for milli, weight in zip((400, 1000), weights, strict=True)
    ]
    fleet, policy, chosen = fleet_of([(9, "AA"), (9, "A")]), new_policy(), []
    for milli in (600, 400, 300, 1000):
        demand = Demand(1, gpu_milli=milli)
        value = ask(policy, fleet, demand, typical)
        chosen.append((value["node_id"], value["gpus"]))
        take(fleet, value, demand)
    assert chosen == [("n0", ["0"]), ("n0", ["0"]), ("n0", ["1"]), ("n1", ["0"])]


def test_without_typical_requests_the_policy_learns_them_in_its_context():
    fleet, context, policy = fleet_of([(64, "A" * 8)]), {}, new_policy()
    demand = Demand(1, gpu_milli=700, models=("A", "B"), cpu_milli=3000)
    for _ in range(fgd.Learner.BATCH):
        ask(policy, fleet, demand, context=context)
    assert context == {"seen": {"3000 1 700 A|B": fgd.Learner.BATCH}}
    kinds = fgd.Learner().typical(FleetView(fleet), context)
    assert kinds[0] == fgd.Typical(3000, 1, 700, ("A", "B"), float(fgd.Learner.BATCH))


def test_the_fleet_is_valued_again_each_time_the_request_count_doubles():
    learner, context, view, relearned = fgd.Learner(), {}, FleetView(fleet_of([(8, "A")])), []
    for number in range(1, 9 * fgd.Learner.BATCH):
        if learner.observe(Demand(1), context):
            relearned.append(number / fgd.Learner.BATCH)
            learner.typical(view, context)
    assert relearned == [1, 2, 4, 8]


def test_the_policy_continues_to_learn_when_the_counts_are_halved():
    learner, context, view = fgd.Learner(), {}, FleetView(fleet_of([(8, "A")]))
    relearned = 0
    for _ in range(4 * fgd.Learner.COUNT_MAX):
        if learner.observe(Demand(1), context):
            relearned += 1
            learner.typical(view, context)
    # log2(COUNT_MAX / BATCH) doublings to the first halving, then one per COUNT_MAX / 2.
    assert relearned >= 8 + 5


def test_the_learnt_mix_of_requests_changes_the_placement():
    fleet, policy, context = fleet_of([(4, "A"), (4, "A")]), new_policy(), {}
    take(fleet, {"cluster_id": "c", "node_id": "n1", "gpus": ["0"]}, Demand(1, gpu_milli=500))
    little, usual = Demand(1, gpu_milli=300), Demand(1, gpu_milli=400)
    assert ask(policy, fleet, little, context=context)["node_id"] == "n1"  # It assumes whole GPUs.
    for _ in range(8 * fgd.Learner.BATCH):
        ask(policy, fleet, usual, context=context)
    # The rest of n1 would be useless for typical requests.
    assert ask(policy, fleet, little, context=context)["node_id"] == "n0"


def test_with_given_typical_requests_the_context_does_not_change():
    context, policy, fleet = {}, new_policy(), fleet_of([(64, "A" * 8)])
    for _ in range(2 * fgd.Learner.BATCH):
        ask(policy, fleet, Demand(1), [{"gpus": 1}], context)
    assert context == {}


def test_a_request_with_very_many_models_is_placed_but_not_counted_as_typical():
    policy, context, fleet = new_policy(), {}, fleet_of([(64, "A" * 8)])
    demand = Demand(1, models=("A", *(f"model-{number}" for number in range(100))))
    for _ in range(fgd.Learner.BATCH):
        assert "node_id" in ask(policy, fleet, demand, context=context)
    assert context == {"seen": {}}


def test_the_learnt_mix_of_requests_is_bounded_and_old_requests_lose_weight():
    learner, context = fgd.Learner(), {}
    for cpu in range(4 * fgd.TYPICAL_MAX):
        learner.observe(Demand(1, cpu_milli=cpu), context)
    assert len(context["seen"]) == fgd.TYPICAL_MAX
    for _ in range(2 * fgd.Learner.COUNT_MAX):
        learner.observe(Demand(1, cpu_milli=5), context)
    assert sum(context["seen"].values()) <= fgd.Learner.COUNT_MAX + fgd.Learner.BATCH
    assert max(context["seen"], key=context["seen"].get) == "5 1 1000 "
