"""A real agent at servers that lead one after another: it takes no orders of an earlier one."""

import asyncio
import sys
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from moorage.backends.agents import wire
from moorage.testing.daemon_process import serve_variables

pytestmark = pytest.mark.heavy


async def order(connection: ServerConnection, epoch: int) -> bool:
    """Welcome an agent as the server of an epoch; return whether it carries an order out."""
    await connection.recv()
    await connection.send(wire.encode(wire.AgentWelcome("lab", "box", "key", epoch, 60.0)))
    await connection.send(wire.encode(wire.AgentCall(1, wire.DiscoverOrder(), epoch)))
    try:
        while True:
            report = wire.decode_report(bytes(await connection.recv()))
            if not isinstance(report, wire.AgentMetrics):
                return isinstance(report, wire.AgentDone)
    except ConnectionClosed:
        return False


async def test_an_agent_refuses_an_earlier_epoch_also_after_its_restart(tmp_path: Path):
    epochs = iter([7, 6, 7, 8])
    done: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()

    async def lead(connection: ServerConnection) -> None:
        epoch = next(epochs)
        await done.put((epoch, await order(connection, epoch)))

    async with asyncio.timeout(120), serve(lead, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        place = ["--server", url, "--data", str(tmp_path / "box"), "--token", "t"]
        command = [sys.executable, "-P", "-m", "moorage", "agent", *place, "--no-machine-id"]
        seen = []
        for connections in (1, 3):
            agent = await asyncio.create_subprocess_exec(
                *command, env=serve_variables(), stderr=asyncio.subprocess.PIPE
            )
            seen += [await done.get() for _ in range(connections)]
            agent.kill()
            _, errors = await agent.communicate()
    assert b"the server's epoch, 6, is older than 7" in errors
    assert seen == [(7, True), (6, False), (7, True), (8, True)]
