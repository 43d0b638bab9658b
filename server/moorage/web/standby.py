"""HTTP answers of a standby: reads with their age, and refusals of all other requests."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moorage.web.services import StandbyReads

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_POSTED: Final = ("/query", "/aggregate", "/websocket-ticket")
"""Ends of the paths that are posted to, and answered from documents alone."""
_OF_THE_WRITER: Final = frozenset(
    {
        "/api/tasks/{task_id}",
        "/policy/{uri}/logs",
        "/policy-alias/{alias}/canary",
        "/policy-alias/{alias}/shadow",
    }
)
"""What only the server knows that did it."""


def is_read(method: str, path: str) -> bool:
    """Return whether a standby can answer a request, which only reads.

    Args:
        method: Of the request.
        path: Template of its route, such as `/policy/{uri}`.
    """
    return path.endswith(_POSTED) if method not in _READING else path not in _OF_THE_WRITER


class Dated:
    """Adds the age headers to each answer.

    Args:
        app: The application.
        reads: Say it.
    """

    def __init__(self, app: ASGIApp, reads: StandbyReads) -> None:
        self._app = app
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = self._reads.headers()  # What comes meanwhile may be in the answer, or not.

        async def send_with_age(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, send_with_age)
