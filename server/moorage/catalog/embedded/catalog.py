"""The catalog in one SQLite file, under the names that callers had before there were parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from moorage.catalog.changes import CatalogChange
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.opening import open_catalog
from moorage.catalog.ports import Catalog

__all__ = ["EmbeddedCatalog"]


class EmbeddedCatalog(Catalog):
    """A catalog that has everything itself."""

    @classmethod
    async def open(
        cls,
        path: Path,
        on_change: Callable[[CatalogChange], None],
        code_root: Path | None = None,
        code_hosts: frozenset[str] | None = None,
    ) -> Self:
        """See `catalog.opening.open_catalog`."""
        return cls(await open_catalog(path, on_change, CodeSources(code_root, code_hosts)))
