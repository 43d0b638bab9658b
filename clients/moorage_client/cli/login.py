"""`moorage login` and `logout`: sign in with OpenID Connect, by a code on any device (RFC 8628)."""

import time
from dataclasses import replace
from typing import Final

from moorage.records.json_values import JsonMapping, JsonObject
from moorage_client.answers import UnreadableError
from moorage_client.cli.output import ends_in, note, print_json, say
from moorage_client.cli.session import CommandSession
from moorage_client.endpoint import setting, split_addresses
from moorage_client.errors import Unauthorized
from moorage_client.sign_in import (
    IssuerSilent,
    SignInFailed,
    ask_issuer,
    entry_of,
    logins,
    origin_of,
)

_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
_INTERVAL_SECONDS: Final = 5
"""Seconds between two polls unless the issuer sets another interval (RFC 8628, 3.2)."""
_PAUSE_SECONDS_MIN: Final = 0.1
_DISCOVERY: Final = "/.well-known/openid-configuration"


def login(session: CommandSession) -> None:
    """Sign in at the server's issuer: open the printed URL, and confirm the code."""
    ca_file = setting(session.ca_file)
    with session.services() as services:
        server = services.url
        offered = services.sign_in()
        if not offered["client_id"]:
            raise SignInFailed(
                "this server offers no login; its operator makes tokens with `moored token create`"
            )
        found = _discover(str(offered["issuer"]), ca_file)
        form = {"client_id": str(offered["client_id"])}
        answer = _authorize(found, form, offered, ca_file)
        entry = entry_of(answer, str(offered["audience"]))
    with replace(session, token=entry["token"]).services() as services:
        try:
            services.check_token()
        except Unauthorized as error:
            raise SignInFailed(
                f"{offered['issuer']} knows you, but its token is not valid for {server}; the "
                "server's log has the reason, for example that you have no tenant or role there"
            ) from error
    more = {
        **form,
        "audience": offered["audience"],
        "token_endpoint": found["token_endpoint"],
        "ca_file": ca_file,
    }
    added = {origin: {**more, **entry} for origin in _origins(session, server)}
    logins().change(lambda entries: {**entries, **added})
    if session.json:
        data = {"servers": list(added), "expires_at": entry["expires_at"]}
        print_json({"success": True, "data": data})
        return
    lasts = "It is refreshed" if entry.get("refresh_token") else "Sign in again"
    say(f"Signed in at {server}. The token ends in {ends_in(entry['expires_at'])}. {lasts} then.")


def logout(session: CommandSession) -> None:
    """Forget the token of `moorage login` for this server."""
    with session.services() as services:
        server = services.url
    gone = {*_origins(session, server)}
    logins().change(lambda all_: {each: entry for each, entry in all_.items() if each not in gone})
    session.say(
        {"success": True, "data": {"servers": sorted(gone)}}, f"The login at {server} is forgotten."
    )


def _origins(session: CommandSession, server: str) -> list[str]:
    """Return the addresses at which a login is valid: the servers in the options."""
    named = [
        setting(session.http_url, "MOORAGE_HTTP_URL", default=server),
        setting(session.url, "MOORAGE_URL", default=server),
    ]
    urls = (server, *(each for urls in named for each in split_addresses(urls)))
    return list(dict.fromkeys(map(origin_of, urls)))


def _discover(issuer: str, ca_file: str) -> JsonObject:
    """Return the issuer's metadata, from its discovery document."""
    url = issuer.rstrip("/") + _DISCOVERY
    failed, found = ask_issuer(url, ca_file)
    if failed is not None or found.get("issuer") != issuer:
        raise SignInFailed(f"{url} is not a discovery document of {issuer}")
    if not found.get("device_authorization_endpoint") or not found.get("token_endpoint"):
        raise SignInFailed(f"{issuer} offers no sign-in by device code; use a token instead")
    return found


def _authorize(
    found: JsonMapping, form: dict[str, str], offered: JsonMapping, ca_file: str
) -> JsonObject:
    """Print the URL and the code, and wait for the user; return the issuer's answer with tokens."""
    audience = str(offered["audience"])
    wanted = {**form, "scope": str(offered["scopes"]), "audience": audience}
    if ":" in audience:  # RFC 8707 takes URIs only.
        wanted["resource"] = audience
    failed, started = ask_issuer(str(found["device_authorization_endpoint"]), ca_file, wanted)
    if failed is not None:
        raise SignInFailed(_reason(failed, started))
    try:
        pause = max(_PAUSE_SECONDS_MIN, float(started.get("interval", _INTERVAL_SECONDS)))
        give_up_at = time.monotonic() + float(started["expires_in"])
        polled = {**form, "grant_type": _GRANT, "device_code": str(started["device_code"])}
        note(f"Open {started['verification_uri']} and enter the code {started['user_code']}")
        if complete := started.get("verification_uri_complete"):
            note(f"or open {complete} and compare the code.")
    except (KeyError, ValueError, TypeError) as error:
        raise UnreadableError("the issuer's answer has no device code (RFC 8628)") from error
    while time.monotonic() < give_up_at:
        time.sleep(pause)  # RFC 8628 has clients poll.
        try:
            failed, answer = ask_issuer(str(found["token_endpoint"]), ca_file, polled)
        except IssuerSilent:
            failed, answer = "slow_down", {}  # The user may still confirm the code (3.5).
        if failed is None:
            return answer
        if failed == "slow_down":
            pause += _INTERVAL_SECONDS
        elif failed != "authorization_pending":
            raise SignInFailed(_reason(failed, answer))
    raise SignInFailed("the code was not confirmed in time; try again")


def _reason(code: str, answer: JsonMapping) -> str:
    known = {
        "access_denied": "the login was refused there",
        "expired_token": "the code has expired",
    }
    said = known.get(code) or answer.get("error_description") or "the issuer refuses the login"
    return f"not signed in: {said} [{code}]"
