"""The interface of policies: all that a policy may read, and the answer that it may give.

A policy is a class named `AIOSv1PolicyRule`; `Rule` below is its contract. `FleetView` is the
columnar view that it finds in `input_data["fleet"]`; `place` makes a whole policy of a score, and
`read_demand`, `fitting_scores`, `best_rows`, `spread_rows`, `close_gpus`, `propose`, `decline` and
`decline_because` are the steps from scores to an answer, and `print_scores` shows them;
`MixLearner` and `read_typical` describe the
typical requests, `RequestStreams` estimates how many of them a node can host, and `fleet_shares`,
`KindCopies` and `ScarcityPrices` how many more the fleet can host; `NodeLabels` reads the
labels of nodes; `parse_proposal` reads the value that the policy returned.
"""

from typing import Any, Protocol

from moorage.records.json_values import JsonObject

try:
    import numpy as np  # noqa: F401  # This package needs it throughout.
except ModuleNotFoundError as error:
    from moorage.extras import install_command

    reason = f"moorage.policy needs numpy: {install_command('policy')}"
    raise ModuleNotFoundError(reason, name=error.name) from error

from moorage.policy.changes import close_gpus, decline_because, fitting_scores, place, spread_rows
from moorage.policy.choice import (
    best_rows,
    decline,
    print_scores,
    propose,
    read_demand,
    tightest_gpus,
)
from moorage.policy.fleet import NEVER, Fleet, Misfit
from moorage.policy.inventory import gang_groups
from moorage.policy.labels import NodeLabels, capacity_type
from moorage.policy.proposal import ProposalError, ProposedShare, has_empty_parts, parse_proposal
from moorage.policy.scarcity import KindCopies, ScarcityPrices, fleet_shares
from moorage.policy.streams import RequestStreams
from moorage.policy.typical import MixLearner, RequestKind, mix, node_sorts, read_typical
from moorage.policy.view import FleetView

__all__ = [
    "NEVER",
    "Fleet",
    "FleetView",
    "KindCopies",
    "Misfit",
    "MixLearner",
    "NodeLabels",
    "ProposalError",
    "ProposedShare",
    "RequestKind",
    "RequestStreams",
    "Rule",
    "ScarcityPrices",
    "best_rows",
    "capacity_type",
    "close_gpus",
    "decline",
    "decline_because",
    "fitting_scores",
    "fleet_shares",
    "gang_groups",
    "has_empty_parts",
    "mix",
    "node_sorts",
    "parse_proposal",
    "place",
    "print_scores",
    "propose",
    "read_demand",
    "read_typical",
    "spread_rows",
    "tightest_gpus",
]


class Rule(Protocol):
    """The methods that a class named `AIOSv1PolicyRule` must have."""

    def __init__(self, rule_id: str, settings: JsonObject, parameters: JsonObject) -> None:
        """Prepare the policy.

        Args:
            rule_id: The URI of the policy.
            settings: Merged settings, with `cluster_client` and `cluster_metrics_client`.
            parameters: Merged parameters.
        """

    def eval(self, parameters: JsonObject, input_data: Any, context: JsonObject) -> Any:
        """Propose a placement.

        Args:
            parameters: Merged parameters.
            input_data: `cluster_data` (lazy, by cluster id), `inputs` (the request's own),
                `resources` (the demand as a dict, or None), `fleet` (the columnar view) and
                `seed` (for every choice made at random).
            context: Kept by the server across evaluations of this policy version and tenant.

        Returns:
            `{"cluster_id", "node_id", "gpus"}`, a list of them for a gang, or any other value,
            which is passed to the client and grants nothing.
        """
