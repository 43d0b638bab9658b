"""Tests of the parameters of endpoints: from the path, from the query, and the request."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moorage.protocol.faults import ServiceError
from moorage.web.bodies import failure
from moorage.web.router import HttpRouter


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return failure(error, request.url.path)


@pytest.fixture
async def client():
    router = HttpRouter("things")

    @router.get("/things/{name}", "Read a thing", {"responses": {}})
    async def read(name: str, request: Request, limit: int = 100, part: str | None = None):
        """Return the answer of an endpoint unchanged."""
        return JSONResponse([name, limit, part, request.method])

    routes = [each.route() for each in router.endpoints]
    app = Starlette(routes=routes, exception_handlers={ServiceError: refuse})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


@pytest.mark.parametrize(
    ("query", "limit", "part"),
    [
        ("", 100, None),
        ("?limit=5&part=", 5, ""),
        ("?limit=%205.0&part=a&other=b", 5, "a"),
        ("?limit=1&limit=2", 2, None),
    ],
)
async def test_parameters_have_the_types_of_the_signature(client, query, limit, part):
    answer = await client.get(f"/things/x1{query}")
    assert answer.json() == ["x1", limit, part, "GET"]


@pytest.mark.parametrize("text", ["x", "", "5.5"])
async def test_text_in_place_of_a_number_is_refused_with_the_name_of_its_field(client, text):
    answer = await client.get(f"/things/x1?limit={text}")
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "query.limit"
