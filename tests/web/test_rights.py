"""The right that each endpoint needs, tested for all endpoints in the description."""

import json
from pathlib import Path

import pytest

from moorage.web.rights import right_of

RELEASED = Path(__file__).parents[2] / "tools" / "released" / "openapi.json"
OPEN = ("/healthz", "/readyz", "/console/session")
READ_BY_POST = {
    *("/api/filter", "/api/filter-data", "/api/no-ir/filter", "/api/no-ir/similarity-search"),
    *("/api/search", "/api/similarity-search", "/block/aggregate", "/block/query"),
    *("/blocks/query", "/cluster/aggregate", "/cluster/query", "/clusters/query"),
    *("/executor/query", "/policy/query", "/websocket-ticket"),
}
PLACE = {
    *("/allocate", "/blockActions/allocate", "/blockActions/dryRun"),
    *("/blockActions/selectClusters", "/executor/{executor}/execute_policy"),
}


def expected_right(method: str, path: str) -> str:
    if path.startswith("/tokens"):
        return "TOKEN"
    if path == "/metrics":
        return "METRICS"
    if path in PLACE:
        return "PLACE"
    if method == "get" or path in READ_BY_POST or path.startswith("/quotas"):
        return "READ"  # The quota operation itself checks its right.
    return "POLICY" if path.startswith(("/policy", "/console/playground")) else "CLUSTER"


ENDPOINTS = [
    (method, path)
    for path, operations in json.loads(RELEASED.read_text())["paths"].items()
    for method in operations
    if path not in OPEN
]


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_each_endpoint_needs_its_right(method: str, path: str) -> None:
    assert right_of(method.upper(), path).name == expected_right(method, path)
    for looks in ("HEAD", "OPTIONS"):
        assert right_of(looks, path).name == expected_right("get", path)
