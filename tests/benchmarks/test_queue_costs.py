"""What the queue may cost as it grows: ratios of one run, in CPU time."""

import pytest

from moorage.benchmarks.queue_costs import queue


@pytest.mark.heavy
@pytest.mark.quiet
def test_a_queue_of_thousands_costs_little_more_than_one_of_ten() -> None:
    figures = queue()
    assert figures["release_many_to_few"] <= 3
    assert figures["add_most_to_few"] <= 3
    assert figures["lost_session_most_to_few"] <= 3
    assert figures["refusal_125000_to_1250_nodes"] <= 5
    assert figures["explained_to_grant"] <= 1.1
    assert figures["overload_asks_to_peak"] >= 9
    assert figures["overload_grants_to_peak"] >= 0.8
    assert figures["overload_busy_to_asks"] > 0
    assert figures["overload_renewal_max_seconds"] <= 1
