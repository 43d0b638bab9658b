"""Durable changes, which the catalog reports to its listeners on the event loop."""

from dataclasses import dataclass

from moorage.model import Cluster, ClusterId


@dataclass(frozen=True, slots=True)
class ClusterPut:
    """A cluster document was created or changed.

    Args:
        cluster: The fields of the document that placement uses.
        live: Whether the document's `status` allows placements on the cluster from now on.
    """

    cluster: Cluster
    live: bool


@dataclass(frozen=True, slots=True)
class ClusterDeleted:
    """A cluster document was deleted."""

    cluster_id: ClusterId


@dataclass(frozen=True, slots=True)
class MetricsPut:
    """The metrics of a cluster changed."""

    cluster_id: ClusterId


@dataclass(frozen=True, slots=True)
class MetricsDeleted:
    """The metrics of a cluster were deleted."""

    cluster_id: ClusterId


@dataclass(frozen=True, slots=True)
class PolicyPut:
    """A policy was registered, or its descriptive fields changed."""

    uri: str


@dataclass(frozen=True, slots=True)
class PolicyDeleted:
    """A policy was deleted. Leases that the policy proposed stay."""

    uri: str


@dataclass(frozen=True, slots=True)
class ClustersListed:
    """The external registry was read for the first time; clusters not in `cluster_ids` are gone."""

    cluster_ids: frozenset[ClusterId]


CatalogChange = (
    ClusterPut
    | ClusterDeleted
    | ClustersListed
    | MetricsPut
    | MetricsDeleted
    | PolicyPut
    | PolicyDeleted
)
