"""`slots`: the cost of a checkout from the slot pool as the pool grows.

Checkouts and checkins are timed alternately in a pool of ten thousand instances and in a pool of a
hundred, both half full. Then a million random operations must leave a pool unchanged.
"""

import contextlib
import random
import time
from typing import Any, Final

from moorage.lab.errors import CommandError
from moorage.slots import Allocation, ResourcePool, ResourceUnavailable

INSTANCES_FEW: Final = 100
INSTANCES_MANY: Final = 10_000
SLOTS_EACH: Final = 8
ROUNDS: Final = 10
"""Number of measurements of each pool; the quickest counts, since noise only adds time."""
PAIRS: Final = 2_000
"""Number of checkins, each with a checkout, in one measurement."""
OPERATIONS: Final = 1_000_000
SEED: Final = 42


def slots() -> dict[str, Any]:
    """Measure a checkout among ten thousand instances, as a multiple of a checkout among a hundred.

    Raises:
        CommandError: Slots are missing after random operations.
    """
    draw = random.Random(SEED)
    few, many = _half_full(INSTANCES_FEW, draw), _half_full(INSTANCES_MANY, draw)
    turns = [(_seconds(*few, draw), _seconds(*many, draw)) for _ in range(ROUNDS)]
    few_seconds, many_seconds = (min(column) for column in zip(*turns, strict=True))
    return {
        "few": INSTANCES_FEW,
        "many": INSTANCES_MANY,
        "few_seconds": few_seconds,
        "many_seconds": many_seconds,
        "many_to_few": many_seconds / few_seconds,
        "operations": OPERATIONS,
        "operations_granted": churn(OPERATIONS, SEED),
    }


def _half_full(instances: int, draw: random.Random) -> tuple[ResourcePool, list[Allocation]]:
    """Return a pool about half of whose slots are checked out, and the checkouts."""
    rows = [{"id": str(number), "slots": SLOTS_EACH} for number in range(instances)]
    pool = ResourcePool({"resources": {"gpus": rows}})
    return pool, [pool.checkout(_request(draw)) for _ in range(instances * 2)]


def _request(draw: random.Random) -> list[dict[str, Any]]:
    return [{"type": "gpus", "slots": draw.randint(1, 3)}]


def _seconds(pool: ResourcePool, held: list[Allocation], draw: random.Random) -> float:
    """Return the mean seconds of a checkin of a random allocation and a checkout."""
    started = time.perf_counter()
    for _ in range(PAIRS):
        position = draw.randrange(len(held))
        pool.checkin(held[position])
        held[position] = pool.checkout(_request(draw))
    return (time.perf_counter() - started) / PAIRS


def churn(operations: int, seed: int) -> int:
    """Check out and check in whole slots and parts of slots at random; then check in the rest.

    Returns:
        The number of checkouts that were granted.

    Raises:
        CommandError: The operations have changed the pool.
    """
    draw = random.Random(seed)
    rows = [{"id": str(number), "slots": 1 + number % 4} for number in range(INSTANCES_FEW)]
    pool = ResourcePool({"resources": {"cpus": rows, "gpus": rows}})
    idle, granted = pool.getstate(), 0
    held: list[Allocation] = []
    for _ in range(operations):
        if held and draw.random() < 0.5:  # noqa: PLR2004  # As often as not.
            position = draw.randrange(len(held))
            held[position], held[-1] = held[-1], held[position]
            pool.checkin(held.pop())
            continue
        member = {"type": draw.choice(["cpus", "gpus"]), "slots": draw.choice([0.1, 0.25, 1, 2, 3])}
        with contextlib.suppress(ResourceUnavailable):
            held.append(pool.checkout([member] * draw.randint(1, 3)))
            granted += 1
    for allocation in held:
        pool.checkin(allocation)
    if pool.getstate() != idle:
        raise CommandError(f"after {operations} operations some slots are missing (seed {seed})")
    return granted
