"""The daemon: builds the packages, introduces them to each other, starts, drains and stops.

`moorage.__main__` runs it for `moored serve`; the trials run it as a process of its own.
"""

import asyncio
import contextlib
import gc
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, assert_never

import structlog
from prometheus_client.metrics_core import Metric

from moorage.backends.base import WorkloadReport
from moorage.catalog.changes import (
    CatalogChange,
    ClusterDeleted,
    ClusterPut,
    ClustersListed,
    MetricsDeleted,
    MetricsPut,
    PolicyDeleted,
    PolicyPut,
)
from moorage.catalog.mirrored.prometheus import PrometheusPoller
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord
from moorage.config.settings import Config
from moorage.core.allocator import Allocator
from moorage.core.effects import (
    Address,
    Consult,
    Effect,
    Forget,
    Information,
    KeepWarm,
    Look,
    Recall,
    Respond,
    Start,
    Stop,
)
from moorage.core.events import ClusterGone, ClusterSeen, ConsultFailed, Event, Proposed, Restarted
from moorage.core.facts import Queued
from moorage.core.turn import Turn
from moorage.daemon import descriptors, pruning
from moorage.daemon.blocks.placement import BlockPlacement
from moorage.daemon.blocks.tasks import BlockServices
from moorage.daemon.commit_loop import CommitLoop
from moorage.daemon.observability.counters import Measures, gauge
from moorage.daemon.observability.gauges import (
    core_gauges,
    gateway_gauges,
    prometheus_gauges,
    sandbox_gauges,
)
from moorage.daemon.publishing.aliases import Publishing
from moorage.daemon.publishing.management import Management
from moorage.daemon.publishing.shadows import Shadows
from moorage.daemon.publishing.vetting import examine
from moorage.daemon.requests import recall, services
from moorage.daemon.requests.admission import Admission
from moorage.daemon.requests.answers import encode, refusal_of, refuse
from moorage.daemon.requests.consultations import Consultations
from moorage.daemon.requests.context_keeper import ContextKeeper
from moorage.daemon.requests.executor import PolicyExecutor
from moorage.daemon.requests.finder import Finder
from moorage.daemon.requests.http_calls import HttpCalls
from moorage.daemon.requests.lease_tokens import LeaseTokens, open_secret
from moorage.daemon.requests.origins import names
from moorage.daemon.requests.remote_policies import remote_policies
from moorage.daemon.requests.tokens import Tokens
from moorage.daemon.requests.watchers import Watchers, about_workload
from moorage.daemon.tasks import Tasks
from moorage.daemon.workloads.access import WorkloadAccess
from moorage.daemon.workloads.backends import configured_backends
from moorage.daemon.workloads.control import WorkloadControl
from moorage.gateway.server import Gateway, GatewaySettings
from moorage.ledger.base import Ledger
from moorage.ledger.sqlite import SqliteLedger
from moorage.model import RequestId, SessionId, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host.sandbox import Sandbox
from moorage.sandbox.wire.limits import Limits
from moorage.web.server import WebServer
from moorage.web.services import WebServices

DRAIN_SECONDS_MAX: Final = 10.0
"""How long a stop waits for what is under way before it closes anyway."""

log = structlog.get_logger("moored")


class Daemon:
    """One server. Use it once: `start`, then `run`, then `stop`.

    Args:
        config: All settings.

    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._allocator = Allocator(config.requeue_pause_seconds)
        self._tokens = Tokens(config.tokens)
        self._measures = Measures()
        self._calls = HttpCalls()
        self._watchers = Watchers(self._push, self._owner)
        self._tasks = Tasks()
        self._closing = contextlib.AsyncExitStack()
        self._ready = False
        self._ledger: Ledger
        self._catalog: Catalog
        self._sandbox: Sandbox
        self._commit_loop: CommitLoop
        self._backends: WorkloadControl
        self._finder: Finder
        self._admission: Admission
        self._gateway: Gateway
        self._prometheus: PrometheusPoller | None = None

    async def start(self) -> tuple[int, int]:
        """Open everything and serve.

        Returns:
            The ports of the WebSocket and of HTTP.

        Raises:
            LedgerError: The ledger cannot be opened.
            JailError: Policies cannot be locked in here.
            EngineError: What a backend needs is not here.
            OSError: An address cannot be listened on.

        """
        try:
            return await self._start()
        except BaseException:
            await self._tasks.close()
            await self._closing.aclose()
            raise

    async def _start(self) -> tuple[int, int]:
        config = self._config
        config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ledger = SqliteLedger(config.data_dir / "ledger.db")
        recovery = await self._ledger.open()
        self._closing.push_async_callback(self._ledger.close)
        self._lease_tokens = LeaseTokens(open_secret(config.data_dir / "lease_secret"))
        self._allocator.replay(recovery.facts, recovery.fencing)
        self._catalog = await services.open_catalog(config, self._changed, self._examine)
        self._closing.push_async_callback(self._catalog.close)
        self._sandbox = Sandbox(
            fleet=self._allocator.state.fleet,
            services=services.CatalogReader(self._catalog),
            deliver=self._post,
            limits=Limits(
                evaluation_seconds=config.policy_deadline_seconds,
                memory_mib=config.policy_memory_mib,
            ),
            mode=config.sandbox,
            isolation=config.isolation,
            circuits=self._watchers.circuits,
        )
        report = await self._sandbox.start()
        self._closing.push_async_callback(self._sandbox.close)
        self._remembering = ContextKeeper(self._catalog.contexts, self._sandbox)
        await self._remembering.restore()
        for warning in (*recovery.warnings, *self._catalog.warnings):
            log.warning("damage", finding=warning)
        self._closing.push_async_callback(self._remembering.close)
        self._tasks.spawn(self._remembering.run())
        log.info("sandbox", mode=report.mode, layers=dict(report.layers), warning=report.warning)
        self._commit_loop = CommitLoop(
            self._allocator,
            self._ledger,
            last_seq=recovery.last_seq,
            carry_out=self._carry_out,
            stepped=self._stepped,
            durable=self._watchers.durable,
            failed=self._tasks.fail,
            checkpoint_every_facts=config.checkpoint_every_facts,
        )
        self._tasks.spawn(self._commit_loop.commit_forever())
        self._tasks.spawn(pruning.prune_forever(self._ledger, config))
        backends = configured_backends(config, lambda: self._allocator.state.clusters)
        self._backends = WorkloadControl(backends, self._post, self._tasks.fail, self._progressed)
        self._closing.push_async_callback(self._backends.close)
        held = self._allocator.state.leases
        await self._backends.open([each.workload for each in held.values() if each.provision])
        self._introduce()  # Before anything happens: policies are asked about what waited.
        self._reconcile()
        await self._settled()
        self._measures.watch(self._gauges)
        # What was loaded stays. Without this, collections that look through ten thousand documents
        # in vain stop the server for a third of a second each (measured).
        gc.freeze()
        return await self._open_doors()

    def _introduce(self) -> None:
        """Build what answers requests, of packages that are open."""
        config, allocator = self._config, self._allocator
        self._finder = Finder(self._catalog, self._sandbox)
        executor = remote_policies(config, self._catalog, lambda: allocator.state.fleet, self._post)
        if executor is not None:
            self._closing.push_async_callback(executor.close)
        self._management = Management(self._catalog, self._sandbox, elsewhere=executor is not None)
        self._workloads = WorkloadAccess(self._backends, allocator.state.lease)
        self._shadows = Shadows(
            self._catalog, self._sandbox, lambda: allocator.state, lambda: allocator.undecided
        )
        self._consulting = Consultations(
            self._catalog, self._sandbox, executor, self._shadows, self._post
        )
        self._publishing = Publishing(
            catalog=self._catalog,
            sandbox=self._sandbox,
            shadows=self._shadows,
            failures_max=config.policy_fallback_failures,
            asked_before=self._allocator.policy_asked,
            tell=partial(self._watchers.tell, "policies"),
            spawn=self._tasks.spawn,
        )
        self._blocks = BlockPlacement(
            catalog=self._catalog,
            finder=self._finder,
            sandbox=self._sandbox,
            fleet=lambda: self._allocator.state.fleet,
            clusters_max=config.candidates_max,
        )
        self._admission = Admission(
            config=config,
            catalog=self._catalog,
            finder=self._finder,
            publishing=self._publishing,
            backends=self._backends,
            tokens=self._lease_tokens,
            post=self._post,
            reply=self._reply,
            manage=self._manage,
            inside=self._inside,
            place=self._place,
            watchers=self._watchers,
            fleet=allocator.state.fleet,
            failed=self._tasks.fail,
        )

    async def _examine(self, record: PolicyRecord) -> str:
        if doubt := await examine(self._sandbox, record):
            self._watchers.examples_failed(record.ref, doubt)
        return doubt

    def _reconcile(self) -> None:
        """Bring the core up to date with the world before anybody may ask."""
        live = {cluster.id: cluster for cluster in self._catalog.memory.models()}
        if self._catalog.freshness.registry_known:
            for cluster_id in self._allocator.state.clusters.keys() - live.keys():
                self._post(ClusterGone(cluster_id))
        self._tasks.spawn(self._catalog.freshness.keep_fresh())
        for cluster in live.values():
            self._post(ClusterSeen(cluster))
        self._post(Restarted(self._config.restart_grace_seconds))

    async def _settled(self) -> None:
        """Wait until the commit loop is idle; raise what broke it, since it then never will."""
        settled = asyncio.ensure_future(self._commit_loop.settled())
        await asyncio.wait([settled, self._tasks.broken], return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        if self._tasks.broken.done():
            await self._tasks.broken

    async def _open_doors(self) -> tuple[int, int]:
        config = self._config
        limits = descriptors.connection_limits()
        settings = GatewaySettings(
            sessions_max=config.sessions_max,
            connections_max=limits.gateway,
            message_bytes_max=config.message_bytes_max,
            deflate=config.deflate,
            origins=names(config),
        )
        if config.sessions_max > limits.gateway:
            log.warning("sessions", finding=descriptors.too_few(config.sessions_max))
        self._gateway = Gateway(self._admission, settings, self._tokens.tenant)
        catalog = self._catalog
        allocation = services.AllocationServices(self._admission, self._calls)
        behind = WebServices(
            clusters=catalog.clusters,
            metrics=catalog.metrics,
            blocks=catalog.blocks,
            executors=catalog.executors,
            policies=catalog.policies,
            publications=services.PolicyServices(
                catalog, self._sandbox, self._publishing, self._management
            ),
            aliases=self._publishing,
            block_actions=BlockServices(self._blocks, self._tasks.spawn),
            search=services.SearchServices(self._finder).search,
            execute=PolicyExecutor(catalog, self._sandbox).execute,
            allocate=allocation.allocate if config.allocate_over_http else None,
            authenticate=self._tokens.tenant,
            readiness=self._readiness,
            metrics_text=self._measures.text,
        )
        web = WebServer(behind, origins=names(config), connections_max=limits.web)
        http_port = await web.start(config.http_host, config.http_port)
        self._closing.push_async_callback(web.close)
        port = await self._gateway.start(config.host, config.port, http_port)
        web.name_websocket_port(port)
        self._closing.push_async_callback(self._gateway.close)
        self._follow_prometheus()
        self._ready = True
        return port, http_port

    def _follow_prometheus(self) -> None:
        if not self._config.prometheus_url:
            return

        def tell(finding: str) -> None:
            log.warning("prometheus", finding=finding)

        source = services.prometheus_source(self._config)
        self._prometheus = PrometheusPoller(self._catalog, source, tell)
        self._closing.push_async_callback(self._prometheus.close)
        self._tasks.spawn(self._prometheus.run())

    def change_tokens(self, tokens: Mapping[str, str]) -> None:
        """Let these in from now on, and close the sessions of all others."""
        self._tokens.change(tokens)
        self._gateway.expel()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            BaseException: Whatever broke an invariant or the ledger; the process must end.

        """
        await self._tasks.broken

    async def stop(self) -> None:
        """Close the doors, let what is under way finish, write a checkpoint, let go."""
        self._ready = False
        self._calls.draining = True
        broken = self._tasks.broken.done()
        self._tasks.broken.cancel()
        if not broken:
            await self._gateway.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS_MAX):
                    await self._commit_loop.settled()
                    await self._commit_loop.checkpoint()
        for to in self._calls.waiting():  # In the queue, or with a policy: they end now.
            if (reply := self._admission.answer(to, services.STOPPING)) is not None:
                self._calls.reply(to, reply)
        await self._tasks.close()
        await self._closing.aclose()

    # Introductions -------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._commit_loop.post(event)

    def _changed(self, change: CatalogChange) -> None:
        """Pass on what changed in the registry."""
        match change:
            case ClusterPut(cluster, live):
                self._sandbox.documents_changed(cluster.id)
                self._post(ClusterSeen(cluster) if live else ClusterGone(cluster.id))
            case ClusterDeleted(cluster_id):
                self._sandbox.documents_changed(cluster_id)
                self._post(ClusterGone(cluster_id))
            case ClustersListed(cluster_ids):
                for cluster_id in self._allocator.state.clusters.keys() - cluster_ids:
                    self._post(ClusterGone(cluster_id))
            case MetricsPut(cluster_id) | MetricsDeleted(cluster_id):
                self._sandbox.documents_changed(cluster_id)
            case PolicyPut():
                pass  # Admission looks policies up anew for every ask.
            case PolicyDeleted(uri):
                self._sandbox.forget_contexts(uri)
            case _:
                assert_never(change)

    def _stepped(self, event: Event, turn: Turn) -> None:
        """Pass on what the step means, before anything of it leaves.

        The cells learn what became of their proposals before they are asked anything else; the
        gateway learns whose messages wait in the queue and are in flight no longer.
        """
        for fact in turn.facts:
            if isinstance(fact, Queued) and (to := self._admission.asker(fact.ask.id)) is not None:
                self._gateway.park(to)
                self._admission.parked(to)
        if isinstance(event, Proposed | ConsultFailed):
            self._consulting.decided(event, turn)
        self._measures.stepped(event, turn)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Respond(to, answer):
                self._measures.told(effect)
                reply = self._admission.answer(to, answer)
                if reply is not None:
                    self._reply(to, reply)
            case Consult():
                self._consulting.consult(effect)
            case Forget():
                self._consulting.forget(effect)
            case Look(lease):
                self._backends.look(lease)
            case Start(lease):
                self._backends.start(lease)
            case Stop(lease):
                self._backends.stop(lease)
            case KeepWarm(lease):
                self._backends.keep(lease)
            case Recall():
                self._tasks.spawn(self._recall(effect))
            case _:
                assert_never(effect)

    def _reply(self, to: Address, reply: bytes) -> None:
        if to.session == HttpCalls.SESSION:
            self._calls.reply(to, reply)
        else:
            self._gateway.tell(to, reply)

    def _push(self, session: SessionId, frame: bytes) -> None:
        self._gateway.push(session, frame)

    def _owner(self, request: RequestId) -> Tenant | None:
        lease = self._allocator.state.lease(request)
        return None if lease is None else lease.tenant

    async def _recall(self, effect: Recall) -> None:
        reply = self._admission.answer(effect.to, await recall.told(effect, self._ledger))
        if reply is not None:
            self._reply(effect.to, reply)

    def _progressed(self, workload: WorkloadReport) -> None:
        """Tell those who watch their leases how far a workload is."""
        lease = RequestId(workload.id)
        if (owner := self._owner(lease)) is not None:
            self._watchers.tell("leases", "workload", about_workload(workload), owner)

    def _manage(self, to: Address, tenant: Tenant, message: wire.Manage) -> None:
        self._tasks.spawn(self._run_management(to, tenant, message))

    async def _run_management(self, to: Address, tenant: Tenant, message: wire.Manage) -> None:
        uri, action = message.policy_rule_uri, message.action
        whence = self._gateway.remote(to.session)
        try:
            data = await self._management.run(uri, tenant, action, message.data)
            about = {"what": "manage", "policy_rule_uri": uri, "action": action, "remote": whence}
            log.info("changed", who=tenant, **about)
            reply = encode(Information(data), message_id=message.id)
        except ServiceError as error:
            reply = refuse(refusal_of(error), message_id=message.id)
        self._admission.forget(to)
        self._reply(to, reply)

    def _inside(self, to: Address, message: wire.Logs | wire.Exec) -> None:
        self._tasks.spawn(self._look_inside(to, message))

    async def _look_inside(self, to: Address, message: wire.Logs | wire.Exec) -> None:
        answer = await self._workloads.answer(message)
        self._admission.forget(to)
        self._reply(to, encode(answer, message_id=message.id))

    def _place(self, to: Address, *asked: *tuple[Tenant, wire.BlockRequest, Sequence[str]]) -> None:
        async def place() -> None:
            self._reply(to, await self._blocks.answer(*asked))

        self._tasks.spawn(place())

    # Health --------------------------------------------------------------------------------

    def _readiness(self) -> tuple[bool, dict[str, Any]]:
        details = {
            "ledger_seq": self._ledger.last_seq,
            "backlog": self._commit_loop.backlog,
            "sandbox": self._config.sandbox if self._sandbox.up else "down",
        }
        return self._ready and self._sandbox.up and not self._tasks.broken.done(), details

    def _gauges(self) -> Iterable[Metric]:
        yield from core_gauges(self._allocator)
        yield gauge("moorage_ledger_seq", "Facts ever stored", self._ledger.last_seq)
        yield gauge("moorage_backlog", "Events and facts under way", self._commit_loop.backlog)
        yield from sandbox_gauges(self._sandbox.report())
        yield from gateway_gauges(self._gateway.stats())
        for part in (self._watchers, self._publishing, self._shadows):
            yield from part.metrics()
        if self._prometheus is not None:
            yield from prometheus_gauges(self._prometheus)
