"""The daemon: builds the rooms, introduces them to each other, starts, drains and stops.

`moorage.__main__` runs it for `moored serve`; the trials run it as a process of its own.
"""

import asyncio
import contextlib
import gc
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, assert_never

import structlog
from prometheus_client.metrics_core import Metric

from moorage.catalog import base as catalog
from moorage.catalog.prometheus import PrometheusPoller
from moorage.config import Config
from moorage.core.allocator import Allocator
from moorage.core.events import ClusterGone, ClusterSeen, ConsultFailed, Event, Proposed, Restarted
from moorage.core.words import (
    Address,
    Consult,
    Effect,
    Forget,
    Keep,
    Look,
    Queued,
    Recall,
    Start,
    Stop,
    Tell,
    Told,
    Turn,
)
from moorage.daemon import descriptors, pruning, recall
from moorage.daemon.admission import Admission
from moorage.daemon.answers import encode, refusal_of, refuse
from moorage.daemon.backends import backends
from moorage.daemon.block_tasks import BlockServices
from moorage.daemon.blocks import Blocks
from moorage.daemon.consulting import Consulting
from moorage.daemon.crank import Crank
from moorage.daemon.engine_room import EngineRoom
from moorage.daemon.executing import Executing
from moorage.daemon.finding import Finder
from moorage.daemon.gauges import (
    core_gauges,
    gateway_gauges,
    prometheus_gauges,
    sandbox_gauges,
)
from moorage.daemon.http_calls import HttpCalls
from moorage.daemon.lease_tokens import LeaseTokens, open_secret
from moorage.daemon.managing import Management
from moorage.daemon.measures import Measures, gauge
from moorage.daemon.names import names
from moorage.daemon.publishing import Publishing
from moorage.daemon.remembering import Remembering
from moorage.daemon.remote_rules import remote_rules
from moorage.daemon.services import (
    STOPPING,
    HttpServices,
    RuleServices,
    open_catalog,
    prometheus_source,
)
from moorage.daemon.shadows import Shadows
from moorage.daemon.tokens import Tokens
from moorage.daemon.vetting import examine
from moorage.daemon.watching import Watchers, about_workload
from moorage.daemon.workloads import Workloads
from moorage.engines.base import Workload
from moorage.gateway.server import Gateway, GatewaySettings
from moorage.ledger.base import Ledger
from moorage.ledger.sqlite import SqliteLedger
from moorage.model import RequestId, SessionId, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.faults import ServiceError
from moorage.sandbox.host import Sandbox
from moorage.sandbox.limits import Limits
from moorage.web.server import WebServer

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
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = contextlib.AsyncExitStack()
        self._ready = False
        self._ledger: Ledger
        self._catalog: catalog.Catalog
        self._rules: Sandbox
        self._crank: Crank
        self._engines: EngineRoom
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
            JailError: Rules cannot be locked in here.
            EngineError: What a backend needs is not here.
            OSError: An address cannot be listened on.

        """
        try:
            return await self._start()
        except BaseException:
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
        self._catalog = await open_catalog(config, self._changed, self._examine)
        self._closing.push_async_callback(self._catalog.close)
        self._rules = Sandbox(
            fleet=self._allocator.state.fleet,
            services=RuleServices(self._catalog),
            deliver=self._post,
            limits=Limits(
                evaluation_seconds=config.policy_deadline_seconds,
                memory_mib=config.policy_memory_mib,
            ),
            mode=config.sandbox,
            isolation=config.isolation,
            rests=self._watchers.rests,
        )
        report = await self._rules.start()
        self._closing.push_async_callback(self._rules.close)
        self._remembering = Remembering(self._catalog.contexts, self._rules)
        await self._remembering.restore()
        for warning in (*recovery.warnings, *self._catalog.warnings):
            log.warning("damage", finding=warning)
        self._closing.push_async_callback(self._remembering.close)
        self._spawn(self._remembering.run())
        log.info("sandbox", mode=report.mode, layers=dict(report.layers), warning=report.warning)
        self._crank = Crank(
            self._allocator,
            self._ledger,
            last_seq=recovery.last_seq,
            carry_out=self._carry_out,
            stepped=self._stepped,
            durable=self._watchers.durable,
            failed=self._fail,
            checkpoint_every_facts=config.checkpoint_every_facts,
        )
        self._spawn(self._crank.commit_forever())
        self._spawn(pruning.prune_forever(self._ledger, config))
        engines = backends(config, lambda: self._allocator.state.clusters)
        self._engines = EngineRoom(engines, self._post, self._fail, self._progressed)
        self._closing.push_async_callback(self._engines.close)
        held = self._allocator.state.leases
        await self._engines.open([each.workload for each in held.values() if each.provision])
        self._introduce()  # Before anything happens: rules are asked about what waited.
        self._reconcile()
        await self._settled()
        self._measures.watch(self._gauges)
        # What was loaded stays. Without this, collections that look through ten thousand documents
        # in vain stop the server for a third of a second each (measured).
        gc.freeze()
        return await self._open_doors()

    def _introduce(self) -> None:
        """Build what answers requests, of rooms that are open."""
        config, allocator = self._config, self._allocator
        self._finder = Finder(self._catalog, self._rules)
        executor = remote_rules(config, self._catalog, lambda: allocator.state.fleet, self._post)
        if executor is not None:
            self._closing.push_async_callback(executor.close)
        self._management = Management(self._catalog, self._rules, elsewhere=executor is not None)
        self._workloads = Workloads(self._engines, allocator.state.lease)
        self._shadows = Shadows(
            self._catalog, self._rules, lambda: allocator.state, lambda: allocator.undecided
        )
        self._consulting = Consulting(
            self._catalog, self._rules, executor, self._shadows, self._post
        )
        self._publishing = Publishing(
            catalog=self._catalog,
            rules=self._rules,
            shadows=self._shadows,
            failures_max=config.policy_fallback_failures,
            asked_before=self._allocator.policy_asked,
            tell=partial(self._watchers.tell, "policies"),
            spawn=self._spawn,
        )
        self._blocks = Blocks(
            catalog=self._catalog,
            finder=self._finder,
            rules=self._rules,
            fleet=lambda: self._allocator.state.fleet,
            clusters_max=config.candidates_max,
        )
        self._admission = Admission(
            config=config,
            catalog=self._catalog,
            finder=self._finder,
            publishing=self._publishing,
            engines=self._engines,
            tokens=self._lease_tokens,
            post=self._post,
            reply=self._reply,
            manage=self._manage,
            inside=self._inside,
            place=self._place,
            watchers=self._watchers,
            failed=self._fail,
        )

    async def _examine(self, record: catalog.PolicyRecord) -> str:
        if doubt := await examine(self._rules, record):
            self._watchers.examples_failed(record.ref, doubt)
        return doubt

    def _reconcile(self) -> None:
        """Bring the core up to date with the world before anybody may ask."""
        live = {cluster.id: cluster for cluster in self._catalog.clusters()}
        if self._catalog.registry_known:
            for cluster_id in self._allocator.state.clusters.keys() - live.keys():
                self._post(ClusterGone(cluster_id))
        self._spawn(self._catalog.keep_fresh())
        for cluster in live.values():
            self._post(ClusterSeen(cluster))
        self._post(Restarted(self._config.restart_grace_seconds))

    async def _settled(self) -> None:
        """Wait until the crank rests; raise what broke it, since it then never will."""
        settled = asyncio.ensure_future(self._crank.settled())
        await asyncio.wait([settled, self._broken], return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        if self._broken.done():
            await self._broken

    async def _open_doors(self) -> tuple[int, int]:
        config = self._config
        settings = GatewaySettings(
            sessions_max=config.sessions_max,
            descriptors_max=descriptors.connections_max(),
            message_bytes_max=config.message_bytes_max,
            deflate=config.deflate,
            origins=names(config),
        )
        if config.sessions_max > descriptors.connections_max():
            log.warning("sessions", finding=descriptors.too_few(config.sessions_max))
        self._gateway = Gateway(self._admission, settings, self._tokens.tenant)
        services = HttpServices(
            catalog=self._catalog,
            rules=self._rules,
            finder=self._finder,
            blocks=BlockServices(self._blocks, self._spawn),
            publishing=self._publishing,
            management=self._management,
            executing=Executing(self._catalog.executors, self._catalog, self._rules),
            admission=self._admission,
            calls=self._calls,
            allocate_over_http=config.allocate_over_http,
            authenticate=self._tokens.tenant,
            readiness=self._readiness,
            metrics_text=self._measures.text,
        )
        most = settings.descriptors_max
        web = WebServer(services, origins=names(config), descriptors_max=most)
        http_port = await web.start(config.http_host, config.http_port)
        self._closing.push_async_callback(web.close)
        port = await self._gateway.start(config.host, config.port, http_port)
        self._closing.push_async_callback(self._gateway.close)
        self._follow_prometheus()
        self._ready = True
        return port, http_port

    def _follow_prometheus(self) -> None:
        if not self._config.prometheus_url:
            return

        def tell(finding: str) -> None:
            log.warning("prometheus", finding=finding)

        self._prometheus = PrometheusPoller(self._catalog, prometheus_source(self._config), tell)
        self._closing.push_async_callback(self._prometheus.close)
        self._spawn(self._prometheus.run())

    def change_tokens(self, tokens: Mapping[str, str]) -> None:
        """Let these in from now on, and close the sessions of all others."""
        self._tokens.change(tokens)
        self._gateway.expel()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            BaseException: Whatever broke an invariant or the ledger; the process must end.

        """
        await self._broken

    async def stop(self) -> None:
        """Close the doors, let what is under way finish, write a checkpoint, let go."""
        self._ready = False
        self._calls.draining = True
        broken = self._broken.done()
        self._broken.cancel()
        if not broken:
            await self._gateway.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS_MAX):
                    await self._crank.settled()
                    await self._crank.checkpoint()
        for to in self._calls.waiting():  # In the queue, or with a rule: they end with the crank.
            if (reply := self._admission.answer(to, STOPPING)) is not None:
                self._calls.reply(to, reply)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._closing.aclose()

    # Introductions -------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._crank.post(event)

    def _changed(self, change: catalog.Change) -> None:
        """Pass on what changed in the registry."""
        match change:
            case catalog.ClusterPut(cluster, live):
                self._rules.documents_changed(cluster.id)
                self._post(ClusterSeen(cluster) if live else ClusterGone(cluster.id))
            case catalog.ClusterDeleted(cluster_id):
                self._rules.documents_changed(cluster_id)
                self._post(ClusterGone(cluster_id))
            case catalog.ClustersListed(cluster_ids):
                for cluster_id in self._allocator.state.clusters.keys() - cluster_ids:
                    self._post(ClusterGone(cluster_id))
            case catalog.MetricsPut(cluster_id) | catalog.MetricsDeleted(cluster_id):
                self._rules.documents_changed(cluster_id)
            case catalog.PolicyPut():
                pass  # Admission looks rules up anew for every ask.
            case catalog.PolicyDeleted(uri):
                self._rules.forget_contexts(uri)
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
            case Tell(to, answer):
                self._measures.told(effect)
                reply = self._admission.answer(to, answer)
                if reply is not None:
                    self._reply(to, reply)
            case Consult():
                self._consulting.consult(effect)
            case Forget():
                self._consulting.forget(effect)
            case Look(lease):
                self._engines.look(lease)
            case Start(lease):
                self._engines.start(lease)
            case Stop(lease):
                self._engines.stop(lease)
            case Keep(lease):
                self._engines.keep(lease)
            case Recall():
                self._spawn(self._recall(effect))
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

    def _progressed(self, workload: Workload) -> None:
        """Tell those who watch their leases how far a workload is."""
        lease = RequestId(workload.id)
        if (owner := self._owner(lease)) is not None:
            self._watchers.tell("leases", "workload", about_workload(workload), owner)

    def _manage(self, to: Address, tenant: Tenant, message: wire.Manage) -> None:
        self._spawn(self._run_management(to, tenant, message))

    async def _run_management(self, to: Address, tenant: Tenant, message: wire.Manage) -> None:
        uri, action = message.policy_rule_uri, message.action
        whence = self._gateway.remote(to.session)
        try:
            data = await self._management.run(uri, tenant, action, message.data)
            about = {"what": "manage", "policy_rule_uri": uri, "action": action, "remote": whence}
            log.info("changed", who=tenant, **about)
            reply = encode(Told(data), message_id=message.id)
        except ServiceError as error:
            reply = refuse(refusal_of(error), message_id=message.id)
        self._admission.forget(to)
        self._reply(to, reply)

    def _inside(self, to: Address, message: wire.Logs | wire.Exec) -> None:
        self._spawn(self._look_inside(to, message))

    async def _look_inside(self, to: Address, message: wire.Logs | wire.Exec) -> None:
        answer = await self._workloads.answer(message)
        self._admission.forget(to)
        self._reply(to, encode(answer, message_id=message.id))

    def _place(self, to: Address, tenant: Tenant, message: wire.BlockRequest) -> None:
        async def place() -> None:
            self._reply(to, await self._blocks.answer(tenant, message))

        self._spawn(place())

    # Health --------------------------------------------------------------------------------

    def _readiness(self) -> tuple[bool, dict[str, Any]]:
        details = {
            "ledger_seq": self._ledger.last_seq,
            "backlog": self._crank.backlog,
            "sandbox": self._config.sandbox if self._rules.up else "down",
        }
        return self._ready and self._rules.up and not self._broken.done(), details

    def _gauges(self) -> Iterable[Metric]:
        yield from core_gauges(self._allocator)
        yield gauge("moorage_ledger_seq", "Facts ever stored", self._ledger.last_seq)
        yield gauge("moorage_backlog", "Events and facts under way", self._crank.backlog)
        yield from sandbox_gauges(self._rules.report())
        yield from gateway_gauges(self._gateway.stats())
        for part in (self._watchers, self._publishing, self._shadows):
            yield from part.metrics()
        if self._prometheus is not None:
            yield from prometheus_gauges(self._prometheus)

    def _fail(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
