"""Random inventories, demands and requests. All are small, so that many compete for devices."""

from collections.abc import Iterator
from random import Random

from msgspec.structs import replace

from moorage.model import (
    DEVICE,
    AntiAffinity,
    Ask,
    Cluster,
    ClusterId,
    Demand,
    DeviceId,
    Gpu,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    Provision,
    RequestId,
    Requirement,
    Tenant,
)

MODELS = {"A100": 80_000, "T4": 16_000}
CLUSTERS = ("harbour", "marina", "quay")


LABELS: list[dict[str, str]] = [{}, {"zone": "a"}, {"zone": "b"}, {"zone": "b", "spot": "yes"}]
WHERE: list[tuple[Requirement, ...]] = [
    (),
    (Requirement("zone", "In", ("a", "nowhere")),),
    (Requirement("zone", "NotIn", ("b",)),),
    (Requirement("zone", "Exists"), Requirement("spot", "DoesNotExist")),
    (Requirement("moorage/node", "NotIn", ("node-1",)),),
]
"""Label requirements that demands may have."""


def gpu(rng: Random, number: int, of: int, model: str) -> Gpu:
    half = number * 2 // of
    return Gpu(
        id=str(number),
        model=model,
        memory_mib=MODELS[model],
        link_group=rng.choice(["", f"link-{half}", f"link-{half}"]),
        numa=rng.choice([-1, half, half]),
        exclusive=rng.random() < 0.15,
    )


def node(rng: Random, name: str) -> Node:
    count = rng.choice([0, 1, 2, 2, 4])
    model = rng.choice(list(MODELS))
    return Node(
        id=NodeId(name),
        cpu_milli=rng.choice([4_000, 16_000]),
        memory_mib=rng.choice([8_192, 65_536]),
        gpus=tuple(gpu(rng, number, count, model) for number in range(count)),
        rack=rng.choice(["", "rack-0", "rack-0", "rack-1"]),
    )


def cluster(rng: Random, name: str) -> Cluster:
    return Cluster(ClusterId(name), tuple(node(rng, f"node-{n}") for n in range(rng.randint(1, 3))))


def change_hardware(rng: Random, before: Cluster) -> Cluster:
    """Return the cluster after a random change of its hardware."""
    nodes = [each for each in before.nodes if rng.random() < 0.7]
    if nodes and rng.random() < 0.5:
        one = rng.randrange(len(nodes))
        remaining = tuple(gpu for gpu in nodes[one].gpus if rng.random() < 0.6)
        nodes[one] = replace(nodes[one], gpus=remaining, cpu_milli=nodes[one].cpu_milli // 2)
    if nodes and rng.random() < 0.4:
        one = rng.randrange(len(nodes))
        nodes[one] = replace(nodes[one], unavailable=rng.choice(["", "cordoned"]))
    if rng.random() < 0.4:
        nodes.append(node(rng, f"node-{rng.randint(3, 5)}"))
    return Cluster(before.id, tuple({each.id: each for each in nodes}.values()))


def change_labels(rng: Random, one: Cluster) -> Cluster:
    """Return the cluster with random labels on its nodes."""
    return replace(one, nodes=tuple(replace(each, labels=rng.choice(LABELS)) for each in one.nodes))


def change_zones(rng: Random, one: Cluster) -> Cluster:
    """Return the cluster with its nodes in random zones."""
    zones = ["", "zone-0", "zone-0", "zone-1"]
    return replace(one, nodes=tuple(replace(each, zone=rng.choice(zones)) for each in one.nodes))


GpuOnNode = tuple[Gpu, DeviceId]


def _with_gpus(one: Node, pairs: list[GpuOnNode]) -> Node:
    """Return the node with these devices, named by their positions in the list."""
    uuids = dict.fromkeys(uuid for _, device in pairs for uuid in device if uuid)
    return replace(
        one,
        gpus=tuple(replace(gpu, id=str(at)) for at, (gpu, _) in enumerate(pairs)),
        devices=tuple(device for _, device in pairs),
        identity=tuple(f"{DEVICE}{uuid.lower()}" for uuid in uuids),
    )


def with_uuids(one: Cluster, numbers: Iterator[int]) -> Cluster:
    """Return the cluster with a UUID for each device."""
    return replace(
        one,
        nodes=tuple(
            _with_gpus(node, [(gpu, DeviceId(f"GPU-{next(numbers)}")) for gpu in node.gpus])
            for node in one.nodes
        ),
    )


def rebuilt(rng: Random, before: Cluster, numbers: Iterator[int]) -> Cluster:
    """Return the cluster after a change of its GPUs."""
    nodes = {each.id: each for each in before.nodes if rng.random() < 0.9}
    hands = {name: [*zip(each.gpus, each.devices, strict=True)] for name, each in nodes.items()}
    for pairs in hands.values():
        deed = rng.choice(["", "", "lose", "swap", "add", "move", "shuffle", "divide", "unite"])
        at = rng.randrange(len(pairs)) if pairs else 0
        if deed in {"lose", "move"} and pairs:
            pair = pairs.pop(at)
            if deed == "move" and not pair[1].parent:
                rng.choice(list(hands.values())).insert(0, pair)
        elif deed == "swap" and pairs:
            pairs[at] = (pairs[at][0], DeviceId(f"GPU-{next(numbers)}"))
        elif deed == "add" and len(pairs) < 4:
            pairs.insert(at, (gpu(rng, 0, 1, "T4"), DeviceId(f"GPU-{next(numbers)}")))
        elif deed == "shuffle":
            rng.shuffle(pairs)
        elif deed == "divide" and pairs and not pairs[at][1].parent:
            whole, device = pairs.pop(at)
            parts = [DeviceId(f"MIG-{n}-{device.uuid}", device.uuid) for n in range(2)]
            pairs += [(replace(whole, exclusive=True), part) for part in parts]
        elif deed == "unite" and pairs and (parent := pairs[at][1].parent):
            whole = pairs[at][0]
            pairs[:] = [each for each in pairs if each[1].parent != parent]
            pairs.append((whole, DeviceId(parent)))
    return replace(before, nodes=tuple(_with_gpus(nodes[name], hands[name]) for name in nodes))


def anti_affinity(rng: Random) -> AntiAffinity:
    return AntiAffinity(rng.choice("aab"), rng.choice(["node", "node", "rack", "zone"]))


def in_zones(rng: Random, one: Demand) -> Demand:
    """Return the demand; a gang may demand one zone instead of its topology."""
    return replace(one, topology="zone") if one.nodes > 1 and rng.random() < 0.5 else one


def demand(rng: Random) -> Demand:
    gpus = rng.choice([0, 1, 1, 1, 2, 2, 4])
    share = gpus > 0 and rng.random() < 0.4
    nodes = rng.choice([1, 1, 1, 1, 2])
    topologies = ["", "", ""]
    if gpus > 1:
        topologies += ["nvlink", "numa"]
    if nodes > 1:
        topologies += ["rack", "rack"]
    return Demand(
        gpus=gpus,
        gpu_milli=rng.choice([250, 300, 500]) if share else 1000,
        models=rng.choice([(), (), (), ("A100",), ("T4", "A100"), ("H100",)]),
        gpu_memory_mib=rng.choice([0, 0, 0, 20_000]),
        cpu_milli=rng.choice([0, 1_000, 3_000]),
        memory_mib=rng.choice([0, 1_024, 6_000]),
        nodes=nodes,
        topology=rng.choice(topologies),
    )


def _key(rng: Random) -> str:
    chance = rng.random()
    return "" if chance < 0.7 else "shared" if chance < 0.72 else f"key-{rng.randint(0, 300)}"


def provision(rng: Random) -> Provision:
    warm = rng.choice([0.0, 5.0, 20.0, 60.0])
    if rng.random() < 0.4:
        return Provision("memory", keep_warm_seconds=warm)
    attempts = rng.choice([1, 2, 3, 3])
    return Provision("memory", {}, "requeue", attempts, warm)


def ask(
    rng: Random,
    request: str,
    tenant: str,
    demands: list[Demand],
    policies: list[PolicyRef],
    bare: float,
    provisioned: float,
) -> Ask:
    """Draw a request.

    `bare` is the share of requests that give their needs only to the policy, `provisioned` that
    of requests that start a workload.
    """
    terms = None
    if rng.random() < 0.88:
        terms = LeaseTerms(
            ttl_seconds=rng.choice([3.0, 10.0, 30.0, 60.0]),
            wait_seconds=rng.choice([0.0, 5.0, 20.0, 20.0, 60.0]),
            priority=rng.choice([0, 0, 0, 1, 2]),
            preemptible=rng.random() < 0.2,
            idempotency_key=_key(rng),
        )
    candidates = None
    if rng.random() < 0.2:
        candidates = tuple(ClusterId(c) for c in (*CLUSTERS, "atlantis") if rng.random() < 0.5)
    drawn = Ask(
        id=RequestId(request),
        tenant=Tenant(tenant),
        policy=rng.choice(policies),
        candidates=candidates,
        demand=rng.choice(demands) if rng.random() >= bare else None,
        terms=terms,
        provision=provision(rng) if terms is not None and rng.random() < provisioned else None,
        inputs={"gpus": rng.randint(0, 2)},
        token_digest=f"token of {request}",
        seed=rng.randrange(1000),
        explain=rng.random() < 0.15,
        dry_run=rng.random() < 0.07,
    )
    # Only a policy without a demand reads the inputs; requests with equal inputs share a line.
    return drawn if drawn.demand is None else replace(drawn, inputs={})
