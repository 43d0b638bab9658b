"""Fixtures with a gateway on a real socket, in front of a small but complete daemon."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from moorage.core.turns.effects import Address
from moorage.daemon.access.socket_tickets import SocketTickets
from moorage.gateway import Gateway, GatewaySettings, Request
from moorage.gateway.deliver import Taking
from moorage.model import SessionId, Tenant
from moorage.protocol.codes import SESSION_HEADER
from moorage.protocol.logins import Tickets
from moorage.protocol.messages import AllocationRequest, Resume
from moorage.protocol.replies import success
from moorage.records.rights import Caller, Role

PATIENCE_SECONDS = 60.0
"""Longest wait in seconds, far above what tests need."""
UPGRADE = (
    "Host: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test of this package on the event loop that production uses."""
    return {"uvloop": uvloop.new_event_loop}


class Harbour:
    """A small daemon that answers requests with their `inputs`; `inputs.do` chooses when.

    `hold`: when the test calls `answer`; `wait`: not before the test opens `room`; `park`: as
    `hold`, and the request is parked; `raise`: never, because of a defect; otherwise at once.
    """

    def __init__(self) -> None:
        self.gateway: Gateway
        self.seen: list[tuple[Address, Tenant, Request]] = []
        self.held: dict[Any, Address] = {}
        self.sessions: dict[SessionId, Tenant] = {}
        self.ever: list[SessionId] = []
        self.defects: list[BaseException] = []
        self.room = asyncio.Event()
        self.waiting = 0
        self.changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def open_session(self, session: SessionId, caller: Caller) -> None:
        self.sessions[session] = caller.tenant
        self.ever.append(session)
        self._notify()

    def drop_session(self, session: SessionId, caller: Caller) -> None:
        del self.sessions[session]
        self._notify()

    def fail(self, error: BaseException) -> None:
        self.defects.append(error)
        self._notify()

    def request(
        self, to: Address, caller: Caller, message: Request, warnings: Sequence[str] = ()
    ) -> Taking:
        if isinstance(message, Resume):
            still_open = self.gateway.unanswered(to)
            self.gateway.tell(to, success({"open": still_open}, id=message.id))
            return None
        assert isinstance(message, AllocationRequest)
        if message.inputs.get("do") == "wait" and not self.room.is_set():
            return self._wait(to, caller, message)
        self._take(to, caller, message)
        return None

    async def _wait(self, to: Address, caller: Caller, message: AllocationRequest) -> None:
        self.waiting += 1
        self._notify()
        await self.room.wait()
        self._take(to, caller, message)

    def _take(self, to: Address, caller: Caller, message: AllocationRequest) -> None:
        self.seen.append((to, caller.tenant, message))
        self._notify()
        match message.inputs.get("do"):
            case "hold":
                self.held[message.inputs["n"]] = to
            case "park":
                self.held[message.inputs["n"]] = to
                self.gateway.park(to)
            case "raise":
                raise RuntimeError("a defect")
            case _:
                self.gateway.tell(to, success(message.inputs, id=message.id))

    def answer(self, n: Any, data: Any = None) -> None:
        to = self.held.pop(n)
        message = next(seen for at, _, seen in self.seen if at == to)
        self.gateway.tell(to, success(n if data is None else data, id=message.id))

    def _notify(self) -> None:
        async def wake() -> None:
            async with self.changed:
                self.changed.notify_all()

        task = asyncio.get_running_loop().create_task(wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def taken(self) -> list[Any]:
        """The `n` of every admitted request, in order."""
        return [m.inputs["n"] for _, _, m in self.seen if isinstance(m, AllocationRequest)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), self.changed:
            await self.changed.wait_for(condition)


class Client:
    """A client on a real socket; each of its waits has a time limit."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, frame: str | bytes) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.socket.send(frame)

    async def ask(self, n: Any, do: str = "", **fields: Any) -> None:
        """Send a request; `Harbour` answers with the request's inputs."""
        inputs = {"n": n, "do": do} if do else {"n": n}
        message = {"adhoc": True, "policy_rule_uri": "p:1-a", "inputs": inputs, **fields}
        await self.say(json.dumps(message))

    async def reply(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            found: dict[str, Any] = json.loads(await self.socket.recv())
        return found

    async def answers(self, n: Any = 1) -> bool:
        """Send a request, and return whether the next reply is the request's reply."""
        await self.ask(n)
        return bool(await self.data() == {"n": n})

    @property
    def session(self) -> SessionId:
        assert self.socket.response is not None
        return SessionId(self.socket.response.headers[SESSION_HEADER])

    async def resume(self, session: str, **fields: Any) -> dict[str, Any]:
        """Ask to resume a session over this connection; return the reply."""
        await self.say(json.dumps({"op": "resume", "session": session, **fields}))
        return await self.reply()

    async def data(self) -> Any:
        return (await self.reply())["data"]

    async def close_code(self) -> int | None:
        """Read until the server closes, and return its code."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await self.socket.recv()
            await self.socket.wait_closed()
        return self.socket.close_code


class Attacker:
    """A raw socket after a WebSocket handshake, which may send invalid frames."""

    def __init__(self, endpoint: socket.socket) -> None:
        self.endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._received = b""

    async def open(self, extensions: str) -> None:
        extra = f"Sec-WebSocket-Extensions: {extensions}\r\n" if extensions else ""
        await self.write(f"GET / HTTP/1.1\r\n{UPGRADE}{extra}\r\n".encode())
        while b"\r\n\r\n" not in self._received:
            self._received += await self._read()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        assert (b"permessage-deflate" in head) == bool(extensions)

    @staticmethod
    def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv1: bool = False) -> bytes:
        """Return one frame, masked with zeros."""
        first = opcode | (0x80 if fin else 0) | (0x40 if rsv1 else 0)
        if len(payload) < 126:
            head = struct.pack("!BB", first, 0x80 | len(payload))
        elif len(payload) < 65_536:
            head = struct.pack("!BBH", first, 0x80 | 126, len(payload))
        else:
            head = struct.pack("!BBQ", first, 0x80 | 127, len(payload))
        return head + bytes(4) + payload

    async def write(self, data: bytes) -> bool:
        """Send bytes; return whether the server stayed connected until all were sent."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._loop.sock_sendall(self.endpoint, data)
        except ConnectionError:
            return False
        return True

    async def close_code(self) -> int:
        """Read up to the server's close frame, and return its code; 0 if the connection is cut."""
        while await self._fill(4):
            size, skip = self._received[1], 2
            if size == 126:
                size, skip = struct.unpack("!H", self._received[2:4])[0], 4
            if not await self._fill(skip + size):
                break
            opcode, payload = self._received[0] & 0x0F, self._received[skip : skip + size]
            self._received = self._received[skip + size :]
            if opcode == 8:
                code: int = struct.unpack("!H", payload[:2])[0]
                return code
        return 0

    async def _fill(self, size: int) -> bool:
        """Read until a given number of bytes has come; return whether they came."""
        while len(self._received) < size:
            chunk = await self._read()
            if not chunk:
                return False
            self._received += chunk
        return True

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._loop.sock_recv(self.endpoint, 65_536)
        except ConnectionError:
            return b""

    def vanish(self) -> None:
        """Disconnect without a close frame: the kernel sends a reset."""
        linger = struct.pack("ii", 1, 0)
        self.endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.endpoint.close()

    async def leave(self) -> None:
        self.endpoint.close()


@dataclass
class Port:
    """A running gateway, as its clients and the daemon see it."""

    gateway: Gateway
    harbour: Harbour
    number: int
    clients: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.number}"

    async def client(self, path: str = "", **options: Any) -> Client:
        """Connect a client, which is closed at the end of the test."""
        options = {"compression": None, "close_timeout": 1, **options}
        return Client(await self.clients.enter_async_context(connect(self.url + path, **options)))

    async def attacker(self, extensions: str = "", receive_bytes: int = 0) -> "Attacker":
        """Connect a client that writes any bytes, and may never read."""
        endpoint = socket.socket()
        if receive_bytes:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        endpoint.setblocking(False)  # noqa: FBT003  # The standard library's signature.
        await asyncio.get_running_loop().sock_connect(endpoint, ("127.0.0.1", self.number))
        found = Attacker(endpoint)
        self.clients.push_async_callback(found.leave)
        await found.open(extensions)
        return found

    async def http(self, request: bytes) -> bytes:
        """Send raw HTTP, and return the whole response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionError):
                writer.write(request)
                await writer.drain()
            answer = b""
            with contextlib.suppress(ConnectionError):
                while chunk := await reader.read(65_536):
                    answer += chunk
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return answer


def let_in(token: str | None) -> Caller | None:
    """Admit clients without a token, and two tenants by their tokens."""
    tenants = {None: "local", "token-a": "a", "token-b": "b"}
    name = tenants.get(token)
    return None if name is None else Caller(Tenant(name), Role.ADMIN)


Open = Callable[..., Awaitable[Port]]
Authenticate = Callable[[str | None], Caller | None]


@pytest.fixture
async def open_port() -> AsyncIterator[Open]:
    """Return a function that opens gateways with given settings until the end of the test."""
    ports: list[Port] = []

    async def open_one(
        authenticate: Authenticate = let_in,
        pages_port: int = 0,
        tickets: Tickets | None = None,
        on_stranger: Callable[[str, str | None], None] = lambda *_: None,
        **settings: Any,
    ) -> Port:
        harbour = Harbour()
        quick = {"close_seconds_max": 0.5, "drain_seconds_max": 0.5, **settings}
        gateway = Gateway(
            GatewaySettings(**quick),
            authenticate,
            tickets or SocketTickets(authenticate),
            on_stranger=on_stranger,
        )
        harbour.gateway = gateway
        ports.append(
            Port(gateway, harbour, await gateway.start(harbour, "127.0.0.1", 0, pages_port))
        )
        return ports[-1]

    yield open_one
    for port in ports:
        await port.clients.aclose()
        await port.gateway.close()


@pytest.fixture
async def port(open_port: Open) -> Port:
    """A running gateway with its default limits."""
    return await open_port()
