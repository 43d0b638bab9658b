"""Finds the nodes that have the labels of a demand.

`Fleet` calls this module. A label that a demand requires becomes a column of numbers. So demands
compare numbers, and only the first demand after a change of the inventory reads labels.
"""

from collections.abc import Mapping
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt

from moorage.model import Requirement
from moorage.policy.inventory import Bools, NodeInventory

CLUSTER_KEY: Final = "moorage/cluster"
NODE_KEY: Final = "moorage/node"

MASKS_MAX: Final = 256
"""At most this many cached masks, and as many cached columns; a further one clears its cache."""


class _Column:
    """The values of one label on all nodes.

    Args:
        values: The label by node; None if a node lacks it.
    """

    def __init__(self, values: list[str | None]) -> None:
        self._numbers: dict[str | None, int] = {None: 0}
        numbers = [self._numbers.setdefault(each, len(self._numbers)) for each in values]
        self._column: npt.NDArray[Any] = np.array(numbers, np.int32)

    def meets(self, requirement: Requirement) -> Bools:
        """Return which nodes meet a requirement of the label in this column."""
        if requirement.operator in {"Exists", "DoesNotExist"}:
            exists: Bools = self._column > 0
            return exists if requirement.operator == "Exists" else ~exists
        wanted = [self._numbers[each] for each in requirement.values if each in self._numbers]
        among: Bools = np.isin(self._column, wanted)
        return among if requirement.operator == "In" else ~among


class Matching:
    """Finds the nodes that meet requirements; caches the results until the inventory changes."""

    def __init__(self) -> None:
        self._layout = -1
        self._columns: dict[str, _Column] = {}
        self._masks: dict[tuple[Requirement, ...], Bools] = {}

    def mask(self, inventory: NodeInventory, where: tuple[Requirement, ...]) -> Bools:
        """Return which nodes meet all of `where`: bool `[nodes]`, read-only."""
        if self._layout != inventory.layout:
            self._layout = inventory.layout
            self._columns.clear()
            self._masks.clear()
        mask = self._masks.get(where)
        if mask is None:
            mask = np.ones(len(inventory), np.bool_)
            for requirement in where:
                mask &= self._column(inventory, requirement.key).meets(requirement)
            if len(self._masks) >= MASKS_MAX:
                self._masks.clear()
            mask.flags.writeable = False
            self._masks[where] = mask
        return mask

    def meets(self, inventory: NodeInventory, row: int, where: tuple[Requirement, ...]) -> bool:
        """Return whether one node meets all of `where`.

        This method reads the labels of this node alone, since thousands of demands may be checked
        for it.
        """
        cluster, node = inventory.node_ids[row]
        labels: Mapping[str, str] = {**inventory.labels[row], CLUSTER_KEY: cluster, NODE_KEY: node}
        return all(_meets(labels.get(each.key), each) for each in where)

    def _column(self, inventory: NodeInventory, key: str) -> _Column:
        column = self._columns.get(key)
        if column is None:
            if len(self._columns) >= MASKS_MAX:
                self._columns.clear()
            column = self._columns[key] = _Column(label_values(inventory, key))
        return column


def _meets(value: str | None, requirement: Requirement) -> bool:
    match requirement.operator:
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case _:
            assert_never(requirement.operator)


def label_values(inventory: NodeInventory, key: str) -> list[str | None]:
    """Return the label `key` of each node, or the id that `key` stands for; None: no such label."""
    if key == CLUSTER_KEY:
        return [cluster for cluster, _ in inventory.node_ids]
    if key == NODE_KEY:
        return [node for _, node in inventory.node_ids]
    labels: tuple[Mapping[str, str], ...] = inventory.labels
    assert len(labels) == len(inventory), "a replica has no labels"
    return [each.get(key) for each in labels]
