"""The examples of the document about workflows run; the tests change only their import.

They run in order, in one namespace, and must print what their comments say.
"""

import io
import re
from contextlib import redirect_stdout
from typing import Any

IMPORT = ("import dagron", "from moorage_client import workflow as dagron")

EXECUTOR = """
import dagron

dag = (
    dagron.DAG.builder()
    .add_node("preprocess")
    .add_node("train_model_a")
    .add_node("train_model_b")
    .add_node("evaluate")
    .add_edge("preprocess", "train_model_a")
    .add_edge("preprocess", "train_model_b")
    .add_edge("train_model_a", "evaluate")
    .add_edge("train_model_b", "evaluate")
    .build()
)

pool = dagron.ResourcePool(capacities={"gpu": 2, "cpu": 8, "memory_mb": 16000})

requirements = {
    "preprocess": dagron.ResourceRequirements(resources={"cpu": 2, "memory_mb": 2000}),
    "train_model_a": dagron.ResourceRequirements(resources={"gpu": 1, "cpu": 4, "memory_mb": 8000}),
    "train_model_b": dagron.ResourceRequirements(resources={"gpu": 1, "cpu": 4, "memory_mb": 8000}),
    "evaluate": dagron.ResourceRequirements(resources={"cpu": 2, "memory_mb": 4000}),
}

executor = dagron.ResourceAwareExecutor(dag, pool, requirements)
result = executor.execute({
    "preprocess": lambda: "data ready",
    "train_model_a": lambda: "model A trained",
    "train_model_b": lambda: "model B trained",
    "evaluate": lambda: "evaluation complete",
})

print(result.succeeded) # 4
"""

ASYNC = """
import asyncio
import dagron

async def main():
    executor = dagron.AsyncResourceAwareExecutor(dag, pool, requirements)
    result = await executor.execute({
        "preprocess": lambda: preprocess_async(),
        "train_model_a": lambda: train_async("model_a"),
        "train_model_b": lambda: train_async("model_b"),
        "evaluate": lambda: evaluate_async(),
    })
    print(result.succeeded)

asyncio.run(main())
"""

POOL = """
pool = dagron.ResourcePool(capacities={"gpu": 4, "cpu": 16, "memory_mb": 32000})

print(pool.capacities) # {"gpu": 4, "cpu": 16, "memory_mb": 32000}
print(pool.available) # {"gpu": 4, "cpu": 16, "memory_mb": 32000}

req = dagron.ResourceRequirements(resources={"gpu": 2})
pool.acquire(req)
print(pool.available) # {"gpu": 2, "cpu": 16, "memory_mb": 32000}
print(pool.allocated) # {"gpu": 2, "cpu": 0, "memory_mb": 0}

pool.release(req)
print(pool.available) # {"gpu": 4, "cpu": 16, "memory_mb": 32000}
"""

REQUIREMENTS = """
# Explicit construction
req = dagron.ResourceRequirements(resources={"gpu": 2, "cpu": 4, "memory_mb": 8000})

# Convenience constructors
gpu_req = dagron.ResourceRequirements.gpu(1)
cpu_req = dagron.ResourceRequirements.cpu(4)
mem_req = dagron.ResourceRequirements.memory(4096)

# Check fit
print(req.fits({"gpu": 4, "cpu": 16, "memory_mb": 32000})) # True
print(req.fits({"gpu": 1, "cpu": 16, "memory_mb": 32000})) # False
"""

TIMELINE = """
result = executor.execute(tasks)

timeline = pool.timeline
print(f"Snapshots: {len(timeline.snapshots)}")
print(f"Peak utilization: {timeline.peak_utilization()}")

for snap in timeline.snapshots:
    print(f" t={snap.timestamp:.3f} {snap.event} {snap.node_name}: \
gpu={snap.allocated.get('gpu', 0)}")
"""

OWN = """
async def preprocess_async():
    return "data ready"

async def train_async(name):
    return name

async def evaluate_async():
    return 0.93
"""


def play(text: str, names: dict[str, Any]) -> list[str]:
    """Run an example, compare its output with its comments, and return its result."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        exec(text.replace(*IMPORT), names)  # noqa: S102  # The example.
    lines = shown.getvalue().splitlines()
    said = re.findall(r"^print\(.*\) # (.*)$", text, re.MULTILINE)
    assert not said or lines == [each.replace('"', "'") for each in said]
    return lines


def test_the_examples_of_the_document_run_unchanged():
    names: dict[str, Any] = {}
    play(EXECUTOR, names)
    result = names["result"]
    assert result["train_model_a"].result == "model A trained"
    assert ("evaluate" in result, "deploy" in result) == (True, False)
    names["tasks"] = dict.fromkeys(names["dag"], lambda: 1)
    lines = play(TIMELINE, names)
    assert lines[0] == "Snapshots: 16"  # Includes those of the first run.
    assert lines[-1].endswith(" release evaluate: gpu=0")
    play(OWN, names)
    assert play(ASYNC, names) == ["4"]
    play(POOL, names)
    play(REQUIREMENTS, names)
