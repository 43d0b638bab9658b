"""Many watchers get news of the map less often, so that the cost per second is bounded."""

import pytest

from moorage.daemon.news.map_news import pause_seconds


@pytest.mark.parametrize(
    ("watching", "seconds"), [(1, 0.1), (5, 0.1), (25, 0.5), (50, 1.0), (5_000, 1.0)]
)
def test_many_watchers_of_the_map_wait_longer_for_news_than_few(
    watching: int, seconds: float
) -> None:
    assert pause_seconds(watching) == seconds
