"""Tests of the rows in lists of clusters, leases, waiters and decisions."""

import pytest
from by_hand import Hand, answers, ask, nodes, place, plain
from msgspec.structs import asdict, replace

from moorage.core.turns.effects import Recall
from moorage.core.turns.events import (
    CancelAsked,
    Inquired,
    ReleaseAsked,
    RenewAsked,
    WorkloadStarted,
)
from moorage.core.turns.turn import DECISIONS_MAX
from moorage.model import (
    LOST,
    ClusterId,
    Code,
    Demand,
    Lease,
    LeaseTerms,
    NodeId,
    PolicyRef,
    Provision,
    RequestId,
    Requirement,
    Share,
    Tenant,
)
from moorage.records.leases import Lease as LeaseAnswer
from moorage.records.requests import resources_of

ONE, BIG = Demand(gpus=1), Demand(gpus=9)


def test_fleet_reports_each_cluster_as_the_sum_of_its_nodes() -> None:
    hand = Hand()
    assert hand.inquire("fleet") == {"clusters": [], "next": None}
    for cluster in (nodes(2, 3), nodes(0, 0, name="a"), nodes(1, 1, name="z")):
        hand.see(cluster)
    share = ask("r1", Demand(gpus=2, gpu_milli=400, cpu_milli=7, memory_mib=9))
    hand.grant(share, place("n001", "0", "2", gpu_milli=400, cpu_milli=7, memory_mib=9))
    clusters = hand.inquire("fleet")["clusters"]
    assert [row["cluster_id"] for row in clusters] == ["a", "c", "z"]
    for row in clusters:
        rows = hand.inquire("fleet", filters={"cluster": row["cluster_id"]})["nodes"]
        assert row["nodes"] == len(rows)
        assert row["gpus"] == sum(len(node["gpus"]) for node in rows)
        assert row["gpu_milli_total"] == 1_000 * row["gpus"]
        assert row["gpu_milli_free"] == sum(sum(node["gpus"].values()) for node in rows)
        for name in ("cpu_milli_total", "cpu_milli_free", "memory_mib_total", "memory_mib_free"):
            assert row[name] == sum(node[name] for node in rows)
    assert clusters[1]["gpu_milli_free"] == 6_000 - 800


def test_the_pages_of_a_cluster_list_each_node_only_once() -> None:
    hand = Hand.seeing(nodes(7, 1))
    found, after = [], ""
    while after is not None:
        page = hand.inquire("fleet", filters={"cluster": "c"}, after=after, limit=3)
        found += [node["node_id"] for node in page["nodes"]]
        after = page["next"]
    assert found == [f"n{number:03}" for number in range(7)]


def test_a_lease_names_its_lost_machine() -> None:
    """The lease of a lost machine stays, but its row must not look healthy."""
    hand = Hand.seeing(nodes(3, 1))
    start = Provision("memory", {"type": "memory"})
    gang = ask("gang", Demand(gpus=1, nodes=2), provision=start)
    hand.grant(gang, [place("n000", "0"), place("n001", "0")])
    lease = hand.allocator.state.leases[gang.id]
    hand.grant(ask("alone", ONE), place("n002", "0"))
    hand.step(WorkloadStarted(lease.id, lease.fencing, ""))
    lost = nodes(3, 1)
    since = "the machine n001 is not heard of since 2026-11-28"
    away = replace(lost.nodes[1], unavailable=f"{LOST}{since}")
    cordoned = replace(lost.nodes[2], unavailable="cordoned")
    hand.see(replace(lost, nodes=(lost.nodes[0], away, cordoned)))
    gang, alone = hand.inquire("leases")["leases"]
    workload, reason = gang["workload"], f"node c/n001 is lost: {since}"
    assert (gang["state"], workload["phase"]) == ("active", "lost")
    assert gang["reason"] == workload["detail"] == reason
    assert (alone["state"], alone.get("reason")) == ("granted", None)
    assert hand.inquire("leases", sort="tenant")["leases"][0]["reason"] == reason
    assert hand.inquire("why", subject="gang")["reason"] == reason
    (seen,) = answers(hand.step(Inquired(hand.to(), "status", Tenant("ann"), lease.id)))
    (renewed,) = answers(hand.step(RenewAsked(hand.to(), lease.id, "token of gang", None)))
    assert seen.lost == renewed.lost == reason
    hand.step(ReleaseAsked(hand.to(), lease.id, "token of gang"))
    ending = hand.inquire("leases")["leases"][0]
    assert ending["reason"] == f"released; {reason}"
    assert ending["workload"]["phase"] == "stopping"
    hand.see(nodes(3, 1))
    assert hand.inquire("leases")["leases"][0]["reason"] == "released"


def test_a_listing_has_all_fields_of_a_lease_except_its_token():
    lease = Lease(
        id=RequestId("r-1"),
        tenant=Tenant("acme"),
        token_digest="secret",  # noqa: S106  # A test's value.
        policy=PolicyRef("p:1-a", "d" * 64),
        placement=(Share(ClusterId("c"), NodeId("n"), ("0", "2"), 500, 4000, 1024),),
        fencing=7,
        granted_at=100.0,
        expires_at=400.0,
        terms=LeaseTerms(300.0),
        state="ended",
        reason="expired",
    )
    share = {"cluster_id": "c", "node_id": "n", "gpus": ["0", "2"], "gpu_milli": 500}
    assert plain(LeaseAnswer.of(lease)) == {
        "id": "r-1",
        "state": "ended",
        "tenant": "acme",
        "placement": [{**share, "cpu_milli": 4000, "memory_mib": 1024}],
        "granted_at": 100.0,
        "expires_at": 400.0,
        "fencing": 7,
        "ttl_seconds": 300.0,
        "policy_rule_uri": "p:1-a",
        "reason": "expired",
    }


def test_a_demand_is_shown_as_the_client_sent_it():
    where = (Requirement("zone", "In", ("eu", "us")), Requirement("spot", "DoesNotExist"))
    demand = Demand(gpus=2, models=("A100",), topology="nvlink", where=where)
    shown = plain(resources_of(demand))
    answer = [
        Requirement(each["key"], each["operator"], tuple(each["values"])) for each in shown["where"]
    ]
    read = {**shown, "models": tuple(shown["models"]), "where": tuple(answer)}
    assert read == asdict(demand)


def test_pages_of_the_queue_skip_no_waiter_that_moves_up() -> None:
    hand = Hand.seeing(nodes(1, 4))
    hand.grant(ask("held", Demand(gpus=4)), place("n000", "0", "1", "2", "3"))
    names = [f"w{number}" for number in range(6)]
    for name in names:
        hand.ask(ask(name, Demand(gpus=4), wait=600.0, inputs={"name": name}))
    first = hand.inquire("queue", limit=3)
    for name in names[:2]:
        hand.step(CancelAsked(hand.to(), RequestId(name), Tenant("ann")))
    rest = hand.inquire("queue", limit=3, after=first["next"])
    listed = [row["request"] for row in (*first["waiting"], *rest["waiting"])]
    assert listed == names
    assert [row["position"] for row in rest["waiting"]] == [2, 3, 4]
    assert rest["next"] is None


@pytest.mark.parametrize("after", ["2", "harbour", "[1]", "{}", '["a", 0, "r"]', "[0, 1", "null"])
def test_an_invalid_cursor_is_refused(after: str) -> None:
    hand = Hand.seeing(nodes(1, 1))
    hand.grant(ask("held", ONE), place("n000", "0"))
    hand.ask(ask("waits", ONE, wait=600.0))
    (refused,) = answers(hand.step(Inquired(hand.to(), "queue", Tenant("ann"), after=after)))
    assert (refused.code, refused.field) == (Code.BAD_MESSAGE, "after")


def test_leases_of_one_node_are_listed_together() -> None:
    hand = Hand.seeing(nodes(3, 4))
    for name, ttl, at in (("a", 300.0, "n000"), ("b", 200.0, "n001"), ("c", 100.0, "n000")):
        wanted = ask(name, ONE, terms={"ttl_seconds": ttl})
        hand.grant(wanted, place(at, "0" if name != "c" else "1"))
    both = ask("d", Demand(gpus=1, nodes=2), terms={"ttl_seconds": 400.0})
    hand.grant(both, [place("n001", "1"), place("n002", "1")])
    found = hand.inquire("leases", sort="node_ends", limit=3)
    assert [each["id"] for each in found["leases"]] == ["a", "c", "b"]
    rest = hand.inquire("leases", sort="node_ends", after=found["next"])
    assert [each["id"] for each in rest["leases"]] == ["d"]  # Its first node is n001.


def test_leases_sorted_by_a_column_come_page_by_page() -> None:
    hand = Hand.seeing(nodes(4, 4))
    for number, gpus in enumerate((1, 3, 2)):
        terms = {"ttl_seconds": 100.0 * (number + 1), "project": f"p{2 - number}"}
        wanted = ask(f"r{number}", Demand(gpus=gpus), terms=terms)
        hand.grant(wanted, place(f"n00{3 - number}", *map(str, range(gpus))))

    def order(sort: str) -> str:
        found, after = [], ""
        while after is not None:
            page = hand.inquire("leases", sort=sort, after=after, limit=2)
            assert page["total"] == 3
            found += [lease["id"] for lease in page["leases"]]
            after = page["next"]
        return " ".join(found)

    assert order("gpus") == "r0 r2 r1"
    assert order("-gpus") == "r1 r2 r0"
    assert order("-expires_at") == "r2 r1 r0"
    assert order("project") == "r2 r1 r0"
    assert order("place") == "r2 r1 r0"
    assert order("state") == "r0 r1 r2"
    assert order("node") == "r2 r1 r0"
    assert order("node_ends") == "r0 r1 r2"
    assert order("node_gpus") == "r1 r2 r0"
    listed = hand.inquire("leases", sort="gpus", filters={"node_id": "n001"})
    assert [each["project"] for each in listed["leases"]] == ["p0"]
    assert listed["total"] == 1
    assert "total" not in hand.inquire("leases")


def test_decisions_about_one_tenant_do_not_push_out_decisions_about_another_tenant() -> None:
    hand = Hand.seeing(nodes(1, 1))
    hand.ask(ask("his", BIG, tenant=Tenant("bob")))
    for number in range(DECISIONS_MAX + 5):
        hand.ask(ask(f"m{number}", BIG, tenant=Tenant("mallory")))
    assert hand.inquire("why", "bob", subject="his")["state"] == "refused"
    assert hand.inquire("why", "mallory", subject="m7")["state"] == "refused"
    assert isinstance(hand.inquire("why", "mallory", subject="m5"), Recall)


def test_many_decisions_about_one_request_push_out_no_decisions_about_other_requests() -> None:
    hand = Hand.seeing(nodes(1, 1))
    hand.ask(ask("his", BIG, tenant=Tenant("bob")))
    again = ask("again", BIG, tenant=Tenant("mallory"))
    for _ in range(9):
        hand.ask(again)
    for number in range(DECISIONS_MAX - 2):
        hand.ask(ask(f"m{number}", BIG, tenant=Tenant("mallory")))
    for tenant, name in (("bob", "his"), ("mallory", "again"), ("mallory", "m0")):
        assert hand.inquire("why", tenant, subject=name)["state"] == "refused"
