import time

from moorage.core.turns.turn import DECISIONS_MAX, TurnWriter
from moorage.model import RequestId


def test_a_record_costs_no_more_when_the_oldest_gives_way() -> None:
    turns = TurnWriter()

    def cost(first: int, many: int = 5_000) -> float:
        began = time.process_time()
        for number in range(first, first + many):
            turns.explain(RequestId(f"r{number}"), {})
        return time.process_time() - began

    empty = min(cost(0) for _ in range(3))
    turns.decisions.clear()
    cost(0, DECISIONS_MAX)
    full = cost(DECISIONS_MAX, 50_000) / 10
    assert len(turns.decisions) == DECISIONS_MAX
    assert next(iter(turns.decisions)) == "r50000"
    assert full < 5 * empty
