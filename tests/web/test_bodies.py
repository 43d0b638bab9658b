"""All bodies that are being read share a limit of memory; a tenant gets only a part."""

import asyncio
import json

import pytest
from starlette.requests import Request

from moorage.model import Code, Tenant
from moorage.protocol.faults import ServiceError
from moorage.records.rights import Caller, Role
from moorage.web.bodies import (
    BODY_BYTES_MAX,
    CALLER,
    HELD,
    TENANT,
    TENANT_BYTES_MAX,
    BodyReader,
    find,
)

LARGE = b" " * BODY_BYTES_MAX
"""A body of the largest size; the clients below send it, and then pause."""


def request(
    tenant: str, chunk: bytes, end: asyncio.Event, waits: asyncio.Semaphore | None = None
) -> Request:
    """Return a request with one chunk; reading the chunk releases `waits`."""
    chunks = [{"type": "http.request", "body": chunk, "more_body": True}]

    async def receive() -> dict:
        if chunks:
            return chunks.pop()
        if waits is not None:
            waits.release()
        await end.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/policy", "headers": []}
    made = Request(scope, receive)
    setattr(made.state, TENANT, tenant)
    return made


@pytest.mark.heavy  # For a moment it holds 200 MiB.
async def test_a_tenant_that_sends_bodies_slowly_leaves_room_for_other_tenants():
    bodies, end, waits = BodyReader(), asyncio.Event(), asyncio.Semaphore(0)
    fits = TENANT_BYTES_MAX // BODY_BYTES_MAX
    held = [request("a", LARGE, end, waits) for _ in range(fits)]
    slow = [asyncio.create_task(bodies.read(each)) for each in held]
    for _ in slow:
        await waits.acquire()
    with pytest.raises(ServiceError) as caught:
        await bodies.read(request("a", b"more", end))
    assert caught.value.code is Code.BUSY
    other = asyncio.create_task(bodies.read(request("b", b"mine", end)))
    end.set()
    assert await other == b"mine"
    assert [len(body) for body in await asyncio.gather(*slow)] == [BODY_BYTES_MAX] * fits
    with pytest.raises(ServiceError):  # Until the answers, the bodies use memory.
        await bodies.read(request("a", b"again", end))
    for each in held:
        finish(each)
    assert await bodies.read(request("a", b"again", end)) == b"again"


def whole(body: bytes, tenant: str = "a") -> Request:
    end = asyncio.Event()
    end.set()
    return request(tenant, body, end)


def finish(each: Request) -> None:
    for end in each.scope.pop(HELD, ()):
        end()


MIB = 1024 * 1024
SMALL_VALUES = {
    "lists": b"[" + b"[]," * (MIB // 3) + b"[]]",
    "numbers": b"[" + b"1," * (MIB // 2) + b"1]",
    "texts": b"[" + b'"",' * (MIB // 3) + b'""]',
    "fields": b'{"a":[' + b'{"":0},' * (MIB // 7) + b"0]}",
    "exponents": b"[" + b"1e290," * (MIB // 6) + b"1]",
    "long numbers": b"[" + (b"0." + b"0" * 310 + b"1,") * (MIB // 314) + b"1]",
}


@pytest.mark.parametrize("name", SMALL_VALUES)
async def test_a_body_that_would_become_much_larger_is_refused_and_freed(name):
    bodies, sent = BodyReader(), whole(SMALL_VALUES[name])
    with pytest.raises(ServiceError) as caught:
        await bodies.read_json(sent)
    assert (caught.value.code, caught.value.status) == (Code.TOO_LARGE, 413)
    assert caught.value.expected in caught.value.reason
    finish(sent)
    assert not bodies._held


async def test_a_large_document_counts_by_its_decoded_size():
    node = {"id": "n-000001", "gpus": [{"id": "0", "model": "A100", "memory_mib": 81920}] * 8}
    document = {"id": "c", "nodes": [node] * 2_000}
    bodies, sent = BodyReader(), whole(json.dumps(document).encode())
    assert await bodies.read_json(sent) == document
    assert bodies._held["a"] > 3 * len(json.dumps(document)) / 2
    finish(sent)
    assert not bodies._held


async def test_a_body_that_is_too_large_or_compressed_is_refused_before_it_is_read():
    with pytest.raises(ServiceError) as caught:
        await BodyReader().read(whole(b"x" * 100), 99)
    assert caught.value.code is Code.TOO_LARGE
    scope = {"type": "http", "method": "POST", "path": "/policy"}
    scope["headers"] = [(b"content-encoding", b"gzip")]
    with pytest.raises(ServiceError) as caught:
        await BodyReader().read(Request(scope))
    assert (caught.value.status, caught.value.field) == (415, "content-encoding")


async def test_a_flood_of_searches_by_one_tenant_does_not_delay_a_search_of_another():
    bodies, begun, go_on = BodyReader(), list[str](), asyncio.Event()
    several = asyncio.Event()

    async def search(tenant: str) -> list[dict]:
        async def query(wanted: dict) -> list[dict]:
            begun.append(tenant)
            if len(begun) > 1:
                several.set()
            await go_on.wait()
            return [wanted]

        asking = whole(b'{"id": "%s"}' % tenant.encode(), tenant)
        setattr(asking.state, CALLER, Caller(Tenant(tenant), Role.CLIENT))
        return await find(asking, bodies, query)

    flood = [asyncio.create_task(search("mallory")) for _ in range(99)]
    other = asyncio.create_task(search("bob"))
    async with asyncio.timeout(60):
        await several.wait()
    assert begun == ["mallory", "bob"]
    go_on.set()
    assert await other == [{"id": "bob"}]
    await asyncio.gather(*flood)
