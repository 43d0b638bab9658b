"""Tests of clients whose connection the server has closed."""

import asyncio
import gc
from typing import Any

import pytest

from moorage.daemon.access.socket_tickets import SocketTickets
from moorage.gateway import Gateway, GatewaySettings
from moorage.model import Tenant
from moorage.records.rights import Caller, Role
from moorage_client import Client, RequestRefused


def local(_: str | None) -> Caller:
    return Caller(Tenant("local"), Role.ADMIN)


class Silent:
    """A daemon that gets no request: the gateway refuses all messages of these tests."""

    def open_session(self, *_: Any) -> None:
        pass

    def drop_session(self, *_: Any) -> None:
        pass


async def test_a_refused_message_of_huge_size_leaves_no_stray_exception() -> None:
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    gateway = Gateway(GatewaySettings(), local, SocketTickets(local))
    port = await gateway.start(Silent(), "127.0.0.1", 0)  # type: ignore[arg-type]  # As it says.
    async with Client(f"ws://127.0.0.1:{port}") as client:
        with pytest.raises(RequestRefused, match="too_large"):
            await client.ask("rule:1-a", inputs={"text": "x" * (80 << 20)})
    await gateway.close()
    gc.collect()
    await asyncio.sleep(0)
    assert [each["message"] for each in stray] == []
