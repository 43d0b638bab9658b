"""The types of the web console's requests and answers over HTTP: see `schemas`."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from moorage.records.json_values import JsonObject
from moorage.web.schemas import WebType


class ConsoleLogin(WebType, forbid_unknown_fields=True):
    """A login to the console."""

    token: Annotated[str, Meta(description="a token of this server")]


class ConsoleSession(WebType):
    """The session of a page: its tenant, its role and the server.

    `rights`: the names of its role's rights. `login`: whether the daemon has tokens. `csrf`: the
    value that requests for changes must send as `X-Console-Token`.
    """

    tenant: str
    role: str
    operator: bool
    rights: list[str]
    login: bool
    csrf: str
    websocket: str
    version: str
    expires_at: float | None = field(name="expires_at")


class LoggedOut(WebType):
    """The answer to a logout.

    `sign_out`: The URL at which the browser ends the login at the issuer, if there is one.
    """

    sign_out: str | UnsetType = field(default=UNSET, name="sign_out")


class PlaygroundRun(WebType, rename=None):
    """A policy to try: `code` of its file, or the URI of a version.

    `fleet`: `"live"`, `{"clusters": [documents]}`, or `{"decision": request}`, the fleet before
    that decision. `requests`: at most 100; each one that fits takes its place on the fleet.
    """

    code: str | UnsetType = UNSET
    policy_rule_uri: str | UnsetType = field(default=UNSET, name="policy_rule_uri")
    fleet: str | JsonObject = "live"
    requests: list[JsonObject] = field(default_factory=list[JsonObject])
    parameters: JsonObject | UnsetType = UNSET
    settings: JsonObject | UnsetType = UNSET


class PlaygroundBacktest(WebType, rename=None):
    """A policy to backtest on an initially empty fleet; `trace` is a table (CSV) of requests."""

    trace: str
    code: str | UnsetType = UNSET
    policy_rule_uri: str | UnsetType = field(default=UNSET, name="policy_rule_uri")
    fleet: str | JsonObject = "live"


class PlaygroundOutcome(WebType):
    """`results`, `prints` and `lines` of a run, or `curve` and `granted` of a backtest."""
