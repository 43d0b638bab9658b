"""Run a graph of tasks, each with its own lease: python graph_of_tasks.py [URL]."""

import sys

from moorage_client import MoorageError
from moorage_client.workflow import (
    DAG,
    LeasedPool,
    ResourceAwareExecutor,
    ResourceRequirements,
    current_node,
)


def prepare() -> str:
    """Prepare the data; this task needs no GPU."""
    return "data"


def train() -> str:
    """Return this task's GPUs. A real task passes `current_node().environment` to its processes."""
    (share,) = current_node().placement
    return f"{share.node_id} GPU {' '.join(share.gpus)}"


graph = DAG.builder()
for name in ("prepare", "small", "large", "compare"):
    graph.add_node(name)
for before, after in (
    ("prepare", "small"),
    ("prepare", "large"),
    ("small", "compare"),
    ("large", "compare"),
):
    graph.add_edge(before, after)

needs = {
    "prepare": ResourceRequirements.cpu(1),
    "small": ResourceRequirements.gpu(1),
    "large": ResourceRequirements.gpu(2),
    "compare": ResourceRequirements.cpu(1),
}
url = sys.argv[1] if len(sys.argv) > 1 else None  # None: MOORAGE_URL, else this machine.
dag = graph.build()
try:
    with LeasedPool("first_fit:1.0-stable", url=url) as pool:
        executor = ResourceAwareExecutor(dag, pool, needs)
        result = executor.execute(
            {"prepare": prepare, "small": train, "large": train, "compare": lambda: "compared"}
        )
except MoorageError as error:
    sys.exit(f"not run: {error}")
for name in ("prepare", "small", "large", "compare"):
    print(f"{name}: {result[name].result}")
sys.exit(0 if result.succeeded else 1)
