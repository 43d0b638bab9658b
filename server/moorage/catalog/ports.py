"""The interface of a catalog: a small Protocol for each part, and `Catalog` for the whole.

`catalog.opening` builds catalogs. Methods that may send requests to a service are `async`, for
mirrored parts; the hot path calls only plain functions of `Memory`.

Every refusal is a `protocol.faults.ServiceError`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from moorage.catalog.allowances import Allowance
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.contexts import KeptContexts
from moorage.catalog.embedded.executors import Executors
from moorage.catalog.embedded.following import FollowedRecords
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.search import ClusterSearch
from moorage.catalog.values import Document, Examine, PolicyRecord, PreparedPolicy
from moorage.protocol.registry import BlockDocuments, ClusterDocuments, Metrics, PolicyDocuments
from moorage.query import Filter
from moorage.records.json_values import JsonMapping
from moorage.storage.base import RecordStore


class Blocks(BlockDocuments, Protocol):
    """Documents of blocks and of their metrics, and searches of them."""

    async def fetch(self, allowance: Allowance) -> list[str]:
        """Read outdated metrics again if an external service has them; return warnings.

        Afterwards the metrics for `matching` and `documents` are at most `metrics_fresh_seconds`
        old.
        """

    async def matching(self, wanted: Filter) -> Sequence[str]:
        """Return the blocks whose documents and metrics match a filter, by id."""

    async def alike(
        self, like: str | JsonMapping, weights: Mapping[str, float] | None
    ) -> Sequence[str]:
        """Return all blocks, the most similar first; see `query.nearest`."""

    def documents(self, block_ids: Sequence[str]) -> list[Document]:
        """Return blocks with their `metrics`, null if there are none; skip unknown ids.

        Raises:
            ServiceError: `too_large`.
        """


class Policies(PolicyDocuments, Protocol):
    """Policies in all their versions, and their registration."""

    async def prepare(self, document: Document) -> PreparedPolicy:
        """Check a PolicyRule document and fetch its code, without storing or running it.

        Raises:
            ServiceError: `bad_message` naming the field; `bad_policy` about the code; `too_large`;
            `unavailable` if a URL could not be fetched.
        """

    async def register(self, prepared: PreparedPolicy, who: str = "") -> PolicyRecord:
        """Store a policy. Storing the same policy again is not an error.

        Args:
            prepared: The result of `prepare`.
            who: The tenant, for the policy's history.

        Raises:
            ServiceError: `already_exists` if the URI has other content; `too_large`.
        """

    async def update(self, uri: str, change: Document, who: str = "") -> Document:
        """Change descriptive fields of a policy, as `DocumentCollection.update` does.

        Raises:
            ServiceError: `unknown_policy`; `already_exists` if the change affects the policy's
            behaviour (code, defaults, schemas), which needs a new version.
        """

    async def delete(self, uri: str, who: str = "") -> Document:
        """Delete a policy and return its document; raise `unknown_policy` if there is none."""


class Freshness(Protocol):
    """Provides the data that a request needs: from memory if fresh, else from its source."""

    async def keep_fresh(self, examine: Examine) -> None:
        """Follow the mirrored services until cancelled; return at once if there are none.

        Args:
            examine: Runs the examples of a mirrored policy; returns why they fail, or "".
        """

    @property
    def registry_known(self) -> bool:
        """Whether an external registry has answered at least once."""

    def at_hand(self, uri: str, cluster_ids: Sequence[str] | None) -> list[str] | None:
        """Return warnings for a request if memory has all its data and they are fresh, else None.

        Args:
            uri: URI of the request's policy.
            cluster_ids: Clusters that the request names, known or not; None: all live clusters.
        """

    async def fetch(
        self,
        uri: str,
        cluster_ids: Sequence[str] | None,
        allowance: Allowance,
        *,
        searching: bool = False,
    ) -> list[str]:
        """Load the data that `at_hand` missed, in bulk and with a time limit.

        Args:
            uri: URI of the request's policy; empty: no policy is needed.
            cluster_ids: Clusters that the request names; None: all live clusters.
            allowance: The external requests that may be sent: first for an unknown policy, then for
                unknown clusters, then for metrics. Outdated data may be left to a later request.
            searching: Whether a search for clusters follows, which may need external requests, too.

        Returns:
            Warnings about data that could not be read, and about the data that are missing
            therefore.

        Raises:
            ServiceError: `unavailable` naming the service, or `unknown_policy`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The documents outside of the core: clusters, metrics, blocks and policies.

    Args:
        freshness: Loads the data that a request needs into memory.
        memory: All data for the hot path, on the event loop.
        aliases: Names that stand for a version of a policy, and may replace its URI.
        executors: Names by which other servers request evaluations of policies here.
        contexts: The stored contexts of policies.
        warnings: Sentences for the log about damaged records, which are not served.
        following: Loads the changes of another process; None: this process writes the records.
    """

    clusters: ClusterDocuments
    metrics: Metrics
    blocks: Blocks
    policies: Policies
    search: ClusterSearch
    freshness: Freshness
    memory: Memory
    aliases: Aliases
    executors: Executors
    contexts: KeptContexts
    warnings: Sequence[str]
    closing: AsyncExitStack
    following: FollowedRecords | None = None

    async def lead(self, records: RecordStore) -> "Catalog | None":
        """Return a catalog that writes the records that this catalog has followed until now.

        Returns:
            The catalog; None if a part mirrors a service: then open a new catalog.

        Raises:
            ServiceError: `unavailable`: the records cannot be opened.
        """
        if self.following is None or not self.following.has_all:
            return None
        await self.following.lead(records)
        return replace(self, following=None)

    async def close(self) -> None:
        """Finish running jobs and close all parts. Later calls are refused."""
        await self.closing.aclose()
