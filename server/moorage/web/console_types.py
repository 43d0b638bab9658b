"""What the web console is told and sends over HTTP, as types: see `schemas`."""

from typing import Annotated

from msgspec import Meta, field

from moorage.web.schemas import WebType

__all__ = ["ConsoleLogin", "ConsoleSession", "LoggedOut"]


class ConsoleLogin(WebType, forbid_unknown_fields=True):
    """A login to the console."""

    token: Annotated[str, Meta(description="a token of this server")]


class ConsoleSession(WebType):
    """Whose page asks.

    `login`: the daemon has tokens. `csrf`: what changing requests carry as `X-Console-Token`.
    """

    tenant: str
    operator: bool
    login: bool
    csrf: str
    websocket: str
    version: str
    expires_at: float | None = field(name="expires_at")


class LoggedOut(WebType):
    """Nothing is left of a login."""
