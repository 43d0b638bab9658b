"""Tests of the history of the last day: its figures, its bounds, and sums of other tenants."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.state.facts import ClusterSet, Cordoned, Granted, Refusal
from moorage.core.state.state import apply
from moorage.daemon.observability import history
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.durations import DurationMetrics, quantile
from moorage.daemon.observability.history import HistoryFile, HistoryRing
from moorage.model import (
    Cluster,
    ClusterId,
    Code,
    Gpu,
    Lease,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    RequestId,
    Share,
    Tenant,
)
from moorage.records.history import GpuUse
from moorage.records.rights import Caller, Role

ALL = Caller(Tenant("ops"), Role.OPERATOR)


class Watched:
    """A core with a node of four GPUs, and the history of its figures."""

    def __init__(self) -> None:
        self.allocator = Allocator(1.0, 3)
        self.measures = Measures()
        self.durations = DurationMetrics(self.allocator.state.lease)
        gpus = tuple(Gpu(str(n), "A100", 80_000) for n in range(4))
        node = Node(NodeId("n"), cpu_milli=8_000, memory_mib=8_000, gpus=gpus)
        apply(self.allocator.state, ClusterSet(Cluster(ClusterId("c"), (node,))))
        self.ring = HistoryRing(
            self.allocator.state, self.measures, self.durations, lambda: 3, lambda _: []
        )

    def grant(self, tenant: str, number: int, waited: float = 0.0) -> None:
        share = Share(ClusterId("c"), NodeId("n"), (str(number),), 1000, 0, 0)
        lease = Lease(
            id=RequestId(f"r{number}"),
            tenant=Tenant(tenant),
            token_digest="",
            policy=PolicyRef("p:1-x", "d"),
            placement=(share,),
            terms=LeaseTerms(ttl_seconds=800.0),
            asked_at=100.0,
            granted_at=100.0 + waited,
            expires_at=900.0,
            fencing=number + 1,
        )
        fact = Granted(lease)
        apply(self.allocator.state, fact)
        self.durations.observe_facts([fact])

    def lease_until(self, number: int, expires_at: float) -> None:
        leases, name = self.allocator.state.leases, RequestId(f"r{number}")
        leases[name] = replace(leases[name], expires_at=expires_at)

    def refuse(self) -> None:
        self.measures.count(Refusal(Code.NO_CAPACITY, "no"))


def test_a_sample_of_the_history_has_held_capacity_and_events_of_a_minute() -> None:
    watched = Watched()
    watched.ring.take(60.0)
    watched.grant("ann", 0, waited=2.0)
    watched.grant("bob", 1)
    watched.refuse()
    watched.ring.take(120.0)
    watched.ring.take(180.0)
    reply = watched.ring.answer(ALL, 60, 1)
    assert reply.at == [60.0, 120.0, 180.0]
    assert reply.minutes == [1, 1, 1]
    assert reply.models["A100"].total == [4000, 4000, 4000]
    assert reply.models["A100"].used == [0, 2000, 2000]
    assert reply.tenants == {"ann": [0, 1000, 1000], "bob": [0, 1000, 1000]}
    assert reply.grants == [0, 2, 0]
    assert reply.refusals == {"no_capacity": [0, 1, 0]}
    assert reply.grant.p50[0] is None
    assert reply.grant.p99[1] is not None
    assert 1.0 < reply.grant.p99[1] <= 2.5
    assert reply.now.models["A100"].used == 2000
    assert (reply.now.nodes, reply.now.sessions, reply.now.leases) == (1, 3, 2)


def test_leases_on_a_cordoned_node_count_as_held() -> None:
    watched = Watched()
    watched.grant("ann", 0)
    apply(watched.allocator.state, Cordoned(ClusterId("c"), NodeId("n"), 1.0, Tenant("ops")))
    now = watched.ring.answer(ALL, 60, 1).now
    assert now.models["A100"] == GpuUse(total=4000, used=1000, unavailable=3000)
    assert now.nodes_unavailable == 1


def test_several_minutes_of_the_history_can_be_merged_into_one_point() -> None:
    watched = Watched()
    for minute in range(7):
        watched.refuse()
        watched.ring.take(60.0 * minute)
    reply = watched.ring.answer(ALL, 5, 5)
    assert reply.minutes == [3, 2]
    assert reply.refusals == {"no_capacity": [3, 2]}
    assert reply.at == [240.0, 360.0]


def test_a_tenant_sees_other_tenants_in_the_history_as_a_sum() -> None:
    watched = Watched()
    for number, tenant in enumerate(("ann", "bob", "eve")):
        watched.grant(tenant, number)
    watched.ring.take(60.0)
    reply = watched.ring.answer(Caller(Tenant("ann"), Role.CLIENT), 60, 1)
    assert reply.tenants == {"ann": [1000], "others": [2000]}
    assert reply.now.tenants == {"ann": 1000, "others": 2000}


def test_history_covers_a_day_and_merges_many_tenants() -> None:
    watched = Watched()
    for minute in range(history.SAMPLES_MAX + 30):
        watched.ring.take(60.0 * minute)
    reply = watched.ring.answer(ALL, history.SAMPLES_MAX, 1)
    assert len(reply.at) == history.SAMPLES_MAX
    assert reply.at[0] == 60.0 * 30
    many: Any = {f"t{n}": n for n in range(50)}
    few = history._bound(many)
    assert len(few) == history.SERIES_MAX
    assert sum(few.values()) == sum(many.values())


def test_quantiles_of_the_history_lie_within_their_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, (0, 0, 0, 0), 0.5) is None
    assert quantile(bounds, (0, 2, 0, 0), 0.5) == 1.5
    assert quantile(bounds, (1, 0, 0, 9), 0.99) == 4.0


def test_a_sample_counts_ending_leases_and_whole_gpus() -> None:
    watched = Watched()
    watched.grant("ann", 0)
    watched.grant("bob", 1)
    for number in (0, 1):
        watched.lease_until(number, time.time() + (600 if number else 7200))
    now = watched.ring.answer(ALL, 60, 1).now
    assert (now.ending.leases, now.ending.gpu_milli) == (1, 1000)
    assert (now.models["A100"].largest, now.models["A100"].nodes_empty) == (2, 0)
    own = watched.ring.answer(Caller(Tenant("ann"), Role.CLIENT), 60, 1).now
    assert own.ending.leases == 0
    assert own.agents is None


def test_the_history_names_a_cluster_without_a_node_in_service_and_the_reason() -> None:
    watched = Watched()
    assert watched.ring.answer(ALL, 60, 1).now.clusters_out == []
    apply(
        watched.allocator.state, Cordoned(ClusterId("c"), NodeId("n"), 1.0, Tenant("ops"), "fans")
    )
    (out,) = watched.ring.answer(ALL, 60, 1).now.clusters_out
    assert (out.cluster_id, out.nodes, out.reason) == ("c", 1, "cordoned by ops: fans")


async def start_history(path: Path) -> Watched:
    """Return a history that has read its file and taken its first sample."""
    watched = Watched()
    watched.ring.path = path
    begun = time.time()
    running = asyncio.create_task(watched.ring.run())
    async with asyncio.timeout(60):
        while not has_stored_since(path, begun):  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.01)  # As above.
    running.cancel()
    return watched


def has_stored_since(path: Path, at: float) -> bool:
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return bool(lines) and json.loads(lines[-1])["now"]["at"] >= at
    except ValueError:
        return False  # The last line is still being written.


async def test_the_history_of_the_day_continues_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    await start_history(path)
    assert path.stat().st_mode & 0o077 == 0
    reply = (await start_history(path)).ring.answer(ALL, 60, 1)
    assert len(reply.at) == 2
    assert reply.models["A100"].total == [4000, 4000]


async def test_at_a_start_only_whole_lines_of_the_last_day_are_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    await start_history(path)
    line = path.read_text()
    document = json.loads(line)
    document["now"]["at"] -= 25 * 3600
    fewer = json.loads(line)
    fewer["counts"]["grants"].pop()
    path.write_text("\n".join([json.dumps(document), json.dumps(fewer), line.strip(), line[:99]]))
    assert len((await start_history(path)).ring.answer(ALL, 1440, 1).at) == 2


async def test_without_a_stored_file_the_history_begins_with_the_process(tmp_path: Path) -> None:
    watched = Watched()
    watched.ring.path = tmp_path / "none" / "history.jsonl"
    running = asyncio.create_task(watched.ring.run())
    async with asyncio.timeout(60):
        while not watched.ring.answer(ALL, 60, 1).at:  # noqa: ASYNC110  # No event reports this.
            await asyncio.sleep(0.01)  # As above.
    running.cancel()


def test_the_size_of_the_file_of_the_history_is_bounded(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "history.jsonl", int, 3)
    assert file.read() == []
    for each in range(20):
        file.append(each)
    assert len((tmp_path / "history.jsonl").read_text().split()) <= 6
    assert file.read() == [17, 18, 19]
