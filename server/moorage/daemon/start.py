"""Starts a daemon in phases: each builds its parts from the parts of the phases before it.

`daemon.main` starts a daemon. Its parts are closed in the reverse order: when the daemon stops, or
when its start fails.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from moorage.backends.registry import kinds
from moorage.config.settings import Config
from moorage.core.allocator import Allocator
from moorage.daemon.access.lease_tokens import LeaseTokens
from moorage.daemon.access.seen_tokens import SeenTokens
from moorage.daemon.agents.agent_store import AgentStore, AgentStoreError
from moorage.daemon.agents.roster import AgentRoster
from moorage.daemon.daemon import Daemon
from moorage.daemon.doors import Doors, Entrance, make_entrance, naming
from moorage.daemon.following import Applied, Follower, Reads
from moorage.daemon.observability import gauges
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.health import Health, follow_disk
from moorage.daemon.parts import (
    OpenLedger,
    Outset,
    Prepared,
    Runners,
    Stores,
    follow_clusters,
    follow_prometheus,
    make_core,
    make_requests,
    make_web_services,
    open_agents,
    open_ledger,
    open_runners,
    open_stores,
    prepare,
    run_core,
)
from moorage.daemon.requests import services
from moorage.daemon.standby import Reading, Standby, role_metrics
from moorage.daemon.tasks import Tasks
from moorage.daemon.trust import Trust, beating
from moorage.daemon.workloads.control import WorkloadControl
from moorage.ledger.base import LedgerError
from moorage.ledger.following import FollowedLedger
from moorage.protocol.faults import ServiceError
from moorage.protocol.replies import Shared
from moorage.storage.base import Election, StorageError
from moorage.storage.opening import claim_folder, open_storage
from moorage.web.services import StandbyServices

LOAD_SECONDS_MAX: Final = 5.0
"""Seconds after which a standby prints its ready line even if the state is not loaded."""
FOLLOW_PAUSE_SECONDS: Final = 5.0
"""Seconds after which a standby that failed to follow the leader loads the state again."""
log = structlog.get_logger("moored")


class Stopped(Exception):  # noqa: N818  # The name says what happened, like asyncio.QueueFull.
    """The server received a stop signal while it stood by."""


@dataclass(slots=True)
class Waiting:
    """Callbacks and signals for a server that may have to stand by.

    Args:
        announce: Called with the open doors of a standby, once it has loaded the leader's state and
            can take over quickly.
        stopping: Set when the server must stop.
        announced: Whether `announce` was called.
    """

    announce: Callable[[Doors], None] = lambda _: None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    announced: bool = False


async def start(config: Config, measures: Measures, waiting: Waiting | None = None) -> Daemon:
    """Open everything and serve; if another server leads, stand by first until this one leads.

    Args:
        config: All settings.
        measures: The metrics of `/metrics`; the daemon adds its own.
        waiting: The callbacks of a server that may have to stand by.

    Raises:
        Stopped: The server received a stop signal while it stood by.
        LedgerError: The ledger cannot be opened.
        JailError: This machine cannot isolate policies.
        BackendError: A backend lacks something on this machine.
        OSError: The server cannot listen on an address.
    """
    tasks = Tasks()
    async with AsyncExitStack() as stack:
        try:
            return await _start(config, measures, tasks, waiting or Waiting(), stack)
        except BaseException:
            await tasks.close()
            raise


async def _start(
    config: Config, measures: Measures, tasks: Tasks, waiting: Waiting, stack: AsyncExitStack
) -> Daemon:
    with naming(f"set data_dir (MOORAGE_DATA_DIR, --data), {config.data_dir}, to a folder"):
        config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        _warn_root(config.data_dir)
    storage = open_storage(config.storage, config.data_dir)
    stack.callback(claim_folder(config.storage, config.data_dir))
    election = storage.election()
    agents = AgentStore(storage.agents())
    stack.callback(agents.close)
    outset = Outset(config, measures, tasks, storage, agents, Trust(election, tasks.fail))
    if election is None:
        measures.watch(partial(role_metrics, "writer"))
        ledger = await open_ledger(storage, stack)  # First: its lock says whose folder that is.
        entrance = _entrance(outset, stack)
        return await _lead(outset, ledger, entrance, await prepare(config, stack), stack)
    entrance = _entrance(outset, stack)
    prepared = await _stand_by(election, outset, entrance, waiting, stack)
    stack.callback(election.resign)
    outset.trust.begin()
    with beating(election):
        ledger = await open_ledger(storage, stack, prepared)
        return await _lead(outset, ledger, entrance, prepared, stack)


def _warn_root(folder: Path) -> None:
    """Warn if root runs a server in another user's folder, as a container may do."""
    owner = folder.stat().st_uid
    if os.geteuid() == 0 and owner != 0:
        whose = f"{folder} belongs to the user {owner}, but this server runs as root"
        finding = f"{whose}: a server of that user can never use the files that this one makes"
        log.warning("data_dir_of_another_user", finding=finding)


def _entrance(outset: Outset, stack: AsyncExitStack) -> Entrance:
    entrance = make_entrance(outset.config, outset.storage, outset.tasks, outset.trust, stack)
    outset.measures.watch(entrance.metrics)
    return entrance


async def _stand_by(
    election: Election, outset: Outset, entrance: Entrance, waiting: Waiting, stack: AsyncExitStack
) -> Prepared:
    """Wait until this server leads; until then its ports refer callers to the leader."""
    measures, doors = outset.measures, entrance.doors
    standby = Standby(election, entrance.gateway, outset.tasks, outset.config.rollout)
    measures.watch(standby.metrics)
    services = StandbyServices(
        authenticate=entrance.tokens.caller,
        pending=entrance.tokens.pending,
        why_refused=entrance.tokens.why_refused,
        readiness=standby.readiness,
        refusal=standby.refusal,
        metrics_text=measures.text,
        audit=entrance.audit,
    )
    await doors.open(services, standby, standby)
    stack.push_async_callback(doors.close)
    # The first attempt reports what is wrong with the database, and ends a server that cannot use
    # it.
    standby.leads = await asyncio.to_thread(election.stand, doors.seat())
    if standby.leads:
        with beating(election):
            return await prepare(outset.config, stack)
    prepared = await prepare(outset.config, stack)
    prepared.standby = standby
    gc.freeze()
    gc.enable()  # Standing by may take months.

    def announce() -> None:
        if not (waiting.announced or standby.leads):
            waiting.announced = True
            waiting.announce(doors)

    reading = outset.tasks.spawn(_read_on(outset, entrance, prepared, standby, announce))
    late = asyncio.get_running_loop().call_later(LOAD_SECONDS_MAX, announce)
    await standby.wait(doors.seat(), waiting.stopping)
    late.cancel()
    reading.cancel()
    await asyncio.wait([reading])
    gc.disable()
    if not standby.leads:
        raise Stopped
    log.info("leads", finding="the former leader ended, and this server replaces it")
    return prepared


async def _read_on(
    outset: Outset,
    entrance: Entrance,
    prepared: Prepared,
    standby: Standby,
    announce: Callable[[], None],
) -> None:
    """Answer reads from the leader's stored facts while standing by. Runs until cancelled."""
    for name in outset.config.backends:
        with suppress(Exception):  # `open` says what is wrong, once this server leads.
            await asyncio.to_thread(kinds()[name].load, outset.config.data_dir)
    while not standby.leads:
        try:
            async with AsyncExitStack() as stack:
                try:
                    await _read(outset, entrance, prepared, standby, announce, stack)
                finally:
                    standby.read(None)
                    if not standby.leads:
                        entrance.doors.give_way()
                        entrance.gateway.change(standby, standby)  # Watching sessions start again.
        except (LedgerError, ServiceError, StorageError) as error:
            log.warning(
                "standby_read_failed", finding=f"this standby does not follow the leader: {error}"
            )
        except Exception:  # A defect here must not cost a takeover.
            log.exception(
                "standby_read_failed", finding="a defect; this standby loads the state again"
            )
        await asyncio.sleep(FOLLOW_PAUSE_SECONDS)


async def _read(
    outset: Outset,
    entrance: Entrance,
    prepared: Prepared,
    standby: Standby,
    announce: Callable[[], None],
    stack: AsyncExitStack,
) -> None:
    """Build the parts that answer reads, and follow the leader until following fails."""
    config, at = replace(outset.config, traces=False), time.time()
    followed = await _follow(outset, standby, stack)
    if followed is None:
        return
    ledger, allocator, catalog = followed.ledger, followed.allocator, followed.catalog
    assert catalog.following is not None
    following = Follower(ledger, allocator, catalog.following, at)
    tasks, reads = Tasks(), Reads(allocator, ledger, lambda: requests.replies)
    stack.push_async_callback(tasks.close)
    no_tokens = LeaseTokens(b"")  # A standby grants nothing.
    stores = Stores(ledger, allocator, no_tokens, outset.agents, entrance.audit, catalog)
    core = make_core(stores, entrance, replace(prepared, inbox=reads), outset.measures, tasks)
    workloads = WorkloadControl({}, reads.post, tasks, core.watchers.workload, outset.trust.check)
    runners = Runners(prepared.sandbox, workloads, {}, prepared.rates)
    lost_seconds = config.agent_lost_seconds
    roster = AgentRoster(outset.agents, None, catalog, lost_seconds, stores.audit.note)
    requests = make_requests(config, stores, core, runners, roster, stack, standby.stamp)
    stack.enter_context(
        outset.measures.watching(
            partial(gauges.core_gauges, allocator),
            partial(gauges.fleet_gauges, allocator.state.fleet),
            lambda: gauges.gateway_gauges(core.gateway.stats()),
            core.watchers.metrics,
            gauges.build_gauges,
            following.gauges,
        )
    )
    for work in (
        following.run(core.watchers.note_durable),
        following.run_catalog(),
        core.map_news.run(_nothing),
        core.shape_news.run(),
        core.history.run(),
        core.tokens.follow(core.gateway.expel),
    ):
        tasks.spawn(work)
    standby.read(Reading(following, requests.router))
    behind = make_web_services(config, stores, core, runners, requests, standby.readiness)
    entrance.doors.show(replace(behind, standby=standby.reads()))
    announce()
    await tasks.broken


async def _follow(outset: Outset, standby: Standby, stack: AsyncExitStack) -> Applied | None:
    """Load the parts that answer a standby's reads; the server keeps them when it leads."""
    config, source = outset.config, outset.storage.followed()
    if source is None:
        return None
    async with AsyncExitStack() as opening:
        ledger = FollowedLedger(source.facts)
        opening.callback(ledger.close)
        allocator = Allocator(config.requeue_pause_seconds, config.overtaken_max)
        await ledger.load(allocator.follow)
        for _ in allocator.index():
            await asyncio.sleep(0)
        with suppress(AgentStoreError):  # A caller that needs the store gets the error.
            await asyncio.to_thread(outset.agents.agents)
        catalog = await services.open_catalog(config, source.records, follows=True)
        opening.callback(catalog.memory.forget)
        opening.push_async_callback(catalog.close)
        followed = Applied(ledger, allocator, catalog, opening.pop_all())

    async def leave() -> None:
        if standby.leads:
            standby.followed = followed
        else:
            await followed.closing.aclose()
            followed.allocator.forget()

    stack.push_async_callback(leave)
    return followed


async def _nothing() -> None:
    """Do nothing: the facts that a standby applies are durable already."""


async def _lead(
    outset: Outset,
    ledger: OpenLedger,
    entrance: Entrance,
    prepared: Prepared,
    stack: AsyncExitStack,
) -> Daemon:
    config, measures, tasks, trust = outset.config, outset.measures, outset.tasks, outset.trust
    stores = await open_stores(outset, ledger, entrance, prepared, stack)
    core = make_core(stores, entrance, prepared, measures, tasks)
    runners = await open_runners(outset, stores, core, prepared, stack)
    agents = open_agents(config, stores, runners, trust.epoch)
    stack.callback(agents.close)
    core.history.agents = agents.now
    core.history.path = config.data_dir / "history.jsonl"

    def stamp() -> Shared:
        return {"revision": stores.ledger.last_seq}

    stamps = None if trust.election is None else stamp
    requests = make_requests(config, stores, core, runners, agents, stack, stamps)
    commit_loop = await run_core(config, stores, core, runners, requests, trust)
    # The loaded objects stay. Without a freeze, each garbage collection among ten thousand
    # documents would free nothing and stop the server for a third of a second (measured).
    gc.freeze()
    health = Health(
        core.gateway, stores.ledger, commit_loop, runners.sandbox, config.sandbox, tasks
    )
    doors = entrance.doors
    behind = make_web_services(config, stores, core, runners, requests, health.readiness)
    standby, seen_tokens = prepared.standby, SeenTokens(config.data_dir, stores.audit)
    if standby is None:
        await seen_tokens.compare(config.tokens)
        await doors.open(behind, requests.router, agents)
    else:
        tasks.spawn(seen_tokens.compare(config.tokens))  # Waiting clients come first.
        await doors.open(behind, requests.router, agents, standby.is_idle)
        standby.hand_over(requests.router)
        core.durations.observe_takeover(standby.vacant_seconds())
    stack.push_async_callback(doors.close)
    core.tasks.spawn(core.map_news.run(partial(services.settle, requests.router, requests.calls)))
    core.tasks.spawn(core.shape_news.run())
    core.tasks.spawn(core.shape_news.measure())
    core.tasks.spawn(core.watchers.progress.run())
    core.tasks.spawn(core.history.run())
    core.tasks.spawn(core.tokens.follow(core.gateway.expel))
    core.tasks.spawn(trust.run())
    core.tasks.spawn(follow_disk(stores.ledger))
    core.tasks.spawn(agents.watch())
    core.tasks.spawn(agents.watch_own())
    follow_prometheus(config, stores.catalog, core, stack)
    follow_clusters(config, stores, core, runners)
    return Daemon(
        doors=doors,
        tokens=core.tokens,
        seen_tokens=seen_tokens,
        agents=agents,
        gateway=core.gateway,
        calls=requests.calls,
        replies=requests.replies,
        commit_loop=commit_loop,
        tasks=tasks,
        trust=trust,
        closing=stack.pop_all(),
    )
