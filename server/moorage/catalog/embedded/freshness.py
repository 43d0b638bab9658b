"""Freshness of a catalog without external services."""

from collections.abc import Sequence

from moorage.catalog.allowances import Allowance
from moorage.catalog.values import Examine


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
