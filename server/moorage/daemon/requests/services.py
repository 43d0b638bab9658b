"""The daemon's services for HTTP endpoints and for the injected clients of policies.

Sibling packages do not import one another; this module connects them. HTTP reads and writes
documents of the catalog directly.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Final, assert_never
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from moorage.catalog import opening
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.mirrored.external import External
from moorage.catalog.mirrored.prometheus import PrometheusSource
from moorage.catalog.mirrored.samples import Labels
from moorage.catalog.ports import Catalog
from moorage.catalog.values import Document as JsonDocument
from moorage.config.settings import Config
from moorage.core.state.facts import Refusal
from moorage.daemon.access.rates import UPLOADS, TenantRates
from moorage.daemon.access.tokens import LOCAL
from moorage.daemon.answers import encode
from moorage.daemon.publishing.aliases import Publishing
from moorage.daemon.publishing.management import Management
from moorage.daemon.publishing.vetting import vet, vet_change
from moorage.daemon.requests.http_calls import STOPPING, HttpCalls
from moorage.daemon.requests.router import Router
from moorage.gateway.deliver import Request
from moorage.model import Code, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.diagnosis import message_id
from moorage.protocol.errors import BadMessage
from moorage.protocol.fair_semaphore import FairSemaphore
from moorage.protocol.faults import ServiceError, status_of
from moorage.protocol.json_bounds import LARGE_BYTES
from moorage.records.json_values import JsonValue
from moorage.records.rights import Caller
from moorage.sandbox.host import contract
from moorage.sandbox.host.sandbox import Sandbox
from moorage.storage.base import RecordStore

_OVER_HTTP: Final = {
    "manage": "POST /policy/URI/manage",
    "quotas": "GET /quotas",
    "remove_quota": "DELETE /quotas/TENANT",
    "set_quota": "PUT /quotas/TENANT",
}
"""Operations that have an HTTP path of their own."""


async def open_catalog(config: Config, records: RecordStore, *, follows: bool = False) -> Catalog:
    """Open the embedded catalog, or the catalog that mirrors the services named in `config`."""
    root = config.policy_code_root
    hosts = frozenset(config.policy_code_hosts) or None
    external = External(
        clusters=config.cluster_service_url,
        metrics=config.global_cluster_metrics_url,
        block_metrics=config.global_block_metrics_url,
        search=config.search_server_api_url,
        policies=config.policy_db_url,
        timeout_seconds=config.external_timeout_seconds,
        cluster_refresh_seconds=config.cluster_refresh_seconds,
        metrics_fresh_seconds=config.metrics_fresh_seconds,
        policy_fresh_seconds=config.policy_fresh_seconds,
        stale_seconds_max=config.external_stale_seconds_max,
    )
    store = urlsplit(config.policy_db_url).hostname or ""
    sources = CodeSources(root, hosts, store)
    return await opening.open_catalog(records, sources, external, follows=follows)


def prometheus_source(config: Config) -> PrometheusSource:
    """Return the configured Prometheus source, for the catalog's poller."""
    return PrometheusSource(
        url=config.prometheus_url,
        labels=Labels(
            cluster_label=config.prometheus_cluster_label,
            cluster=config.prometheus_cluster,
            node_labels=config.prometheus_node_labels,
        ),
        interval_seconds=config.prometheus_interval_seconds,
        stale_seconds=config.prometheus_stale_seconds,
    )


class CatalogReader:
    """Answers the injected clients of policies from the catalog in this process.

    Args:
        catalog: The catalog; it is only read. None: it is set before any policy runs.
    """

    def __init__(self, catalog: Catalog | None = None) -> None:
        if catalog is not None:
            self.catalog: Catalog = catalog

    async def call(
        self, client: str, method: contract.Method, arguments: tuple[JsonValue, ...]
    ) -> JsonValue:
        """Answer a call that a policy makes with an injected client."""
        del client  # Each method belongs to one client.
        catalog, (argument,) = self.catalog, arguments
        try:
            match method:
                case "read_cluster":
                    return await catalog.clusters.get(argument)
                case "execute_query":
                    return await catalog.clusters.query(argument or {})
                case "get_cluster":
                    return await catalog.metrics.get(argument)
                case "query_clusters":
                    return await catalog.metrics.query(argument)
                case "get_block":
                    return await catalog.blocks.get("block_metrics", argument)
                case "query_blocks":
                    return await catalog.blocks.query("block_metrics", argument)
                case _:
                    assert_never(method)
        except ServiceError as error:
            raise contract.CallRefusedError(error.reason, error.status) from error

    def at_hand(
        self, client: str, method: contract.Method, ids: Sequence[str]
    ) -> Mapping[str, bytes]:
        """Return the result of `call` if all its documents are in memory."""
        del client
        match method:
            case "read_cluster":
                return self.catalog.memory.packed("cluster", ids)
            case "get_cluster":
                return self.catalog.memory.packed("metrics", ids)
            case "execute_query" | "query_clusters" | "get_block" | "query_blocks":
                return {}
            case _:
                assert_never(method)

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[contract.Document]:
        """Return the packed documents of clusters."""
        blobs = self.catalog.memory.blobs(cluster_ids)
        return [contract.Document(name, version, blob) for name, version, blob in blobs]


class PolicyServices:
    """Carries out authors' operations on policies; implements `web.services.Publications`.

    Args:
        sandbox: Checks a policy before it is registered.
        management: Runs `management` of policies.
        rates: Refuses policies that a tenant publishes too fast.
        note_surplus: Notes a refused publication in the audit log; see `AuditLog`.
    """

    def __init__(
        self,
        catalog: Catalog,
        sandbox: Sandbox,
        publishing: Publishing,
        management: Management,
        rates: TenantRates,
        note_surplus: Callable[[str, str, str], None],
    ) -> None:
        self._rates = rates
        self._note_surplus = note_surplus
        self._catalog = catalog
        self._sandbox = sandbox
        self.delete = publishing.delete_version
        self.manage = management.run
        self.logs = management.logs

    async def publish(
        self, document: JsonDocument, who: str, remote: str
    ) -> tuple[str, Sequence[str]]:
        """Check a policy's document, load it and run its examples in a cell, then store it."""
        try:
            self._rates.take_upload(Tenant(who))
        except ServiceError:
            self._note_surplus(who, remote, UPLOADS)
            raise
        prepared = await vet(self._catalog, self._sandbox, document, who)
        record = await self._catalog.policies.register(prepared, who)
        return record.ref.uri, prepared.warnings

    async def update(self, uri: str, change: JsonDocument, who: str) -> JsonDocument:
        """Update the description of a version; examples in the update must pass."""
        await vet_change(self._catalog, self._sandbox, uri, change, who)
        return await self._catalog.policies.update(uri, change, who)


class AllocationServices:
    """Serves `POST /allocate` (an ad-hoc request over HTTP), and operations over HTTP.

    Args:
        calls: The addresses of HTTP calls.
        websocket: Returns the address of the WebSocket.
    """

    def __init__(self, router: Router, calls: HttpCalls, websocket: Callable[[], str]) -> None:
        self._router = router
        self._calls = calls
        self._websocket = websocket
        self._turns = FairSemaphore(rests=True)

    async def allocate(
        self, body: bytes, caller: Caller, remote: str, traceparent: str
    ) -> tuple[int, bytes]:
        """Handle `POST /allocate`; return the status and the JSON of the answer."""
        try:
            if len(body) > LARGE_BYTES:
                async with self._turns.turn(caller.tenant):
                    message, warnings = self._allocation(body)
            else:
                message, warnings = self._allocation(body)
            if traceparent and not message.traceparent:
                message = structs.replace(message, traceparent=traceparent)
        except BadMessage as error:
            return status_of(error.code), _unread(error)
        return await self._result(message, caller, remote, warnings)

    def _allocation(self, body: bytes) -> tuple[wire.AllocationRequest, list[str]]:
        """Return the request in a body, and warnings about it."""
        self._refuse_operation(body)
        message = wire.decode_allocation(body)
        warnings = wire.ignored_fields(body, message)
        if message.stream:
            warnings.append("stream: it was ignored; progress is sent over the WebSocket only.")
        return message, warnings

    def _refuse_operation(self, body: bytes) -> None:
        """Refuse an operation in the body, and name the HTTP path of the operation."""
        if not (name := wire.operation_of(body)):
            return
        expected = f"no `op`; operations go over the WebSocket, {self._websocket()}"
        if path := _OVER_HTTP.get(name):
            expected += f", or for this operation {path}"
        identity = message_id(body)
        raise BadMessage(Code.BAD_MESSAGE, f"op: expected {expected}", "op", expected, identity)

    async def operate(
        self, operation: JsonDocument, caller: Caller, remote: str
    ) -> tuple[int, bytes]:
        """Carry out an operation; return the status and the JSON of the answer."""
        try:
            message = wire.decode(msgspec.json.encode(operation))
        except BadMessage as error:
            return status_of(error.code), _unread(error)
        return await self._result(message, caller, remote)

    async def _result(
        self, message: Request, caller: Caller, remote: str, warnings: Sequence[str] = ()
    ) -> tuple[int, bytes]:
        """Return the status and the JSON of the answer to a message."""
        if self._calls.draining:
            return status_of(STOPPING.code), encode(STOPPING, message_id=message.id)
        to, future = self._calls.open(caller, remote)
        try:
            taking = self._router.request(to, caller, message, warnings)
            if isinstance(
                taking, Coroutine | asyncio.Task
            ):  # A plain future pauses no HTTP caller.
                await taking
            reply = await future
        except asyncio.CancelledError:
            self._router.leave(to, caller)
            raise
        verdict = msgspec.json.decode(reply, type=_Verdict)
        if verdict.error is None:
            return 200, reply
        known = verdict.error.code is Code.UNAUTHORIZED  # The caller is known, and lacks the right.
        return status_of(Code.FORBIDDEN if known else verdict.error.code), reply


def _unread(error: BadMessage) -> bytes:
    refusal = Refusal(error.code, error.reason, error.field, error.expected, error.details)
    return encode(refusal, message_id=error.id)


async def settle(router: Router, calls: HttpCalls) -> None:
    """Wait until all present decisions of the core are durable and answered."""
    to, future = calls.open(LOCAL)
    router.request(to, LOCAL, wire.Status(request="settled"))
    await future


class _Error(msgspec.Struct):
    code: Code


class _Verdict(msgspec.Struct):
    """The fields of a reply that decide its HTTP status."""

    success: bool
    error: _Error | None = None
