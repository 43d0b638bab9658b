"""`moored demo`: show the main use on a laptop, without preparation.

The demo starts a daemon with all parts embedded, registers a small fleet, publishes a shipped
policy, requests GPUs over a real socket, and shows the replies, with the reasons of the policy.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from websockets.sync.client import ClientConnection, connect

from moorage.lab.errors import CommandError
from moorage.records.json_values import JsonObject
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog

REPLY_SECONDS_MAX: Final = 30.0
POLICY: Final = "expected_fill"
FLEET: Final = {"harbour": ("A100-80GB", 81_920, 3, 8), "lagoon": ("L4", 24_576, 4, 2)}
"""Per cluster: GPU model, GPU memory in MiB, number of nodes, GPUs per node."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request of the demo, and its reply."""

    title: str
    request: JsonObject
    reply: JsonObject


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The result of the demo."""

    exchanges: list[Exchange]
    first_lease_seconds: float


def demo(started: float, data: Path | None = None, options: tuple[str, ...] = ()) -> DemoOutcome:
    """Run the demo.

    Args:
        started: `time.perf_counter()` when the program began.
        data: Data directory; None: a temporary one.
        options: Further flags for `moored serve`.

    Raises:
        CommandError: A step of the demo failed.
    """
    with daemon(data, options=options) as running:
        uri = _prepare(running.http)
        with connect(running.ws, compression=None, proxy=None) as socket:
            exchanges = [
                _ask(socket, "A lease of one GPU with 80 GB", _request(uri, _BIG, lease=True))
            ]
            lease = exchanges[0].reply.get("lease")
            if lease is None:
                raise CommandError(f"the demo's first request got no lease: {exchanges[0].reply}")
            first = time.perf_counter() - started
            for title, proposed in (
                ("Why there?", {"op": "why", "lease": lease["id"]}),
                ("Advice on 40 % of an L4, without a lease", _request(uri, _SHARE, lease=False)),
                ("Nine GPUs on one node: can that ever fit?", _request(uri, _NEVER, lease=True)),
                ("Release", {"op": "release", "lease": lease["id"], "token": lease["token"]}),
            ):
                exchanges.append(_ask(socket, title, proposed))
    return DemoOutcome(exchanges, first)


_BIG: Final = {"gpus": 1, "gpu_memory_mib": 80_000, "cpu_milli": 8_000, "memory_mib": 65_536}
_SHARE: Final = {"gpus": 1, "gpu_milli": 400, "models": ["L4"], "cpu_milli": 2_000}
_NEVER: Final = {"gpus": 9}


def _request(uri: str, resources: JsonObject, *, lease: bool) -> JsonObject:
    proposed: JsonObject = {
        "adhoc": True,
        "policy_rule_uri": uri,
        "inputs": {},
        "resources": resources,
        "explain": True,
    }
    return proposed | ({"lease": {"ttl_seconds": 60}} if lease else {})


def _ask(socket: ClientConnection, title: str, request: JsonObject) -> Exchange:
    socket.send(json.dumps(request))
    return Exchange(title, request, json.loads(socket.recv(REPLY_SECONDS_MAX)))


def _prepare(url: str) -> str:
    with httpx.Client(base_url=url, timeout=REPLY_SECONDS_MAX, trust_env=False) as client:
        for name in FLEET:
            client.post("/clusters", json=_cluster(name)).raise_for_status()
        answer = client.post("/policy", json=catalog.document(POLICY)).raise_for_status()
    uri: str = answer.json()["data"]["policy_rule_uri"]
    return uri


def _cluster(name: str) -> JsonObject:
    model, memory, nodes, gpus = FLEET[name]
    node = {
        "gpus": {"count": gpus, "gpus": [{"modelName": model, "memory": memory}] * gpus},
        "vcpus": {"count": 12 * gpus},
        "memory": 98_304 * gpus,
    }
    rows = [{"id": f"{name}-{number}", **node} for number in range(nodes)]
    return {"id": name, "status": "live", "nodes": {"count": nodes, "nodeData": rows}}
