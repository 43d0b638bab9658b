"""The parts of a daemon. Each phase of a start builds its parts from those of earlier phases.

`daemon.start` builds the parts in order.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import structlog

from moorage.backends.agents.backend import FleetBackend
from moorage.backends.base import Backend
from moorage.backends.registry import BrokenKind, Inventory, Surroundings, kinds, open_backend
from moorage.catalog.mirrored.prometheus import PrometheusPoller
from moorage.catalog.ports import Catalog
from moorage.config.settings import Config
from moorage.core.allocator import Allocator
from moorage.core.state.state import State
from moorage.core.turns.events import HalfLifeConfigured, QuotaAsked, Restarted
from moorage.daemon import pruning
from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.audit_recovery import recover
from moorage.daemon.access.audit_trail import AuditTrail, Standing
from moorage.daemon.access.console_logins import ConsoleLogins
from moorage.daemon.access.lease_tokens import LeaseTokens
from moorage.daemon.access.rates import EvaluationRate, TenantRates
from moorage.daemon.access.rights import Owners, Ownership
from moorage.daemon.access.socket_tickets import SocketTickets
from moorage.daemon.access.token_changes import TokenChanges
from moorage.daemon.access.tokens import LOCAL, Tokens
from moorage.daemon.agents.agent_store import AgentStore
from moorage.daemon.agents.roster import AgentRoster
from moorage.daemon.blocks.placement import BlockPlacement
from moorage.daemon.blocks.tasks import BlockServices
from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.doors import Entrance, note_stranger, sign_in
from moorage.daemon.effects import EffectCarrier
from moorage.daemon.history.decisions import Decisions
from moorage.daemon.history.recalled_fleets import RecalledFleets
from moorage.daemon.inbox import Inbox
from moorage.daemon.news.map_news import MapNews
from moorage.daemon.news.request_progress import RequestProgress
from moorage.daemon.news.shape_news import ShapeNews
from moorage.daemon.news.watchers import Watchers
from moorage.daemon.observability import gauges
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.durations import DurationMetrics
from moorage.daemon.observability.history import HistoryRing
from moorage.daemon.observability.traces import RequestTraces
from moorage.daemon.policies.consultations import Consultations
from moorage.daemon.policies.context_keeper import ContextKeeper
from moorage.daemon.policies.executor import PolicyExecutor
from moorage.daemon.policies.finder import Finder
from moorage.daemon.policies.remote_policies import remote_policies
from moorage.daemon.publishing.aliases import Publishing
from moorage.daemon.publishing.management import Management
from moorage.daemon.publishing.playground import Playground
from moorage.daemon.registry import RegistryChanges
from moorage.daemon.requests import services
from moorage.daemon.requests.admission import Admission
from moorage.daemon.requests.asks import Asks
from moorage.daemon.requests.http_calls import HttpCalls
from moorage.daemon.requests.operations import Lookups, Operations
from moorage.daemon.requests.replies import Followers, Replies
from moorage.daemon.requests.router import Router
from moorage.daemon.requests.whatif import WhatIfs
from moorage.daemon.standby import Standby
from moorage.daemon.tasks import Tasks
from moorage.daemon.trust import Trust
from moorage.daemon.workloads.access import WorkloadAccess
from moorage.daemon.workloads.control import WorkloadControl
from moorage.extras import install_command
from moorage.gateway.server import Gateway
from moorage.ledger.base import Ledger, LedgerHistory, Recovery
from moorage.ledger.stored import StoredLedger
from moorage.model import Code, Lease, RequestId, Tenant
from moorage.protocol.faults import ServiceError
from moorage.protocol.origins import authority_of
from moorage.protocol.replies import Shared
from moorage.records.json_values import JsonObject
from moorage.records.rights import SERVER_ITSELF
from moorage.sandbox.host.contract import OpenCircuit
from moorage.sandbox.host.sandbox import Sandbox, WorkerSettings
from moorage.sandbox.wire.limits import Limits
from moorage.storage.base import RecordStore, Storage, lost_records
from moorage.storage.opening import open_storage
from moorage.web.services import Console, SignInFlow, WebServices

L_co = TypeVar("L_co", bound=LedgerHistory, covariant=True)
log = structlog.get_logger("moored")


@dataclass(frozen=True, slots=True)
class Outset:
    """The parts that exist before any data is loaded."""

    config: Config
    measures: Measures
    tasks: Tasks
    storage: Storage
    agents: AgentStore
    trust: Trust


@dataclass(slots=True)
class Prepared:
    """The parts that are slow to start and read no stored data: a standby has them ready.

    Args:
        allocator: The core, empty.
        sandbox: The sandbox, running.
        reader: Serves the injected clients of policies; it has no catalog yet.
        rates: Limits of requests and processor time per tenant.
        circuits: Called when a policy's circuit opens; set later.
        standby: The standby that this server was before it led, with its followed state; None: it
            was not a standby.
    """

    allocator: Allocator
    inbox: Inbox
    sandbox: Sandbox
    reader: services.CatalogReader
    rates: TenantRates
    circuits: Callable[[OpenCircuit], None]
    standby: Standby | None = None


class OpenLedger(NamedTuple):
    """The open ledger, and the contents that were read from it."""

    ledger: Ledger
    recovery: Recovery


@dataclass(frozen=True, slots=True)
class Stores(Generic[L_co]):
    """The open stores, and the core with the state of the ledger; a standby follows the ledger."""

    ledger: L_co
    allocator: Allocator
    lease_tokens: LeaseTokens
    agents: AgentStore
    audit: AuditLog
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that all later parts use: the inbox, the background tasks, news and counters."""

    inbox: Inbox
    tasks: Tasks
    tokens: Tokens
    logins: ConsoleLogins | None
    browsers: SignInFlow | None
    tickets: SocketTickets
    gateway: Gateway
    map_news: MapNews
    shape_news: ShapeNews
    watchers: Watchers
    measures: Measures
    durations: DurationMetrics
    history: HistoryRing


@dataclass(frozen=True, slots=True)
class Runners:
    """The parts that run the code of tenants."""

    sandbox: Sandbox
    workloads: WorkloadControl
    backends: Mapping[str, Backend]
    rates: TenantRates


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts that answer requests."""

    finder: Finder
    publishing: Publishing
    management: Management
    blocks: BlockPlacement
    consultations: Consultations
    calls: HttpCalls
    replies: Replies
    lookups: Lookups
    router: Router
    rates: TenantRates
    traces: RequestTraces | None


async def open_ledger(
    storage: Storage, stack: AsyncExitStack, prepared: Prepared | None = None
) -> OpenLedger:
    """Open the ledger; if this server has followed it, read only newer facts."""
    standby = None if prepared is None else prepared.standby
    followed = None if standby is None else standby.followed
    ledger = StoredLedger(storage.facts())
    recovery = await ledger.open(None if followed is None else followed.ledger.position)
    stack.push_async_callback(ledger.close)
    if prepared is not None and followed is not None:
        await asyncio.to_thread(followed.ledger.close)
        if recovery.goes_on:
            prepared.allocator = followed.allocator
            prepared.sandbox.show(followed.allocator.state.fleet)
    return OpenLedger(ledger, recovery)


async def open_stores(
    outset: Outset,
    opened: OpenLedger,
    entrance: Entrance,
    prepared: Prepared,
    stack: AsyncExitStack,
) -> Stores[Ledger]:
    """Replay the ledger into the core, and open the other stores; complete the audit log."""
    config, storage, recovery = outset.config, outset.storage, opened.recovery
    allocator = prepared.allocator
    if prepared.standby is None:
        for rows in (storage.tokens(), storage.agents()):
            with closing(rows):  # First: without its tokens, no server must serve.
                await asyncio.to_thread(rows.version)
    tokens = LeaseTokens(await asyncio.to_thread(storage.secret))
    allocator.replay(recovery.facts, recovery.fencing)
    records = storage.records()
    if recovery.last_seq and not storage.has_records():
        log.error(
            "damage_found",
            finding=lost_records(records.place),
        )
    catalog = await _open_catalog(config, records, prepared)
    stack.push_async_callback(catalog.close)
    for warning in (*recovery.warnings, *catalog.warnings):
        log.warning("damage_found", finding=warning)
    audit = entrance.audit
    trail = AuditTrail(
        audit, lambda _: (None, ""), lambda _: None, allocator.state.lease, Standing()
    )
    recovering = recover(audit, trail, opened.ledger)
    if prepared.standby is None:
        await recovering
    else:  # Clients wait.
        outset.tasks.spawn(recovering)
    stack.callback(audit.note_server, "stopped")
    return Stores(opened.ledger, allocator, tokens, outset.agents, audit, catalog)


async def _open_catalog(config: Config, records: RecordStore, prepared: Prepared) -> Catalog:
    """Open the catalog; a former standby keeps the catalog that it has followed."""
    followed = None if prepared.standby is None else prepared.standby.followed
    if followed is not None:
        if (catalog := await followed.catalog.lead(records)) is not None:
            return catalog
        await followed.closing.aclose()
    return await services.open_catalog(config, records)


def make_core(
    stores: Stores[LedgerHistory],
    entrance: Entrance,
    prepared: Prepared,
    measures: Measures,
    tasks: Tasks,
) -> Core:
    """Make the parts that report what the core decides."""
    gateway = entrance.gateway
    state, estimates = stores.allocator.state, stores.allocator.estimates
    telling = (gateway.push, gateway.reads_on, lambda: stores.ledger.last_seq)
    map_news, shape_news = MapNews(state, *telling), ShapeNews(state, *telling)
    progress = RequestProgress(
        gateway.push,
        stores.allocator.requests.queue.positions,
        lambda waiting: estimates.turns(waiting, time.time()),
    )
    watchers = Watchers(gateway.push, state.lease, state.leases, map_news, shape_news, progress)
    durations = DurationMetrics(state.lease)
    return Core(
        prepared.inbox,
        tasks,
        entrance.tokens,
        entrance.logins,
        entrance.browsers,
        entrance.tickets,
        gateway,
        map_news,
        shape_news,
        watchers,
        measures,
        durations,
        HistoryRing(state, measures, durations, lambda: gateway.stats().sessions, watchers.recent),
    )


async def prepare(config: Config, stack: AsyncExitStack) -> Prepared:
    """Start the sandbox, with a core that is still empty."""
    burnt = config.tenant_evaluation_seconds_per_minute
    rates = TenantRates(
        config.tenant_requests_per_second,
        config.tenant_uploads_per_minute,
        evaluations=EvaluationRate(burnt) if burnt else None,
    )
    allocator = Allocator(config.requeue_pause_seconds, config.overtaken_max)
    inbox, reader = Inbox(), services.CatalogReader()
    sandbox = Sandbox(
        fleet=allocator.state.fleet,
        services=reader,
        deliver=inbox.post,
        limits=_limits(config),
        mode=config.sandbox,
        isolation=config.isolation,
        circuits=lambda circuit: prepared.circuits(circuit),  # noqa: PLW0108  # It is set later.
        workers=_workers(config),
        meter=rates.evaluations,
    )
    prepared = Prepared(allocator, inbox, sandbox, reader, rates, lambda _: None)
    report = await sandbox.start()
    stack.push_async_callback(sandbox.close)
    log.info("sandbox", mode=report.mode, layers=dict(report.layers), warning=report.warning)
    return prepared


async def open_runners(
    outset: Outset,
    stores: Stores[LedgerHistory],
    core: Core,
    prepared: Prepared,
    stack: AsyncExitStack,
) -> Runners:
    """Let the sandbox read the stores; open the backends, and stop workloads without leases."""
    config, state, sandbox = outset.config, stores.allocator.state, prepared.sandbox
    prepared.reader.catalog = stores.catalog
    prepared.circuits = core.watchers.circuits
    stack.push_async_callback(sandbox.close)  # It closes before the stores that it reads.
    contexts = ContextKeeper(stores.catalog.contexts, sandbox)
    await contexts.restore()
    stack.push_async_callback(contexts.close)
    core.tasks.spawn(contexts.run())
    surroundings = Surroundings(
        config.data_dir,
        lambda: state.clusters,
        not config.tokens,
        partial(_lease_of, state),
        outset.storage.names(),
    )
    backends = _backends(config, surroundings)
    workloads = WorkloadControl(
        backends,
        core.inbox.post,
        core.tasks,
        core.watchers.workload,
        outset.trust.check,
        config.stop_seconds_max,
    )
    stack.push_async_callback(workloads.close)
    await workloads.open([each.workload for each in state.leases.values() if each.provision])
    return Runners(sandbox, workloads, backends, prepared.rates)


def open_agents(
    config: Config, stores: Stores[LedgerHistory], runners: Runners, epoch: int
) -> AgentRoster:
    """Open the list of agents; if the backend `local` is configured, it starts workloads there."""
    fleet = runners.backends.get("local")
    if not isinstance(fleet, FleetBackend):
        fleet = None
    audit, lost_seconds = stores.audit.note, config.agent_lost_seconds
    roster = AgentRoster(stores.agents, fleet, stores.catalog, lost_seconds, audit)
    roster.open(epoch)
    return roster


def _backends(config: Config, surroundings: Surroundings) -> dict[str, Backend]:
    """Open and return the backends that the configuration names."""
    for kind in kinds().values():
        if isinstance(kind, BrokenKind):
            log.warning("backend_kind_broken", backend=kind.name, reason=kind.reason)
    named = {name: kinds()[name] for name in config.backends}
    return {
        name: open_backend(kind, config.settings_of(kind), surroundings)
        for name, kind in named.items()
    }


def _lease_of(state: State, workload: str) -> Lease | None:
    """Return the lease that has the named workload, or was the last lease to have it."""
    lease = state.lease(RequestId(workload))
    if lease is not None and lease.id in state.leases and lease.workload == workload:
        return lease
    heirs = (each for each in state.leases.values() if each.workload == workload)
    return next(heirs, lease)


def _limits(config: Config) -> Limits:
    return Limits(
        evaluation_seconds=config.policy_deadline_seconds,
        evaluation_seconds_max=config.policy_deadline_seconds_max,
        memory_mib=config.policy_memory_mib,
        # A cell's last evaluation may use its whole deadline, after earlier ones used some.
        cpu_seconds_per_cell_max=round(max(3600, 2 * config.policy_deadline_seconds_max)),
    )


def _workers(config: Config) -> WorkerSettings | None:
    if not config.policy_workers:
        return None

    def tell(place: str, finding: str, good: bool) -> None:
        (log.info if good else log.warning)("policy_workers_changed", place=place, finding=finding)

    return WorkerSettings(config.policy_workers, config.policy_worker_cells, tell)


def make_requests(
    config: Config,
    stores: Stores[LedgerHistory],
    core: Core,
    runners: Runners,
    agents: AgentRoster,
    stack: AsyncExitStack,
    stamp: Callable[[], Shared] | None,
) -> RequestParts:
    """Make the parts that answer requests."""
    catalog, allocator, inbox, tasks = stores.catalog, stores.allocator, core.inbox, core.tasks
    sandbox, workloads, state = runners.sandbox, runners.workloads, allocator.state
    finder = Finder(catalog, sandbox)
    executor = remote_policies(config, catalog, lambda: state.fleet, inbox.post, tasks)
    if executor is not None:
        stack.push_async_callback(executor.close)
    publishing = Publishing(
        catalog, sandbox, allocator, core.watchers, tasks, config.policy_fallback_failures
    )
    management = Management(catalog, sandbox, elsewhere=executor is not None)
    blocks = BlockPlacement(
        catalog=catalog,
        finder=finder,
        sandbox=sandbox,
        fleet=lambda: state.fleet,
        clusters_max=config.candidates_max,
    )
    calls = HttpCalls()
    progress, traces = core.watchers.progress, _traces(config, core.measures, stack)
    is_follower = not isinstance(stores.ledger, StoredLedger)
    followers = Followers(progress, traces, stamp, is_follower)
    replies = Replies(core.gateway, calls, workloads, stores.lease_tokens, tasks, followers)
    asks = Asks(config, catalog, finder, workloads, stores.lease_tokens, lambda: state.fleet)
    admission = Admission(catalog, publishing, asks, inbox, replies, sandbox.is_crowded)
    access = WorkloadAccess(workloads, state.lease)
    decisions = Decisions(stores.ledger)
    fleets = RecalledFleets(stores.ledger, decisions)
    bounds: JsonObject = {"mode": config.sandbox, "limits": _limits(config)}
    bounds["overtaken_max"] = config.overtaken_max
    whatifs = WhatIfs(catalog, publishing, asks, state, bounds)
    lookups = Lookups(agents, access, decisions, fleets, whatifs)
    operations = Operations(
        inbox,
        replies,
        core.watchers,
        management,
        lookups,
        config.lease_ttl_seconds_max,
        state,
        config.tenant_watchers_max,
        stores.audit,
        catalog.memory.owner,
    )
    return RequestParts(
        finder,
        publishing,
        management,
        blocks,
        Consultations(catalog, sandbox, executor, publishing.shadows, progress, inbox.post),
        calls,
        replies,
        lookups,
        Router(admission, operations, blocks, replies, stores.audit, runners.rates),
        runners.rates,
        traces,
    )


def _traces(config: Config, measures: Measures, stack: AsyncExitStack) -> RequestTraces | None:
    """Return the tracer of requests; None if neither spans nor log lines are wanted."""
    if not config.traces:
        return RequestTraces(None) if config.log_level == "debug" else None
    try:
        from moorage.daemon.observability.otlp import Spans  # noqa: PLC0415  # The module needs an extra.
    except ModuleNotFoundError as error:
        way = f"{install_command('otel')}, or remove the setting traces"
        raise ServiceError(
            Code.UNAVAILABLE, f"the setting traces needs the module {error.name}: {way}"
        ) from error
    try:
        spans = Spans()
    except ValueError as error:
        raise ServiceError(Code.UNAVAILABLE, f"a variable OTEL_… is wrong: {error}") from error
    stack.push_async_callback(spans.close)
    measures.watch(spans.metrics)
    return RequestTraces(spans)


async def run_core(
    config: Config,
    stores: Stores[Ledger],
    core: Core,
    runners: Runners,
    requests: RequestParts,
    trust: Trust,
) -> CommitLoop:
    """Run the core from now on.

    Before the first request, the core gets what changed while no server ran: the calendar, the
    registered clusters, and the quotas and half-life of the configuration.
    """
    allocator, inbox, tasks = stores.allocator, core.inbox, core.tasks
    replies, state = requests.replies, allocator.state
    trail = AuditTrail(stores.audit, replies.origin, replies.asker, state.lease, Standing.of(state))
    effects = EffectCarrier(
        replies,
        requests.consultations,
        runners.workloads,
        allocator.requests,
        trust.check,
        core.watchers,
        core.measures,
        requests.lookups.decisions,
        trail,
        core.durations,
        requests.traces,
    )
    commit_loop = CommitLoop(allocator, stores.ledger, inbox, effects, tasks, config)
    await commit_loop.follow_calendar()
    registry = RegistryChanges(
        stores.catalog, runners.sandbox, allocator.state, inbox, core.watchers
    )
    registry.reconcile()
    inbox.post(HalfLifeConfigured(config.usage_half_life_seconds))
    for each in config.quotas:
        inbox.post(QuotaAsked(None, Tenant("configuration"), *each))
    inbox.post(Restarted(config.restart_grace_seconds))
    tasks.spawn(registry.keep_fresh())
    tasks.spawn(pruning.prune_forever(stores.ledger, config))
    tasks.spawn(commit_loop.commit_forever())
    tasks.spawn(commit_loop.step_forever())
    tasks.spawn(commit_loop.watch_clocks())
    settled = asyncio.ensure_future(commit_loop.settle())
    await asyncio.wait([settled, tasks.broken], return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    if tasks.broken.done():  # Then `settle` never ends.
        await tasks.broken
    publishing = requests.publishing
    for figures in (
        partial(gauges.core_gauges, allocator),
        partial(gauges.fleet_gauges, allocator.state.fleet),
        partial(gauges.audit_counters, stores.audit),
        gauges.build_gauges,
        core.durations.metrics,
        core.shape_news.metrics,
        partial(gauges.commit_gauges, stores.ledger, commit_loop),
        lambda: gauges.sandbox_gauges(runners.sandbox.report()),
        lambda: gauges.gateway_gauges(core.gateway.stats()),
        core.watchers.metrics,
        publishing.metrics,
        publishing.shadows.metrics,
    ):
        core.measures.watch(figures)
    return commit_loop


def make_web_services(
    config: Config,
    stores: Stores[LedgerHistory],
    core: Core,
    runners: Runners,
    requests: RequestParts,
    readiness: Callable[[], tuple[bool, JsonObject]],
) -> WebServices:
    """Return what the HTTP port serves."""
    catalog, sandbox = stores.catalog, runners.sandbox
    scheme = "ws" if config.tls_cert is None else "wss"
    allocation = services.AllocationServices(
        requests.router,
        requests.calls,
        lambda: f"{scheme}://{authority_of(config.host, core.gateway.port)}",
    )
    return WebServices(
        clusters=catalog.clusters,
        ownership=_ownership(stores, requests.lookups.agents),
        metrics=catalog.metrics,
        blocks=catalog.blocks,
        executors=catalog.executors,
        policies=catalog.policies,
        publications=services.PolicyServices(
            catalog,
            sandbox,
            requests.publishing,
            requests.management,
            requests.rates,
            stores.audit.note_surplus,
        ),
        aliases=requests.publishing,
        block_actions=BlockServices(requests.blocks, core.tasks.spawn),
        search=requests.finder.answer,
        execute=PolicyExecutor(catalog, sandbox).execute,
        allocate=allocation.allocate if config.allocate_over_http else None,
        operate=allocation.operate,
        named_tokens=TokenChanges(
            core.tokens.read_named_tokens,
            lambda: open_storage(config.storage, config.data_dir).tokens(),
            stores.audit,
            core.gateway.expel,
        ),
        authenticate=core.tokens.caller,
        pending=core.tokens.pending,
        why_refused=core.tokens.why_refused,
        sign_in=sign_in(config),
        readiness=readiness,
        metrics_text=core.measures.text,
        history=core.history.answer,
        tickets=core.tickets,
        audit=stores.audit,
        console=_console(config, stores, core, requests.lookups.fleets),
    )


def _ownership(stores: Stores[LedgerHistory], agents: AgentRoster) -> Ownership:
    catalog, state = stores.catalog, stores.allocator.state
    memory = catalog.memory
    blocks = partial(catalog.blocks.owner, "block_metrics")

    def maintained(of: Callable[[str], str], cluster_id: str) -> str:
        return SERVER_ITSELF if agents.maintains(cluster_id) else of(cluster_id)

    owner, metrics_owner = (partial(maintained, of) for of in (memory.owner, memory.metrics_owner))
    owners = Owners(owner, metrics_owner, blocks, catalog.executors.owner)
    return Ownership(state, catalog.policies, catalog.aliases.find, owners, memory.policy_uris)


def _console(
    config: Config, stores: Stores[LedgerHistory], core: Core, recalled: RecalledFleets
) -> Console | None:
    if core.logins is None:
        return None
    playground = Playground(stores.catalog, stores.allocator.state, recalled.before, config.sandbox)
    return Console(
        logins=core.logins,
        needs_login=lambda: core.tokens.required,
        local=LOCAL,
        websocket_scheme="ws" if config.tls_cert is None else "wss",
        websocket_port=lambda: core.gateway.port,
        expel=core.gateway.expel,
        on_stranger=partial(note_stranger, stores.audit, core.tokens, "console"),
        pending=core.tokens.pending,
        sign_in=core.browsers,
        try_policy=playground.run,
    )


def follow_prometheus(config: Config, catalog: Catalog, core: Core, stack: AsyncExitStack) -> None:
    """Read metrics of nodes from Prometheus, if the configuration names one."""
    if not config.prometheus_url:
        return

    def tell(finding: str) -> None:
        log.warning("prometheus_failed", finding=finding)

    poller = PrometheusPoller(catalog, services.prometheus_source(config), tell)
    stack.push_async_callback(poller.close)
    core.measures.watch(partial(gauges.prometheus_gauges, poller))
    core.tasks.spawn(poller.run())


def follow_clusters(
    config: Config, stores: Stores[LedgerHistory], core: Core, runners: Runners
) -> None:
    """Have each kind of backend register the clusters that it follows."""
    catalog = stores.catalog
    inventory = Inventory(
        config.data_dir,
        catalog.clusters,
        catalog.memory.knows,
        catalog.memory.is_live,
        stores.allocator.state,
        core.tasks.spawn,
        core.measures.watch,
        core.watchers.tell,
    )
    for name, kind in kinds().items():
        kind.follow(config.settings_of(kind), runners.backends.get(name), inventory)
