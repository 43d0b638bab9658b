"""Changes that listeners of the catalog get, on the event loop, once they are durable."""

from dataclasses import dataclass

from moorage.model import Cluster, ClusterId


@dataclass(frozen=True, slots=True)
class ClusterPut:
    """A cluster document was created or changed.

    Args:
        cluster: What placement depends on.
        live: Whether its `status` lets it be a candidate; it has just stopped being one if not.
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
    """A policy was deleted. Leases that it proposed stay."""

    uri: str


@dataclass(frozen=True, slots=True)
class ClustersListed:
    """A registry that could not be read at the start has been read: these are all its clusters."""

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
