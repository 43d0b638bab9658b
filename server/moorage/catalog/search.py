"""Searches documents: an index of cluster documents, an index of metrics, and their thread.

The embedded catalog has one `DocumentSearch` over its documents in memory. Only the thread uses the
indexes, so a query over ten thousand documents blocks no request. The event loop collects changed
ids and passes them on with the next query.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from moorage.catalog.allowances import Allowance
from moorage.catalog.embedded.records import DocumentEntry
from moorage.catalog.limits import CLUSTERS_MAX
from moorage.catalog.values import Document, SearchAction
from moorage.model import ClusterId, Code
from moorage.protocol.faults import ServiceError
from moorage.query import (
    EVERYTHING,
    Condition,
    DocumentIndex,
    Filter,
    QueryError,
    nearest,
    restrict,
    text_at,
)
from moorage.records.json_values import JsonMapping

T = TypeVar("T")

WAITING_MAX: Final = 1024
"""Maximum searches at one time; one more is refused as `busy`."""
CHANGED_MAX: Final = 4 * CLUSTERS_MAX
"""Maximum changed ids between two searches; with more, the next search indexes all documents."""

FEW: Final = 1000
"""Maximum clusters whose metrics a search looks up by id; with more, it searches all metrics."""

_News = dict[str, tuple[Document | None, Document | None]]
"""Changed clusters by id, each with its document and its metrics; None: deleted."""


class ClusterSearch:
    """Searches of clusters, live or not; call `Freshness.fetch` first if memory may be old.

    Args:
        index: The index of the documents in memory.
        elsewhere: Sends a search to an external service; None: no such service is configured.
    """

    def __init__(
        self,
        index: "DocumentSearch",
        elsewhere: Callable[[SearchAction, Document], Awaitable[list[ClusterId]]] | None = None,
    ) -> None:
        self.matching = index.matching
        self.alike = index.alike
        self._elsewhere = elsewhere

    async def ask(
        self, action: SearchAction, body: Document, allowance: Allowance
    ) -> list[ClusterId] | None:
        """Send a search to the external service; return None if no service is configured.

        Args:
            action: The kind of search, which defines the body.
            body: The client's body, bare or in its envelope.
            allowance: The remaining external requests; a search uses one.

        Raises:
            ServiceError: `unavailable`, or `bad_message` with the service's message.
        """
        if self._elsewhere is None:
            return None
        spent = allowance.spend()
        assert spent, "expected a policy or nothing before a search"
        return await self._elsewhere(action, body)


class DocumentSearch:
    """Searches the documents of a catalog.

    Args:
        clusters: The cluster documents in memory, or those of blocks.
        metrics: The metrics documents, by cluster or block id.
        companion: The field of a filter with the condition on metrics.
        key: The field of metrics with the id of their cluster or block.
    """

    def __init__(
        self,
        clusters: Mapping[str, DocumentEntry],
        metrics: Mapping[str, DocumentEntry],
        companion: str = "clusterMetrics",
        key: str = "clusterId",
    ) -> None:
        self._companion, self._key = companion, key
        self._entries = (clusters, metrics)
        self._indexes = (DocumentIndex(), DocumentIndex())
        self._changed: set[str] | None = None  # Before the first search, nothing is indexed.
        self._thread = ThreadPoolExecutor(1, "catalog-search")
        self._updated: Future[None] | None = None
        self._waiting = 0
        self._closed = False

    def note_change(self, document_id: str) -> None:
        """Record that a cluster document or its metrics have changed."""
        if self._changed is not None:
            self._changed.add(document_id)
            if len(self._changed) > CHANGED_MAX:
                self._changed = None

    async def matching(self, wanted: Filter) -> list[ClusterId]:
        """Return the clusters that match a filter with `matchType` `cluster`, by id.

        If the filter also has a condition on metrics, a cluster must meet both.

        Raises:
            ServiceError: `too_large` if a `$regex` would read too much; `busy`.
        """

        def work() -> list[str]:
            clusters, metrics = self._indexes
            companion = wanted.companions.get(self._companion)
            if companion is None:
                return clusters.matching(wanted.condition)
            if wanted.condition == EVERYTHING:
                return [name for name in metrics.matching(companion) if name in clusters]
            # Both must hold, so evaluate the one with fewer results first.
            found = clusters.matching(wanted.condition)
            if len(found) <= FEW:
                return metrics.matching(restrict(companion, self._key, found))
            measured = frozenset(metrics.matching(companion))
            return [name for name in found if name in measured]

        return [ClusterId(name) for name in await self.run(work)]

    async def alike(
        self, like: str | JsonMapping, weights: Mapping[str, float] | None
    ) -> list[ClusterId]:
        """Return all clusters, those most similar to `like` first; see `query.nearest`.

        Args:
            like: The id of a known cluster, or a part of a cluster document.
            weights: Weights by path; None: `query.DEFAULT_WEIGHTS`.
        """
        found = await self.run(lambda: nearest(self._indexes[0], like, weights))
        return [ClusterId(name) for name, _ in found]

    async def clusters(self, condition: Condition) -> list[str]:
        """Return the ids of the cluster documents that meet a condition, sorted."""
        if (named := self._name_clusters(condition, "id", self._entries[0])) is not None:
            return named
        return await self.run(lambda: self._indexes[0].matching(condition))

    async def metrics(self, condition: Condition) -> list[str]:
        """Return the ids of the metrics documents that meet a condition, sorted."""
        if (named := self._name_clusters(condition, self._key, self._entries[1])) is not None:
            return named
        return await self.run(lambda: self._indexes[1].matching(condition))

    def _name_clusters(
        self, condition: Condition, key: str, entries: Mapping[str, DocumentEntry]
    ) -> list[str] | None:
        """Return the id of the only document that a condition matches, if it names a known id.

        The result is None for a condition of another form, which the thread must evaluate.
        """
        name = text_at(condition, key)  # `entries` has the same key.
        return [name] if name in entries and not self._closed else None

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread, after an update of the indexes.

        Raises:
            ServiceError: `busy`, `shutting_down`, or the refusal of a `QueryError` of the work.
        """
        if self._closed:
            raise ServiceError(
                Code.SHUTTING_DOWN, "the catalog is closed; try again when the server runs"
            )
        if self._waiting >= WAITING_MAX:
            raise ServiceError(Code.BUSY, f"{WAITING_MAX} searches wait; ask again in a moment")
        if self._changed is None or self._changed:
            # Outside of the work, which may be cancelled before it begins.
            afresh, news = self._changed is None, self._news()
            self._updated = self._thread.submit(self._update, news, afresh=afresh)
        updated = self._updated

        def job() -> T:
            if updated is not None:
                updated.result()
            return work()

        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._thread.submit(job))
        except QueryError as error:
            raise refusal_of(error) from error
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Finish running jobs and end the thread."""
        self._closed = True
        self._thread.shutdown()
        self._indexes = (DocumentIndex(), DocumentIndex())

    def _news(self) -> _News:
        clusters, metrics = self._entries
        ids = clusters.keys() | metrics.keys() if self._changed is None else self._changed
        self._changed = set()
        return {name: (_document(clusters, name), _document(metrics, name)) for name in ids}

    def _update(self, news: _News, *, afresh: bool) -> None:
        if afresh:
            self._indexes = (DocumentIndex(), DocumentIndex())
        for document_id, documents in news.items():
            for index, document in zip(self._indexes, documents, strict=True):
                if document is None:
                    index.remove(document_id)
                elif document is not index.get(document_id):
                    index.put(document_id, document)


def _document(entries: Mapping[str, DocumentEntry], document_id: str) -> Document | None:
    entry = entries.get(document_id)
    return None if entry is None else entry.document


def refusal_of(error: QueryError) -> ServiceError:
    """Return the refusal of an invalid query, for its sender."""
    return ServiceError(error.code, str(error), field=error.path, expected=error.expected)
