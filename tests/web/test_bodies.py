"""Bodies: one budget for all that are being read, of which no tenant has all."""

import asyncio

import pytest
from starlette.requests import Request

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.web.bodies import BODY_BYTES_MAX, TENANT, TENANT_BYTES_MAX, BodyReader

LARGE = b" " * BODY_BYTES_MAX
"""As large as one may be; the clients below send it, and then nothing for a while."""


def request(
    tenant: str, chunk: bytes, end: asyncio.Event, waits: asyncio.Semaphore | None = None
) -> Request:
    """Return a request of one chunk; `waits` is released once that has been read."""
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
async def test_a_tenant_that_sends_slowly_leaves_room_for_others():
    bodies, end, waits = BodyReader(), asyncio.Event(), asyncio.Semaphore(0)
    fits = TENANT_BYTES_MAX // BODY_BYTES_MAX
    slow = [asyncio.create_task(bodies.read(request("a", LARGE, end, waits))) for _ in range(fits)]
    for _ in slow:
        await waits.acquire()
    with pytest.raises(ServiceError) as caught:
        await bodies.read(request("a", b"more", end))
    assert caught.value.code is Code.BUSY
    other = asyncio.create_task(bodies.read(request("b", b"mine", end)))
    end.set()
    assert await other == b"mine"
    assert [len(body) for body in await asyncio.gather(*slow)] == [BODY_BYTES_MAX] * fits
    assert await bodies.read(request("a", b"again", end)) == b"again"
