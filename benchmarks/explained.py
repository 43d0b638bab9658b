"""Measures the cost that `explain` adds to a grant: part of `queue`.

One client asks for one GPU and releases it, every other time with reasons, through socket, jailed
policy and ledger: so what else the machine does meanwhile slows both.
"""

import asyncio
import statistics
import time
from typing import Any, Final

import msgspec
from websockets.sync.client import ClientConnection, connect

from benchmarks.overload import prepare
from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon

PAIRS: Final = 2_000
WARM_PAIRS: Final = 200
"""Asked first, and not counted."""


def measure_explanations() -> dict[str, Any]:
    """Measure how long a grant takes without reasons, and with them as a multiple of that."""
    with daemon() as running, connect(running.ws, proxy=None) as socket:
        uri = asyncio.run(prepare(running))
        pairs = [(_grant(socket, uri), _grant(socket, uri, explain=True)) for _ in range(PAIRS)]
    plain, reasoned = (statistics.median(each) for each in zip(*pairs[WARM_PAIRS:], strict=True))
    return {"grant_seconds": plain, "explained_to_grant": reasoned / plain}


def _grant(socket: ClientConnection, uri: str, *, explain: bool = False) -> float:
    """Return the seconds from a request to its lease, which is then released."""
    request = {
        "adhoc": True,
        "policy_rule_uri": uri,
        "inputs": {},
        "resources": {"gpus": 1},
        "lease": {"ttl_seconds": 600},
        "explain": explain,
    }
    started = time.perf_counter()
    reply = _say(socket, request)
    seconds = time.perf_counter() - started
    lease = reply["lease"]
    _say(socket, {"op": "release", "lease": lease["id"], "token": lease["token"]})
    return seconds


def _say(socket: ClientConnection, message: dict[str, Any]) -> Any:
    socket.send(msgspec.json.encode(message).decode())
    reply = msgspec.json.decode(socket.recv(60))
    if not reply["success"]:
        raise CommandError(f"the daemon refused: {reply['message']}")
    return reply
