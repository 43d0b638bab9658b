"""Turns the scores that a policy computes into an answer; all policies share these steps.

Authors' policies inside a cell and the policies that ship with Moorage call these functions:

    demand = read_demand(input_data)
    if demand is None:
        return decline(None)
    scores = ...                      # one number per node, below 0 if it does not fit
    return propose(fleet, demand, best_rows(fleet, demand, scores))
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.model import GPU_MILLI, Demand
from moorage.policy.inventory import gang_groups
from moorage.policy.proposal import GPUS_MAX, SHARES_MAX
from moorage.policy.view import FleetView
from moorage.records.json_values import JsonMapping, JsonObject

_WHOLE_NUMBERS: Final = ("gpus", "gpu_memory_mib", "cpu_milli", "memory_mib")


def read_demand(input_data: JsonMapping) -> Demand | None:
    """Return the demand: the request's `resources`, or the same keys in its `inputs`.

    Args:
        input_data: The `input_data` of `eval`.

    Returns:
        The demand; None if neither place has one, or if a value in `inputs` is invalid (text for
        a number, a share above 1000): the policy then has nothing to place.
    """
    demand: Demand | None = input_data["fleet"].demand
    if demand is not None:
        return demand
    wanted = input_data.get("resources") or input_data.get("inputs")
    if not isinstance(wanted, Mapping):
        return None
    amounts = {key: wanted.get(key, 0) for key in _WHOLE_NUMBERS}
    gpu_milli, nodes = wanted.get("gpu_milli", GPU_MILLI), wanted.get("nodes", 1)
    models, topology = wanted.get("models", ()), wanted.get("topology", "")
    sane = (
        all(_whole(amount, 0) for amount in amounts.values())
        and (amounts["gpus"] or amounts["cpu_milli"] or amounts["memory_mib"])
        and amounts["gpus"] <= GPUS_MAX
        and _whole(gpu_milli, 1)
        and gpu_milli <= GPU_MILLI
        and _whole(nodes, 1)
        and nodes <= SHARES_MAX
        and isinstance(models, list | tuple)
        and all(isinstance(model, str) for model in models)
        and isinstance(topology, str)
        and topology in {"", "nvlink", "numa", "rack", "zone"}
    )
    if not sane:
        return None
    return Demand(
        **amounts, gpu_milli=gpu_milli, models=tuple(models), nodes=nodes, topology=topology
    )


def print_scores(most: int = 5) -> None:
    """Print the best nodes of each choice by score, with their free amounts.

    Call this function once, when a policy is tried: text that a policy prints is shown beside the
    policy's answer.

    Args:
        most: The largest number of nodes.
    """
    _Printed.nodes = most


class _Printed:
    """The number of best nodes that `show_scores` prints, and the terms of their scores."""

    nodes = 0
    terms: Mapping[str, npt.NDArray[np.float64]] = {}
    """The named terms whose sum is the current scores; empty: the scores have no terms."""


def sum_terms(fleet: FleetView, terms: Mapping[str, npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """Return the sum of named terms, and remember them for `show_scores`.

    Args:
        fleet: The view from which the terms were computed.
        terms: One number per node each, or one for all nodes.

    Raises:
        ValueError: `terms` is empty, or a term is not one number per node or for all nodes.
    """
    if not terms:
        raise ValueError("a score has no terms: give at least one term")
    columns = {}
    for name, given in terms.items():
        column = np.asarray(given, np.float64)
        if column.shape not in {(), (len(fleet),)}:
            raise ValueError(
                f"expected one score per node ({len(fleet)}), got shape {column.shape} of {name!r}"
            )
        columns[name] = np.broadcast_to(column, (len(fleet),))
    _Printed.terms = columns
    total: npt.NDArray[np.float64] = np.sum(list(columns.values()), axis=0)
    return total


def show_scores(fleet: FleetView, scores: npt.NDArray[Any]) -> None:
    """Print the best nodes with scores from 0, if the policy called `print_scores`."""
    terms, _Printed.terms = _Printed.terms, {}
    if not _Printed.nodes:
        return
    fitting = np.flatnonzero(scores >= 0)
    ranking = fitting[np.argsort(-scores[fitting], kind="stable")].tolist()
    print(f"{len(ranking)} nodes fit; the best by score:")  # noqa: T201  # For the author.
    for row in ranking[: _Printed.nodes]:
        gpus, cores = fleet.gpu_free[row].sum() / GPU_MILLI, fleet.cpu_free[row] / 1000
        free = f"{gpus:g} GPUs, {cores:g} cores and {fleet.memory_free[row] / 1024:.0f} GiB free"
        name = "/".join(fleet.node_ids[row])
        parts = ", ".join(f"{each} {column[row]:.6g}" for each, column in terms.items())
        score = f"{scores[row]:.6g}" + (f" ({parts})" if parts else "")
        print(f"{name}: score {score}, {free}")  # noqa: T201  # Likewise.


def read_scores(fleet: FleetView, scores: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return the scores of a policy as an array.

    Raises:
        ValueError: The scores are not one number per node.
    """
    expected = f"expected one score per node ({len(fleet)} numbers)"
    try:
        given = np.asarray(scores)
        given = given if given.dtype.kind in "fi" else given.astype(np.float64)
    except (TypeError, ValueError):  # NumPy's own message does not mention scores.
        raise ValueError(f"{expected}, got {scores!r:.100}") from None
    if given.shape != (len(fleet),):
        found = f"shape {given.shape}" if given.shape else f"{scores!r:.100}"
        raise ValueError(f"{expected}, got {found}")
    return given


def best_rows(fleet: FleetView, demand: Demand, scores: npt.ArrayLike) -> list[int]:
    """Return the rows to use: the highest score first, equal scores by the lowest row.

    A gang takes the best nodes of one rack or zone if the demand has such a topology, else of one
    cluster if a cluster has room for the gang, else of all clusters. Down the ranking, the first
    group with enough nodes wins.

    Args:
        fleet: The view from which the scores were computed.
        demand: The number of nodes, and their topology.
        scores: One number per node, below 0 if the demand does not fit.

    Returns:
        `demand.nodes` different rows, or [] if too few nodes fit.

    Raises:
        ValueError: The scores are not one number per node.
    """
    scores = read_scores(fleet, scores)
    show_scores(fleet, scores)
    if demand.nodes == 1:
        row = int(scores.argmax()) if len(scores) else 0
        return [row] if len(scores) and scores[row] >= 0 else []
    fitting = np.flatnonzero(scores >= 0)
    ranking = fitting[np.argsort(-scores[fitting], kind="stable")].tolist()
    together = gang_groups(fleet, demand)
    groups: dict[tuple[int, int], list[int]] = {}
    for row in ranking:
        place = 0 if together is None else int(together[row])
        if place < 0:
            continue  # A node without a named rack shares it with no other.
        group = groups.setdefault((int(fleet.cluster[row]), place), [])
        group.append(row)
        if len(group) == demand.nodes:
            return group
    return [] if together is not None or len(ranking) < demand.nodes else ranking[: demand.nodes]


def propose(
    fleet: FleetView,
    demand: Demand,
    rows: Sequence[int],
    pick: Callable[[int], Sequence[int]] | None = None,
) -> JsonObject | list[JsonObject]:
    """Return the answer that proposes these nodes, in the documented output format.

    Args:
        fleet: The view the rows belong to.
        demand: The demand that each node takes.
        rows: One row, or one per member of a gang; empty: the answer declines.
        pick: Chooses the device columns of a row; None: `fleet.pick_gpus` does.
    """
    if not rows:
        return decline(demand)
    shares = []
    for row in rows:
        columns: Sequence[int] = ()
        if demand.gpus:
            columns = pick(row) if pick else fleet.pick_gpus(row, demand)
        share = fleet.placement(row, columns)
        if fleet.demand is None:
            # The server fills in amounts from `resources`; a demand read from `inputs` is
            # known to the policy alone.
            share["gpu_milli"] = demand.gpu_milli
            share["cpu_milli"] = demand.cpu_milli
            share["memory_mib"] = demand.memory_mib
        shares.append(share)
    return shares if demand.nodes > 1 else shares[0]


def tightest_gpus(
    demand: Demand, gpu_free: npt.NDArray[Any], able: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return the GPUs of each node that the demand takes, like `pick_gpus` without topology.

    Args:
        demand: The demand that each node would take.
        gpu_free: Free milli of every GPU: `[nodes, devices]`.
        able: The GPUs that could serve the demand; on every node at least as many as the demand
            needs.

    Returns:
        bool `[nodes, devices]`: the able GPUs with the least free milli; of equal GPUs, those with
        the lowest index.
    """
    free = np.where(able, gpu_free, GPU_MILLI + 1)
    order = np.argsort(free, axis=1, kind="stable")[:, : demand.gpus]
    taken = np.zeros(able.shape, np.bool_)
    np.put_along_axis(taken, order, values=True, axis=1)
    return taken


def decline(demand: Demand | None) -> dict[str, str]:
    """Return an answer that grants nothing, with the reason.

    Args:
        demand: The demand, which fits nowhere now; None: the request has no demand.
    """
    if demand is None:
        return {
            "declined": 'the request names no resources: give `resources`, e.g. {"gpus": '
            "1}, or the same keys in `inputs` (whole numbers; gpu_milli 1 to 1000)"
        }
    gang = f"{demand.nodes} different nodes, each with " if demand.nodes > 1 else ""
    models = f" of {' or '.join(demand.models)}" if demand.models else ""
    topology = f" in one {demand.topology} group" if demand.topology else ""
    return {
        "declined": f"no room now among the nodes this request may use for {gang}{demand.gpus} "
        f"GPUs of {demand.gpu_milli} milli{models}, {demand.cpu_milli} CPU milli and "
        f"{demand.memory_mib} MiB{topology}"
    }


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
