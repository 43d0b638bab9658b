"""What the HTTP doors and the policies' injected clients reach: the catalog, behind one class.

Implements `web.services.WebServices` and `contract`'s `Services`. Siblings do not meet; they meet
here.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.catalog import opening
from moorage.catalog.allowances import Allowance
from moorage.catalog.changes import CatalogChange
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.embedded.aliases import Canary
from moorage.catalog.mirrored.external import External
from moorage.catalog.mirrored.prometheus import PrometheusSource
from moorage.catalog.mirrored.samples import Labels
from moorage.catalog.ports import Catalog
from moorage.catalog.values import Document as JsonDocument
from moorage.catalog.values import PolicyRecord, SearchAction
from moorage.config.settings import Config
from moorage.core.facts import Refusal
from moorage.daemon.blocks.tasks import BlockServices
from moorage.daemon.publishing.aliases import Publishing
from moorage.daemon.publishing.management import Management
from moorage.daemon.publishing.vetting import vet, vet_change
from moorage.daemon.requests.admission import Admission
from moorage.daemon.requests.answers import refuse
from moorage.daemon.requests.executor import PolicyExecutor
from moorage.daemon.requests.finder import Finder
from moorage.daemon.requests.http_calls import HttpCalls
from moorage.gateway.deliver import Request
from moorage.model import Code, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.errors import BadMessage
from moorage.protocol.faults import ServiceError, twin_status
from moorage.sandbox.host import contract
from moorage.sandbox.host.sandbox import Sandbox

_CANARY_FIELDS: Final = {
    "policy_rule_uri": "the URI of a registered version",
    "percent": "a number above 0, up to 100",
    "by": "`request` or `tenant`",
    "seed": "a whole number",
}
STOPPING: Final = Refusal(Code.SHUTTING_DOWN, "The server is stopping; connect again in a moment.")


async def open_catalog(
    config: Config,
    changed: Callable[[CatalogChange], None],
    examine: Callable[[PolicyRecord], Awaitable[str]],
) -> Catalog:
    """Open the embedded catalog, or the one that mirrors the services named in its place.

    Args:
        config: Says which, and where.
        changed: Told what changes.
        examine: Runs the examples of mirrored policies, as `policy_mirror` takes it.

    """
    path, root = config.data_dir / "catalog.db", config.policy_code_root
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
    return await opening.open_catalog(path, changed, CodeSources(root, hosts), external, examine)


def prometheus_source(config: Config) -> PrometheusSource:
    """Return what the configuration says of Prometheus, as the catalog's poller takes it."""
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


class PolicyServices:
    """What a policy's injected clients reach. Answers come from the catalog in this process."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def call(self, client: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer an injected client; see `sandbox.host.contract.HostServices`."""
        try:
            match client, method, arguments:
                case ["cluster_client", "read_cluster", (cluster_id,)]:
                    return await self._catalog.clusters.get(cluster_id)
                case ["cluster_client", "execute_query", (query,)]:
                    return await self._catalog.clusters.query(query or {})
                case ["cluster_metrics_client", "get_cluster", (cluster_id,)]:
                    return await self._catalog.metrics.get(cluster_id)
                case ["cluster_metrics_client", "query_clusters", (query,)]:
                    return await self._catalog.metrics.query(query)
                case ["block_metrics_client", "get_block", (block_id,)]:
                    return await self._catalog.blocks.get("block_metrics", block_id)
                case ["block_metrics_client", "query_blocks", (query,)]:
                    return await self._catalog.blocks.query("block_metrics", query)
                case _:
                    raise contract.CallRefusedError(f"{client} has no method {method}")
        except ServiceError as error:
            raise contract.CallRefusedError(error.reason, error.status) from error

    def at_hand(self, client: str, method: str, ids: Sequence[str]) -> Mapping[str, bytes]:
        """Return what `call` would answer where the catalog has it in memory."""
        match client, method:
            case ["cluster_client", "read_cluster"]:
                return self._catalog.memory.packed("cluster", ids)
            case ["cluster_metrics_client", "get_cluster"]:
                return self._catalog.memory.packed("metrics", ids)
            case _:
                return {}

    def documents(self, cluster_ids: Sequence[str]) -> Sequence[contract.Document]:
        """Return the packed documents of clusters."""
        blobs = self._catalog.memory.blobs(cluster_ids)
        return [contract.Document(name, version, blob) for name, version, blob in blobs]


class HttpServices:
    """What the HTTP endpoints reach; see `web.services.WebServices`.

    Args:
        catalog: Documents and policies.
        sandbox: Checks a policy before it is registered.
        finder: Answers the search endpoints.
        blocks: Answers the block endpoints.
        publishing: Changes aliases.
        management: Runs `management` of policies.
        executing: Executes policies for other servers.
        admission: Where `POST /allocate` goes.
        calls: Addresses for it.
        allocate_over_http: Whether there is such an endpoint.
        authenticate: Bearer token to tenant.
        readiness: Whether the daemon serves.
        metrics_text: Its own metrics.

    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        sandbox: Sandbox,
        finder: Finder,
        blocks: BlockServices,
        publishing: Publishing,
        management: Management,
        executing: PolicyExecutor,
        admission: Admission,
        calls: HttpCalls,
        allocate_over_http: bool,
        authenticate: Callable[[str | None], Tenant | None],
        readiness: Callable[[], tuple[bool, JsonDocument]],
        metrics_text: Callable[[], bytes],
    ) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._finder = finder
        self._admission = admission
        self._calls = calls
        self.allocate_over_http = allocate_over_http
        self._readiness = readiness
        self.authenticate = authenticate
        self.metrics_text = metrics_text
        self.create_cluster = catalog.clusters.create
        self.get_cluster = catalog.clusters.get
        self.update_cluster = catalog.clusters.update
        self.delete_cluster = catalog.clusters.delete
        self.query_clusters = catalog.clusters.query
        self.put_metrics = catalog.metrics.put
        self.get_metrics = catalog.metrics.get
        self.update_metrics = catalog.metrics.update
        self.delete_metrics = catalog.metrics.delete
        self.query_metrics = catalog.metrics.query
        self.aggregate_metrics = catalog.metrics.aggregate
        self.get_policy = catalog.policies.get
        self.policy_history = catalog.policies.history
        self.query_policies = catalog.policies.query
        self.select_clusters_for_block = blocks.select_clusters
        self.dry_run_block = blocks.dry_run
        self.allocate_block = blocks.allocate
        self.block_task = blocks.task
        self.block_documents = catalog.blocks
        self._publishing = publishing
        self._management = management
        self.create_executor = executing.executors.create
        self.get_executor = executing.executors.get
        self.update_executor = executing.executors.update
        self.delete_executor = executing.executors.delete
        self.query_executors = executing.executors.query
        self.execute_policy = executing.execute
        self.aliases = publishing.list
        self.alias = publishing.show
        self.activate_policy = publishing.activate
        self.roll_back_policy = publishing.roll_back
        self.stop_canary = publishing.stop_canary
        self.canary_report = publishing.canary_report
        self.delete_alias = publishing.delete
        self.start_shadow = publishing.start_shadow
        self.stop_shadow = publishing.stop_shadow
        self.shadow_report = publishing.shadow_report

    async def start_canary(self, alias: str, body: JsonDocument, who: str) -> JsonDocument:
        """Send a share of an alias's requests to another version."""
        return await self._publishing.start_canary(alias, _canary(body), who)

    async def update_policy(self, uri: str, change: JsonDocument, who: str) -> JsonDocument:
        """Describe a version anew; examples that come along must pass."""
        await vet_change(self._catalog, self._sandbox, uri, change, who)
        return await self._catalog.policies.update(uri, change, who)

    async def delete_policy(self, uri: str, who: str, *, force: bool) -> JsonDocument:
        """Delete a version that no alias means, or (without `force`) would fall back to."""
        return await self._publishing.delete_version(uri, who, force=force)

    async def policy_logs(self, uri: str, tenant: str) -> JsonDocument:
        """Return what a version printed lately, at requests of this tenant."""
        return await self._management.logs(uri, Tenant(tenant))

    async def manage_policy(self, uri: str, tenant: str, action: str, data: JsonDocument) -> Any:
        """Run a policy's `management`."""
        return await self._management.run(uri, Tenant(tenant), action, data)

    async def publish_policy(self, document: JsonDocument, who: str) -> str:
        """Register a policy: read on paper, loaded and rehearsed in a cell, then stored."""
        prepared = await vet(self._catalog, self._sandbox, document, who)
        record = await self._catalog.policies.register(prepared, who)
        return record.ref.uri

    async def search(
        self, action: SearchAction, body: JsonDocument, tenant: str
    ) -> tuple[list[JsonDocument], list[str]]:
        """Answer the search service's endpoints from the documents in this process."""
        found = await self._finder.find(action, body, Tenant(tenant), Allowance())
        return found.documents(), found.warnings

    async def allocate(self, body: bytes, tenant: str) -> tuple[int, bytes]:
        """Answer the HTTP twin of an ad-hoc request."""
        try:
            message: Request = wire.decode_allocation(body)
            warnings = wire.ignored_fields(body, message)
        except BadMessage as error:
            refusal = Refusal(error.code, error.reason, error.field, error.expected, error.details)
            return twin_status(error.code), refuse(refusal, message_id=error.id)
        if self._calls.draining:
            return twin_status(STOPPING.code), refuse(STOPPING, message_id=message.id)
        to, future = self._calls.open()
        if not self._admission.request_nowait(to, Tenant(tenant), message, warnings):
            await self._admission.request(to, Tenant(tenant), message, warnings)
        reply = await future
        verdict = msgspec.json.decode(reply, type=_Verdict)
        code = verdict.error.code if verdict.error else None
        return (200 if verdict.success or code is None else twin_status(code)), reply

    async def readiness(self) -> tuple[bool, JsonDocument]:
        """Return whether requests can be served, and what says so."""
        return self._readiness()


class _Error(msgspec.Struct):
    code: Code


class _Verdict(msgspec.Struct):
    """As much of a reply as its HTTP status depends on."""

    success: bool
    error: _Error | None = None


def _canary(body: JsonDocument) -> Canary:
    for field in body.keys() - _CANARY_FIELDS.keys():
        raise ServiceError.wrong_field(field, f"one of {', '.join(_CANARY_FIELDS)}")
    try:
        return msgspec.convert({**body, "version": body.get("policy_rule_uri", "")}, type=Canary)
    except msgspec.ValidationError as error:
        # It says the field at its end, as `percent` where it is missing and else as `$.percent`.
        field = next((name for name in _CANARY_FIELDS if f"{name}`" in str(error)), "body")
        expected = _CANARY_FIELDS.get(field, "an object")
        raise ServiceError.wrong_field(field, expected) from error
