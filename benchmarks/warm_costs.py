"""Measures the time that warm workloads save, with a real daemon; `engines` runs it.

Measured is the time from a request to the event that its workload is ready: with a workload that
must be started (cold), and with a workload that the previous lease left running (warm).
"""

import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
from websockets.sync.client import ClientConnection, connect

from moorage.lab.errors import CommandError
from moorage.testing.daemon_process import daemon
from moorage_policies import catalog as shipped

STARTS: Final = 20
"""Number of timed cold leases, and of timed warm leases."""
NEWS_SECONDS_MAX: Final = 60.0
"""Maximum seconds that the daemon may take for its next message."""
PROCESS: Final = {"command": ["sleep", "100000"]}
SERVICE: Final = {
    "category": "service",
    "command": [sys.executable, "-P", "-m", "http.server", "--bind", "127.0.0.1", "{port}"],
    "port": 0,
    "readiness": {"path": "/"},
}

Figures = dict[str, Any]


def warm_leases(starts: int = STARTS) -> Figures:
    """Time cold and warm leases of a process, and of a service that must answer.

    Raises:
        CommandError: A warm lease started its workload again.
    """
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="moorage-") as folder, daemon(Path(folder)) as running:
        with httpx.Client(base_url=running.http, timeout=60, trust_env=False) as http:
            http.post("/clusters", json=_this_machine()).raise_for_status()
            http.post("/policy", json=shipped.document("first_fit")).raise_for_status()
        for name, spec in (("process", PROCESS), ("service", SERVICE)):
            with connect(running.ws, compression=None, proxy=None) as socket:
                _call(socket, {"op": "watch", "topics": ["leases"]})
                cold = [_lease(socket, spec, warm=False) for _ in range(starts)]
                _lease(socket, spec, warm=False, keep_seconds=600)
                warm = [_lease(socket, spec, warm=True, keep_seconds=600) for _ in range(starts)]
                _call(socket, {"op": "flush"})
                _message(socket, "event", "ended")
            figures[f"{name}_cold_seconds"] = statistics.median(cold)
            figures[f"{name}_warm_seconds"] = statistics.median(warm)
            figures[f"{name}_cold_to_warm"] = statistics.median(cold) / statistics.median(warm)
    return figures


def _this_machine() -> dict[str, Any]:
    gpu = {"modelName": "none", "memory": 1024}
    node = {
        "id": platform.node(),
        "gpus": {"count": 1, "gpus": [gpu]},
        "vcpus": {"count": 64},
        "memory": 65_536,
    }
    return {"id": "here", "nodes": {"nodeData": [node]}}


def _lease(
    socket: ClientConnection, spec: dict[str, Any], *, warm: bool, keep_seconds: float = 0
) -> float:
    """Request a lease and release it when its workload is ready; return the seconds until ready."""
    provision = {"backend": "local", "spec": spec, "keep_warm_seconds": keep_seconds}
    request = {
        "adhoc": True,
        "policy_rule_uri": "first_fit:1.0-stable",
        "inputs": {},
        "resources": {"gpus": 1},
        "lease": {"ttl_seconds": 600},
        "provision": provision,
        "id": "ask",
    }
    began = time.perf_counter()
    socket.send(json.dumps(request))
    lease = _message(socket, "id", "ask")["lease"]
    _message(socket, "event", "started")
    took = time.perf_counter() - began
    if lease["workload"].get("warm", False) != warm:
        raise CommandError(f"expected a {'warm' if warm else 'cold'} lease, got {lease}")
    _call(socket, {"op": "release", "lease": lease["id"], "token": lease["token"]})
    _message(socket, "event", "warm" if keep_seconds else "ended")
    return took


def _call(socket: ClientConnection, message: dict[str, Any]) -> None:
    socket.send(json.dumps({**message, "id": "call"}))
    _message(socket, "id", "call")


def _message(socket: ClientConnection, key: str, value: str) -> dict[str, Any]:
    """Return the next message that has a value under a key; skip all others."""
    while True:
        message: dict[str, Any] = json.loads(socket.recv(NEWS_SECONDS_MAX))
        if message.get("success") is False:
            raise CommandError(f"the daemon refused a request: {message}")
        if message.get(key) == value:
            return message
