"""Tests of the mix of requests that policies learn, and of the kinds that a node serves."""

import json

import pytest

from moorage.model import Cluster, Demand, Gpu, Node
from moorage.policy import (
    Fleet,
    FleetView,
    MixLearner,
    RequestKind,
    mix,
    node_sorts,
    read_typical,
    tightest_gpus,
)
from moorage.policy import typical as room


def view_of(*nodes):
    """Return a view of nodes, given the models of each node's GPUs; `!` makes a GPU exclusive."""
    fleet = Fleet()
    members = tuple(
        Node(
            f"n{number}",
            8000,
            8192,
            tuple(
                Gpu(str(place), model.strip("!"), exclusive="!" in model)
                for place, model in enumerate(models)
            ),
        )
        for number, models in enumerate(nodes)
    )
    fleet.install([Cluster("c", members)])
    return FleetView(fleet)


# Reading ---------------------------------------------------------------------------------------


def test_a_kind_of_request_accepts_num_gpu_and_defaults():
    assert read_typical([{"num_gpu": 2}]) == [RequestKind(0, 2, 1000, 0, (), 1.0)]


def test_the_most_frequent_kinds_come_first_as_shares_of_all():
    kinds = read_typical(
        [
            {"cpu_milli": 1, "weight": 1},
            {"cpu_milli": 2, "weight": 3},
            {"cpu_milli": 3, "weight": 0},
        ]
    )
    assert [(kind.cpu_milli, kind.weight) for kind in kinds] == [(2, 0.75), (1, 0.25)]


def test_kinds_of_requests_with_several_gpus_take_whole_gpus():
    assert read_typical([{"gpus": 2, "gpu_milli": 300}])[0].milli == 2000
    assert read_typical([{"gpus": 1, "gpu_milli": 300}])[0].milli == 300


def test_only_the_most_frequent_of_too_many_kinds_of_requests_count():
    kinds = mix([RequestKind(n, weight=n) for n in range(1, room.KINDS_MAX + 50)])
    assert len(kinds) == room.KINDS_MAX
    assert kinds[0].cpu_milli == room.KINDS_MAX + 49


# Learning --------------------------------------------------------------------------------------


def feed(learner, context, demands, *, through_json=False):
    """Let the learner observe these demands; return the counts after which its mix was new."""
    readings = []
    for number, demand in enumerate(demands, 1):
        if learner.observe(demand, context):
            readings.append(number)
        if through_json:  # As the server transfers it.
            context.update(json.loads(json.dumps(context)))
    return readings


def test_a_full_batch_of_counted_requests_is_stored_in_the_context():
    learner, context = MixLearner(), {}
    demand = Demand(1, 700, models=("A", "B"), cpu_milli=3000, memory_mib=64, nodes=2)
    assert feed(learner, context, [demand] * (MixLearner.BATCH - 1)) == []
    assert context == {}
    assert feed(learner, context, [demand], through_json=True) == [1]
    assert context["seen"] == {"3000 1 700 A|B": [2 * MixLearner.BATCH, 128 * MixLearner.BATCH]}
    (kind, *guessed) = learner.typical(view_of("A"), context)
    assert kind == RequestKind(3000, 1, 700, 64, ("A", "B"), 128 / 158)
    assert sum(each.weight for each in guessed) == pytest.approx(30 / 158)


def test_the_mix_is_read_again_when_the_count_doubles():
    readings = feed(MixLearner(), {}, [Demand(1)] * (9 * MixLearner.BATCH))
    assert readings == [MixLearner.BATCH * times for times in (1, 2, 4, 8)]


def test_requests_after_the_last_read_of_the_mix_do_not_count():
    learner, context, view = MixLearner(), {}, view_of("A")
    feed(learner, context, [Demand(1)] * MixLearner.BATCH)
    before = learner.typical(view, context)
    feed(learner, context, [Demand(2)] * (MixLearner.BATCH - 1))
    assert learner.typical(view, context) == before
    feed(learner, context, [Demand(2)])
    assert learner.typical(view, context) != before


def test_a_new_instance_continues_with_the_stored_counts_of_the_last_instance():
    context, demands = {}, [Demand(1, 100 + 100 * (n % 9)) for n in range(7 * MixLearner.BATCH)]
    learner, view = MixLearner(), view_of("A")
    feed(learner, context, demands)
    assert MixLearner().typical(view, context) == learner.typical(view, context)


def test_old_requests_lose_weight():
    context, learner = {}, MixLearner()
    feed(learner, context, [Demand(1)] * (MixLearner.COUNT_MAX + MixLearner.BATCH))
    readings = feed(learner, context, [Demand(2)] * (2 * MixLearner.COUNT_MAX))
    assert readings
    assert learner.typical(view_of("A"), context)[0].gpus == 2
    assert sum(count for count, _ in context["seen"].values()) <= MixLearner.COUNT_MAX


def test_the_number_of_request_kinds_and_the_length_of_their_names_are_limited():
    context, learner = {}, MixLearner()
    feed(learner, context, [Demand(cpu_milli=n) for n in range(1, 20 * MixLearner.BATCH)])
    assert len(context["seen"]) == room.KINDS_MAX
    models = tuple(f"model-{n}" for n in range(room.KIND_CHARACTERS_MAX))
    feed(learner, context, [Demand(1, models=models)] * 2 * MixLearner.BATCH)
    assert max(map(len, context["seen"])) <= room.KIND_CHARACTERS_MAX


def test_the_first_guess_of_typical_requests_fits_the_fleet():
    kinds = room.guess(view_of(["A", "A"], ["A"], ["A"]))
    assert [(kind.cpu_milli, kind.milli) for kind in kinds] == [
        (3000, 1000),
        (1500, 500),
        (750, 250),
        (3000, 0),
        (4000, 2000),
    ]
    assert [kind.gpus for kind in room.guess(view_of(["A"]))] == [1, 1, 1, 0]
    assert room.guess(view_of([]))[0].cpu_milli == 8000  # No node has GPUs.


# Nodes -----------------------------------------------------------------------------------------


def test_nodes_are_distinguished_by_the_kinds_that_they_serve():
    kinds = [
        RequestKind(0, 1, models=("A",)),
        RequestKind(0, 1, 500),
        RequestKind(0),
        RequestKind(0, 1, models=("A", "B")),
    ]
    serves, type_of = node_sorts(kinds, view_of(["A"], ["B"], ["A!"], ["C"], [], ["A", "B"]))
    assert serves[type_of].tolist()[:4] == [
        [True, True, True, True],
        [False, True, True, True],
        [True, False, True, True],
        [False, True, True, False],
    ]
    assert type_of[5] == type_of[0]
    assert serves[type_of[4], 2]


def test_the_number_of_node_types_is_bounded():
    models = [f"M{number}" for number in range(room.NODE_TYPES_MAX + 6)]
    kinds = [RequestKind(0, 1, models=(model,)) for model in models]
    serves, type_of = node_sorts(kinds, view_of(*([model] for model in models)))
    assert serves.shape == (room.NODE_TYPES_MAX, len(kinds))
    assert type_of.max() == room.NODE_TYPES_MAX - 1


def test_tightest_gpus_agree_with_pick_gpus():
    view = view_of(["A"] * 4)
    for free in ([1000, 400, 700, 400], [300, 1000, 300, 1000]):
        view._fleet.set_capacity(0, 8000, 8192, free)
        for demand in (Demand(1, 300), Demand(2, 300), Demand(1, 700)):
            taken = tightest_gpus(demand, view.gpu_free, view.fitting_gpus(demand))
            assert taken[0].nonzero()[0].tolist() == view.pick_gpus(0, demand)
