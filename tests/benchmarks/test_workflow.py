"""The overhead of a workflow executor per task does not grow with the graph."""

import math
import time

import pytest

from benchmarks import workflow

NODES_FEW, NODES_MANY = 1_000, 8_000
GROWTH_MAX = 2.5
"""Largest growth of the time compared with n log n; a loop over all nodes for each gives 6."""


@pytest.mark.heavy
@pytest.mark.parametrize("build", [workflow._chain, workflow._wide])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_time_of_an_executor_grows_like_n_log_n(kind, build) -> None:
    """Measure CPU time for few and many tasks in turn, and take the minimum of each."""
    few, many = (
        workflow._kinds(build(nodes), time.process_time)[kind] for nodes in (NODES_FEW, NODES_MANY)
    )
    best = workflow._quickest({"few": few, "many": many})
    expected = NODES_MANY * math.log(NODES_MANY) / (NODES_FEW * math.log(NODES_FEW))
    growth = best["many"] / best["few"] / expected
    print(f"{growth:.2f} of n log n")
    assert growth <= GROWTH_MAX
