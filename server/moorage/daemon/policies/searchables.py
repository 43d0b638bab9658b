"""Searchable kinds of documents: clusters, blocks and policies, each behind one interface.

`daemon.policies.finder.Finder` asks for the kind that a body's `matchType` names. The kinds are
listed in docs/reference/allocation-server.md, "Kinds of documents"; this server stores no documents
of other kinds.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from moorage.catalog.ports import Catalog
from moorage.catalog.search import refusal_of
from moorage.catalog.values import Document
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.query import (
    EVERYTHING,
    SEARCHED,
    Condition,
    Filter,
    MatchType,
    QueryError,
    nearest,
    predicate,
    restrict,
)
from moorage.records.json_values import JsonMapping


class Searched(Protocol):
    """Documents of one searchable kind, by id."""

    async def matching(self, wanted: Filter) -> Sequence[str]:
        """Return the ids of the documents that a filter finds, in the filter's order."""

    async def alike(
        self, like: str | JsonMapping, weights: Mapping[str, float] | None
    ) -> Sequence[str]:
        """Return all ids, the most similar first. `weights` of None: the kind's own weights."""

    def knows(self, name: str) -> bool:
        """Return whether a document with this name exists."""

    def documents(self, names: Sequence[str]) -> list[Document]:
        """Return the known documents of these names, each with its `id`, in this order."""

    def ranked(self, names: Sequence[str]) -> list[Document]:
        """Return the documents for rankings; those of clusters include their `metrics`."""

    def ranking_bytes(self, names: Sequence[str]) -> int:
        """Return the approximate size of `ranked` in bytes; 0: metrics must not be left out."""


async def find_searched(catalog: Catalog, match_type: MatchType, field: str) -> Searched:
    """Return the documents that a `matchType` names.

    Args:
        catalog: The catalog, which has the documents.
        match_type: The kind of documents.
        field: Path of the match type in the body.

    Raises:
        ServiceError: `unsupported`: no documents of this kind are stored here; or an error of the
            policies' external store.
    """
    if match_type == "cluster":
        return SearchedClusters(catalog)
    if match_type == "block":
        return SearchedBlocks(catalog)
    if match_type == "policy":
        return SearchedPolicies(await catalog.policies.query())
    expected = " or ".join(SEARCHED)
    reason = f"{field}: this server keeps no {match_type} documents; expected {expected}"
    raise ServiceError(Code.UNSUPPORTED, reason, field=field, expected=expected)


class SearchedClusters:
    """`Searched` of all registered clusters, live or not."""

    def __init__(self, catalog: Catalog) -> None:
        search, memory = catalog.search, catalog.memory
        self.matching, self.alike = search.matching, search.alike
        self.knows, self.documents = memory.knows, memory.documents
        self.ranked, self.ranking_bytes = memory.measured, memory.measured_bytes


class SearchedBlocks:
    """`Searched` of blocks; a filter may first fetch their clusters and metrics."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._blocks = catalog.blocks
        self.documents = self.ranked = self._blocks.documents

    def knows(self, name: str) -> bool:
        return self._blocks.owner("block", name) is not None

    def ranking_bytes(self, names: Sequence[str]) -> int:
        del names
        return 0

    async def matching(self, wanted: Filter) -> Sequence[str]:
        condition: Condition = wanted.condition
        companions = dict(wanted.companions)
        clusters = companions.pop("cluster", EVERYTHING)
        if clusters != EVERYTHING:
            found = await self._catalog.search.matching(Filter("cluster", clusters))
            condition = restrict(condition, "cluster.id", found)
        return await self._blocks.matching(Filter("block", condition, companions))

    async def alike(
        self, like: str | JsonMapping, weights: Mapping[str, float] | None
    ) -> Sequence[str]:
        if weights is None:
            like_document = self.documents([like])[0] if isinstance(like, str) else like
            weights = _equal_weights(like_document)
        return await self._blocks.alike(like, weights)


class SearchedPolicies:
    """`Searched` of policies: registered here, or known to the external store."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = {
            uri: {**each, "id": uri}
            for each in documents
            if isinstance(uri := each.get("policy_rule_uri"), str)
        }

    def knows(self, name: str) -> bool:
        return name in self._documents

    async def matching(self, wanted: Filter) -> Sequence[str]:
        def work() -> list[str]:
            test = predicate(wanted.condition)
            return sorted(name for name, each in self._documents.items() if test(each))

        return await asyncio.to_thread(work)

    async def alike(
        self, like: str | JsonMapping, weights: Mapping[str, float] | None
    ) -> Sequence[str]:
        reference = self._documents[like] if isinstance(like, str) else like
        weights = _equal_weights(reference) if weights is None else weights
        try:
            found = await asyncio.to_thread(nearest, self._documents, like, weights)
        except QueryError as error:
            raise refusal_of(error) from error
        return [name for name, _ in found]

    def documents(self, names: Sequence[str]) -> list[Document]:
        return [self._documents[name] for name in names if name in self._documents]

    ranked = documents

    def ranking_bytes(self, names: Sequence[str]) -> int:
        del names
        return 0


def _equal_weights(reference: JsonMapping) -> Mapping[str, float]:
    """Return equal weights for all top-level fields of a reference document."""
    return {name: 1.0 for name in reference if name and name != "id" and "." not in name}
