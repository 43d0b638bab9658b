"""An echo server on the daemon's socket stack: the baseline for the daemon's speed.

As a program (`python -m moorage.bench.echo`), it prints its address as one
JSON line once it listens.
"""

import asyncio
import json
import signal
import sys

import uvloop
from websockets.asyncio.server import ServerConnection, serve


async def _echo(socket: ServerConnection) -> None:
    async for message in socket:
        await socket.send(message)


async def _main() -> None:
    async with serve(_echo, "127.0.0.1", 0, compression=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        sys.stdout.write(json.dumps({"event": "ready", "ws": f"ws://127.0.0.1:{port}"}) + "\n")
        sys.stdout.flush()
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        await stopping.wait()


if __name__ == "__main__":
    uvloop.run(_main())
