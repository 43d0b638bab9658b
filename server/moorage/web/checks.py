"""What a request must be before any endpoint sees it: of a program or our pages, and of one length.

`web.server` puts it around the application.
"""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.protocol.origins import Origins
from moorage.web.bodies import failure

__all__ = ["RequestChecks"]

_LENGTHS: Final = frozenset({"content-length", "transfer-encoding"})


class RequestChecks:
    """Answers the requests that no endpoint may see.

    Args:
        app: The application behind it.
        origins: Under which names, and for whose pages, requests are answered.

    """

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        target = scope["raw_path"].decode("latin-1")
        foreign = self.origins.refusal(target, headers, (scope["server"] or ("",))[0])
        if foreign is not None:
            fault = ServiceError(Code.FORBIDDEN, foreign.advice, field=foreign.header)
            await failure(fault, scope["path"])(scope, receive, send)
        elif _LENGTHS.issubset(name for name, _ in headers):
            # Two programs on the way may each believe another one (RFC 9112, 6.1).
            fault = ServiceError.wrong_field(
                "content-length", "either Content-Length or Transfer-Encoding"
            )
            answer = failure(fault, scope["path"])
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)
