import time

from by_hand import ask

from moorage.core.turns import turn
from moorage.core.turns.turn import DECISIONS_MAX, TurnWriter


def test_recording_a_decision_costs_no_more_when_the_oldest_of_many_decisions_is_dropped(
    monkeypatch,
) -> None:
    def cost(most: int, more: int = 20_000) -> float:
        """Return the seconds in which a number of decisions replaces older decisions."""
        monkeypatch.setattr(turn, "DECISIONS_MAX", most)
        turns = TurnWriter()
        asks = [ask(f"r{number}", None) for number in range(most + more)]
        for each in asks[:most]:
            turns.explain(each, {})
        began = time.process_time()
        for each in asks[most:]:
            turns.explain(each, {})
        seconds = time.process_time() - began
        assert len(turns.decisions) == most
        assert next(iter(turns.decisions)) == f"r{more}"
        return seconds

    few, many = (min(cost(most) for _ in range(3)) for most in (100, DECISIONS_MAX))
    assert many < 3 * few
