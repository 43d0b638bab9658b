"""Fill nodes that are in use, so that empty nodes stay whole for large requests."""

import numpy as np

from moorage.policy import place

EMPTY = 1_000_000
"""More than the GPUs of a node: the policy uses an empty node only if no other node fits."""


def score(free: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the score of each node: a fuller node has a higher score, an empty node the lowest.

    Args:
        free: Free GPU of each node, in milli.
        total: All GPU of each node, in milli.
    """
    return -free - EMPTY * (free == total)


class AIOSv1PolicyRule:
    """Chooses the fullest node."""

    def __init__(self, rule_id, settings, parameters):
        """Prepare nothing."""

    def eval(self, parameters, input_data, context):
        """Propose the fullest node on which the request fits."""
        return place(
            input_data,
            lambda fleet, demand: score(fleet.free_gpu_milli(), fleet.gpu_total.sum(axis=1)),
        )
