"""`GET /history`: the figures of the server's last day."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from moorage.protocol.faults import ServiceError
from moorage.records.history import History
from moorage.web.bodies import caller_of, success
from moorage.web.router import HttpRouter
from moorage.web.schemas import operation
from moorage.web.services import WebServices

MINUTES_MAX: Final = 24 * 60
STEP_MAX: Final = 60


def history_routes(services: WebServices) -> HttpRouter:
    """Return the router of this endpoint."""
    router = HttpRouter("about")

    @router.get("/history", "The last day in numbers", operation(History))
    async def history(request: Request, minutes: int = MINUTES_MAX, step: int = 5) -> Response:
        """Return the current figures, and those of the last minutes in points of `step` minutes.

        It is at most a day long, and goes on over a restart of the server.
        """
        for name, given, most in (("minutes", minutes, MINUTES_MAX), ("step", step, STEP_MAX)):
            if not 1 <= given <= most:
                raise ServiceError.wrong_field(f"query.{name}", f"a whole number from 1 to {most}")
        return success(services.history(caller_of(request), minutes, step))

    return router
