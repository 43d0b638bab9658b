"""Inventories, demands and random walks over a fleet, as hypothesis strategies."""

from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from moorage.model import Cluster, ClusterId, Demand, Gpu, Node, NodeId, Share
from moorage.policy import Fleet

MODELS = ("", "T4", "A100")


@st.composite
def gpus(draw: st.DrawFn) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            id=f"g{number}",
            model=draw(st.sampled_from(MODELS)),
            memory_mib=draw(st.sampled_from([0, 16_000, 80_000])),
            link_group=draw(st.sampled_from(["", "a", "b"])),
            numa=draw(st.sampled_from([-1, 0, 1, 7])),
            exclusive=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 4)))
    )


@st.composite
def inventories(draw: st.DrawFn) -> list[Cluster]:
    return [
        Cluster(
            ClusterId(f"c{number}"),
            tuple(
                Node(
                    NodeId(f"n{place}"),
                    cpu_milli=draw(st.sampled_from([0, 2_000, 8_000])),
                    memory_mib=draw(st.sampled_from([0, 1_024, 9_000])),
                    gpus=draw(gpus()),
                    rack=draw(st.sampled_from(["", "r1", "r2"])),
                    zone=draw(st.sampled_from(["", "z1", "z2"])),
                )
                for place in range(draw(st.integers(0, 3)))
            ),
        )
        for number in range(draw(st.integers(0, 3)))
    ]


demands = st.builds(
    Demand,
    gpus=st.integers(0, 4),
    gpu_milli=st.sampled_from([1, 250, 500, 1000, 1000]),
    models=st.sampled_from([(), (), ("A100",), ("T4", "A100"), ("H100",)]),
    gpu_memory_mib=st.sampled_from([0, 0, 16_000, 90_000]),
    cpu_milli=st.sampled_from([0, 1_000, 10**30]),
    memory_mib=st.sampled_from([0, 1_024]),
    nodes=st.integers(1, 3),
    topology=st.sampled_from(["", "nvlink", "numa", "rack", "zone"]),
)


@dataclass
class Walk:
    """A fleet after random takes and gives, and the shares that are held."""

    fleet: Fleet
    rng: Random
    held: list[Share] = field(default_factory=list)

    def step(self) -> None:
        if self.held and self.rng.random() < 0.4:
            self.fleet.give(self.held.pop(self.rng.randrange(len(self.held))))
        elif len(self.fleet):
            row = self.rng.randrange(len(self.fleet))
            demand = Demand(
                gpus=self.rng.randint(0, 2),
                gpu_milli=self.rng.choice([250, 500, 1000]),
                cpu_milli=self.rng.choice([0, 500]),
            )
            columns = self.fleet.pick_gpus(row, demand)
            if len(columns) == demand.gpus and self.fleet.feasible(demand)[row]:
                share = self.fleet.share(row, demand, columns)
                self.fleet.take(share)
                self.held.append(share)


@st.composite
def walks(draw: st.DrawFn, steps: int = 12) -> Walk:
    fleet = Fleet()
    fleet.install(draw(inventories()))
    walk = Walk(fleet, Random(draw(st.integers(0, 2**32))))
    for _ in range(draw(st.integers(0, steps))):
        walk.step()
    return walk
