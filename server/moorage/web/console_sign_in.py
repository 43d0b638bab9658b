"""Signs browsers in to the console at an OpenID Connect issuer."""

from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from moorage.protocol.faults import ServiceError
from moorage.web.console import give_cookie
from moorage.web.router import HttpRouter
from moorage.web.services import Console
from moorage.web.sign_in import CALLBACK, wait_for_issuer

_PATH: Final = "/console/sign-in"
_SECONDS: Final = 600
"""Seconds that a person may take to sign in at the issuer."""
BEGUN_MAX: Final = 4
"""Most unfinished sign-ins of one browser, each in its own tab; beyond it the oldest is dropped."""
_REFUSED: Final = "/console?sign-in={}"
_UNSTORED: Final = {"cache-control": "no-store"}
_PAGE: Final = (
    '<!doctype html><meta http-equiv="refresh" content="0;url={url}"><title>Moorage</title>'
    '<p>Go on to <a href="{url}">the console</a>.'
)
"""Page that opens the console. After a redirect from the issuer, browsers would omit the cookie."""


def console_sign_in_routes(console: Console) -> HttpRouter:
    """Return the router of the sign-in endpoints, which need no token; empty without an issuer.

    Args:
        console: The daemon's services for the console.
    """
    router, flow = HttpRouter("console"), console.sign_in
    if flow is None:
        return router

    async def begin(request: Request) -> Response:
        """Redirect the browser to the issuer."""
        begun = await flow.begin(_address(request) + CALLBACK)
        if begun is None:
            return RedirectResponse(_REFUSED.format("unavailable"), 303, _UNSTORED)
        url, proof = begun
        response = RedirectResponse(url, 303, _UNSTORED)
        _keep(request, response, [proof, *_proofs(request)][:BEGUN_MAX])
        return response

    async def finish(request: Request) -> Response:
        """Exchange the issuer's code for a login."""
        answer, proofs = request.query_params, _proofs(request)
        proof = next((each for each in proofs if _state(each) == answer.get("state")), "")
        tokens = await flow.finish(proof, answer, _address(request) + CALLBACK)
        entered = None
        try:
            for token in tokens or ():
                await wait_for_issuer(console.pending, token)
                entered = entered or console.logins.enter(token)
        except ServiceError:  # Its keys cannot be fetched, or the login cannot be stored.
            tokens = None
        away = _REFUSED.format("unavailable" if tokens is None else "refused")
        page = _PAGE.format(url="/console" if entered else away)
        response = HTMLResponse(page, headers=_UNSTORED)
        response.headers["content-security-policy"] = "default-src 'none'; frame-ancestors 'none'"
        response.headers["referrer-policy"] = "no-referrer"
        _keep(request, response, [each for each in proofs if each != proof])
        if entered is not None:
            give_cookie(request, response, entered[0], secure=url_is_secure(request))
        elif tokens is not None:
            console.on_stranger(request.client.host if request.client is not None else "")
        return response

    router.add(_PATH, begin, ["GET"])
    router.add(CALLBACK, finish, ["GET"])
    return router


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
    return [each for each in request.cookies.get(_cookie(request), "").split("~") if each]


def _state(proof: str) -> str:
    return proof.partition(".")[0]


def _keep(request: Request, response: Response, proofs: list[str]) -> None:
    """Store these proofs in the browser's cookie; without proofs, delete the cookie."""
    response.set_cookie(
        _cookie(request),
        "~".join(proofs),
        _SECONDS if proofs else 0,
        path=_PATH,
        secure=url_is_secure(request),
        httponly=True,
    )  # Lax: the issuer sends the browser back.


def _cookie(request: Request) -> str:
    return f"moorage-sign-in-{(request.scope['server'] or ('', 0))[1]}"
