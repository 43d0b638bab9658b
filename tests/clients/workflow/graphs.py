"""Graphs and both kinds of executor, for all tests of workflows."""

import asyncio
import inspect
from functools import partial

import pytest

from moorage_client.workflow import (
    DAG,
    AsyncResourceAwareExecutor,
    ResourceAwareExecutor,
    ResourcePool,
    ResourceRequirements,
)

KINDS = [ResourceAwareExecutor, AsyncResourceAwareExecutor]
both = pytest.mark.parametrize("kind", KINDS)
gpu = ResourceRequirements.gpu


def graph(*names: str, edges: str = "") -> DAG:
    dag = DAG()
    dag.add_nodes(names)
    dag.add_edges([tuple(edge.split(">")) for edge in edges.split()])
    return dag


def execute(executor, tasks, **options):
    result = executor.execute(tasks, **options)
    return asyncio.run(result) if inspect.isawaitable(result) else result


def noting(order, names="abcd"):
    """Return tasks that record the order in which they run."""
    return {name: partial(order.append, name) for name in names}


def statuses(result):
    return {name: str(each.status) for name, each in result.node_results.items()}


def run(kind, tasks, *, edges="", gpus=1, **options):
    """Run tasks that need one GPU each, check that all GPUs come back, and return the result."""
    pool, dag = ResourcePool({"gpu": gpus}), graph(*tasks, edges=edges)
    result = execute(kind(dag, pool, dict.fromkeys(dag, gpu(1)), **options), tasks)
    assert pool.available == {"gpu": gpus}
    return result
