"""Tests of the benchmark `packing`: its counts, and the allocator's check of each proposal."""

import pytest

from benchmarks.packing import openb, pack
from moorage.lab.trace import TraceNode, TracePod
from moorage_policies.first_fit import AIOSv1PolicyRule as FirstFit

NODES = [TraceNode("a", 64_000, 65_536, 2, "T4")]
WHOLE = TracePod("w", 4000, 1024, 1, 1000)
HALF = TracePod("h", 2000, 1024, 1, 500)
CPU = TracePod("c", 1000, 1024, 0, 0)


def test_packing_counts_placed_requests():
    packing = pack(FirstFit("", {}, {}), openb(NODES, 1), [WHOLE, HALF, WHOLE, CPU])
    assert (packing.granted, packing.declined) == (3, 1)
    assert packing.allocated_percent == 75.0
    assert packing.microseconds_per_decision > 0


def test_packing_reports_allocation_at_the_first_overload():
    packing = pack(FirstFit("", {}, {}), openb(NODES, 1), [HALF, WHOLE, WHOLE, HALF, CPU])
    assert packing.allocated_percent_at_100 == 75.0
    assert packing.allocated_percent == 100.0


def test_a_request_that_fits_nowhere_causes_no_call_of_the_policy():
    packing = pack(FirstFit("", {}, {}), openb(NODES, 1), [WHOLE, WHOLE, WHOLE, HALF])
    assert (packing.granted, packing.declined, packing.decisions) == (2, 2, 2)


def test_policies_see_the_same_fleet_as_in_cells():
    seen = []

    class Curious(FirstFit):
        def eval(self, parameters, input_data, context):
            seen.append({**input_data, "cluster_data": dict(input_data["cluster_data"])})
            return super().eval(parameters, input_data, context)

    metrics = {"clusterId": "openb", "nodes": []}
    pack(Curious("", {}, {}), openb(NODES, 1, metrics=metrics), [HALF, HALF], {}, 7)
    first, second = seen
    assert (first["seed"], second["seed"]) == (7 << 32, (7 << 32) + 1)
    assert first["resources"]["gpu_milli"] == 500
    entry = first["cluster_data"]["openb"]
    assert entry["data"]["nodes"]["nodeData"][0]["id"].endswith("-a")
    assert entry["cluster_metrics"] == metrics


class Greedy:
    """A policy that proposes the same GPUs each time."""

    def __init__(self, gpus):
        self.gpus = gpus

    def eval(self, parameters, input_data, context):
        cluster, node = input_data["fleet"].node_ids[0]
        return {"cluster_id": cluster, "node_id": node, "gpus": self.gpus}


@pytest.mark.parametrize("gpus", [["0"], ["0", "1"], ["2"]])
def test_packing_refuses_an_unsound_policy(gpus):
    with pytest.raises(ValueError, match="w: policy_unsound"):
        pack(Greedy(gpus), openb(NODES, 1), [WHOLE, WHOLE])


def test_a_policy_that_declines_feasible_requests_is_refused():
    class Shy:
        def eval(self, parameters, input_data, context):
            return {"declined": "not today"}

    with pytest.raises(ValueError, match="w: policy_declined"):
        pack(Shy(), openb(NODES, 1), [WHOLE])
