"""Logs one line for every HTTP request that changes something, with its caller.

`web.app` puts `Noted` around the application. Every request counts as a change unless its method or
`READS` says otherwise, so that no new endpoint lacks its log line.
"""

import logging
import time
from typing import Final

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moorage.protocol.proxies import FORWARDED_FOR, remote_text
from moorage.records.audit import AuditEntry
from moorage.records.rights import SERVER_ITSELF, Caller
from moorage.web.bodies import CALLER, NAMED, TENANT, UNCHANGED
from moorage.web.changes import AFTER, BEFORE
from moorage.web.router import ROUTE
from moorage.web.services import AuditNotes

READS: Final = frozenset(
    {
        "/allocate",  # It changes leases, which the ledger records.
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
"""Paths whose POST changes no document."""
NOTED_ELSEWHERE: Final = frozenset({"/quotas/{tenant}", "/tokens", "/tokens/{name}"})
"""Paths whose changes have audit entries of their own: of facts of the ledger, and of tokens."""
FORWARDED_CHARS_MAX: Final = 200
_CHANGING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FAILURES: Final = 400

log = structlog.get_logger("moored")


class Noted:
    """Writes the log line of a change before the answer is sent.

    Args:
        audit: Takes the entry of the audit log, which is written before the answer leaves.
    """

    def __init__(self, app: ASGIApp, audit: AuditNotes) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and log it if it changes something."""

        async def send_and_watch(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < _FAILURES:
                self._note(scope)
                await self._audit.flush()
            await send(message)

        changing = scope["type"] == "http" and scope["method"] in _CHANGING
        await self._app(scope, receive, send_and_watch if changing else send)

    def _note(self, scope: Scope) -> None:
        path = scope.get(ROUTE, scope["path"])
        state = scope.get("state", {})
        if path in READS or state.get(UNCHANGED):
            return
        caller: Caller | None = state.get(CALLER)
        about = {**state.get(NAMED, {}), **scope.get("path_params", {})}
        what, remote = f"{scope['method']} {path}", remote_of(scope)
        who = state.get(TENANT, "")
        # The server logs its own changes itself, in one line.
        itself = caller is not None and caller.token_name == SERVER_ITSELF
        log.log(
            logging.DEBUG if itself else logging.INFO,
            "changed",
            who=who,
            what=what,
            **about,
            remote=remote,
            # Any client may send this header, so its value has a field of its own.
            forwarded_for=Headers(scope=scope).get(FORWARDED_FOR, "")[:FORWARDED_CHARS_MAX],
        )
        if path in NOTED_ELSEWHERE:
            return
        role, token = (caller.role, caller.token_name) if caller else ("", "")
        before, after = state.get(BEFORE), state.get(AFTER)
        self._audit.note(
            AuditEntry(time.time(), what, who, role, token, remote, about, before, after)
        )


def remote_of(scope: Scope) -> str:
    """Return the address and port of a request's client; empty if unknown."""
    client = scope.get("client")
    return remote_text(*client) if client else ""
