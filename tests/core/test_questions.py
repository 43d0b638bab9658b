"""What the listings say."""

from dataclasses import asdict

from by_hand import Hand, ask, nodes, place

from moorage.core import questions
from moorage.model import (
    ClusterId,
    Demand,
    Lease,
    LeaseTerms,
    NodeId,
    PolicyRef,
    RequestId,
    Share,
    Tenant,
)


def test_the_fleet_is_the_sum_of_its_nodes_cluster_by_cluster() -> None:
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


def test_the_pages_of_a_cluster_are_its_nodes_each_once() -> None:
    hand = Hand()
    hand.see(nodes(7, 1))
    found, after = [], ""
    while after is not None:
        page = hand.inquire("fleet", filters={"cluster": "c"}, after=after, limit=3)
        found += [node["node_id"] for node in page["nodes"]]
        after = page["next"]
    assert found == [f"n{number:03}" for number in range(7)]


def test_a_lease_is_listed_whole_but_for_its_token():
    lease = Lease(
        id=RequestId("r-1"),
        tenant=Tenant("acme"),
        token_digest="secret",  # noqa: S106  # The fixture's, not ours.
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
    assert questions.lease_row(lease) == {
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


def test_a_demand_is_shown_as_it_is_asked_for():
    demand = Demand(gpus=2, models=("A100",), topology="nvlink")
    shown = questions.demand_row(demand)
    assert {**shown, "models": tuple(shown["models"])} == asdict(demand)
