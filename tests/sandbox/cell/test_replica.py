"""A policy sees the fleet that the host last sent, minus its own open proposals."""

import random
from types import SimpleNamespace

import msgspec
import pytest

from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId, Share
from moorage.policy import Fleet
from moorage.sandbox.cell.replica import Replica

DEMANDS = (
    Demand(gpus=1),
    Demand(gpus=2, gpu_milli=500, cpu_milli=500, memory_mib=100),
    Demand(cpu_milli=7_000),
)


def fleet_of(rng: random.Random, nodes: int) -> Fleet:
    fleet = Fleet()
    fleet.install(
        Cluster(
            ClusterId(f"c{c}"),
            tuple(
                Node(
                    NodeId(f"n{n}"),
                    8000,
                    8000,
                    tuple(Gpu(str(g)) for g in range(rng.randint(0, 4))),
                )
                for n in range(nodes)
            ),
        )
        for c in range(2)
    )
    return fleet


class Link:
    """The host's half of `channel.Cell`: it sends rows, and proposals that have been settled."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.replica = Replica()
        self.sync = (-1, -1)
        self.settled: list[str] = []

    def frame(self) -> None:
        fleet = self.fleet
        spliced, changed = fleet.spliced_since(self.sync[0]), fleet.rows_since(self.sync[1])
        rows, parts, snapshot = (), (), None
        if spliced is None or changed is None:
            snapshot = msgspec.msgpack.encode(fleet.snapshot())
        else:
            parts = tuple((name, pack(fleet.part(name))) for name in spliced)
            rows = tuple((r, c, m, tuple(g)) for r in changed for c, m, g in [fleet.capacity(r)])
        self.replica.update(snapshot, parts, rows, self.settled)
        self.settled = []
        self.sync = (fleet.layout, fleet.version)


def pack(part: Fleet | None) -> bytes:
    return b"" if part is None else msgspec.msgpack.encode(part.snapshot())


def proposal(rng: random.Random, fleet: Fleet) -> tuple[dict, Share] | None:
    row = rng.randrange(len(fleet))
    cluster, node = fleet.node_ids[row]
    cpu, memory, gpus = fleet.capacity(row)
    milli = rng.choice([250, 500, 1000])
    free = [gpu for gpu, left in zip(fleet.gpu_ids[row], gpus, strict=False) if left >= milli]
    if cpu < 500 or memory < 100:
        return None
    chosen = tuple(rng.sample(free, rng.randint(0, len(free))))
    share = Share(ClusterId(cluster), NodeId(node), chosen, milli, 500, 100)
    value = {"cluster_id": cluster, "node_id": node, "gpus": list(chosen), "gpu_milli": milli}
    return value | {"cpu_milli": 500, "memory_mib": 100}, share


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(20, 60))]
)
def test_the_view_of_a_cell_is_the_fleet_minus_outstanding_proposals(seed):
    rng = random.Random(seed)
    truth = fleet_of(rng, 3)
    link = Link(truth)
    outstanding: dict[str, Share] = {}  # The cell's view.
    undecided: list[str] = []
    leases: list[Share] = []
    for number in range(150):
        action = rng.random()
        if action < 0.1 and leases:
            truth.give(leases.pop(rng.randrange(len(leases))))
        elif action < 0.2:
            found = proposal(rng, truth)
            if found:  # A grant of another cell's proposal.
                truth.take(found[1])
                leases.append(found[1])
        elif action < 0.3:  # One cluster comes, changes or goes.
            name = f"c{rng.randint(0, 3)}"
            if len(truth.cluster_ids) > 1 and rng.random() < 0.3:
                truth.remove(name)
            else:
                width = rng.randint(0, 5)
                gpus = tuple(Gpu(str(g)) for g in range(width))
                rows = [Node(NodeId(f"n{n}"), 8000, 8000, gpus) for n in range(rng.randint(1, 4))]
                truth.put(Cluster(ClusterId(name), tuple(rows)))
                for share in leases:
                    if share.cluster_id == name:
                        truth.take(share)
        elif action < 0.32:
            shares = list(leases)
            truth.install(fleet_clusters(truth, rng))
            for share in shares:
                truth.take(share)
        elif action < 0.5 and undecided:
            request = undecided.pop(rng.randrange(len(undecided)))
            share = outstanding[request]
            if rng.random() < 0.5 and fits(truth, share):
                truth.take(share)
                leases.append(share)
                if rng.random() < 0.5:
                    link.frame()  # A frame between the grant and its settlement.
                    check(link, outstanding)
            link.settled.append(request)
            del outstanding[request]
        else:
            link.frame()
            check(link, outstanding)
            if undecided and rng.random() < 0.2:  # A new request before the first one is settled.
                request = rng.choice(undecided)
                undecided.remove(request)
                del outstanding[request]
            else:
                request = f"r{number}"
            link.replica.reconsider(request)
            check(link, outstanding)
            found = proposal(rng, link.replica.fleet)
            if found:
                link.replica.propose(request, found[0], None)
                outstanding[request] = found[1]
                undecided.append(request)
                check(link, outstanding)
    link.frame()
    check(link, outstanding)


def fleet_clusters(fleet: Fleet, rng: random.Random):
    extra = rng.randint(3, 5)
    for name in fleet.cluster_ids:
        nodes = [
            Node(NodeId(node), 8000, 8000, tuple(Gpu(g) for g in fleet.gpu_ids[row]))
            for row, (cluster, node) in enumerate(fleet.node_ids)
            if cluster == name
        ]
        if len(nodes) < extra:
            nodes.append(Node(NodeId(f"n{len(nodes)}x{rng.randint(0, 99)}"), 8000, 8000))
        yield Cluster(ClusterId(name), tuple(nodes))


def fits(fleet: Fleet, share: Share) -> bool:
    row = fleet.row(share.cluster_id, share.node_id)
    if row is None:
        return False
    cpu, memory, gpus = fleet.capacity(row)
    left = dict(zip(fleet.gpu_ids[row], gpus, strict=False))
    free = all(left.get(gpu, 0) >= share.gpu_milli for gpu in share.gpus)
    return cpu >= 500 and memory >= 100 and free


def check(link: Link, outstanding: dict[str, Share]) -> None:
    """Compare the view with the last fleet that was sent, minus each open share by name."""
    expected = Fleet()
    if not hasattr(link, "word") or link.sync != link.word[0]:
        link.word = (link.sync, link.fleet.snapshot())
    expected.restore(link.word[1])
    for share in outstanding.values():
        expected.take(share)
    seen = link.replica.fleet
    assert seen.node_ids == expected.node_ids
    assert seen.cpu_free.tolist() == expected.cpu_free.tolist()
    assert seen.memory_free.tolist() == expected.memory_free.tolist()
    assert seen.gpu_free.tolist() == expected.gpu_free.tolist()
    for demand in DEMANDS:
        fits = seen.feasible(demand)
        assert fits.tolist() == expected.feasible(demand).tolist()
        fits[:] = True  # A policy may change its answer; the next one must be right again.


def test_a_granted_proposal_marks_no_row_as_changed():
    truth = fleet_of(random.Random(1), 2)
    link = Link(truth)
    link.frame()
    share = Share(ClusterId("c0"), NodeId("n0"), (), 1000, 500, 100)
    value = {"cluster_id": "c0", "node_id": "n0", "gpus": [], "cpu_milli": 500, "memory_mib": 100}
    link.replica.propose("r1", value, None)
    version = link.replica.fleet.version
    truth.take(share)
    link.settled.append("r1")
    link.frame()
    assert link.replica.fleet.version == version
    link.settled.append("r1")  # A second settlement changes nothing.
    truth.give(share)
    link.frame()
    assert link.replica.fleet.version == version + 1


@pytest.mark.parametrize(
    "value",
    [
        {"cluster_id": "c0", "node_id": "n0"},
        {"cluster_id": "c0"},
        {"cluster_id": "c0", "node_id": "nowhere", "gpus": []},
        {"cluster_id": "c0", "node_id": "n0", "gpus": ["99"]},
        {"cluster_id": "c0", "node_id": "n0", "gpus": [], "cpu_milli": 9_000_000},
        {"cluster_id": "c0", "node_id": 1.5, "gpus": []},
        [{"cluster_id": "c0", "node_id": "n0", "gpus": [], "cpu_milli": 1}, {"cluster_id": "c0"}],
        {"error": "none"},
    ],
)
def test_an_incomplete_or_impossible_proposal_takes_no_capacity(value):
    link = Link(fleet_of(random.Random(1), 2))
    link.frame()
    before = link.replica.fleet.snapshot()
    link.replica.propose("r1", value, None)
    after = link.replica.fleet.snapshot()
    assert {**before, "version": 0} == {**after, "version": 0}


def test_what_a_policy_imagines_changes_no_later_answer():
    """A policy that looks ahead takes shares of a copy, and asks the copy what still fits."""
    replica = Replica()
    nodes = [Node(NodeId(f"n{n}"), 8000, 8000, (Gpu("0"),)) for n in range(2)]
    replica.fleet.install([Cluster(ClusterId("c"), tuple(nodes))])
    fleet, demand = replica.fleet, Demand(gpus=1)
    assert fleet.feasible(demand).tolist() == [True, True]
    copy = fleet.imagined()
    copy.take(fleet.share(0, demand, [0]))
    assert copy.feasible(demand).tolist() == [False, True]
    fleet.take(fleet.share(1, demand, [0]))
    assert fleet.feasible(demand).tolist() == [True, False]


def test_a_policy_may_pass_any_object_with_the_fields_of_a_demand():
    replica = Replica()
    replica.fleet.install([Cluster(ClusterId("c"), (Node(NodeId("n"), 8000, 8000),))])
    assert replica.fleet.feasible(Demand(models=["A100"], cpu_milli=1)).tolist() == [True]
    fields = {name: getattr(Demand(), name) for name in Demand.__struct_fields__}
    own = SimpleNamespace(**fields | {"cpu_milli": 9000})
    assert replica.fleet.feasible(own).tolist() == [False]
    own.cpu_milli = 1
    assert replica.fleet.feasible(own).tolist() == [True]
