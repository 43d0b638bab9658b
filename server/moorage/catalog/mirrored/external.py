"""The configured external services, which the catalog mirrors."""

from dataclasses import dataclass
from typing import Final

from moorage.catalog.mirrored.http import Service

EXTERNAL_NAMES: Final = {
    "clusters": "cluster registry",
    "metrics": "cluster metrics service",
    "block_metrics": "block metrics service",
    "search": "search service",
    "policies": "policy store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """The URLs of the external services, and the maximal ages of their answers.

    Args:
        clusters: Base URL of the cluster registry; empty: the embedded registry.
        metrics: Base URL of the cluster metrics service, or empty.
        block_metrics: Base URL of the block metrics service, or empty.
        search: Base URL of the search service, or empty.
        policies: Base URL of the policy store, or empty.
        timeout_seconds: Longest duration of one request, including repetitions.
        cluster_refresh_seconds: Interval at which the registry is read.
        metrics_fresh_seconds: Maximal age of metrics; older ones are read again.
        policy_fresh_seconds: Maximal age of policies; older ones are read again.
        stale_seconds_max: How long clusters and policies are served, with a warning, while their
            service does not answer.
    """

    clusters: str = ""
    metrics: str = ""
    block_metrics: str = ""
    search: str = ""
    policies: str = ""
    timeout_seconds: float = 5.0
    cluster_refresh_seconds: float = 30.0
    metrics_fresh_seconds: float = 5.0
    policy_fresh_seconds: float = 30.0
    stale_seconds_max: float = 300.0

    def __bool__(self) -> bool:
        """Return whether any service is external."""
        return bool(self.parts())

    def parts(self) -> frozenset[str]:
        """Return the names of the external services."""
        return frozenset(part for part in EXTERNAL_NAMES if getattr(self, part))

    def service(self, part: str) -> Service | None:
        """Return the external service for a part of the catalog; None if that part is embedded."""
        url: str = getattr(self, part)
        return Service(EXTERNAL_NAMES[part], url, self.timeout_seconds) if url else None
