"""Bodies: one budget for all that are being read, of which no tenant has all."""

import asyncio

import pytest
from starlette.requests import Request

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.web.bodies import BODY_BYTES_MAX, TENANT, TENANT_BYTES_MAX, BodyReader

LARGE = b" " * BODY_BYTES_MAX
"""As large as one may be; the clients below send it, and then nothing for a while."""


def request(tenant: str, chunk: bytes, end: asyncio.Event) -> Request:
    chunks = [{"type": "http.request", "body": chunk, "more_body": True}]

    async def receive() -> dict:
        if chunks:
            return chunks.pop()
        await end.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/policy", "headers": []}
    made = Request(scope, receive)
    setattr(made.state, TENANT, tenant)
    return made


@pytest.mark.heavy  # For a moment it holds 200 MiB.
async def test_a_tenant_that_sends_slowly_leaves_room_for_others():
    bodies, end = BodyReader(), asyncio.Event()
    fits = TENANT_BYTES_MAX // BODY_BYTES_MAX
    slow = [asyncio.create_task(bodies.read(request("a", LARGE, end))) for _ in range(fits)]
    await asyncio.sleep(0.1)  # Each has sent what it has, and waits.
    with pytest.raises(ServiceError) as caught:
        await bodies.read(request("a", b"more", end))
    assert caught.value.code is Code.BUSY
    other = asyncio.create_task(bodies.read(request("b", b"mine", end)))
    end.set()
    assert await other == b"mine"
    assert [len(body) for body in await asyncio.gather(*slow)] == [BODY_BYTES_MAX] * fits
    assert await bodies.read(request("a", b"again", end)) == b"again"
