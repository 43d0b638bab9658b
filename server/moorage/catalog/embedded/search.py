"""Search and freshness of a catalog without external services."""

from collections.abc import Mapping, Sequence

from moorage.catalog.allowances import Allowance
from moorage.catalog.search import DocumentSearch
from moorage.catalog.values import Document, Examine, SearchAction
from moorage.model import ClusterId
from moorage.query import Filter
from moorage.records.json_values import JsonMapping


class EmbeddedSearch:
    """`catalog.ports.ClusterSearch` over the documents in memory, and no external service.

    Args:
        index: Over them.
    """

    def __init__(self, index: DocumentSearch) -> None:
        self._index = index

    async def matching(self, wanted: Filter) -> list[ClusterId]:
        """See `ClusterSearch.matching`."""
        return await self._index.matching(wanted)

    async def alike(
        self, like: str | JsonMapping, weights: Mapping[str, float] | None
    ) -> list[ClusterId]:
        """See `ClusterSearch.alike`."""
        return await self._index.alike(like, weights)

    async def ask(
        self, action: SearchAction, body: Document, allowance: Allowance
    ) -> list[ClusterId] | None:
        """See `ClusterSearch.ask`."""
        del action, body, allowance
        return None


class AlwaysFresh:
    """`catalog.ports.Freshness` of a catalog that mirrors no service."""

    registry_known = True

    async def keep_fresh(self, examine: Examine) -> None:
        """See `Freshness.keep_fresh`."""
        del examine

    def at_hand(self, uri: str, cluster_ids: Sequence[str] | None) -> list[str] | None:
        """See `Freshness.at_hand`."""
        del uri, cluster_ids
        return []

    async def fetch(
        self,
        uri: str,
        cluster_ids: Sequence[str] | None,
        allowance: Allowance,
        *,
        searching: bool = False,
    ) -> list[str]:
        """See `Freshness.fetch`."""
        del uri, cluster_ids, allowance, searching
        return []
