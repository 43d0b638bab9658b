"""Policies that behave well or badly. Each gets a consultation, and returns the answer to it."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from moorage.core.state.facts import Refusal
from moorage.core.turns.effects import Consult
from moorage.model import Ask, Code, Demand
from moorage.policy import Fleet, FleetView, best_rows, decline, propose

Character = Callable[[Random, Fleet, Consult], Any]
"""Returns a value, a `Refusal` (the consultation failed) or `SILENCE`."""

SILENCE = object()


def view_of(fleet: Fleet, consult: Consult) -> FleetView:
    ask = consult.ask
    if consult.excluded_parts:
        fleet = fleet.imagined()
        for share in consult.excluded_parts:
            fleet.take(share)
    return FleetView(fleet, ask.demand, ask.candidates, consult.reserved)


def hidden_demand(ask: Ask) -> Demand:
    """Return the demand of a request without `resources`; only its policy can read it."""
    return Demand(gpus=ask.inputs["gpus"], gpu_milli=500)


def honest(rng: Random, fleet: Fleet, consult: Consult) -> Any:
    """Proposes the first nodes that fit, as many shipped policies do."""
    view = view_of(fleet, consult)
    demand = view.demand or hidden_demand(consult.ask)
    scores = np.where(view.feasible(demand), -np.arange(len(view)), -np.inf)
    scores = np.where(np.isinf(scores), -1.0, 1e6 + scores)
    return propose(view, demand, best_rows(view, demand, scores))


def terse(rng: Random, fleet: Fleet, consult: Consult) -> Any:
    """Proposes well, but leaves the choice of nodes or devices to the allocator."""
    value = honest(rng, fleet, consult)
    for share in value if isinstance(value, list) else [value]:
        if "cluster_id" in share and consult.ask.demand is not None:
            del share["gpus"]
            if rng.random() < 0.5 and not isinstance(value, list):
                del share["node_id"]
    return value


def blind(rng: Random, fleet: Fleet, consult: Consult) -> Any:
    """Proposes nodes that could serve the request when empty, whether free or reserved."""
    demand = consult.ask.demand or Demand(gpus=1, gpu_milli=500)
    able = np.flatnonzero(fleet.gpu_total.sum(1) >= 1000 * demand.gpus).tolist()
    if demand.topology in {"rack", "zone"} and rng.random() < 0.5:
        groups = getattr(fleet, demand.topology)
        place = rng.choice(groups.tolist() or [0])
        able = [row for row in able if groups[row] == place]
    if len(able) < demand.nodes:
        return decline(demand)
    shares = []
    for row in rng.sample(able, demand.nodes):
        ids = list(fleet.gpu_ids[row])
        share = {
            "cluster_id": fleet.node_ids[row][0],
            "node_id": fleet.node_ids[row][1],
            "gpus": rng.sample(ids, demand.gpus),
        }
        if consult.ask.demand is None:
            share["gpu_milli"] = 500
        shares.append(share)
    return shares if demand.nodes > 1 else shares[0]


def lying(rng: Random, fleet: Fleet, consult: Consult) -> Any:
    """Starts from a proposal and breaks it in one of many ways."""
    value = rng.choice([honest, blind])(rng, fleet, consult)
    share = value[0] if isinstance(value, list) else value
    ids = list(share.get("gpus", []))
    breaks: list[Callable[[], Any]] = [
        lambda: share.update(gpus=[*ids, *ids[:1]]),
        lambda: share.update(gpus=ids[1:]),
        lambda: share.update(gpus=[*ids, "no-such-gpu"]),
        lambda: share.update(gpus=[0, 1, 2, 3]),
        lambda: share.update(gpu_milli=rng.choice([1, 999, 1000, 0, -5, 1e300, "all"])),
        lambda: share.update(cpu_milli=rng.choice([0, 10**9, -1, 0.5, True])),
        lambda: share.update(memory_mib=10**18),
        lambda: share.update(cluster_id=rng.choice(["atlantis", "marina", 7, {}, ""])),
        lambda: share.update(node_id=rng.choice(["node-0", "node-9", 3.5, ""])),
        lambda: share.pop("node_id", None),
        lambda: None,
    ]
    rng.choice(breaks)()
    if isinstance(value, list) and rng.random() < 0.5:
        return rng.choice([value[:1], [share, share], [*value, share]])
    return [share, share] if rng.random() < 0.1 else value


def babbling(rng: Random, fleet: Fleet, consult: Consult) -> Any:
    garbage = [None, 7, "harbour", [], [[]], {}, {"cluster_id": None}, [{"cluster_id": "quay"}, 3]]
    return rng.choice([*garbage, {"clusterId": "quay", "gpus": "0"}])


def moody(rng: Random, fleet: Fleet, consult: Consult) -> Any:
    """Proposes well, declines, fails or does not answer, at random."""
    mood = rng.random()
    if mood < 0.15:
        return {"declined": "not today"}
    if mood < 0.25:
        return Refusal(Code.POLICY_ERROR, "ZeroDivisionError: division by zero")
    return SILENCE if mood < 0.3 else honest(rng, fleet, consult)


HONEST: tuple[Character, ...] = (honest,)
DISHONEST: tuple[Character, ...] = (honest, terse, blind, lying, babbling, moody)
