"""Signs browsers in to the console at an OpenID Connect issuer, and logs them out of both."""

from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from moorage.protocol.credentials import console_cookies
from moorage.protocol.faults import ServiceError
from moorage.web.bodies import TENANT, UNCHANGED, success
from moorage.web.console import give_cookie, needed_login_of, take_cookie
from moorage.web.console_types import LoggedOut
from moorage.web.router import HttpRouter
from moorage.web.schemas import operation
from moorage.web.services import Console, SignInFlow
from moorage.web.sign_in import CALLBACK, wait_for_issuer

_PATH: Final = "/console/sign-in"
_BEGUN: Final = "sign-in"
"""Cookie with the proofs of sign-ins. Browsers send it, and `_LEAVING`, only to `_PATH`."""
_LEAVING: Final = "sign-out"
"""Cookie with the state of a logout at the issuer."""
_SECONDS: Final = 600
"""Seconds that a person may take to sign in or log out at the issuer."""
BEGUN_MAX: Final = 4
"""Maximum unfinished sign-ins of one browser, one per tab; with more, the oldest is dropped.
"""
_ENDED: Final = "/console?sign-in={}"
_UNSTORED: Final = {"cache-control": "no-store"}
_PAGE: Final = (
    '<!doctype html><meta http-equiv="refresh" content="0;url={url}"><title>Moorage</title>'
    '<p>Go on to <a href="{url}">the console</a>.'
)
"""Page that opens the console. After a redirect from the issuer, browsers would omit the cookie."""


def console_sign_in_routes(console: Console) -> HttpRouter:
    """Return the router of the logout and, with an issuer, the sign-in; both need no token."""
    router = HttpRouter("console")
    _add_log_out(router, console)
    if console.sign_in is not None:
        _add_sign_in(router, console, console.sign_in)
    return router


def _add_log_out(router: HttpRouter, console: Console) -> None:
    flow = console.sign_in

    @router.delete("/console/session", "Log out", operation(LoggedOut))
    async def log_out(request: Request) -> Response:
        """End the login of this browser, and close its WebSockets.

        `sign_out` is the issuer's URL that ends the login there and sends the browser back. 401
        without a login.
        """
        login, left = needed_login_of(console, request), None
        if login is None:
            setattr(request.state, UNCHANGED, True)
        else:
            setattr(request.state, TENANT, login.caller.tenant)
            console.logins.leave(console_cookies(request.headers.getlist("cookie")))
            console.expel()
            if flow is not None and login.id_token is not None:
                left = await flow.leave(login.id_token, _address(request) + CALLBACK)
        response = success({} if left is None else {"sign_out": left[0]})
        response.headers.update(_UNSTORED)
        take_cookie(request, response)
        if left is not None:
            _give(request, response, _LEAVING, left[1])
        return response


def _add_sign_in(router: HttpRouter, console: Console, flow: SignInFlow) -> None:
    async def begin(request: Request) -> Response:
        """Redirect the browser to the issuer."""
        begun = await flow.begin(_address(request) + CALLBACK)
        if begun is None:
            return RedirectResponse(_ENDED.format("unavailable"), 303, _UNSTORED)
        url, proof = begun
        response = RedirectResponse(url, 303, _UNSTORED)
        _keep(request, response, [proof, *_proofs(request)][:BEGUN_MAX])
        return response

    async def finish(request: Request) -> Response:
        """Exchange the issuer's code for a login; after a logout there, show the console."""
        answer, proofs = request.query_params, _proofs(request)
        proof = next((each for each in proofs if _state(each) == answer.get("state")), "")
        if not (proof or answer.get("code") or answer.get("error")):  # After a logout.
            left = request.cookies.get(_cookie(request, _LEAVING))
            known = left is not None and left == answer.get("state")
            response = _page(_ENDED.format("over") if known else "/console")
            _give(request, response, _LEAVING, "")
            return response
        tokens = await flow.finish(proof, answer, _address(request) + CALLBACK)
        entered = None
        try:
            found = tokens or {}
            for token in found.values():
                await wait_for_issuer(console.pending, token)
                entered = entered or console.logins.enter(token, found.get("id_token", ""))
        except ServiceError:  # The issuer's keys, or the store of logins, fail.
            tokens = None
        away = _ENDED.format("unavailable" if tokens is None else "refused")
        response = _page("/console" if entered else away)
        _keep(request, response, [each for each in proofs if each != proof])
        if entered is not None:
            give_cookie(request, response, entered[0], secure=url_is_secure(request))
        elif tokens is not None:
            address = request.client.host if request.client is not None else ""
            console.on_stranger(address, next(iter(tokens.values()), None))
        return response

    router.add(_PATH, begin, ["GET"])
    router.add(CALLBACK, finish, ["GET"])


def _page(url: str) -> Response:
    """Return the page that opens the console."""
    response = HTMLResponse(_PAGE.format(url=url), headers=_UNSTORED)
    response.headers["content-security-policy"] = "default-src 'none'; frame-ancestors 'none'"
    response.headers["referrer-policy"] = "no-referrer"
    return response


def url_is_secure(request: Request) -> bool:
    """Return whether the browser uses TLS, to this server or to a proxy in front of it."""
    # A client that forges the header gains nothing: the issuer knows the valid addresses.
    return request.headers.get("x-forwarded-proto", request.url.scheme) == "https"


def _address(request: Request) -> str:
    """Return the URL of this server that the browser uses."""
    scheme = "https" if url_is_secure(request) else "http"
    return f"{scheme}://{request.headers.get('host', 'localhost')}"


def _proofs(request: Request) -> list[str]:
    """Return the proofs of the sign-ins that this browser has begun, the newest first."""
    return [each for each in request.cookies.get(_cookie(request, _BEGUN), "").split("~") if each]


def _state(proof: str) -> str:
    return proof.partition(".")[0]


def _keep(request: Request, response: Response, proofs: list[str]) -> None:
    """Store the proofs in the browser's cookie; delete the cookie if there are no proofs."""
    _give(request, response, _BEGUN, "~".join(proofs))


def _give(request: Request, response: Response, name: str, value: str) -> None:
    response.set_cookie(
        _cookie(request, name),
        value,
        _SECONDS if value else 0,
        path=_PATH,
        secure=url_is_secure(request),
        httponly=True,
    )  # Lax: the issuer sends the browser back.


def _cookie(request: Request, name: str) -> str:
    return f"moorage-{name}-{(request.scope['server'] or ('', 0))[1]}"
