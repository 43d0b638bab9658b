"""Finds the caller of an HTTP request, and ends a long request with the caller's token."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request

from moorage.model import Code
from moorage.protocol.credentials import token_of
from moorage.protocol.faults import ServiceError
from moorage.records.rights import Caller
from moorage.web.bodies import caller_of
from moorage.web.console import login_of
from moorage.web.services import StandbyServices, WebServices
from moorage.web.sign_in import wait_for_issuer

LOOK_SECONDS: Final = 0.5
"""Seconds between two checks whether the token or login of a waiting caller has ended."""


async def identify(services: WebServices | StandbyServices, request: Request) -> Caller | None:
    """Return the caller of a request, by token or by the console's cookie; None if unknown.

    Raises:
        ServiceError: `unavailable`: The token cannot be verified now.
    """
    token, readable = token_of(request.headers.getlist("authorization"))
    if readable:
        await wait_for_issuer(services.pending, token)
    caller = services.authenticate(token) if readable else None
    if caller is None and token is None:
        login = login_of(services.console, request)
        caller = None if login is None else login.caller
    return caller


def unknown_caller() -> ServiceError:
    """Return the error for a request without a valid token."""
    return ServiceError(
        Code.UNAUTHORIZED,
        "the request has no valid token; send `Authorization: Bearer <token>`",
        field="authorization",
        expected="Bearer <token>",
    )


@contextmanager
def ending_with_token(services: WebServices, request: Request) -> Iterator[None]:
    """Cancel the body of this context when the token or login of its caller ends.

    Raises:
        ServiceError: `unauthorized`: The token or login has ended.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None  # Endpoints are coroutines.
    looking: asyncio.Task[None] | None = None
    has_ended = False

    async def look() -> None:
        nonlocal has_ended
        while await _is_still_known(services, request):  # noqa: ASYNC110  # Ends have no event.
            await asyncio.sleep(LOOK_SECONDS)  # No event announces the end of a token.
        has_ended = True
        task.cancel()

    def begin() -> None:
        nonlocal looking
        looking = asyncio.ensure_future(look())

    timer = loop.call_later(LOOK_SECONDS, begin)
    try:
        yield
    except asyncio.CancelledError:
        if not has_ended:
            raise
        task.uncancel()
        raise unknown_caller() from None
    finally:
        timer.cancel()
        if looking is not None:
            looking.cancel()


async def _is_still_known(services: WebServices, request: Request) -> bool:
    try:
        return await identify(services, request) == caller_of(request)
    except ServiceError:  # It cannot be verified now: perhaps its database restarts.
        return True
