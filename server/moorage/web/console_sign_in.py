"""Signs browsers in to the console at an OpenID Connect issuer."""

from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.web.console import give_cookie
from moorage.web.router import HttpRouter
from moorage.web.services import Console
from moorage.web.sign_in import CALLBACK, wait_for_issuer

_PATH: Final = "/console/sign-in"
_SECONDS: Final = 600
"""Seconds that a person may take to sign in at the issuer."""
_PAGE: Final = (
    '<!doctype html><meta http-equiv="refresh" content="0;url={url}"><title>Moorage</title>'
    '<p>Go on to <a href="{url}">the console</a>.'
)
"""Page that opens the console. After a redirect from the issuer, browsers would omit the cookie."""


def console_sign_in_routes(console: Console) -> HttpRouter:
    """Return the router of the sign-in endpoints, which need no token; empty without an issuer.

    Args:
        console: What they need of the daemon.
    """
    router, flow = HttpRouter("console"), console.sign_in
    if flow is None:
        return router

    async def begin(request: Request) -> Response:
        """Redirect the browser to the issuer."""
        begun = await flow.begin(_address(request) + CALLBACK)
        if begun is None:
            raise ServiceError(
                Code.UNAVAILABLE, "the issuer does not answer; try again, or log in with a token"
            )
        url, proof = begun
        response = RedirectResponse(url, 303, {"cache-control": "no-store"})
        secure = url_is_secure(request)
        response.set_cookie(
            _cookie(request), proof, _SECONDS, path=_PATH, secure=secure, httponly=True
        )  # Lax: the issuer sends the browser back.
        return response

    async def finish(request: Request) -> Response:
        """Exchange the issuer's code for a login."""
        query, proof = request.query_params, request.cookies.get(_cookie(request), "")
        state, code = query.get("state", ""), query.get("code", "")
        entered = None
        for token in await flow.finish(proof, state, code, _address(request) + CALLBACK):
            await wait_for_issuer(console.pending, token)
            entered = entered or console.logins.enter(token)
        page = _PAGE.format(url="/console" if entered else "/console?sign-in=refused")
        response = HTMLResponse(page, headers={"cache-control": "no-store"})
        response.headers["content-security-policy"] = "default-src 'none'; frame-ancestors 'none'"
        response.headers["referrer-policy"] = "no-referrer"
        response.delete_cookie(_cookie(request), path=_PATH, httponly=True)
        if entered is None:
            console.on_stranger(request.client.host if request.client is not None else "")
        else:
            give_cookie(request, response, entered[0], secure=url_is_secure(request))
        return response

    router.add(_PATH, begin, ["GET"])
    router.add(CALLBACK, finish, ["GET"])
    return router


def url_is_secure(request: Request) -> bool:
    """Return whether the browser uses TLS, to this server or to a proxy in front of it."""
    # Who forges the header deceives only itself: the issuer knows the addresses that it sends to.
    return request.headers.get("x-forwarded-proto", request.url.scheme) == "https"


def _address(request: Request) -> str:
    """Return the URL of this server that the browser uses."""
    scheme = "https" if url_is_secure(request) else "http"
    return f"{scheme}://{request.headers.get('host', 'localhost')}"


def _cookie(request: Request) -> str:
    return f"moorage-sign-in-{(request.scope['server'] or ('', 0))[1]}"
