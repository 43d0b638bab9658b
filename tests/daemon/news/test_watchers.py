"""Tenants get news of their own leases, and operators news of all leases, within a bound."""

from typing import Any

import msgspec

from moorage.core.state.facts import ClusterSet, Finished, Granted
from moorage.daemon.news import watchers
from moorage.daemon.news.watchers import Watchers
from moorage.model import (
    Cluster,
    ClusterId,
    Lease,
    LeaseTerms,
    Outcome,
    PolicyRef,
    RequestId,
    SessionId,
    Tenant,
)
from moorage.records.rights import Caller, Role

ANN, OPS = SessionId("ann"), SessionId("ops")


class _Silent:
    """A stand-in for news of the map, of shapes and of progress, which these tests do not need."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Heard:
    """Watchers of leases, a tenant and an operator, and the news that each of the two gets."""

    def __init__(self) -> None:
        self.frames: dict[SessionId, list[Any]] = {ANN: [], OPS: []}
        silent: Any = _Silent()
        self.watchers = Watchers(self.push, lambda _: None, {}, silent, silent, silent)
        self.watchers.add(ANN, Caller(Tenant("ann"), Role.CLIENT), ["leases"])
        self.watchers.add(OPS, Caller(Tenant("ops"), Role.OPERATOR), ["leases"])

    def push(self, session: SessionId, frame: bytes) -> None:
        self.frames[session].append(msgspec.json.decode(frame))

    def grant(self, tenant: str, number: int) -> None:
        who = RequestId(f"r{number}"), Tenant(tenant), ""
        terms, policy = LeaseTerms(ttl_seconds=60.0), PolicyRef("p", "d")
        self.watchers.note_durable([Granted(Lease(*who, policy, (), number, 0.0, 60.0, terms))])


def test_an_operator_gets_news_of_all_leases() -> None:
    heard = Heard()
    heard.grant("ann", 1)
    heard.grant("bob", 2)
    assert [each["data"]["id"] for each in heard.frames[ANN]] == ["r1"]
    assert [each["data"]["id"] for each in heard.frames[OPS]] == ["r1", "r2"]


def test_an_operator_gets_the_number_of_dropped_news() -> None:
    heard = Heard()
    for number in range(watchers.OTHERS_MAX + 5):
        heard.grant("bob", number)
    assert len(heard.frames[OPS]) == watchers.OTHERS_MAX
    heard.watchers._others._until = 0.0  # As if a second had passed.
    heard.grant("bob", 99)
    unseen, last = heard.frames[OPS][-2:]
    assert (unseen["event"], unseen["data"]) == ("unseen", {"events": 5})
    assert last["data"]["id"] == "r99"


def test_the_last_news_of_the_fleet_are_remembered_without_watchers() -> None:
    heard = Heard()
    heard.watchers.drop_session(ANN)
    heard.watchers.drop_session(OPS)
    heard.watchers.note_durable([ClusterSet(Cluster(ClusterId("c"), ()))])
    heard.watchers.tell("policies", "rests", {}, Tenant("ann"))
    assert [each.event for each in heard.watchers.recent(None)] == ["rests", "cluster_set"]
    assert [each.event for each in heard.watchers.recent("bob")] == ["cluster_set"]


def test_failures_of_workloads_are_remembered_without_watchers() -> None:
    heard = Heard()
    heard.watchers.drop_session(ANN)
    heard.watchers.drop_session(OPS)
    terms, policy = LeaseTerms(ttl_seconds=60.0), PolicyRef("p", "d")
    lease = Lease(RequestId("r1"), Tenant("ann"), "", policy, (), 1, 0.0, 60.0, terms)
    heard.watchers.lease = {lease.id: lease}.get
    for phase in ("succeeded", "failed"):
        outcome = Outcome(1, phase, "it died", 3.0, (), 1, ("its output",))
        heard.watchers.note_durable([Finished(lease.id, outcome)])
    (event,) = heard.watchers.recent("ann")
    assert (event.topic, event.event, event.data["id"]) == ("leases", "finished", "r1")
    assert event.data["outcome"].log_tail == ()
    assert heard.watchers.recent("bob") == []
    assert len(heard.watchers.recent(None)) == 1
