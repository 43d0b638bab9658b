"""Who changed what: one line of the log for every request over HTTP that changes something.

`web.app` puts it around the application. Every request is taken to change something unless its
method or `READS` says otherwise, so that no new endpoint goes without its line.
"""

from collections.abc import MutableMapping
from typing import Any, Final

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moorage.web.bodies import NAMED, TENANT
from moorage.web.router import ROUTE

__all__ = ["READS", "Noted"]

READS: Final = frozenset(
    {
        "/allocate",  # What it changes is a lease, and in the ledger.
        "/api/filter",
        "/api/filter-data",
        "/api/no-ir/filter",
        "/api/no-ir/similarity-search",
        "/api/search",
        "/api/similarity-search",
        "/block/aggregate",
        "/block/query",
        "/blockActions/allocate",
        "/blockActions/dryRun",
        "/blockActions/selectClusters",
        "/blocks/query",
        "/cluster/aggregate",
        "/cluster/query",
        "/clusters/query",
        "/console/playground",
        "/console/playground/backtest",
        "/executor/query",
        "/executor/{executor}/execute_policy",
        "/policy/query",
        "/websocket-ticket",
    }
)
"""Paths that are posted to and change no document."""
FORWARDED_CHARS_MAX: Final = 200
_CHANGING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FAILURES: Final = 400

log = structlog.get_logger("moored")


class Noted:
    """Writes the line before the answer leaves.

    Args:
        app: The application.

    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] < _FAILURES:
                _note(scope)
            await send(message)

        changing = scope["type"] == "http" and scope["method"] in _CHANGING
        await self._app(scope, receive, watched if changing else send)


def _note(scope: Scope) -> None:
    path = scope.get(ROUTE, scope["path"])
    if path in READS:
        return
    state, client = scope.get("state", {}), scope.get("client")
    log.info(
        "changed",
        who=state.get(TENANT, ""),
        what=f"{scope['method']} {path}",
        **{**state.get(NAMED, {}), **scope.get("path_params", {})},
        remote=f"{client[0]}:{client[1]}" if client else "",
        # What a proxy says, or anybody else: it has a field of its own.
        forwarded_for=Headers(scope=scope).get("x-forwarded-for", "")[:FORWARDED_CHARS_MAX],
    )
