import time

from by_hand import ask

from moorage.core.turns.turn import DECISIONS_MAX, TurnWriter


def test_recording_a_decision_costs_no_more_when_the_oldest_is_dropped() -> None:
    turns = TurnWriter()

    def cost(first: int, many: int = 5_000) -> float:
        asks = [ask(f"r{number}", None) for number in range(first, first + many)]
        began = time.process_time()
        for each in asks:
            turns.explain(each, {})
        return time.process_time() - began

    empty = min(cost(0) for _ in range(3))
    turns = TurnWriter()
    cost(0, DECISIONS_MAX)
    full = cost(DECISIONS_MAX, 50_000) / 10
    assert len(turns.decisions) == DECISIONS_MAX
    assert next(iter(turns.decisions)) == "r50000"
    assert full < 5 * empty
