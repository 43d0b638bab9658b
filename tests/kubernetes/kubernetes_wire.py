"""A connection to a plane's API server; tests cut it, restore it, or make it lose all data."""

import asyncio
import contextlib
from pathlib import Path

import yaml
from kubernetes_plane import Plane


class Wire:
    """A TCP proxy before an API server.

    Args:
        plane: The control plane.
        folder: Folder for the kubeconfig.

    Attributes:
        kubeconfig: Kubeconfig with the proxy's address; valid after the first `mend`.
    """

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self._plane = plane
        self._open: set[asyncio.StreamWriter] = set()
        self._joined: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._losses = 0
        self._loses = False

    async def mend(self) -> None:
        """Let connections through."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        config = yaml.safe_load(self._plane.kubeconfig().read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self._port}"
        self.kubeconfig.write_text(yaml.safe_dump(config))

    async def cut(self) -> None:
        """Break off all connections, and refuse new connections."""
        self._server.close()
        self._server = None
        for each in self._open:
            each.transport.abort()
        await asyncio.gather(*self._joined)

    def lose(self) -> None:
        """Drop all data from now on without notice, like a firewall that lost its state.

        Open connections stay open, but carry no data any more, even after `find`.
        """
        self._losses += 1
        self._loses = True

    def find(self) -> None:
        """Pass on the traffic of new connections again, after `lose`."""
        self._loses = False

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._joined.add(asyncio.current_task())
        port = int(self._plane.url.rpartition(":")[2])
        writers = [writer]
        losses = self._losses - self._loses  # A connection that opens meanwhile is lost, too.
        with contextlib.suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(to_writer)
            self._open.update(writers)
            if self._server is not None:  # The proxy was not cut meanwhile.
                await asyncio.gather(
                    self._pass(reader, to_writer, losses), self._pass(to_reader, writer, losses)
                )
        for each in writers:
            each.transport.abort()
            with contextlib.suppress(OSError):
                await each.wait_closed()
        self._open.difference_update(writers)
        self._joined.discard(asyncio.current_task())

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losses: int
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self._losses == losses:
                    writer.write(data)
                    await writer.drain()
        writer.close()
