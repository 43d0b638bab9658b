"""Small fleets, and calls of policies with them as a cell makes them."""

from importlib import import_module

import msgspec
from hypothesis import strategies as st

from moorage.model import Cluster, Gpu, Node
from moorage.policy import Fleet, FleetView, parse_proposal
from moorage.sandbox.cell.cluster_data import ClusterData


def new_policy(name, parameters=None):
    module = import_module(f"moorage_policies.{name}")
    return module.AIOSv1PolicyRule(f"{name}:1.0-stable", {}, parameters or {})


def node(
    name,
    gpus=4,
    cpu=64_000,
    memory=65_536,
    rack="",
    models=None,
    groups=None,
    numa=None,
    gpu_memory=0,
    labels=None,
):
    gpus = len(models or groups or numa or range(gpus))
    models = models or ["A"] * gpus
    groups = groups or [""] * gpus
    numa = numa or [-1] * gpus
    return Node(
        id=name,
        cpu_milli=cpu,
        memory_mib=memory,
        rack=rack,
        labels=labels or {},
        gpus=tuple(
            Gpu(str(number), model, gpu_memory, group, domain)
            for number, (model, group, domain) in enumerate(zip(models, groups, numa, strict=True))
        ),
    )


def fleet_with(*nodes, cluster="c"):
    fleet = Fleet()
    fleet.install([Cluster(id=cluster, nodes=nodes)])
    return fleet


def document_of(cluster):
    """Return the part of a cluster's document from which policies read labels."""
    rows = [{"id": each.id, "labels": dict(each.labels)} for each in cluster.nodes]
    return {"id": cluster.id, "nodes": {"nodeData": rows}}


def cluster_data(fleet, clusters=(), metrics=None):
    """Return `input_data["cluster_data"]`, as a cell builds it.

    `clusters` have their own documents; each other cluster of the fleet has a minimal one.
    """
    entries = {name: {"data": {"id": name}} for name in fleet.cluster_ids}
    entries |= {cluster.id: {"data": document_of(cluster)} for cluster in clusters}
    packed = {
        name: msgspec.msgpack.encode(entry | {"cluster_metrics": (metrics or {}).get(name)})
        for name, entry in entries.items()
    }
    return ClusterData(ClusterData.keys_of(fleet.cluster_ids), packed.get, fleet)


def ask(
    policy,
    fleet,
    demand,
    *,
    seed=1,
    parameters=None,
    context=None,
    inputs=None,
    clusters=(),
    metrics=None,
    **view,
):
    data = {
        "fleet": FleetView(fleet, demand, **view),
        "cluster_data": cluster_data(fleet, clusters, metrics),
        "inputs": inputs or {},
        "seed": seed,
    }
    return policy.eval(parameters or {}, data, {} if context is None else context)


def options(fleet, demand):
    """Yield each possible placement: row, model, free amounts, columns, and GPUs after it.

    Whole GPUs are the lowest free ones; several shares take the fullest GPUs.
    """
    for row in range(len(fleet)):
        cpu, memory, gpus = fleet.capacity(row)
        gpus = gpus[: len(fleet.gpu_ids[row])]
        model = fleet.models[fleet.gpu_model[row, 0]] if gpus else ""
        fitting = [column for column, free in enumerate(gpus) if free >= demand.gpu_milli]
        if (
            cpu < demand.cpu_milli
            or memory < demand.memory_mib
            or len(fitting) < demand.gpus
            or (demand.gpus and demand.models and model not in demand.models)
        ):
            continue
        tightest = sorted(sorted(fitting, key=gpus.__getitem__)[: demand.gpus])
        for columns in [[column] for column in fitting] if demand.gpus == 1 else [tightest]:
            after = [
                free - demand.gpu_milli if column in columns else free
                for column, free in enumerate(gpus)
            ]
            yield row, model, (cpu, memory, gpus), columns, after


def take(fleet, value, demand):
    for ask_message in parse_proposal(value, demand):
        fleet.take(ask_message.share())


def give(fleet, value, demand):
    for ask_message in parse_proposal(value, demand):
        fleet.give(ask_message.share())


def steps_of(demands, size_max):
    """Return a Hypothesis strategy for changes of a fleet: demands, releases, replaced nodes."""
    step = st.one_of(
        st.tuples(st.just("ask"), demands),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("install"), st.integers(0, 4)),
    )
    return st.lists(step, min_size=1, max_size=size_max)


def play(name, typical, fleet_of, nodes, steps):
    """Assert that a running instance of a policy answers like a new one at each step."""
    fleet, policy, held = fleet_of(nodes), new_policy(name), []
    parameters = {"typical": typical}
    for what, value in steps:
        if what == "ask":
            warm = ask(policy, fleet, value, parameters=parameters)
            assert warm == ask(new_policy(name), fleet, value, parameters=parameters)
            if "declined" not in warm:
                take(fleet, warm, value)
                held.append((warm, value))
        elif what == "release" and held:
            give(fleet, *held.pop(value % len(held)))
        elif what == "install":  # From now on, the rows are other nodes.
            nodes = nodes[value % len(nodes) :] + nodes[: value % len(nodes)]
            fleet.restore(fleet_of(nodes).snapshot())
            held.clear()
