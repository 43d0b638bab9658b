"""HTTP clients: two for policies that run outside the server, and one for the command line.

`ClusterClient` and `GlobalClusterMetricsClient` have the documented names and messages
(docs/reference/allocation-server.md, "Policies"). `Services` is the client of a Moorage server's
policy and cluster registries.
"""

import json
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import quote

import msgspec

from moorage.lazy import LazyModule
from moorage.model import Code
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage_client.addresses import Addresses
from moorage_client.answers import UnreadableError, read_as
from moorage_client.endpoint import HTTP_URL_DEFAULT, Endpoint, read_token, setting
from moorage_client.errors import (
    ConnectionFailed,
    MoorageError,
    ProtocolViolated,
    ProxyFailed,
    RequestRefused,
    Timeout,
    Unauthorized,
    refusal,
)
from moorage_client.sign_in import bearer_of

if TYPE_CHECKING:
    import requests

    from moorage_client import http_session
else:
    requests = LazyModule("requests")
    http_session = LazyModule("moorage_client.http_session")

SECONDS_MAX: Final = 30.0
"""Seconds for connecting, and for each wait for more of a reply."""

CONNECT_SECONDS_MAX: Final = 3.0
"""Seconds for connecting to one address if there are others to try."""

RECONNECT_SECONDS: Final = 30.0
"""Seconds for which the client looks for the leader."""

ANSWER_SECONDS_MAX: Final = 600.0
"""Longest time for a whole answer, in seconds."""

ANSWER_BYTES_MAX: Final = 160 * 1024 * 1024
"""Maximum bytes read of one answer. Moorage's own servers send less."""

_REDIRECTIONS: Final = 3
_GATEWAY_STATUS: Final = frozenset({502, 503, 504})  # Without JSON, these come from a proxy.
_PIECE_BYTES: Final = 1 << 16

Rows = list[JsonObject]

_CODES: Final[Mapping[int, Code]] = {
    400: Code.BAD_MESSAGE,
    401: Code.UNAUTHORIZED,
    403: Code.UNAUTHORIZED,
    404: Code.NOT_FOUND,
    409: Code.ALREADY_EXISTS,
    413: Code.TOO_LARGE,
    421: Code.NOT_LEADER,
    422: Code.BAD_MESSAGE,
    429: Code.BUSY,
    503: Code.UNAVAILABLE,
}


_IDEMPOTENT: Final = frozenset({"GET", "PUT"})

_NO_POST: Final = frozenset({404, 405, 501})
"""HTTP statuses of a metrics service that accepts queries only by GET, as documented."""
logger = logging.getLogger(__name__)


class APIError(Exception):
    """A metrics service refused a request.

    Args:
        error: The service's message.
        status_code: HTTP status of the reply.
    """

    def __init__(self, error: str, status_code: int | None = None) -> None:
        super().__init__(error, status_code)
        self.error = error
        self.status_code = status_code

    def __str__(self) -> str:
        return f"{self.error} (HTTP {self.status_code})"


def _send(method: str, url: str, **given: Any) -> "requests.Response":
    """Send a request of one of the two documented clients, with the environment's token."""
    with http_session.HttpSession(Endpoint(url, read_token(None))) as session:
        return session.request(method, url, timeout=SECONDS_MAX, stream=True, **given)


class ClusterClient:
    """Reads cluster documents at `CLUSTER_SERVICE_URL`; no method raises."""

    def __init__(self) -> None:
        self.base_url = setting(None, "CLUSTER_SERVICE_URL", default=HTTP_URL_DEFAULT)

    def read_cluster(self, cluster_id: str) -> tuple[bool, JsonValue]:
        """Return `(True, document)`, or `(False, message)`."""
        return self._ask("GET", cluster_id)

    def execute_query(self, query: JsonMapping) -> tuple[bool, JsonValue]:
        """Return `(True, documents)` of the clusters that match, or `(False, message)`."""
        return self._ask("POST", "query", json={"query": query})

    def _ask(self, method: str, name: str, **given: Any) -> tuple[bool, JsonValue]:
        try:
            url = f"{self.base_url}/clusters/{quote(name, safe='')}"
            response = _send(method, url, **given)
            content = _content(response)
            response.raise_for_status()
            return True, json.loads(content)
        except requests.exceptions.HTTPError as http_err:
            return False, f"HTTP error occurred: {http_err}"
        except Exception as err:  # noqa: BLE001  # Documented: every error becomes a message.
            return False, f"Error occurred: {err}"


class GlobalClusterMetricsClient:
    """Reads metrics documents at `GLOBAL_CLUSTER_METRICS_URL`.

    Its methods raise `requests.RequestException` for transport and HTTP errors, `ValueError` for a
    reply that is not JSON, and `APIError` for a reply with `success: false`.
    """

    def __init__(self) -> None:
        named = setting(None, "GLOBAL_CLUSTER_METRICS_URL", default=HTTP_URL_DEFAULT)
        self.base_url = named.rstrip("/")
        logger.info("GlobalClusterMetricsClient initialized with base URL: %s", self.base_url)

    def _handle_response(self, response: "requests.Response") -> JsonValue:
        try:
            content = _content(response)
            response.raise_for_status()
            json_data = json.loads(content)
            if not json_data.get("success", False):
                raise APIError(json_data.get("error", "Unknown error"), response.status_code)
            return json_data.get("data")
        except requests.RequestException as e:
            logger.error("HTTP error: %s", e)  # noqa: TRY400  # Documented: text, no trace.
            raise
        except ValueError as e:
            logger.error("Invalid JSON response: %s", e)  # noqa: TRY400  # As above.
            raise

    def get_cluster(self, cluster_id: str) -> JsonValue:
        """Return the metrics document of a cluster."""
        url = f"{self.base_url}/cluster/{quote(cluster_id, safe='')}"
        return self._handle_response(_send("GET", url))

    def query_clusters(self, query_params: JsonMapping | None = None) -> JsonValue:
        """Return the metrics documents that match a Mongo-style filter, as in a policy; None: all.

        A service without POST gets the filter as URL parameters, as documented.
        """
        url, filtering = f"{self.base_url}/cluster/query", dict(query_params or {})
        with _send("POST", url, json=filtering) as response:
            if response.status_code not in _NO_POST:
                return self._handle_response(response)
        return self._handle_response(_send("GET", url, params=filtering))


class Services:
    """Reads and changes the policy and cluster registries of a Moorage server.

    Every method raises `ConnectionFailed` if nothing answers, `Timeout` if no answer comes in time,
    and `RequestRefused` if the server refuses. A token or a file that cannot be used raises
    `SettingRefused` at once.

    Args:
        url: HTTP URL of the server, or of several, separated by commas; default
            `MOORAGE_HTTP_URL`, else `http://127.0.0.1:8080`.
        token: The token of the caller; default `MOORAGE_TOKEN`, else the file `MOORAGE_TOKEN_FILE`,
            else none.
        timeout: Longest time in seconds for connecting, and for each wait for more of a reply.
        ca_file: PEM file of the authority that signed the server's certificate; default
            `MOORAGE_CA_FILE`, else `SSL_CERT_FILE`, else the authorities that this machine knows.
        reconnect_seconds: How long to look for the leader if a standby answers.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = SECONDS_MAX,
        ca_file: str | None = None,
        reconnect_seconds: float = RECONNECT_SECONDS,
    ) -> None:
        self._reconnect_seconds = reconnect_seconds
        self._addresses = Addresses(Endpoint.of_http(url, token, ca_file))
        self._at = self._addresses.order()[0]
        self._timeout = timeout
        self._sessions = {
            each: http_session.HttpSession(each, bearer_of) for each in self._addresses.order()
        }
        self.warnings: tuple[str, ...] = ()
        """Warnings in the latest reply: possible mistakes of the sender."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for session in self._sessions.values():
            session.close()

    @property
    def url(self) -> str:
        """The address of the server that answered last; before that, the first address."""
        return self._at.url

    def sign_in(self) -> JsonValue:
        """Return what a sign-in needs: `issuer`, `client_id`, `audience`, `scopes`."""
        return self._request_data("GET", "/sign-in", kind=dict[str, str])

    def check_token(self) -> None:
        """Check this client's token at the server; an error says why the server refuses it."""
        self._request_data("POST", "/websocket-ticket")

    def publish_policy(self, document: JsonMapping) -> str:
        """Register a policy; return its URI. Registering the same content again is not an error.

        Afterwards `self.warnings` contains possible mistakes of the author.
        """
        registered = self._request_data("POST", "/policy", document, kind=JsonObject)
        return str(self._read_value(str, registered.get("policy_rule_uri")))

    def policy(self, uri: str) -> JsonValue:
        """Return the PolicyRule document of a policy."""
        return self._request_data("GET", f"/policy/{quote(uri, safe='')}", kind=JsonObject)

    def policy_history(self, uri: str) -> JsonValue:
        """Return who changed a policy and when: `at`, `who`, `what`, `digest`, `fields`."""
        return self._request_data("GET", f"/policy/{quote(uri, safe='')}/history", kind=Rows)

    def policies(self, query: JsonMapping | None = None) -> JsonValue:
        """Return the PolicyRule documents that match a Mongo-style filter; None: all."""
        return self._request_data("POST", "/policy/query", query or {}, kind=Rows)

    def delete_policy(self, uri: str, *, force: bool = False) -> None:
        """Delete a policy; with `force` also the fallback version of an alias."""
        query = "?force=true" if force else ""
        self._request_data("DELETE", f"/policy/{quote(uri, safe='')}{query}")

    def manage_policy(self, uri: str, action: str, data: JsonMapping | None = None) -> JsonValue:
        """Call the `management` of a policy and return its result."""
        body = {"action": action, "data": data or {}}
        return self._request_data("POST", f"/policy/{quote(uri, safe='')}/manage", body)

    def policy_logs(self, uri: str) -> JsonValue:
        """Return a version's recent output and log lines for requests of this client's tenant."""
        return self._request_data("GET", f"/policy/{quote(uri, safe='')}/logs")

    def aliases(self) -> JsonValue:
        """Return all aliases, without their histories."""
        return self._request_data("GET", "/policy-alias", kind=Rows)

    def alias(self, alias: str) -> JsonValue:
        """Return an alias: its active version, its canary, its shadow and its history."""
        return self._request_data("GET", _alias(alias), kind=JsonObject)

    def activate_policy(
        self, alias: str, policy_rule_uri: str, *, force: bool = False
    ) -> JsonValue:
        """Make an alias point at a version; return the alias.

        Args:
            alias: `name:word`, or a bare policy name for its `stable`; a missing alias is created.
            policy_rule_uri: A registered version of the alias's policy.
            force: Whether to accept a version that fails as the alias's shadow.
        """
        body: JsonObject = {"policy_rule_uri": policy_rule_uri}
        body |= {"force": True} if force else {}  # Earlier servers do not know the field.
        return self._request_data("POST", _alias(alias, "/activate"), body, kind=JsonObject)

    def roll_back_policy(self, alias: str) -> JsonValue:
        """Make an alias point at its previous version; return the alias."""
        return self._request_data("POST", _alias(alias, "/rollback"), {}, kind=JsonObject)

    def delete_alias(self, alias: str) -> JsonValue:
        """Delete an alias and return its last state; its versions stay."""
        return self._request_data("DELETE", _alias(alias), kind=JsonObject)

    def start_canary(
        self,
        alias: str,
        policy_rule_uri: str,
        percent: float,
        *,
        by: Literal["request", "tenant"] = "request",
        seed: int = 0,
    ) -> JsonValue:
        """Send a share of an alias's requests to another version; return the alias.

        Args:
            alias: `name:word`, or a bare policy name for its `stable`.
            policy_rule_uri: The candidate.
            percent: The candidate's share of the requests: more than 0, at most 100.
            by: What decides the version: the request (its repetition gets the same version), or its
                tenant.
            seed: Another seed selects other requests or tenants.
        """
        body = {"policy_rule_uri": policy_rule_uri, "percent": percent, "by": by, "seed": seed}
        return self._request_data("POST", _alias(alias, "/canary"), body, kind=JsonObject)

    def stop_canary(self, alias: str) -> JsonValue:
        """Send all requests of an alias to its active version again; return the alias."""
        return self._request_data("DELETE", _alias(alias, "/canary"), kind=JsonObject)

    def canary_report(self, alias: str) -> JsonValue:
        """Return the results of the active version and of the canary."""
        return self._request_data("GET", _alias(alias, "/canary"), kind=JsonObject)

    def start_shadow(self, alias: str, policy_rule_uri: str) -> JsonValue:
        """Evaluate a candidate on the alias's requests, without effect; return the alias."""
        body = {"policy_rule_uri": policy_rule_uri}
        return self._request_data("POST", _alias(alias, "/shadow"), body, kind=JsonObject)

    def stop_shadow(self, alias: str) -> JsonValue:
        """Stop evaluating the candidate; return the alias."""
        return self._request_data("DELETE", _alias(alias, "/shadow"), kind=JsonObject)

    def shadow_report(self, alias: str) -> JsonValue:
        """Return the differences between candidate and active version, and the candidate's cost."""
        return self._request_data("GET", _alias(alias, "/shadow"), kind=JsonObject)

    def clusters(self, query: JsonMapping | None = None) -> JsonValue:
        """Return the cluster documents that match a Mongo-style filter; None: all."""
        found = self._call("POST", "/clusters/query", {"query": query or {}})
        return self._read_value(Rows, found)

    def create_cluster(self, document: JsonMapping) -> JsonValue:
        """Register a cluster that does not exist yet; return its stored document."""
        return self._read_value(JsonObject, self._call("POST", "/clusters", document))

    def replace_cluster(self, document: JsonMapping) -> JsonValue:
        """Replace the document of the cluster `document["id"]`; return the stored document.

        Stored fields that the new document lacks are removed; a plain PUT preserves them.
        """
        path = f"/clusters/{quote(str(document['id']), safe='')}"
        stored = {name for found in self.clusters({"id": document["id"]}) for name in found}
        gone = sorted(name for name in stored - document.keys() if "." not in name)
        change = {**document, "$unset": gone} if gone else document
        return self._read_value(JsonObject, self._call("PUT", path, change))

    def add_nodes(self, document: JsonMapping) -> JsonValue:
        """Add the nodes of a document to the cluster `document["id"]`; return the stored document.

        The cluster keeps its other nodes and fields, also those that other users add at the same
        time. If the cluster does not exist, the document becomes the cluster.
        """
        path = f"/clusters/{quote(str(document['id']), safe='')}/nodes"
        return self._read_value(JsonObject, self._call("POST", path, document))

    def delete_cluster(self, cluster_id: str) -> JsonValue:
        """Remove a cluster from the inventory; return its document. Leases on the cluster stay."""
        path = f"/clusters/{quote(cluster_id, safe='')}"
        return self._read_value(JsonObject, self._call("DELETE", path))

    def put_cluster(self, document: JsonMapping) -> JsonValue:
        """Register a cluster, or replace its document; return the stored document."""
        try:
            return self.create_cluster(document)
        except RequestRefused as refused:
            if refused.code != Code.ALREADY_EXISTS:
                raise
        return self.replace_cluster(document)

    def _read_value(self, kind: Any, document: JsonValue) -> JsonValue:
        try:
            return read_as(kind, document)
        except UnreadableError as error:
            finding = f"sent a reply that does not match the protocol: {error}"
            raise ProtocolViolated(self._at.shown, finding) from error

    def _request_data(
        self, method: str, path: str, body: JsonMapping | None = None, *, kind: Any = Any
    ) -> JsonValue:
        """Send a request; return the `data` in the envelope of the reply."""
        reply = self._call(method, path, body)
        if not isinstance(reply, dict) or "success" not in reply:
            finding = f"the answer to {method} {path} has no `success`"
            raise ProtocolViolated(self._at.shown, finding)
        if reply["success"] is not True:
            raise _refusal(reply, Code.INTERNAL, "the server gave no reason")
        self.warnings = tuple(self._read_value(list[str], reply.get("warnings") or []))
        return self._read_value(kind, reply.get("data"))

    def _call(self, method: str, path: str, body: JsonMapping | None = None) -> JsonValue:
        """Send a request to the server that leads; return the answer.

        After a failure, the request is sent again if no server carried it out, or a repetition is
        safe.
        """
        give_up_at = time.monotonic() + self._reconnect_seconds
        is_led = False
        for pause in self._addresses.pauses():
            try:
                return self._round(method, path, body)
            except RequestRefused as refused:
                if refused.code != Code.NOT_LEADER:
                    raise
                led = self._addresses.redirected(self._at, refused, "leader_http")
                if led and not is_led:
                    is_led = True
                    continue
                if time.monotonic() >= give_up_at:
                    word = self._addresses.word_of(self._at)
                    failed = self._addresses.failure(ConnectionFailed(self._at.shown, word))
                    raise failed from refused
            time.sleep(pause)  # No event tells a client that a standby takes over.
        raise AssertionError("this line is never reached: the pauses are endless")

    def _round(self, method: str, path: str, body: JsonMapping | None) -> JsonValue:
        """Send a request to the first address that answers."""
        errors: list[MoorageError] = []
        repeats = method in _IDEMPOTENT or path.endswith("/query")
        for at in self._addresses.order():
            try:
                answer = self._send(at, method, path, body)
            except (ConnectionFailed, Unauthorized, Timeout) as error:
                was_sent = not isinstance(error, Unauthorized) and self._session(
                    at
                ).may_have_reached(error)
                if not self._addresses.several or (was_sent and not repeats):
                    raise
                self._addresses.note_failure(at, error)
                errors.append(error)
            except RequestRefused:
                self._at = at
                raise
            else:
                self._at = at
                self._addresses.note_open(at)
                return answer
        if all(isinstance(each, Unauthorized) for each in errors):
            raise errors[0]
        raise self._addresses.failure(errors[-1], errors)

    def _session(self, at: Endpoint) -> "http_session.HttpSession":
        if at not in self._sessions:  # A standby has named this address.
            self._sessions[at] = http_session.HttpSession(at, bearer_of)
        return self._sessions[at]

    def _send(self, at: Endpoint, method: str, path: str, body: JsonMapping | None) -> JsonValue:
        """Send a request to one address; return the answer."""
        session, shown = self._session(at), at.shown
        connect = (
            min(self._timeout, CONNECT_SECONDS_MAX) if self._addresses.several else self._timeout
        )
        try:
            with session.request(
                method,
                at.url + path,
                json=body,
                timeout=(connect, self._timeout),
                stream=True,
                allow_redirects=False,  # Send the token and the body to no other server.
            ) as response:
                text = _content(response)
        except requests.Timeout as error:
            seconds = connect if isinstance(error, requests.ConnectTimeout) else self._timeout
            late = f"{shown}: no reply within {seconds:g} s{session.through}"
            raise Timeout(late) from error
        except _TooLongError as error:
            raise ProtocolViolated(shown, f"the answer to {method} {path} has {error}") from error
        except (requests.RequestException, ValueError) as error:  # ValueError: a bad redirection.
            raise session.failure(error) from error
        if response.status_code // 100 == _REDIRECTIONS:
            finding = (
                f"{method} {path} answered HTTP {response.status_code}: use the URL to which it "
                "redirects"
            )
            raise ProtocolViolated(shown, finding)
        try:
            reply = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            what = f"{method} {path}"
            raise _unreadable(shown, what, response, text, session.through, error) from error
        found = response.ok or response.status_code == HTTPStatus.NOT_FOUND
        if found and "moorage-as-of" in response.headers:
            # The answer of a standby may be outdated: ask the leader.
            leader = response.headers.get("moorage-leader") or None
            raise refusal(Code.NOT_LEADER, "is a standby", details={"leader_http": leader})
        if not response.ok:
            code = _CODES.get(response.status_code, Code.INTERNAL)
            refused = _refusal(reply, code, response.reason)
            has_token = "Authorization" in response.request.headers
            if refused.code == Code.UNAUTHORIZED and not has_token:
                refused.reason += at.no_token
            raise refused
        return reply


def _unreadable(
    shown: str,
    request: str,
    response: "requests.Response",
    text: bytes,
    through: str,
    error: Exception,
) -> ConnectionFailed:
    """Return the error of this package for an answer that is not JSON.

    Args:
        shown: URL of the server.
        request: Method and path.
        response: The answer.
        text: Body of the answer.
        through: The part of messages that names the environment's proxy; may be empty.
        error: What reading the answer raised.
    """
    if response.status_code == HTTPStatus.UPGRADE_REQUIRED and text:  # The port speaks TLS.
        why = text.decode(errors="replace").strip()[:500] + through
        return ProtocolViolated(shown, why, other_port=True)
    answered = f"{request} answered HTTP {response.status_code}"
    if response.status_code in _GATEWAY_STATUS:
        failed = ProxyFailed if through else ConnectionFailed
        answered += f" {response.reason}, from a proxy before the server"
        return failed(shown, answered + through)
    return ProtocolViolated(shown, f"{answered}, and no JSON: {error}{through}")


class _TooLongError(ValueError):
    """An answer is longer than any that a real server sends."""


def _content(response: "requests.Response") -> bytes:
    """Read an answer, with limits for its length and time."""
    content, late_at = bytearray(), time.monotonic() + ANSWER_SECONDS_MAX
    with response:
        for piece in response.iter_content(_PIECE_BYTES):
            content += piece
            if len(content) > ANSWER_BYTES_MAX:
                raise _TooLongError(f"more than {ANSWER_BYTES_MAX} bytes")
            if time.monotonic() > late_at:
                raise requests.Timeout(f"an answer took longer than {ANSWER_SECONDS_MAX:g} s")
    return bytes(content)


def _alias(alias: str, action: str = "") -> str:
    return f"/policy-alias/{quote(alias, safe='')}{action}"


def _refusal(reply: JsonValue, code: Code, reason: str) -> RequestRefused:
    """Return the error for a failure reply; documented services send `error` as plain text.

    A Moorage server also sends `details`.
    """
    body: JsonObject = reply if isinstance(reply, dict) else {}
    error, details = body.get("error"), body.get("details")
    fields: JsonObject = dict(details) if isinstance(details, dict) else {}
    fields |= error if isinstance(error, dict) else {"reason": error}
    return refusal(
        str(fields.pop("code", code)),
        str(fields.pop("reason", None) or body.get("message") or reason),
        field=str(fields.pop("field", "")),
        expected=str(fields.pop("expected", "")),
        details=fields,
    )
