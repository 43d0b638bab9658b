"""The interface of a catalog: one small Protocol for each part, and one for the whole.

`catalog.opening` builds them. Methods that may ask a service are `async`, so that a mirrored
part fits; what the hot path calls for every request are plain functions of `Memory`.

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
        """Read the metrics again if an external service has them; return warnings.

        The metrics that `matching` and `encoding` then find are at most `metrics_fresh_seconds`
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
            ServiceError: `bad_message` naming the field, `bad_policy` about the code,
                `too_large`, `unavailable` where a URL could not be fetched.
        """

    async def register(self, prepared: PreparedPolicy, who: str = "") -> PolicyRecord:
        """Store a policy. Storing the same policy again is no error.

        Args:
            prepared: By `prepare`.
            who: The tenant, for the policy's history.

        Raises:
            ServiceError: `already_exists` where the URI has another content; `too_large`.
        """

    async def update(self, uri: str, change: Document, who: str = "") -> Document:
        """Change descriptive fields of a policy, as `DocumentCollection.update` does.

        Raises:
            ServiceError: `unknown_policy`; `already_exists` where the change would make another
                policy of it (code, defaults, schemas): that needs a new version.
        """

    async def delete(self, uri: str, who: str = "") -> Document:
        """Delete a policy and return its document, or raise `unknown_policy`."""


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
        """Return warnings for a request if memory has all its data, fresh enough, else None.

        Args:
            uri: Its policy.
            cluster_ids: Clusters it names, known or not; None: every live one.
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
            uri: The ask's policy; empty: none is wanted.
            cluster_ids: Clusters it names; None: every live one.
            allowance: What the ask may cause. A policy that is not known comes first, then clusters
                that are not known, then metrics; what is known, if old, waits for another ask.
            searching: Its clusters are going to be searched for, which may take requests too.

        Returns:
            Warnings for the ask: what could not be read, and what that left out.

        Raises:
            ServiceError: `unavailable` naming the service, or `unknown_policy`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The documents outside of the core: clusters, metrics, blocks and policies.

    Args:
        freshness: Sees to it that memory has what an ask needs.
        memory: All that the hot path reads, on the event loop.
        aliases: Names that mean a version of a policy; they may stand in the place of a URI.
        executors: Names under which other servers have policies executed here.
        contexts: What policies remember, on the disk.
        warnings: What was damaged on the disk and is done without, each a sentence for the log.
        following: Takes over what another process writes; None: this one does.
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
        """Return the catalog that writes these records, which this one has followed until now.

        Returns:
            None where a part mirrors a service: it is to be read again.

        Raises:
            ServiceError: `unavailable`: they cannot be opened.
        """
        if self.following is None or not self.following.has_all:
            return None
        await self.following.lead(records)
        return replace(self, following=None)

    async def close(self) -> None:
        """Finish running jobs and close all parts. Later calls are refused."""
        await self.closing.aclose()
