"""The placement functions of `moorage.policy` choose the best placement, and only sound ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.core.fit.verification import verify
from moorage.model import Ask, Cluster, Demand, Gpu, Node, PolicyRef
from moorage.policy import (
    Fleet,
    FleetView,
    best_rows,
    choice,
    close_gpus,
    decline_because,
    fitting_scores,
    parse_proposal,
    place,
    print_scores,
    spread_rows,
)


def linked_node(node_id, rack="", link=4, gpus=8):
    devices = tuple(
        Gpu(str(n), "A100", 40_960, f"link-{n // link}" if link else "", n // 4)
        for n in range(gpus)
    )
    return Node(node_id, 64_000, 262_144, devices, rack)


CLUSTERS = {
    cluster.id: cluster
    for cluster in (
        Cluster("a", tuple(linked_node(f"n{n}", f"rack-{n // 2}") for n in range(4))),
        Cluster("b", (linked_node("m0", "", 0), linked_node("m1", "rack-9", 2, 4))),
    )
}


def site():
    fleet = Fleet()
    fleet.install(CLUSTERS.values())
    return fleet


def data(fleet, demand, **more):
    return {"fleet": FleetView(fleet, demand), "inputs": {}, "resources": None, **more}


def by_row(fleet, demand):
    return np.arange(len(fleet))


def test_place_takes_the_best_node_that_fits():
    fleet = site()
    best = place(data(fleet, Demand(gpus=1)), by_row)
    assert best == {"cluster_id": "b", "node_id": "m1", "gpus": ["0"]}
    worst = place(data(fleet, Demand(gpus=1)), lambda view, _: -np.arange(len(view)) - 10)
    assert worst == {"cluster_id": "a", "node_id": "n0", "gpus": ["0"]}
    assert "declined" in place(data(fleet, Demand(gpus=9)), by_row)
    assert "declined" in place(data(fleet, None), by_row)


def test_close_gpus_share_an_nvlink_group_or_else_a_numa_domain():
    fleet = site()
    view, demand = FleetView(fleet), Demand(gpus=4)
    fleet.gpu_free[0, :2] = 0  # The first group of n0 has two left.
    assert close_gpus(view, 0, demand) == [4, 5, 6, 7]
    assert place(data(fleet, demand), lambda *_: [1, 0, 0, 0, 0, 0])["gpus"] == list("2345")
    assert place(data(fleet, demand), lambda *_: [1, 0, 0, 0, 0, 0], close=True)["gpus"] == list(
        "4567"
    )
    assert close_gpus(view, 4, Demand(gpus=4)) == [0, 1, 2, 3]  # No NVLink, but a domain.
    assert close_gpus(view, 5, Demand(gpus=3)) == [0, 1, 2]  # Two per group, four per domain.
    assert close_gpus(view, 5, Demand(gpus=3, topology="nvlink")) == []
    assert close_gpus(view, 4, Demand(gpus=6)) == [0, 1, 2, 3, 4, 5]


def test_place_packs_or_spreads_gangs():
    fleet, demand = site(), Demand(gpus=1, nodes=2)
    packed = place(data(fleet, demand), lambda view, _: -np.arange(len(view)))
    assert [share["node_id"] for share in packed] == ["n0", "n1"]
    apart = place(data(fleet, demand), lambda view, _: -np.arange(len(view)), gang="spread")
    assert [share["node_id"] for share in apart] == ["n0", "n2"]
    scores = np.arange(6.0)
    view = FleetView(fleet)
    assert spread_rows(view, Demand(nodes=6), scores) == [5, 4, 3, 1, 2, 0]
    assert spread_rows(view, Demand(nodes=7), scores) == []
    assert spread_rows(view, Demand(nodes=2, topology="rack"), scores) == [3, 2]


def test_the_refusal_of_invalid_scores_names_the_fault():
    view, demand = FleetView(site()), Demand(gpus=1)
    for wrong, found in (
        ([1, 2], r"shape \(2,\)"),
        (["best"] * 6, r"\['best', 'best'"),
        ("best", "'best'"),
        (3, "3"),
        (None, "None"),
        ({}, r"\{\}"),
        ([1, [2]], r"\[1, \[2\]\]"),
    ):
        said = rf"^expected one score per node \(6 numbers\), got {found}"
        with pytest.raises(ValueError, match=said):
            fitting_scores(view, demand, wrong)
    with pytest.raises(ValueError, match="the score of a/n1 is nan"):
        fitting_scores(view, demand, [1, float("nan"), 1, 1, 1, 1])
    # Scores of nodes without a fit are ignored.
    assert fitting_scores(view, Demand(gpus=8), [3, 2, 1, 0, -1, float("inf")]).tolist() == [
        4, 3, 2, 1, 0, -1
    ]  # fmt: skip
    assert decline_because("no") == {"declined": "no"}


def test_place_accepts_scores_as_a_list():
    view, demand = FleetView(site()), Demand(gpus=1, nodes=2)
    assert best_rows(view, demand, [0, 1, 5, -1, -1, -1]) == [2, 1]
    assert spread_rows(view, demand, [0, 1, 5, -1, -1, -1]) == [2, 1]
    for rows in (best_rows, spread_rows):
        with pytest.raises(ValueError, match=r"^expected one score per node \(6 numbers\), got"):
            rows(view, demand, ["best"] * 6)


def test_the_answer_of_place_has_the_taken_share():
    found = data(site(), Demand(gpus=1))
    fleet = found["fleet"]
    with pytest.raises(TypeError, match=r"^place: expected `input_data` as `eval` got it, got F"):
        place(fleet, lambda view, _: np.arange(len(view)))
    with pytest.raises(TypeError, match=r"given; a score function gets the fleet and the demand"):
        place(found, lambda view: np.arange(len(view)))
    with pytest.raises(ValueError, match=r"^gang: expected one of pack, spread, got 'apart'"):
        place(found, lambda view, _: np.arange(len(view)), gang="apart")
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        place(found, lambda view, _: np.arange(len(5)))


@settings(max_examples=150)
@given(
    st.integers(0, 8), st.sampled_from([250, 700, 1000]), st.integers(1, 4),
    st.sampled_from(["", "nvlink", "numa", "rack", "zone"]), st.booleans(),
    st.sampled_from(["pack", "spread"]), st.integers(0, 2**32),
)  # fmt: skip
def test_place_gives_a_sound_answer_for_any_score(gpus, milli, nodes, topology, close, gang, seed):
    draw, fleet = np.random.default_rng(seed), site()
    free = draw.choice([0, 300, 1000], fleet.gpu_free.shape, p=[0.3, 0.2, 0.5])
    fleet.gpu_free[:] = np.minimum(free, fleet.gpu_total)
    fleet.zone[:] = draw.choice([-1, 0, 0, 1], len(fleet)) + 2 * fleet.cluster * (fleet.zone >= 0)
    demand = Demand(gpus=gpus, gpu_milli=milli, nodes=nodes, topology=topology, cpu_milli=100)
    value = place(
        data(fleet, demand), lambda view, _: draw.normal(size=len(view)), close=close, gang=gang
    )
    proposals = parse_proposal(value, demand)
    ask = Ask("r", "t", PolicyRef("p", "d"), demand=demand)
    if proposals:
        assert isinstance(verify(ask, proposals, fleet, CLUSTERS), tuple)
    elif nodes == 1:
        assert not fleet.feasible(demand).any()


def test_scores_are_printed_after_a_call_of_print_scores(capsys, monkeypatch):
    fleet = site()
    place(data(fleet, Demand(gpus=1)), by_row)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(choice._Printed, "nodes", 0)  # Restored after this test.
    print_scores(2)
    place(data(fleet, Demand(gpus=1)), by_row)
    assert capsys.readouterr().out.splitlines() == [
        "6 nodes fit; the best by score:",
        "b/m1: score 5, 4 GPUs, 64 cores and 256 GiB free",
        "b/m0: score 4, 8 GPUs, 64 cores and 256 GiB free",
    ]


def test_a_score_of_named_terms_is_their_sum_and_lists_them(capsys, monkeypatch):
    def by_terms(view, _):
        return {"first": np.arange(len(view)) * 2.0, "busy": -np.arange(len(view)), "base": 1}

    fleet = site()
    best = place(data(fleet, Demand(gpus=1)), by_terms)
    assert best == {"cluster_id": "b", "node_id": "m1", "gpus": ["0"]}
    monkeypatch.setattr(choice._Printed, "nodes", 0)  # Restored after this test.
    print_scores(2)
    place(data(fleet, Demand(gpus=1)), by_terms)
    assert capsys.readouterr().out.splitlines() == [
        "6 nodes fit; the best by score:",
        "b/m1: score 5 (first 10, busy -5, base 1), 4 GPUs, 64 cores and 256 GiB free",
        "b/m0: score 4 (first 8, busy -4, base 1), 8 GPUs, 64 cores and 256 GiB free",
    ]
    place(data(fleet, Demand(gpus=1)), by_row)
    assert "(" not in capsys.readouterr().out


def test_a_term_of_a_score_is_a_number_per_node_or_one_number_for_all_nodes():
    with pytest.raises(ValueError, match=r"one score per node \(6\), got shape \(2,\) of 'odd'"):
        place(data(site(), Demand(gpus=1)), lambda view, _: {"odd": np.arange(2)})
    with pytest.raises(ValueError, match="no terms"):
        place(data(site(), Demand(gpus=1)), lambda view, _: {})
