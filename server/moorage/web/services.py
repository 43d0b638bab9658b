"""The interfaces of the services behind the HTTP endpoints; the daemon implements them.

Documents come directly from the catalog, by the Protocols of `protocol.registry`. This module has
the Protocols of the daemon's operations on policies, aliases and blocks. Every refusal is a
`protocol.faults.ServiceError`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moorage.model import Tenant
from moorage.protocol.faults import ServiceError
from moorage.protocol.logins import Logins, Tickets
from moorage.protocol.registry import (
    BlockDocuments,
    CanaryStart,
    ClusterDocuments,
    Document,
    ExecutorDocuments,
    Metrics,
    PolicyDocuments,
)
from moorage.records.audit import AuditEntry
from moorage.records.history import History
from moorage.records.json_values import JsonValue
from moorage.records.policies import ShadowComparison
from moorage.records.rights import Caller
from moorage.records.tokens import CreatedToken, NewToken, TokenState


class Publications(Protocol):
    """Publishes policies for a tenant."""

    async def publish(self, document: Document, who: str, remote: str) -> tuple[str, Sequence[str]]:
        """Check and register the PolicyRule document of a tenant, sent from an address.

        Return its URI and warnings.
        """

    async def update(self, uri: str, change: Document, who: str) -> Document:
        """Change descriptive fields of a PolicyRule document and return the new one."""

    async def delete(self, uri: str, who: str, *, force: bool) -> Document:
        """Delete a policy and return its document; with force, also a fallback of an alias."""

    async def manage(self, uri: str, tenant: Tenant, action: str, data: Document) -> JsonValue:
        """Call `management` of a policy, by version, alias or name; return its result."""

    async def logs(self, uri: str, tenant: Tenant) -> Document:
        """Return a version's recent output and log lines for requests of this tenant."""


class AliasChanges(Protocol):
    """Changes aliases of policies, with canaries and shadows; each change returns the alias."""

    def list(self) -> list[Document]:
        """Return all aliases without their histories."""

    def show(self, given: str) -> Document:
        """Return an alias: its version, canary, shadow and history."""

    async def activate(self, given: str, uri: str, who: str, *, force: bool = False) -> Document:
        """Make an alias point at a version; with force, even if the version fails as a shadow."""

    async def roll_back(self, given: str, who: str) -> Document:
        """Activate the version that was active before the present one."""

    async def start_canary(self, given: str, start: CanaryStart, who: str) -> Document:
        """Send a share of an alias's requests to a candidate."""

    async def stop_canary(self, given: str, who: str) -> Document:
        """Send all requests to the active version again."""

    def canary_report(self, given: str, who: str) -> Document:
        """Return the results of the active version and of the candidate."""

    async def start_shadow(self, given: str, uri: str, who: str) -> Document:
        """Evaluate a candidate on the active version's requests."""

    async def stop_shadow(self, given: str, who: str) -> Document:
        """Stop evaluating the candidate."""

    def shadow_report(self, given: str, who: str) -> ShadowComparison:
        """Return the part of the comparison of candidate and active version that `who` may see."""

    async def delete(self, given: str) -> Document:
        """Delete an alias; return its last state."""


class BlockActions(Protocol):
    """Finds places for blocks; a body is a block document, bare or as `{"input": document}`."""

    async def select_clusters(self, body: Document, tenant: str) -> JsonValue:
        """Return the result of a block's clusterAllocator: the selected clusters."""

    async def dry_run(self, body: Document, tenant: str) -> tuple[JsonValue, list[str]]:
        """Return the place where a block would run, and warnings."""

    async def allocate(self, body: Document, tenant: str) -> str:
        """Start a task that finds a place for a block; return the task's id."""

    async def task(self, task_id: str, tenant: str) -> Document:
        """Return `task_id`, `status` (`pending`, `completed`, `failed`), `result` or `error`."""


class NamedTokens(Protocol):
    """Lists and changes named tokens for a caller with the right to do so, at an address."""

    def list(self) -> list[TokenState]:
        """Return all named tokens."""

    async def create(self, new: NewToken, caller: Caller, remote: str) -> CreatedToken:
        """Create a token."""

    async def revoke(self, name: str, caller: Caller, remote: str) -> tuple[TokenState, bool]:
        """Refuse a token from now on; return it, and whether it was not revoked before."""


class AuditNotes(Protocol):
    """Adds entries to the audit log, for endpoints."""

    def note(self, entry: AuditEntry, /) -> None:
        """Add an entry to the audit log."""

    def note_refusal(self, caller: Caller, remote: str, what: str, reason: str, /) -> None:
        """Add an entry for a refusal because of a missing right."""

    def note_failed_login(self, remote: str, door: str, why: str) -> None:
        """Add an entry for a request with a wrong or missing token."""

    async def flush(self) -> None:
        """Wait until all entries are written."""


class OwnershipChecks(Protocol):
    """Checks whether a caller may change an object; raises `unauthorized` (403) if not."""

    def check_cluster(self, caller: Caller, cluster_id: str, /) -> None:
        """Check that a caller may change or delete a cluster."""

    def check_new_cluster(self, caller: Caller, cluster_id: str, /) -> None:
        """Check that a caller may add a cluster of this id."""

    def check_metrics(self, caller: Caller, cluster_id: str, /) -> None:
        """Check that a caller may report or remove the metrics of a cluster."""

    def check_block(self, caller: Caller, block_id: str, /) -> None:
        """Check that a caller may change or delete a block, or its metrics."""

    async def check_executor(self, caller: Caller, name: str, /) -> None:
        """Check that a caller may change or delete an executor."""

    async def check_policy(self, caller: Caller, uri: str, /) -> None:
        """Check that a caller may change or delete a policy."""

    async def check_alias(self, caller: Caller, alias: str, /) -> None:
        """Check that a caller may change or delete an alias."""

    def check_shadow(self, caller: Caller, alias: str, /) -> None:
        """Check that a caller may replace or stop the shadow of an alias, if it has one."""


class SignInFlow(Protocol):
    """The sign-in of a browser at an issuer, and its sign-out there."""

    async def begin(self, redirect_uri: str) -> tuple[str, str] | None:
        """Return the issuer's URL and the cookie's proof; None if the issuer does not answer."""

    async def finish(
        self, proof: str, answer: Mapping[str, str], redirect_uri: str
    ) -> dict[str, str] | None:
        """Return the issuer's tokens by name; `{}`: it refuses; None: it does not answer."""

    async def leave(self, id_token: str, redirect_uri: str) -> tuple[str, str] | None:
        """Return the URL that ends the issuer's login, and the state to expect back; or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The additional services of the web console.

    Args:
        logins: The logins of persons.
        needs_login: Returns whether tokens are configured.
        local: The caller of each request if no tokens are configured.
        websocket_scheme: Scheme of the WebSocket's URL: `ws` or `wss`.
        websocket_port: Returns the port of the WebSocket.
        expel: Closes the WebSockets whose login has ended.
        on_stranger: Called with the address of a login with a wrong token, and the token.
        pending: Given a token, returns an awaitable to wait for before a login, or None.
        sign_in: Signs browsers in at an issuer; None: no issuer.
        try_policy: Takes the body of a trial in the playground and its caller; returns the outcome.
    """

    logins: Logins
    needs_login: Callable[[], bool]
    local: Caller
    websocket_scheme: str
    websocket_port: Callable[[], int]
    expel: Callable[[], None]
    on_stranger: Callable[[str, str | None], None]
    pending: Callable[[str | None], Awaitable[bool] | None]
    sign_in: SignInFlow | None
    try_policy: Callable[[Document, Caller], Awaitable[Document]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyServices:
    """The services behind the HTTP endpoints of a standby.

    Args:
        authenticate: Takes the bearer token, or None; returns the caller, or None for 401.
        pending: Takes the token; returns an awaitable to wait for before `authenticate`, or None.
        why_refused: Takes the token; returns why `authenticate` refuses it, for the audit log.
        readiness: Returns whether requests can be served, and the state of each component.
        refusal: Returns the refusal of all other requests.
        metrics_text: Returns the server's own metrics in the Prometheus text format.
        audit: Records changes, refusals and failed logins.
    """

    authenticate: Callable[[str | None], Caller | None]
    pending: Callable[[str | None], Awaitable[bool] | None]
    why_refused: Callable[[str | None], str]
    readiness: Callable[[], tuple[bool, Document]]
    refusal: Callable[[], ServiceError]
    metrics_text: Callable[[], bytes]
    audit: AuditNotes
    console: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyReads:
    """Gives the age of a standby's answers, and the refusal that names the leader.

    Args:
        refusal: Returns the refusal of all requests that the standby does not answer.
        doubt: Returns why the standby refuses reads; None if it answers them.
        headers: Returns the headers of the standby's answers: revision, time, leader.
    """

    refusal: Callable[[], ServiceError]
    doubt: Callable[[], ServiceError | None]
    headers: Callable[[], list[tuple[bytes, bytes]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServices:
    """The services behind the HTTP endpoints of a server that leads.

    Args:
        ownership: Decides who may change clusters, policies and aliases.
        blocks: Documents of blocks, and of their metrics.
        publications: Publishes, changes and deletes policies.
        aliases: Changes aliases of policies.
        block_actions: Finds places for blocks.
        search: Takes the kind (a filter or a ranking), its body, bare or in its envelope, and the
            caller's tenant; returns the found cluster documents, and warnings.
        execute: Takes an executor, a body and the caller's tenant; returns the policy's value.
        allocate: Takes the body of `POST /allocate`, the caller and its address, and the header
            `traceparent` or ""; returns the status and the JSON of the answer. None: that endpoint
            is not served.
        operate: Takes an operation, as on the socket, the caller and its address; returns the same
            as `allocate`.
        named_tokens: Lists, creates and revokes named tokens.
        authenticate: Takes the bearer token, or None if there is none; returns the caller,
            or None to answer 401.
        pending: Takes the token; returns an awaitable to wait for before `authenticate`, or None.
            The awaitable's result: whether the token can be judged now.
        why_refused: Takes the token; returns why `authenticate` refuses it, for the audit log.
        sign_in: The answer to `GET /sign-in`: parameters to sign in with OpenID Connect.
        readiness: Returns whether requests can be served, and the state of each component.
        metrics_text: Returns the server's own metrics in the Prometheus text format.
        history: Takes the caller, minutes, and minutes per point; returns figures of the last day.
        tickets: Tickets with which browser pages open a WebSocket.
        audit: Records changes, refusals and failed logins.
        console: None: the web console is not served.
        standby: The reads of a standby, which changes nothing; None: this server leads.
    """

    clusters: ClusterDocuments
    ownership: OwnershipChecks
    metrics: Metrics
    blocks: BlockDocuments
    executors: ExecutorDocuments
    policies: PolicyDocuments
    publications: Publications
    aliases: AliasChanges
    block_actions: BlockActions
    search: Callable[
        [Literal["filter", "search"], Document, Tenant], Awaitable[tuple[list[Document], list[str]]]
    ]
    execute: Callable[[str, Document, Tenant], Awaitable[JsonValue]]
    allocate: Callable[[bytes, Caller, str, str], Awaitable[tuple[int, bytes]]] | None
    operate: Callable[[Document, Caller, str], Awaitable[tuple[int, bytes]]]
    named_tokens: NamedTokens
    authenticate: Callable[[str | None], Caller | None]
    pending: Callable[[str | None], Awaitable[bool] | None]
    why_refused: Callable[[str | None], str]
    sign_in: Document
    readiness: Callable[[], tuple[bool, Document]]
    metrics_text: Callable[[], bytes]
    history: Callable[[Caller, int, int], History]
    tickets: Tickets
    audit: AuditNotes
    console: Console | None
    standby: StandbyReads | None = None
