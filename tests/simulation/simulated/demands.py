"""What demands need and shares hold, computed independently of the core for `laws`."""

from collections import Counter
from collections.abc import Iterable

from moorage.model import Ask, Demand, Node, Share


def holds(shares: Iterable[Share]) -> dict[str, int]:
    """Return the amounts of shares, by resource."""
    total = Counter[str]()
    for share in shares:
        total["gpu_milli"] += len(share.gpus) * share.gpu_milli
        total["cpu_milli"] += share.cpu_milli
        total["memory_mib"] += share.memory_mib
    return total


def needs_of(ask: Ask) -> int:
    """Return the least GPU milli that a request needs."""
    return needs(ask.demand)["gpu_milli"] if ask.demand is not None else 0


def needs(demand: Demand) -> dict[str, int]:
    """Return the least amounts of a demand, by resource."""
    gpus, nodes = demand.gpus * demand.gpu_milli, demand.nodes
    return {
        "gpu_milli": nodes * gpus,
        "cpu_milli": nodes * demand.cpu_milli,
        "memory_mib": nodes * demand.memory_mib,
    }


def has_labels(pair: tuple[str, str], node: Node, demand: Demand) -> bool:
    """Return whether a node meets each label requirement of a demand."""
    own = {"moorage/cluster": pair[0], "moorage/node": pair[1]}
    for key, operator, values in demand.where:
        value = own.get(key, node.labels.get(key))
        meets = {
            "In": value is not None and value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not meets[operator]:
            return False
    return True


def serves(node: Node, share: Share, demand: Demand) -> bool:
    """Return whether a share satisfies what a demand requires of each node."""
    gpus = [gpu for gpu in node.gpus if gpu.id in share.gpus]
    if len(gpus) != demand.gpus or share.cpu_milli < demand.cpu_milli:
        return False
    if share.memory_mib < demand.memory_mib:
        return False
    if gpus and share.gpu_milli < demand.gpu_milli:
        return False
    if any(demand.models and gpu.model not in demand.models for gpu in gpus):
        return False
    if any(gpu.memory_mib < demand.gpu_memory_mib for gpu in gpus):
        return False
    if len(gpus) > 1 and demand.topology == "nvlink":
        return len({g.link_group for g in gpus}) == 1 and gpus[0].link_group != ""
    if len(gpus) > 1 and demand.topology == "numa":
        return len({g.numa for g in gpus}) == 1 and gpus[0].numa >= 0
    return True
