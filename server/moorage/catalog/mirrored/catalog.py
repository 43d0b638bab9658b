"""The catalog of a site with services of its own, under the names from before there were parts."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from moorage.catalog.changes import CatalogChange
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.mirrored.external import External
from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog
from moorage.catalog.values import PolicyRecord

__all__ = ["External", "MixedCatalog"]


class MixedCatalog(Catalog):
    """A catalog with external parts."""

    @classmethod
    async def open_mixed(
        cls,
        path: Path,
        on_change: Callable[[CatalogChange], None],
        *,
        external: External,
        examine: Callable[[PolicyRecord], Awaitable[str]],
        code_root: Path | None = None,
        code_hosts: frozenset[str] | None = None,
    ) -> Self:
        """See `catalog.opening.open_catalog`."""
        sources = CodeSources(code_root, code_hosts)
        return cls(await open_catalog(path, on_change, sources, external, examine))
