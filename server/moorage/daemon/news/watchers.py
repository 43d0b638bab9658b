"""Sends the news of each topic to the sessions that watch it.

`admission` adds watchers for the operation `watch`. The news come from `aliases` and from the
commit loop's durable facts. The gateway limits a watcher's unread news, and counts the news that it
missed; nothing here waits for a watcher.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import structlog
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric

from moorage.backends.base import Phase, WorkloadReport
from moorage.core.state.facts import (
    AboutLease,
    ClockMoved,
    ClusterRemoved,
    ClusterSet,
    Cordoned,
    Ended,
    Ending,
    Fact,
    Finished,
    Granted,
    Moved,
    Paused,
    Preempted,
    Renewed,
    Requeued,
    Resumed,
    Spared,
    Started,
    Uncordoned,
    Warmed,
)
from moorage.core.state.refusals import nearest
from moorage.daemon.news.map_news import TOPIC as MAP
from moorage.daemon.news.map_news import MapNews
from moorage.daemon.news.request_progress import RequestProgress
from moorage.daemon.news.shape_news import TOPIC as SHAPES
from moorage.daemon.news.shape_news import ShapeNews
from moorage.daemon.observability.counters import counters, gauges
from moorage.model import Ask, Code, Lease, PolicyRef, RequestId, SessionId, Tenant
from moorage.protocol.faults import ServiceError
from moorage.protocol.replies import event as news_of
from moorage.records.history import NewsEvent
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.leases import Lease as LeaseAnswer
from moorage.records.leases import WorkloadEnd
from moorage.records.rights import Caller, Right
from moorage.sandbox.host.sandbox import OpenCircuit

TOPICS: Final = ("policies", "leases", "fleet", MAP, SHAPES)
"""`policies`: changes of aliases, and policies with an open circuit for the watcher's requests;
`leases`: those of the watcher's tenant; `fleet`: clusters that come and go; `map` and `shapes`: see
`map_news` and `shape_news`. Callers who may see all tenants get the news of all leases."""
RECENT_MAX: Final = 100
"""Maximum events of the fleet and of policies that are remembered."""
FAILURES_MAX: Final = 100
"""Maximum failures of workloads that are remembered, even if no session watches."""
OTHERS_MAX: Final = 20
"""Maximum news per second of other tenants' leases; of further news, only the number is sent."""

log = structlog.get_logger("moored")


class Watchers:
    """Sends the news of each topic to the sessions that watch it.

    Args:
        push: Sends news to a session, or counts the news as missed.
        lease: Finds a lease that holds resources, or was one of the last to end.
        leases: The leases that hold resources.
        map_news: Sends topic `map`.
        shape_news: Sends topic `shapes`.
        progress: Sends the progress of requests.

    Attributes:
        progress, lease: The arguments with the same names.
    """

    def __init__(
        self,
        push: Callable[[SessionId, bytes], None],
        lease: Callable[[RequestId], Lease | None],
        leases: Mapping[RequestId, Lease],
        map_news: MapNews,
        shape_news: ShapeNews,
        progress: RequestProgress,
    ) -> None:
        self.progress = progress
        self._push = push
        self.lease = lease
        self._leases = leases
        self._map = map_news
        self._shapes = shape_news
        self._watching: dict[str, dict[SessionId, Caller]] = {topic: {} for topic in TOPICS}
        self._recent: deque[tuple[Tenant | None, NewsEvent]] = deque(maxlen=RECENT_MAX)
        self._failures: deque[tuple[Tenant | None, NewsEvent]] = deque(maxlen=FAILURES_MAX)
        self._others = _Budget()
        self._counts: Counter[str] = Counter()

    def add(self, session: SessionId, caller: Caller, topics: Sequence[str]) -> list[str]:
        """Send a session the news of these topics from now on; return all its topics.

        Raises:
            ServiceError: `bad_message`: a topic does not exist.
        """
        for number, topic in enumerate(topics):
            if topic not in self._watching:
                known = ", ".join(TOPICS)
                raise ServiceError(
                    Code.BAD_MESSAGE,
                    f"topics[{number}]: there is no topic {topic[:100]!r}; there are {known}"
                    f"{nearest(topic, TOPICS)}",
                    field=f"topics[{number}]",
                    expected=f"one of {known}",
                    details={"known": list(TOPICS)},
                )
        for topic in topics:
            self._watching[topic][session] = caller
        if MAP in topics:
            self._map.add(session, caller)
        if SHAPES in topics:
            self._shapes.add(session, caller)
        return self._topics_of(session)

    def others(self, session: SessionId, tenant: Tenant) -> int:
        """Return the number of a tenant's other sessions that watch something."""
        found = {
            each
            for watching in self._watching.values()
            for each, viewer in watching.items()
            if viewer.tenant == tenant
        }
        return len(found - {session})

    def _topics_of(self, session: SessionId) -> list[str]:
        return [topic for topic in TOPICS if session in self._watching[topic]]

    def resumed(self, session: SessionId, caller: Caller) -> list[str]:
        """Send a resumed session the whole map and all shapes again; return its topics."""
        return self.add(session, caller, self._topics_of(session))

    def drop_session(self, session: SessionId) -> None:
        """Forget a session that has ended."""
        for watching in self._watching.values():
            watching.pop(session, None)
        self._map.drop_session(session)
        self._shapes.drop_session(session)
        self.progress.drop_session(session)

    def observe_request(self, ask: Ask) -> None:
        """Count the demand of a request. Runs on the hot path."""
        if ask.demand is not None:
            self._shapes.counts.note(ask.tenant, ask.demand)

    def tell(self, topic: str, name: str, data: JsonValue, tenant: Tenant | None = None) -> None:
        """Send an event to the watchers of a topic.

        Args:
            topic: One of `TOPICS`.
            name: The name of the event.
            data: Values for JSON.
            tenant: The tenant that the news is about; None: all tenants.
        """
        self._counts[topic] += 1
        if topic != "leases":
            self._recent.append((tenant, NewsEvent(time.time(), topic, name, data)))
        watching = self._watching[topic]
        if not watching:
            return
        frame, others = news_of(name, data, topic), list[SessionId]()
        for session, each in tuple(watching.items()):
            if tenant is None or each.tenant == tenant:
                self._push(session, frame)
            elif each.may(Right.READ_ALL):
                others.append(session)
        if others and self._others.spend():
            if unseen := self._others.unseen():
                missed = news_of("unseen", {"events": unseen}, topic)
                for session in others:
                    self._push(session, missed)
            for session in others:
                self._push(session, frame)

    def recent(self, viewer: str | None) -> list[NewsEvent]:
        """Return recent events of the fleet and of policies, and failures of workloads.

        The newest comes first.

        Args:
            viewer: The tenant that asks; None: an operator, who may see all.
        """
        seen = (None, viewer)
        all_news = (*self._recent, *self._failures)
        shown = [each for tenant, each in all_news if viewer is None or tenant in seen]
        return sorted(shown, key=lambda each: each.at, reverse=True)

    def note_durable(self, facts: Sequence[Fact]) -> None:
        """Send durable facts to the sessions that watch them. Runs on the hot path."""
        self._map.note_durable(facts)
        self.progress.note_durable(facts)
        leases = self._watching["leases"]
        for fact in facts:
            if isinstance(fact, Granted):  # Nearly all facts.
                if leases:
                    self.tell("leases", "granted", LeaseAnswer.of(fact.lease), fact.lease.tenant)
            elif isinstance(fact, ClusterSet | ClusterRemoved | Cordoned | Uncordoned):
                self.tell("fleet", *_about_fleet(fact))
            else:
                if isinstance(fact, Finished) and fact.outcome.phase == "failed":
                    self._note_failure(fact)
                if leases:
                    self._tell_of_lease(fact)

    def _tell_of_lease(self, fact: Fact) -> None:
        if isinstance(fact, AboutLease):
            # Only the fact counts: the state may be ahead of the durable facts.
            lease = self.lease(fact.lease)
            if lease is not None:
                self.tell("leases", *_about_lease(fact), lease.tenant)
        elif isinstance(fact, ClockMoved):
            for each in self._leases.values():
                renewed = Renewed(each.id, each.expires_at)
                self.tell("leases", *_about_lease(renewed), each.tenant)

    def _note_failure(self, fact: Finished) -> None:
        """Remember that a workload failed, without its output."""
        lease = self.lease(fact.lease)
        if lease is not None:
            end = replace(WorkloadEnd.of(fact.outcome), log_tail=())
            news: JsonObject = {"id": fact.lease, "at": end.at, "outcome": end}
            event = NewsEvent(time.time(), "leases", "finished", news)
            self._failures.append((lease.tenant, event))

    def workload(self, workload: WorkloadReport) -> None:
        """Send the progress of a workload to watchers of its lease."""
        self.progress.workload(workload)
        lease = self.lease(RequestId(workload.id))
        if lease is not None:
            self.tell("leases", "workload", _about_workload(workload), lease.tenant)

    def circuits(self, circuit: OpenCircuit) -> None:
        """Tell a tenant that a policy is not consulted for its requests, for a while."""
        data = {
            "policy_rule_uri": circuit.ref.uri,
            "overruns": circuit.overruns,
            "seconds": round(circuit.seconds, 1),
        }
        self.tell("policies", "rests", data, circuit.tenant)

    def warn_of_examples(self, ref: PolicyRef, reason: str) -> None:
        """Tell all watchers that a policy of a mirrored store fails its own examples."""
        log.warning(
            "policy_examples_failed",
            policy_rule_uri=ref.uri,
            finding=f"examples of this policy fail: {reason}",
        )
        self.tell("policies", "examples_failed", {"policy_rule_uri": ref.uri, "reason": reason})

    def metrics(self) -> Iterable[Metric]:
        """Yield the numbers of watchers and of events, by topic."""
        watching = ((topic, float(len(each))) for topic, each in self._watching.items())
        yield gauges("moorage_watchers", "Sessions that watch a topic", "topic", watching)
        counts = ((topic, float(self._counts[topic])) for topic in TOPICS)
        yield counters("moorage_news", "News by topic", "topic", counts)


class _Budget:
    """Limits messages about other tenants: a flood of grants must not overload readers."""

    def __init__(self) -> None:
        self._until = 0.0
        self._left = 0
        self._dropped = 0

    def spend(self) -> bool:
        """Return whether one more message may be sent now; if not, count the message."""
        now = time.monotonic()
        if now >= self._until:
            self._until, self._left = now + 1.0, OTHERS_MAX
        if self._left:
            self._left -= 1
            return True
        self._dropped += 1
        return False

    def unseen(self) -> int:
        """Return how many news were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped


def _about_workload(workload: WorkloadReport) -> JsonObject:
    """Return the progress of a workload as an event of its lease."""
    news: JsonObject = {"id": workload.id, "phase": workload.phase, "detail": workload.detail}
    if workload.endpoint:
        news["endpoint"] = workload.endpoint
    if workload.phase is Phase.FAILED:
        news |= {"exit_code": workload.exit_code, "log_tail": list(workload.log_tail)}
    return news


def _about_fleet(
    fact: ClusterSet | ClusterRemoved | Cordoned | Uncordoned,
) -> tuple[str, JsonObject]:
    match fact:
        case ClusterSet(cluster):
            return "cluster_set", {"cluster_id": cluster.id, "nodes": len(cluster.nodes)}
        case ClusterRemoved(cluster):
            return "cluster_removed", {"cluster_id": cluster}
        case Cordoned(cluster, node, at):
            name = "draining" if fact.drains else "cordoned"
            where = {"cluster_id": cluster, "node_id": node or None}
            return name, {**where, "at": at, "unavailable": fact.why, "until": fact.until or None}
        case Uncordoned(cluster, node, at):
            return "uncordoned", {"cluster_id": cluster, "node_id": node or None, "at": at}


def _about_lease(  # noqa: C901  # One case per fact.
    fact: AboutLease,
) -> tuple[str, JsonObject]:
    match fact:
        case Renewed(lease, expires_at):
            return "renewed", {"id": lease, "expires_at": expires_at}
        case Started(lease, at, endpoint):
            return "started", {"id": lease, "at": at, "state": "active", "endpoint": endpoint}
        case Finished(lease, outcome):
            return "finished", {"id": lease, "at": outcome.at, "outcome": WorkloadEnd.of(outcome)}
        case Requeued(lease, at, reason):
            return "requeued", {"id": lease, "at": at, "state": "queued", "reason": reason}
        case Paused(lease, at, retry_at):
            return "paused", {"id": lease, "at": at, "state": "queued", "retry_at": retry_at}
        case Resumed(lease, at):
            return "resumed", {"id": lease, "at": at, "state": "queued"}
        case Preempted(lease, at, by, until, reason):
            return "preempted", {"id": lease, "at": at, "by": by, "until": until, "reason": reason}
        case Spared(lease, at):
            return "spared", {"id": lease, "at": at}
        case Moved(lease, at, placement, _, lost):
            gone = [device.uuid for device in lost]
            return "moved", {"id": lease, "at": at, "placement": placement, "lost_devices": gone}
        case Ending(lease, at, reason):
            return "ending", {"id": lease, "at": at, "state": "ending", "reason": reason}
        case Warmed(lease, at, expires_at):
            news = {"id": lease, "at": at, "state": "warm", "expires_at": expires_at}
            return "warm", news
        case Ended(lease, at, reason):
            return "ended", {"id": lease, "at": at, "state": "ended", "reason": reason}
