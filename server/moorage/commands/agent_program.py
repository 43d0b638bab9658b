"""The program of `moored agent`: connects to the server and carries out its orders.

The server's orders go to an ordinary backend `local` over the agent's own data folder. So workloads
outlive the agent, and the next agent of the folder finds them.
"""

import asyncio
import fcntl
import json
import os
import random
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
import structlog
import uvloop
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException
from websockets.uri import parse_uri

from moorage.backends.agents import wire
from moorage.backends.agents.host import AgentHost
from moorage.backends.local import deadline, workload_store
from moorage.backends.local.backend import LocalBackend
from moorage.backends.local.deadline import HeardFile
from moorage.commands.agent_folder import describe_folder
from moorage.config.settings import Config
from moorage.daemon.observability.logs import configure_log
from moorage.daemon.observability.standard_streams import StandardStream
from moorage.model import Code
from moorage.protocol.agent_socket import AGENT_PATH, AgentSocket
from moorage.records.json_values import JsonObject
from moorage_client.addresses import Addresses
from moorage_client.endpoint import Endpoint
from moorage_client.errors import ConnectionFailed, MoorageError, refusal
from moorage_client.inventory import InventoryError
from moorage_client.inventory.documents import nodes_of
from moorage_client.inventory.this_machine import machine_inventory

EXIT_CANNOT_START: Final = 3
"""Exit code, the same as the daemon's: the user must correct something first."""
PAUSE_SECONDS: Final = (0.2, 30.0)
"""Shortest and longest mean pause before the agent reconnects, in seconds."""
PAUSE_SECONDS_OF_SEVERAL: Final = (0.1, 2.0)
"""`PAUSE_SECONDS` of an agent with several addresses, shorter since a standby soon takes over."""
PING_SECONDS_OF_SEVERAL: Final = 2.0
"""Seconds between two pings, and for a ping's answer, if another server may have taken over. With a
single server, the answers to beats suffice."""
OPEN_SECONDS_MAX: Final = 10.0
OPEN_SECONDS_MAX_OF_SEVERAL: Final = 3.0
"""Maximum seconds to connect, if the agent has several addresses."""
WELCOME_SECONDS_MAX: Final = 30.0
UNHEARD_SECONDS_ADVISED: Final = 5.0
"""Shortest `unheard_seconds` without a warning: a busy machine may be silent for less."""

log = structlog.get_logger("moored")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The options of `moored agent`.

    Args:
        server: URL of the WebSocket, or of several, separated by commas; None: clients' default.
        token: The token to join with; None: the machine has joined already.
        name: Name of the node; empty: the machine's own name.
        machine_id: Whether the agent sends the machine id.
        unheard_seconds: How long workloads run without contact to the server; 0: without limit.
        address: This machine's address for other machines; empty: its address towards the server.
    """

    server: str | None
    token: str | None
    data: Path
    name: str
    labels: Mapping[str, str]
    machine_id: bool
    unheard_seconds: float
    address: str


class _Refused(Exception):  # noqa: N818  # An answer of the server, not a fault.
    """The server refused this agent; `final`: it will refuse every later attempt, too."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class _Standby(Exception):  # noqa: N818  # As above.
    """The server is a standby; `names_another`: it named the leader."""

    def __init__(self, reason: str, *, names_another: bool) -> None:
        super().__init__(reason)
        self.names_another = names_another


def run(options: AgentOptions, config: Config) -> int:
    """Run the agent until SIGTERM or SIGINT; return the exit code."""
    stream = StandardStream(sys.stderr.fileno())
    configure_log(config, stream)
    try:
        options.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(options.data / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        node = _node(options)
        addresses = Addresses(Endpoint.of_socket(options.server, options.token or "", None))
        for at in addresses.order():
            parse_uri(at.url)
        StandardStream(sys.stdout.fileno())  # A stalled reader of stdout must not stop the agent.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_Agent(options, addresses, node).run())
    except BlockingIOError:
        reason = f"another agent runs over {options.data}; give this one a --data of its own"
    except InvalidURI as error:
        reason = f"--server: expected ws://HOST:PORT or wss://HOST, not {error.uri}"
    except (OSError, InventoryError, MoorageError, _Refused) as error:
        reason = str(error)
    else:
        return 0
    sys.stderr.write(f"moored: {reason}\n")
    return EXIT_CANNOT_START


def _node(options: AgentOptions) -> JsonObject:
    """Return this machine as a node of a cluster document."""
    (document,) = machine_inventory("this machine", "").documents
    (node,) = nodes_of(document)
    node["id"] = options.name or node["id"]
    node["labels"] = {**node.get("labels", {}), **options.labels}
    if not options.machine_id:
        node.pop("machineId", None)
    return node


class _HttpRefusal(msgspec.Struct):
    """The body with which a standby or the HTTP port refuses the connection."""

    error: JsonObject


class _Agent:
    def __init__(self, options: AgentOptions, addresses: Addresses, node: JsonObject) -> None:
        self._options = options
        self._addresses = addresses
        self._node = node
        self._file = options.data / "agent.json"
        self._known: JsonObject = workload_store.read(self._file) or {}
        if "agent" not in self._known:
            self._note(agent=secrets.token_hex(16))
        self._is_ready = False
        self._folder = options.data / "local"
        self._deadline = HeardFile(self._folder, options.unheard_seconds)
        if 0 < options.unheard_seconds < UNHEARD_SECONDS_ADVISED:
            log.warning(
                "unheard_seconds_short",
                reason="workloads also end if the machine or server is only busy for this time",
                unheard_seconds=options.unheard_seconds,
                advised_seconds=UNHEARD_SECONDS_ADVISED,
            )

    def _note(self, **known: object) -> None:
        after = self._known | known
        if after != self._known:  # With a full disk, an agent that has joined still runs.
            workload_store.write(self._file, after)
            self._known = after

    async def run(self) -> None:
        """Connect, and reconnect, until a signal."""
        data = self._options.data
        backend = LocalBackend(self._folder, hidden=data)
        host = AgentHost(
            backend,
            data,
            self._deadline.note_contact,
            self._options.address,
            backend.measured,
            self._known.get("epoch", 0),
        )
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(
                number, lambda: main.cancelling() or main.cancel()
            )
        shortest, longest = PAUSE_SECONDS_OF_SEVERAL if self._addresses.several else PAUSE_SECONDS
        pause = shortest
        try:
            while True:
                if await self._round(host):
                    pause = shortest
                await asyncio.sleep(random.uniform(0.5, 1.5) * pause)  # noqa: S311  # No secret.
                pause = min(2 * pause, longest)
        except asyncio.CancelledError:
            pass
        finally:
            await host.close()
        main.uncancel()  # After the close, which a second signal would interrupt.

    async def _round(self, host: AgentHost) -> bool:
        """Try each address until a connection opens, and serve it; return whether one opened."""
        final: list[_Refused] = []
        left = self._addresses.order()
        led = False
        while left:
            at = left.pop(0)
            try:
                await self._connect(host, at)
            except _Refused as refused:
                if refused.final:
                    final.append(refused)
                log.warning("agent_refused", reason=str(refused), server=at.shown)
            except _Standby as standby:
                log.info("agent_found_standby", reason=str(standby), server=at.shown)
                if standby.names_another and not led:  # At most once a round: then it pauses.
                    led = True
                    left = self._addresses.order()
                    continue
            except (OSError, WebSocketException, TimeoutError, msgspec.MsgspecError) as error:
                reason = str(error) or type(error).__name__
                log.warning("agent_disconnected", reason=reason, server=at.shown)
            else:
                return True
        if final and len(final) >= len(self._addresses.order()):
            raise final[-1]
        return False

    async def _connect(self, host: AgentHost, at: Endpoint) -> None:
        """Connect to an address, and serve the connection until it is lost."""
        shown = [each for each in (self._known.get("key"), self._options.token) if each]
        if not shown:
            reason = "this machine has not joined: give --token, as `moored agent token` prints it"
            raise _Refused(reason, final=True)
        for secret in shown:
            try:
                await self._take_part(host, at, secret)
            except _Refused as refused:
                if not refused.final or secret == shown[-1]:
                    raise
            else:
                return

    async def _take_part(self, host: AgentHost, at: Endpoint, secret: str) -> None:
        several = self._addresses.several
        ping_seconds = PING_SECONDS_OF_SEVERAL if several else None
        try:
            connection = await connect(
                at.url.rstrip("/") + AGENT_PATH,
                additional_headers={"Authorization": f"Bearer {secret}"},
                compression=None,
                open_timeout=OPEN_SECONDS_MAX_OF_SEVERAL if several else OPEN_SECONDS_MAX,
                ping_interval=ping_seconds,
                ping_timeout=ping_seconds,
                ssl=at.tls,
                user_agent_header=None,
            )
        except InvalidStatus as error:
            raise self._not_let_in(at, error) from None
        async with connection:
            socket = AgentSocket(connection)
            busy = await host.busy()
            sent_at = deadline.now()
            hello = wire.AgentHello(
                wire.VERSION,
                version("moorage"),
                self._known["agent"],
                self._node,
                self._options.unheard_seconds,
                busy,
                describe_folder(self._options.data),
            )
            await socket.send(wire.encode(hello))
            async with asyncio.timeout(WELCOME_SECONDS_MAX):
                answer = await socket.receive()
            match None if answer is None else wire.decode_instruction(answer):
                case wire.AgentWelcome() as welcome:
                    self._note_welcome(welcome)
                    self._addresses.note_open(at)
                    if self._deadline.passed:  # The server may start workloads elsewhere by now.
                        await host.cancel_starts()
                    self._deadline.note_agreement(sent_at)
                    silence = await host.serve(socket, welcome.beat_seconds, welcome.epoch)
                    reason = f"connection lost {silence:.1f} s after the server's last message"
                    log.warning("agent_disconnected", reason=reason, server=at.shown)
                    self._addresses.note_loss(
                        at, ConnectionFailed(at.shown, "the server went away")
                    )
                case wire.AgentFarewell(reason, final):
                    raise _Refused(reason, final=final)
                case None:
                    reason = f"{at.shown} closed the connection: a standby, or a server that stops"
                    raise _Standby(reason, names_another=False)
                case _:  # An order before the welcome.
                    raise _Refused("the answer does not come from a Moorage server", final=False)

    def _not_let_in(self, at: Endpoint, error: InvalidStatus) -> Exception:
        """Return the error for the HTTP status with which a server refused the handshake."""
        try:
            said = msgspec.json.decode(error.response.body or b"", type=_HttpRefusal).error
        except msgspec.MsgspecError:
            said = {}
        match error.response.status_code:
            case HTTPStatus.UNAUTHORIZED:
                reason = f"{at.shown} does not know this machine's token or key; "
                reason += "`moored agent token`, beside the server, makes a new token"
                return _Refused(reason, final=True)
            case HTTPStatus.MISDIRECTED_REQUEST:
                refused = refusal(Code.NOT_LEADER, "is a standby", details=said)
                names_another = self._addresses.redirected(at, refused)
                return _Standby(self._addresses.word_of(at), names_another=names_another)
            case HTTPStatus.UPGRADE_REQUIRED if said.get("reason"):
                return _Refused(f"{at.shown} answers: {said['reason']}", final=False)
            case _:  # Any other status: the agent tries again.
                return error

    def _note_welcome(self, welcome: wire.AgentWelcome) -> None:
        if welcome.epoch < self._known.get("epoch", 0):
            reason = f"the server's epoch, {welcome.epoch}, is older than {self._known['epoch']}"
            reason += ", that of another server, so this agent obeys no order. If the storage was "
            reason += "restored or moved, and the other server is gone, "
            reason += "run `moored agent reclaim` beside this one"
            raise _Refused(reason, final=False)
        self._note(epoch=welcome.epoch, **({"key": welcome.key} if welcome.key else {}))
        place = {"cluster_id": welcome.cluster_id, "node_id": welcome.node_id}
        log.info("agent_connected", **place)
        if not self._is_ready:
            self._is_ready = True
            line = json.dumps({"event": "connected", **place})
            os.write(sys.stdout.fileno(), line.encode() + b"\n")
