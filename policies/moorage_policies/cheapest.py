"""Cheapest: the node whose GPU-hours cost the least.

What a GPU-hour on a node costs, in whatever currency the site counts; the first that is known:

1. the node's label `moorage.io/gpu-hour-price`, taken as it is (a spot market's own price, say);
2. `prices[<instance type>]`, by the label `node.kubernetes.io/instance-type`;
3. `prices[<GPU model>]`, of the first GPU that would be used.

A price from the table counts `spot_factor` times on spot machines (see `capacity_type` in
`moorage.policy` for the labels that tell). A node of unknown price comes after all others. A
request without GPUs goes to nodes without GPUs first, which cost no GPU-hour.

Among equally cheap nodes the one with the least free GPU is taken, so that whole machines can be
given back; then the first.

Parameters:
    prices: object, price of one GPU-hour by instance type or GPU model.
    spot_factor: 0 to 1, default 1: what spot machines cost of the price in the table.
"""

from collections.abc import Mapping
from math import inf, nan
from typing import Any

import numpy as np

from moorage.policy import NodeLabels, best_rows, capacity_type, decline, propose, read_demand

PRICE_LABEL = "moorage.io/gpu-hour-price"
TYPE_LABEL = "node.kubernetes.io/instance-type"


def price_of(labels: Mapping[str, str]) -> float:
    """Return the price in a node's label, or NaN."""
    try:
        price = float(labels.get(PRICE_LABEL, nan))
    except ValueError:
        return nan
    return price if price >= 0 else nan


def instance_type(labels: Mapping[str, str]) -> str:
    """Return a node's instance type, or an empty text."""
    return labels.get(TYPE_LABEL, "")


class AIOSv1PolicyRule:
    """Proposes the node with the cheapest GPU-hours."""

    def __init__(self, rule_id: str, settings: dict[str, Any], parameters: dict[str, Any]) -> None:  # noqa: ARG002  # The contract's signature.
        self._labels = NodeLabels()
        self._known: Any = None
        self._columns: Any = None

    def eval(self, parameters: dict[str, Any], input_data: Any, context: dict[str, Any]) -> Any:  # noqa: ARG002  # As above.
        """Return the placement, or `{"declined": reason}`."""
        fleet, demand = input_data["fleet"], read_demand(input_data)
        if demand is None:
            return decline(None)
        rows = np.flatnonzero(fleet.feasible(demand))
        scores = np.full(len(fleet), -1)
        if len(rows):
            price = self._prices(fleet, demand, rows, parameters, input_data["cluster_data"])
            left = fleet.gpu_free[rows].sum(1)
            order = np.lexsort((left, price))  # By price, then by what is left, then by row.
            scores[rows[order]] = np.arange(len(rows), 0, -1)
        return propose(fleet, demand, best_rows(fleet, demand, scores))

    def _prices(
        self, fleet: Any, demand: Any, rows: Any, parameters: dict[str, Any], cluster_data: Any
    ) -> Any:
        """Return the price of a GPU-hour on each of `rows`; infinite where it is unknown."""
        table, factor = parameters.get("prices") or {}, parameters.get("spot_factor", 1)
        labelled, typed, factors = self._by_labels(fleet, cluster_data, table, factor)
        by_model = np.array([table.get(model, inf) for model in fleet.models] + [inf], float)
        usable = fleet.fitting_gpus(demand)[rows] if demand.gpus else fleet.gpu_total[rows] > 0
        model = np.full(len(rows), -1)
        if usable.shape[1]:
            model = fleet.gpu_model[rows, usable.argmax(1)]  # -1 finds the last price: unknown.
        listed = np.where(np.isnan(typed[rows]), by_model[model], typed[rows])
        known = np.isfinite(listed)
        listed[known] *= factors[rows][known]
        price = np.where(np.isnan(labelled[rows]), listed, labelled[rows])
        return price if demand.gpus else np.where(usable.any(1), price, 0)

    def _by_labels(
        self, fleet: Any, cluster_data: Any, table: dict[str, float], factor: float
    ) -> Any:
        """Return for each node its label's price, its type's price, and the spot factor."""
        labelled = self._labels.column(fleet, cluster_data, price_of)
        types = self._labels.column(fleet, cluster_data, instance_type)
        bought = self._labels.column(fleet, cluster_data, capacity_type)
        # The same labels are the same tuples, so only the table is compared in earnest.
        known = (labelled, types, bought, table, factor)
        if self._known != known:
            typed = [table.get(name, nan) for name in types]
            factors = [factor if how == "spot" else 1 for how in bought]
            self._known = known
            self._columns = [np.array(each, float) for each in (labelled, typed, factors)]
        return self._columns
