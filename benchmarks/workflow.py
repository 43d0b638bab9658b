"""`workflow`: the time that an executor of `moorage_client.workflow` adds to each task.

The baseline is `concurrent.futures`: a `ThreadPoolExecutor` with as many empty tasks, without graph
or resources, in the same run.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from moorage.lab.errors import CommandError
from moorage_client.workflow import (
    DAG,
    AsyncResourceAwareExecutor,
    ExecutionResult,
    ResourceAwareExecutor,
    ResourcePool,
    ResourceRequirements,
)

NODES: Final = 10_000
NODES_MANY: Final = 100_000
LAYERS: Final = 100
"""Number of layers of the graph `layered`, and of nodes in each layer."""
ROUNDS: Final = 3
"""Number of runs of each kind; the quickest run counts, since noise only adds time."""
_NEED: Final = ResourceRequirements.cpu(1)


def workflow() -> dict[str, Any]:
    """Measure both executors on a chain and a layered graph, and how their cost grows.

    A figure `KIND_SHAPE_to_futures` is the time per node divided by the baseline's time per task.
    The kind `async` runs coroutine functions, `async_plain` runs plain functions in threads. A
    figure `KIND_SHAPE_growth` is the ratio of the CPU times for `NODES_MANY` and `NODES`, divided
    by the growth of n log n: at most 1 means n log n or better. The shape `wide` has no edges.
    Small and large graphs alternate, so that a slow phase of the machine meets both.
    """
    figures: dict[str, Any] = {"nodes": NODES, "nodes_many": NODES_MANY}
    for shape, dag in (("chain", _chain(NODES)), ("layered", _make_layers(LAYERS))):
        best = _quickest({"futures": lambda dag=dag: _futures(len(dag))} | _kinds(dag))
        figures[f"{shape}_futures_seconds_per_task"] = best["futures"] / len(dag)
        for kind in ("sync", "async", "async_plain"):
            figures[f"{kind}_{shape}_to_futures"] = best[kind] / best["futures"]
    expected = NODES_MANY * math.log(NODES_MANY) / (NODES * math.log(NODES))
    for shape, build in (("chain", _chain), ("wide", _wide)):
        few, many = (_kinds(build(nodes), time.process_time) for nodes in (NODES, NODES_MANY))
        for kind in ("sync", "async"):
            best = _quickest({"few": few[kind], "many": many[kind]})
            figures[f"{kind}_{shape}_growth"] = best["many"] / best["few"] / expected
    return figures


def _kinds(
    dag: DAG, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Callable[[], float]]:
    return {
        "sync": lambda: _seconds(dag, _run_sync, _nothing, clock),
        "async": lambda: _seconds(dag, _run_async, _nothing_async, clock),
        "async_plain": lambda: _seconds(dag, _run_async, _nothing, clock),
    }


def _quickest(kinds: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    rounds = [{kind: run() for kind, run in kinds.items()} for _ in range(ROUNDS)]
    return {kind: min(each[kind] for each in rounds) for kind in kinds}


def _futures(tasks: int) -> float:
    """Return the seconds that `concurrent.futures` takes for a number of tasks."""
    gc.collect()
    started = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        for future in [threads.submit(_nothing) for _ in range(tasks)]:
            future.result()
    return time.perf_counter() - started


Run = Callable[[DAG, ResourcePool, Mapping[str, Callable[[], Any]]], ExecutionResult]


def _seconds(dag: DAG, run: Run, task: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the seconds that an executor takes for a graph whose nodes all need a core."""
    tasks = dict.fromkeys(dag, task)
    pool = ResourcePool({"cpu": len(dag)})
    gc.collect()
    started = clock()
    result = run(dag, pool, tasks)
    seconds = clock() - started
    if result.succeeded != len(dag):
        raise CommandError(f"only {result.succeeded} of {len(dag)} nodes succeeded")
    return seconds


def _run_sync(
    dag: DAG, pool: ResourcePool, tasks: Mapping[str, Callable[[], Any]]
) -> ExecutionResult:
    return ResourceAwareExecutor(dag, pool, dict.fromkeys(dag, _NEED)).execute(tasks)


def _run_async(
    dag: DAG, pool: ResourcePool, tasks: Mapping[str, Callable[[], Any]]
) -> ExecutionResult:
    executor = AsyncResourceAwareExecutor(dag, pool, dict.fromkeys(dag, _NEED))
    return asyncio.run(executor.execute(tasks))


def _nothing() -> None:
    pass


async def _nothing_async() -> None:
    pass


def _chain(nodes: int) -> DAG:
    following = [[number + 1] for number in range(nodes - 1)]
    return DAG([str(number) for number in range(nodes)], [*following, []])


def _wide(nodes: int) -> DAG:
    return DAG([str(number) for number in range(nodes)], [[] for _ in range(nodes)])


def _make_layers(layers: int) -> DAG:
    """Return `layers` layers of `layers` nodes; each node depends on the whole layer before."""
    rows = [range(row * layers, (row + 1) * layers) for row in range(layers)]
    following = [list(after) for after in rows[1:] for _ in range(layers)]
    return DAG([str(number) for number in range(layers**2)], [*following, *[[]] * layers])
