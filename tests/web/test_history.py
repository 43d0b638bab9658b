"""`GET /history` names its bounds; `tests/daemon/observability` checks its answers."""

import httpx
import pytest


@pytest.mark.parametrize("query", ["minutes=0", "minutes=1441", "step=0", "step=61", "step=x"])
async def test_ranges_of_the_history_out_of_bounds_are_refused(
    client: httpx.AsyncClient, query: str
) -> None:
    answer = await client.get(f"/history?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == f"query.{query.partition('=')[0]}"
