"""Tests of authentication, health, limits and failures around the endpoints."""

import asyncio
import logging

import httpx
import msgspec
import openapi_spec_validator
import pytest
from interface import Interface

from moorage.web.bodies import BODY_BYTES_MAX


async def test_health_and_readiness_are_answered(site):
    assert (await site.client.get("/healthz")).json() == {"status": "ok"}
    ready, details = await site.client.get("/readyz"), {"catalog": "open"}
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "details": details})
    metrics = await site.client.get("/metrics")
    assert metrics.text == "moorage_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    for path in ("/healthz", "/readyz", "/metrics", "/policy", "/openapi.json"):
        answer, whole = await site.client.head(path), await site.client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == whole.headers["content-type"]
    assert (await site.client.head("/allocate")).status_code == 405
    site.house.ready = False
    for ask in (site.client.get, site.client.head):
        assert (await ask("/readyz")).status_code == 503


NO_BODY = ("/rollback", "/create-infra", "/websocket-ticket")
"""Ends of paths of POST requests without a body."""


def is_typed(schema):
    """Return whether a schema has a type, or is the schema of a policy's value."""
    return bool(schema.get("$ref") or schema.get("type") or all(map(is_typed, schema["anyOf"])))


REFUSALS = {"400", "401", "403", "404", "409", "413", "421", "422", "429", "500"}


async def test_every_operation_has_schemas_of_request_and_answer(client):
    described = (await client.get("/openapi.json")).json()
    openapi_spec_validator.validate(described)  # Also checks that all references resolve.
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"]
            assert operation["description"]
            takes = method in {"post", "put"} and not path.endswith(NO_BODY)
            assert ("requestBody" in operation) is takes, (method, path)
            if takes:
                assert is_typed(operation["requestBody"]["content"]["application/json"]["schema"])
            answers = {**operation["responses"]}
            failure = answers.pop("default")["content"]["application/json"]["schema"]
            wanted = "ClusterFailure" if path.startswith("/clusters") else "Failure"
            assert failure == {"$ref": f"#/components/schemas/{wanted}"}
            assert answers, (method, path)
            known = {"200", "201", "503"} | (REFUSALS if path == "/allocate" else set())
            for status, answer in answers.items():
                assert status in known  # The web framework adds no status of its own.
                (content,) = answer["content"].values()
                assert is_typed(content["schema"]), (method, path, status)


def test_an_answer_that_differs_from_the_description_is_found():
    schema = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
    answers = {"200": {"content": {"application/json": {"schema": schema}}}, "default": {}}
    described = {"paths": {"/x/{id}": {"get": {"responses": answers}}}, "components": {}}
    request = httpx.Request("GET", "http://localhost/x/1")
    Interface(described).check(request, httpx.Response(200, json={"id": "a", "more": 1}))
    for wrong in ({"id": 1}, {}):
        with pytest.raises(AssertionError, match="200"):
            Interface(described).check(request, httpx.Response(200, json=wrong))


PROTECTED = [
    ("GET", "/metrics"), ("GET", "/openapi.json"), ("POST", "/allocate"),
    ("POST", "/api/filter-data"), ("GET", "/clusters/c1"), ("POST", "/clusters/query"),
    ("GET", "/cluster/query"), ("GET", "/policy"),
]  # fmt: skip


class TestWithTokens:
    @pytest.fixture
    def tokens(self):
        return {"secret": "team-a"}

    async def test_without_a_token_only_health_is_served(self, client):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for method, path in PROTECTED:
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                body = answer.json()
                details = body["details"] if path.startswith("/clusters") else body["error"]
                assert details["code"] == "unauthorized"
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200

    async def test_a_token_gives_the_tenant_and_a_ticket_for_a_page(self, site):
        assert (await site.client.post("/websocket-ticket")).status_code == 401
        headers = {"authorization": "bearer secret"}
        answer = await site.client.post("/allocate", content=b"{}", headers=headers)
        assert answer.json()["data"] == ["team-a", 2]
        data = (await site.client.post("/websocket-ticket", headers=headers)).json()["data"]
        assert data["protocols"] == ["moorage", f"moorage.ticket.{data['ticket']}"]
        ticket = site.house.tickets.redeem(data["ticket"])
        assert (ticket.token, ticket.expires_at) == ("secret", data["expires_at"])


async def test_unknown_paths_and_methods_are_refused(client):
    for answer, status, code in (
        (await client.get("/nothing"), 404, "not_found"),
        (await client.post("/healthz"), 405, "unsupported"),
        (await client.get("/cluster/..%2F..%2Fadmin"), 404, "not_found"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["success"] is False
    under = await client.delete("/clusters")
    assert (under.status_code, under.json()["details"]["code"]) == (405, "unsupported")


async def test_the_answer_to_a_wrong_method_lists_the_allowed_methods(client):
    for path, known in (
        ("/clusters", "POST"),
        ("/clusters/c1", "DELETE, GET, PUT"),
        ("/cluster/query", "DELETE, GET, POST, PUT"),
        ("/healthz", "GET"),
    ):
        answer = await client.patch(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, known)
        body = answer.json()
        assert body.get("details", body["error"])["expected"] == known
        assert known in body["message"]


NO_JSON = {
    "empty": b"", "cut": b"{", "quotes": b"{'id': 1}", "not a number": b'{"a": NaN}',
    "not utf-8": b'{"a": "\xff"}', "deep": b"[" * 100_000, "large": b"{" * 300_000,
}  # fmt: skip


async def test_a_body_that_is_not_json_is_refused_even_if_it_is_large(client):
    for name, body in NO_JSON.items():
        answer = await client.post("/policy", content=body)
        assert (name, answer.status_code) == (name, 400)
        assert answer.json()["error"]["code"] == "bad_json"
    document = {"clusterId": "c1", "note": "x" * 2_000_000}
    assert (await client.post("/cluster", json=document)).json()["data"] == document


async def test_a_repeated_field_of_a_body_is_refused(client):
    filling = "x" * 2_000_000
    for more in ("", f', "note": "{filling}"'):
        answer = await client.post("/policy", content=f'{{"id": "a", "id": "b"{more}}}')
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["field"]) == ("bad_message", "id")
        assert "twice" in error["reason"]


async def test_a_body_beyond_the_cap_is_refused_before_the_client_sends_it(site):
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(
        b"POST /policy HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        % (BODY_BYTES_MAX + 1)
    )
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readuntil(b"}}")
    assert b" 413 " in head
    assert msgspec.json.decode(body)["error"]["code"] == "too_large"
    writer.close()
    await writer.wait_closed()


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(client):
    async def chunks():
        for _ in range(BODY_BYTES_MAX // (1024 * 1024) + 1):
            yield bytes(1024 * 1024)

    # The answer may come while the client still sends; some clients report a lost connection.
    try:
        answer = await client.post("/policy", content=chunks())
    except (httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        pass
    else:
        assert answer.status_code == 413
    assert (await client.get("/policy")).json()["data"] == []


async def test_a_client_that_disconnects_during_a_request_does_no_harm(site):
    _, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"POST /policy HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await site.client.get("/policy")).status_code == 200


async def test_a_bug_of_the_server_is_answered_500_in_the_usual_form_and_logged(client, caplog):
    with caplog.at_level(logging.ERROR):
        answer = await client.post("/allocate", content=b"break")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "a bug" not in answer.text
    assert "RuntimeError: a bug" in caplog.text
