"""The policies of the ATC'23 comparison agree with slow implementations of their definitions.

FGD has a separate file. The definitions are those of the original simulator, in whole numbers:
8 GPUs and 128 cores are its largest node.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import ask, fleet_with, give, new_policy, node, take

from moorage.model import Demand

LARGEST = node("zz-largest", gpus=8, cpu=128_000, memory=0)
"""The largest node, for the scale. It has no memory, so nothing is placed on it."""


def dot_product(cpu, gpus, demand, tags, tag):
    wanted = demand.gpus * demand.gpu_milli
    d = cpu / 128_000 * demand.cpu_milli / 128_000 + sum(gpus) / 8000 * wanted / 8000
    return int(100 * (1 - d / 2))


def gpu_clustering(cpu, gpus, demand, tags, tag):
    if not demand.gpus:
        return 0
    base = 25 if not tags else 75 if set(tags) == {tag} else 50 if tag in tags else 0
    return base + 25 * (8000 - sum(gpus)) // 8000


def gpu_packing(cpu, gpus, demand, tags, tag):
    if not demand.gpus:
        return 0
    if all(free == 1000 for free in gpus):
        return max(33 - len(gpus), len(gpus))
    used = sorted(free for free in gpus if free >= demand.gpu_milli)[: demand.gpus]
    idle = sum(free == 1000 for free in used)
    if idle:
        return max(50 - idle, 33)
    return max(100 - sum(free * 100 // 1000 for free in used) // 10, 50)


def best_fit(cpu, gpus, demand, tags, tag):
    cpu_left, gpu_left = cpu - demand.cpu_milli, sum(gpus) - demand.gpus * demand.gpu_milli
    return int(100 * (1 - cpu_left / 128_000 / 2 - gpu_left / 8000 / 2))


DEFINITIONS = {f.__name__: f for f in (dot_product, gpu_clustering, gpu_packing, best_fit)}
MILLI = st.sampled_from([100, 300, 460, 500, 700, 810, 1000])
DEMANDS = st.builds(
    lambda cores, gpus, milli: Demand(
        gpus, milli if gpus == 1 else 1000, cpu_milli=1000 * cores, memory_mib=1
    ),
    st.integers(0, 12),
    st.sampled_from([0, 1, 1, 1, 1, 2, 4]),
    MILLI,
)
NODES = st.tuples(st.sampled_from([8, 32, 64, 96]), st.sampled_from([0, 1, 2, 4, 8]))
STEPS = st.tuples(DEMANDS, st.one_of(st.none(), st.integers(0, 9)))


def tag_of(demand):
    return "share" if demand.gpu_milli < 1000 else demand.gpus


def choose(score, fleet, demand, held):
    """Return the (node, GPUs) that the protocol chooses: the best node, the first of equal ones."""
    scores = {}
    for row, (_, name) in enumerate(fleet.node_ids):
        cpu, memory, gpus = fleet.capacity(row)
        gpus = gpus[: len(fleet.gpu_ids[row])]
        enough = sum(free >= demand.gpu_milli for free in gpus) >= demand.gpus
        if cpu >= demand.cpu_milli and memory >= demand.memory_mib and enough:
            tags = [tag_of(other) for at, other in held if at == name and other.gpus]
            scores[row] = score(cpu, gpus, demand, tags, tag_of(demand))
    if not scores:
        return None
    if score is best_fit:  # Scaled to the candidates, so rounding decides which are equal.
        low, high = min(scores.values()), max(scores.values())
        scores = {row: (x - low) * 100 // max(1, high - low) for row, x in scores.items()}
    row = max(scores, key=lambda row: (scores[row], -row))
    free = fleet.capacity(row)[2]
    columns = [column for column, milli in enumerate(free) if milli >= demand.gpu_milli]
    columns = sorted(columns, key=free.__getitem__)[: demand.gpus]  # Whole GPUs are equal.
    return fleet.node_ids[row][1], [str(column) for column in sorted(columns)]


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=150)
@given(nodes=st.lists(NODES, min_size=1, max_size=5), steps=st.lists(STEPS, max_size=25))
def test_the_decisions_of_the_policy_agree_with_its_definition(name, nodes, steps):
    members = [node(f"n{n}", gpus=g, cpu=1000 * c) for n, (c, g) in enumerate(nodes)]
    fleet, policy, held = fleet_with(*members, LARGEST), new_policy(name), []
    for demand, released in steps:
        if released is not None and released < len(held):
            at, value, ended = held.pop(released)
            if name != "gpu_clustering" or not ended.gpus:  # This one does not see ends.
                give(fleet, value, ended)
            else:
                held.insert(released, (at, value, ended))
        placed = [(at, other) for at, _, other in held]
        expected, value = (
            choose(DEFINITIONS[name], fleet, demand, placed),
            ask(policy, fleet, demand),
        )
        if expected is None:
            assert "declined" in value
            continue
        assert (value["node_id"], value["gpus"]) == expected
        take(fleet, value, demand)
        held.append((value["node_id"], value, demand))


# What clustering infers from the fleet ----------------------------------------------------------


def test_the_policy_clustering_forgets_a_node_that_becomes_empty():
    fleet, policy, half = (
        fleet_with(node("a"), node("b")),
        new_policy("gpu_clustering"),
        Demand(1, 500),
    )
    first = ask(policy, fleet, half)
    take(fleet, first, half)
    assert first["node_id"] == "a"
    assert ask(policy, fleet, Demand(1))["node_id"] == "b"  # Advice, so nothing is placed there.
    give(fleet, first, half)
    assert ask(policy, fleet, Demand(1))["node_id"] == "a"


def test_the_policy_clustering_counts_shares_and_gpus_that_other_policies_placed():
    fleet = fleet_with(node("a"), node("b"), node("c"))
    take(fleet, {"cluster_id": "c", "node_id": "b", "gpus": ["0"]}, Demand(1))
    take(fleet, {"cluster_id": "c", "node_id": "c", "gpus": ["3"]}, Demand(1, 300))
    policy = new_policy("gpu_clustering")
    assert ask(policy, fleet, Demand(1, 500))["node_id"] == "c"
    assert ask(policy, fleet, Demand(1))["node_id"] == "b"


def test_the_policy_clustering_knows_nodes_by_name_after_a_change_of_the_inventory():
    fleet, policy, two = fleet_with(node("b"), node("c")), new_policy("gpu_clustering"), Demand(2)
    value = ask(policy, fleet, two)
    take(fleet, value, two)
    assert ask(policy, fleet, two)["node_id"] == value["node_id"] == "b"
    larger = fleet_with(node("a"), node("b"), node("c"))
    take(larger, value, two)
    fleet.restore(larger.snapshot())
    assert ask(policy, fleet, two)["node_id"] == "b"
    assert ask(policy, fleet, Demand(1))["node_id"] == "a"
