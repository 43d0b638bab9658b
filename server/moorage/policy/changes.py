"""Common steps of policies, each in one call, so that a policy's code has only the author's idea.

Authors' policies call these functions inside a cell:

    def eval(self, parameters, input_data, context):
        return place(input_data, lambda fleet, demand: fleet.free_gpu_milli())

`choice` has the steps of these functions, for policies that need to change a step.
"""

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from moorage.model import Demand
from moorage.policy.choice import (
    best_rows,
    decline,
    propose,
    read_demand,
    read_scores,
    show_scores,
    sum_terms,
)
from moorage.policy.inventory import gang_groups
from moorage.policy.view import FleetView
from moorage.records.json_values import JsonMapping, JsonObject

Score = Callable[[FleetView, Demand], npt.ArrayLike | Mapping[str, npt.ArrayLike]]
"""Returns one finite number per node, the higher the better, or named terms whose sum is this
number; values of nodes where the demand does not fit are ignored."""
Gang = Literal["pack", "spread"]

_CLOSE: Final[tuple[Literal["nvlink", "numa"], ...]] = ("nvlink", "numa")
_GANGS: Final = ("pack", "spread")
_NOT_HERE: Final = -1.0


def place(
    input_data: JsonMapping, score: Score, *, close: bool = False, gang: Gang = "pack"
) -> JsonObject | list[JsonObject]:
    """Return a proposal of the best nodes for the request, or the reason why no node fits.

    For every score, the proposal fits, and has the number of nodes and the topology that the
    request asks for.

    Args:
        input_data: The `input_data` of `eval`.
        score: Rates each node. Of nodes with equal scores, the first by name is chosen.
        close: Whether GPUs of one NVLink group, else of one NUMA domain, are chosen if they have
            room, even if the request asks for no topology.
        gang: `pack` chooses the nodes of a gang in one cluster if one has room, `spread` in as many
            racks as possible.

    Raises:
        TypeError: `input_data` is not that of `eval`, or `score` takes other arguments.
        ValueError: The score is not one finite number per node, or `gang` is another word.
    """
    if gang not in _GANGS:
        raise ValueError(f"gang: expected one of {', '.join(_GANGS)}, got {gang!r:.100}")
    try:
        fleet = input_data["fleet"]
    except TypeError:
        kind = type(input_data).__name__
        raise TypeError(f"place: expected `input_data` as `eval` got it, got {kind}") from None
    demand = read_demand(input_data)
    if demand is None:
        return decline(None)
    try:
        found = score(fleet, demand)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # The score function raised the error.
        raise TypeError(f"{error}; a score function gets the fleet and the demand") from None
    total = sum_terms(fleet, found) if isinstance(found, Mapping) else found
    scores = fitting_scores(fleet, demand, total)
    rows = (best_rows if gang == "pack" else spread_rows)(fleet, demand, scores)
    return propose(
        fleet, demand, rows, (lambda row: close_gpus(fleet, row, demand)) if close else None
    )


def fitting_scores(
    fleet: FleetView, demand: Demand, scores: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Return scores for `best_rows`: 0 or more for rows where the demand fits, -1 for others.

    Args:
        fleet: The view.
        demand: The demand that must fit.
        scores: One number per node, of either sign.

    Raises:
        ValueError: The scores are not one finite number per node.
    """
    given = read_scores(fleet, scores).astype(np.float64, copy=False)
    fits = fleet.feasible(demand)
    if not np.isfinite(given[fits]).all():
        row = int(np.flatnonzero(fits & ~np.isfinite(given))[0])
        name = "/".join(fleet.node_ids[row])
        raise ValueError(f"the score of {name} is {given[row]}; expected a finite number")
    least = given[fits].min(initial=np.inf)
    return np.where(fits, given - (least if np.isfinite(least) else 0.0), _NOT_HERE)


def close_gpus(fleet: FleetView, row: int, demand: Demand) -> list[int]:
    """Return device columns of a node that are as close to each other as possible.

    All devices come from the smallest NVLink group that suffices, else from one NUMA domain, else
    from the whole node. A topology that the demand itself names is respected.

    Args:
        fleet: The view.
        row: Row of the node.
        demand: How many devices, and how much of each.
    """
    if demand.gpus > 1 and demand.topology not in _CLOSE:
        for level in _CLOSE:
            if columns := fleet.pick_gpus(row, replace(demand, topology=level)):
                return columns
    return fleet.pick_gpus(row, demand)


def spread_rows(fleet: FleetView, demand: Demand, scores: npt.ArrayLike) -> list[int]:
    """Return the rows for a gang, from as many racks as possible; the opposite of `best_rows`.

    The best node of each rack comes first, in the order of their scores, then the second of each.
    A node without a named rack counts as a rack of its own. A gang that must share a rack
    or zone gets the rows of `best_rows`.

    Args:
        fleet: The view from which the scores were computed.
        demand: The demand, whose number of nodes is chosen.
        scores: One number per node, below 0 if the demand does not fit.

    Returns:
        `demand.nodes` different rows, or [] if too few nodes fit.

    Raises:
        ValueError: The scores are not one number per node.
    """
    if demand.nodes == 1 or gang_groups(fleet, demand) is not None:
        return best_rows(fleet, demand, scores)
    scores = read_scores(fleet, scores)
    show_scores(fleet, scores)
    fitting = np.flatnonzero(scores >= 0)
    ranking: list[int] = fitting[np.argsort(-scores[fitting], kind="stable")].tolist()
    seen: dict[tuple[int, int], int] = {}
    turns: list[int] = []
    for row in ranking:
        rack = int(fleet.rack[row])
        place_of = (int(fleet.cluster[row]), rack if rack >= 0 else -1 - row)
        turns.append(seen.get(place_of, 0))
        seen[place_of] = turns[-1] + 1
    apart = [row for _, row in sorted(zip(turns, ranking, strict=True), key=itemgetter(0))]
    return apart[: demand.nodes] if len(apart) >= demand.nodes else []


def decline_because(reason: str) -> dict[str, str]:
    """Return an answer that grants nothing, with the reason for the client.

    Args:
        reason: A sentence for the client, e.g. "this policy serves one node at a time".
    """
    return {"declined": reason}
