import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.core.state.facts import (
    Carried,
    ClockMoved,
    ClusterRemoved,
    ClusterSet,
    Cordoned,
    Counted,
    Dequeued,
    DurationsCarried,
    Ended,
    Ending,
    Fact,
    Finished,
    Granted,
    HalfLifeSet,
    Moved,
    Overtaken,
    Paused,
    Preempted,
    Queued,
    QuotaSet,
    Refusal,
    Renewed,
    Requeued,
    Reserved,
    Resumed,
    Spared,
    Started,
    Uncordoned,
    Unreserved,
    UsageCarried,
    WaitExtended,
    Warmed,
)
from moorage.core.state.reserved import NodeReservation
from moorage.ledger.base import FactUnknown, FactUnwritable, LedgerCorrupt
from moorage.ledger.codec import FACTS, KINDS, UPGRADES, Codec, FactKind, seal, subject_of, unseal
from moorage.model import (
    Ask,
    Cluster,
    ClusterId,
    Code,
    Demand,
    DeviceId,
    Gpu,
    Lease,
    LeaseTerms,
    Node,
    NodeId,
    Notice,
    Outcome,
    PolicyRef,
    Provision,
    Quota,
    RequestId,
    Requirement,
    Share,
    Tenant,
)
from moorage.records.requests import LeaseRequest

SHAPES = Path(__file__).with_name("shapes.json")

# Strategies derive all values from the model's types; only those for `Any` are listed here.
times = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | times | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(), plain, max_size=3)
ids = st.text().map(RequestId)
devices = st.lists(st.builds(DeviceId, st.text(), st.text()), max_size=2).map(tuple)
clusters = st.builds(
    Cluster,
    nodes=st.lists(
        st.builds(
            Node,
            gpus=st.lists(st.builds(Gpu), max_size=2).map(tuple),
            labels=st.dictionaries(st.text(), st.text(), max_size=2),
            devices=devices,
        ),
        max_size=2,
    ).map(tuple),
)
terms = st.builds(LeaseTerms, ttl_seconds=times, wait_seconds=times)
provisions = st.none() | st.builds(Provision, spec=objects)
outcomes = st.builds(Outcome, at=times)
requirements = st.builds(Requirement, values=st.lists(st.text(), max_size=2).map(tuple))
demands = st.builds(Demand, where=st.lists(requirements, max_size=2).map(tuple))
asks = st.builds(
    Ask,
    demand=st.none() | demands,
    candidates=st.none() | st.lists(st.text().map(ClusterId), max_size=2).map(tuple),
    terms=st.none() | terms,
    provision=provisions,
    inputs=plain,
    parameters=objects,
    settings=objects,
)
leases = st.builds(
    Lease,
    granted_at=times,
    expires_at=times,
    terms=terms,
    provision=provisions,
    state=st.sampled_from(
        ["granted", "starting", "active", "failing", "queued", "ending", "warm", "ended"]
    ),
    reason=st.text(),
    retry_at=times,
    faults=st.integers(0, 9),
    outcome=st.none() | outcomes,
    asked_at=times,
    ask=st.none() | asks,
    notice=st.none() | st.builds(Notice, until=times),
    devices=st.lists(devices, max_size=2).map(tuple),
    lost=devices,
)
reservations = st.builds(NodeReservation, starts_at=times, ends_at=times, lapse_seconds=times)
refusals = st.builds(Refusal, code=st.sampled_from(Code), details=objects)

BY_TYPE: Mapping[Any, st.SearchStrategy[Any]] = {
    float: times,
    str: st.text(),
    Ask: asks,
    Cluster: clusters,
    Lease: leases,
    NodeReservation: reservations,
    Outcome: outcomes,
    Quota | None: st.none() | st.builds(Quota, weight=times),
    Refusal: refusals,
    tuple[DeviceId, ...]: devices,
}


def strategy(record: type[Any]) -> st.SearchStrategy[Any]:
    kinds = get_type_hints(record).items()
    return st.builds(record, **{name: BY_TYPE[kind] for name, kind in kinds if kind in BY_TYPE})


STRATEGIES = {record: strategy(record) for record in get_args(Fact)}


def test_each_fact_has_a_kind():
    assert {kind.record for kind in KINDS} == set(get_args(Fact))
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("record", STRATEGIES, ids=lambda record: record.__name__)
def test_stored_facts_are_read_back_unchanged(record: type[Any]):
    # No deadlines, since a busy machine says nothing about the codec.
    @settings(max_examples=50)
    @given(STRATEGIES[record], st.integers(1, 2**62), times)
    def come_back(fact: Any, seq: int, at: float) -> None:
        row = seal(seq, at, fact, 7)
        assert row.subject == subject_of(fact)
        entry = unseal(row, "here")
        assert (entry.seq, entry.at, entry.fact) == (seq, at, fact)
        assert type(entry.fact) is record
        assert list(FACTS.unpack(FACTS.pack([fact, fact]), "here", "a part")) == [fact, fact]

    come_back()


def test_a_stored_grant_leaves_out_fields_that_the_request_omits():
    """Half of the ledger would be defaults; other releases read the fields' defaults, too."""
    lease = Lease(
        RequestId("r-1"),
        Tenant("ann"),
        "digest",
        PolicyRef("first_fit:1.0-stable", "digest"),
        (Share(ClusterId("c-1"), NodeId("n-1"), ("0",)),),
        1,
        10.0,
        70.0,
        LeaseRequest(ttl_seconds=60.0).terms(),
    )
    stored = json.loads(seal(1, 10.0, Granted(lease), 0).body)
    assert stored["lease"]["terms"] == {"ttl_seconds": 60.0}
    assert list(stored["lease"]) == [
        "id",
        "tenant",
        "token_digest",
        "policy",
        "placement",
        "fencing",
        "granted_at",
        "expires_at",
        "terms",
    ]


def test_each_fact_names_its_lease_request_or_cluster():
    request, cluster = RequestId("r-1"), ClusterId("c-1")
    ask = Ask(request, Tenant("t"), PolicyRef("p", "0"))
    lease = Lease(request, Tenant("t"), "", PolicyRef("p", "0"), (), 1, 1.0, 2.0, LeaseTerms(1.0))
    about_request: list[Fact] = [
        Queued(ask, 1.0, 2.0),
        Overtaken(request, 7),
        WaitExtended(request, 7.0),
        Dequeued(request, 1.0, Refusal(Code.CANCELLED, "given up")),
        Granted(lease),
        Renewed(request, 1.0),
        Started(request, 1.0),
        Finished(request, Outcome(1, "failed", "no image", 1.0)),
        Requeued(request, 1.0, "failed"),
        Paused(request, 1.0, 2.0),
        Resumed(request, 2.0),
        Preempted(request, 1.0, RequestId("r-2"), 2.0, "preempted"),
        Spared(request, 2.0),
        Moved(request, 2.0, (), ()),
        Reserved(NodeReservation(request, Tenant("t"), (), Demand(), 1.0, 2.0)),
        Unreserved(request, 1.0, "ended"),
        Ending(request, 1.0, "released"),
        Warmed(request, 1.0, 2.0),
        Ended(request, 1.0, "released"),
        Carried(lease),
    ]
    about_cluster: list[Fact] = [
        ClusterSet(Cluster(cluster, ())),
        ClusterRemoved(cluster),
        Cordoned(cluster, NodeId("n"), 1.0, Tenant("t")),
        Uncordoned(cluster, NodeId(""), 1.0, Tenant("t")),
    ]
    assert {subject_of(fact) for fact in about_request} == {"r-1"}
    assert {subject_of(fact) for fact in about_cluster} == {"c-1"}
    about_tenant: list[Fact] = [
        QuotaSet(Tenant("t-1"), None, Quota(), 1.0, Tenant("t")),
        UsageCarried(Tenant("t-1"), "", 0.5, 7),
    ]
    assert {subject_of(fact) for fact in about_tenant} == {"t-1"}
    about_none = (
        Counted(7),
        ClockMoved(7_200.0, 7_100.0),
        HalfLifeSet(60.0, 1.0),
        DurationsCarried("", "", -1, ((3, 1),)),
    )
    assert {subject_of(fact) for fact in about_none} == {""}
    known = len(about_request) + len(about_cluster) + len(about_tenant)
    assert known + len(about_none) == len(KINDS)


nested: list[Any] = []
for _ in range(100_000):
    nested = [nested]


@pytest.mark.parametrize(
    "inputs",
    [
        float("nan"),
        float("inf"),
        (1, 2),
        {"set": {1}},
        {1: "a number as key"},
        MappingProxyType({}),
        b"bytes",
        "half a pair \ud800",
        object(),
        nested,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_lacks_are_refused_before_they_are_stored(inputs: Any):
    ask = Ask(RequestId("r"), Tenant("t"), PolicyRef("p", "0"), inputs=inputs)
    with pytest.raises(FactUnwritable, match="Queued cannot be stored"):
        seal(1, 1.0, Queued(ask, 1.0, 2.0), 0)


def test_invalid_rows_of_the_ledger_are_refused():
    with pytest.raises(FactUnwritable, match="Refusal cannot be stored: it is not a member of"):
        FACTS.encode(Refusal(Code.BUSY, "no fact"))


def test_an_unknown_kind_in_a_checkpoint_is_never_skipped():
    part = b'{"kind":"teleported","version":3,"fact":{}}'
    with pytest.raises(FactUnknown, match="the part of here is of kind 'teleported', version 3"):
        list(FACTS.unpack(part, "here", "the part"))
    with pytest.raises(LedgerCorrupt, match="the part holds a line that is not a fact"):
        list(FACTS.unpack(b'{"kind":"ended"}', "here", "the part"))


def test_a_fact_of_a_known_version_with_another_shape_counts_as_damage():
    with pytest.raises(LedgerCorrupt, match=r"fact 3 is not a 'renewed' of version 1.*lease"):
        FACTS.decode("renewed", 1, b'{"expires_at":1.0}', "here", "fact 3")


@dataclass(frozen=True)
class Moored:
    """A fact of version 3. Version 2 called the berth `place`; version 1 had no rope."""

    berth: str
    rope_metres: float


MOORED_UPGRADES = {
    ("moored", 1): lambda old: {**old, "rope_metres": 10.0},
    ("moored", 2): lambda old: {"berth": old["place"], "rope_metres": old["rope_metres"]},
}
MOORED = Codec([FactKind("moored", 3, Moored)], MOORED_UPGRADES)


@pytest.mark.parametrize(
    ("version", "body", "fact"),
    [
        (1, b'{"place":"A"}', Moored("A", 10.0)),
        (2, b'{"place":"B","rope_metres":2.5}', Moored("B", 2.5)),
        (3, b'{"berth":"C","rope_metres":3.5}', Moored("C", 3.5)),
    ],
)
def test_facts_of_old_versions_are_upgraded_when_they_are_read(
    version: int, body: bytes, fact: Moored
):
    assert MOORED.decode("moored", version, body, "here", "fact 1") == fact
    line = b'{"kind":"moored","version":%d,"fact":%s}' % (version, body)
    assert list(MOORED.unpack(line, "here", "a part")) == [fact]
    assert MOORED.encode(fact)[0].version == 3


def test_an_old_fact_that_its_upgrade_cannot_read_counts_as_damage():
    with pytest.raises(LedgerCorrupt, match="fact 1 is not a 'moored' of version 2"):
        MOORED.decode("moored", 2, b'{"nowhere":1}', "here", "fact 1")


def test_facts_of_newer_versions_are_refused():
    with pytest.raises(FactUnknown, match="this release reads 'moored' up to 3") as caught:
        MOORED.decode("moored", 4, b"{}", "here", "fact 1")
    assert (caught.value.kind, caught.value.version) == ("moored", 4)


def test_each_old_version_of_a_fact_has_an_upgrade():
    with pytest.raises(ValueError, match="moored has version 3 but no upgrade from 1"):
        Codec([FactKind("moored", 3, Moored)], {("moored", 2): MOORED_UPGRADES["moored", 2]})
    # The ledgers' codec is built at import, so it has every needed step.
    known = {(kind.name, v) for kind in KINDS for v in range(1, kind.version)}
    assert set(UPGRADES) == known, "a step for a shape that no release wrote"


def shape(record: type[Any]) -> str:
    """Return the digest of a record's JSON schema, without its descriptions."""

    def bare(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: bare(value) for key, value in part.items() if key != "description"}
        return [bare(item) for item in part] if isinstance(part, list) else part

    text = json.dumps(bare(msgspec.json.schema(record)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_a_changed_shape_of_a_fact_needs_a_new_version():
    shapes = {f"{kind.name} {kind.version}": shape(kind.record) for kind in KINDS}
    pinned = json.loads(SHAPES.read_text())
    assert {key: pinned.get(key) for key in shapes} == shapes, (
        "The shape of a stored fact changed. If a release has written the old one: raise the "
        "kind's version in KINDS, add its step to UPGRADES, and add (never replace) a line here. "
        f"If not: make {SHAPES.name} say {json.dumps(shapes, indent=4)}"
    )
