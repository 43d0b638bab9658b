"""Clusters, metrics and policies from external services, behind the catalog's interfaces.

`catalog.opening` uses one of these classes in place of each embedded part with a configured
service. Mirrored and embedded documents are in the same memory, and the same code reads them. Only
mirrored ones are loaded from a service (`catalog.mirrored.clusters`, `catalog.mirrored.policies`),
and clients must send changes of them to that service.
"""

from collections.abc import Callable, Coroutine
from typing import NoReturn

from moorage.catalog.allowances import Allowance
from moorage.catalog.documents.encoding import cluster_id_of
from moorage.catalog.documents.policies import is_policy_uri
from moorage.catalog.documents.sources import CodeSources
from moorage.catalog.embedded.aliases import Aliases
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.embedded.policies import prepare_policy
from moorage.catalog.embedded.records import aggregate, answer_documents, entry_of, unknown_id_error
from moorage.catalog.filters import compile_filter, parse_filter
from moorage.catalog.mirrored.clusters import ClusterMirror, MetricsMirror
from moorage.catalog.mirrored.http import Service
from moorage.catalog.mirrored.policies import PolicyMirror
from moorage.catalog.values import Document, PreparedPolicy
from moorage.model import Code
from moorage.protocol.faults import ServiceError
from moorage.query import text_at
from moorage.records.json_values import JsonValue

Refused = Callable[..., Coroutine[object, object, NoReturn]]
"""The type of a method that refuses every change."""


def refuse_change_at(service: Service, part: str) -> Refused:
    """Return a method that refuses a change, and names the service that accepts the change."""

    async def refuse(*_: object, **__: object) -> NoReturn:
        raise ServiceError(
            Code.UNSUPPORTED,
            f"This server reads its {part} from {service.url}; send changes to that service.",
            expected=f"a request to {service.url}",
        )

    return refuse


class MirroredClusters:
    """The clusters of an external registry; implements `protocol.registry.ClusterDocuments`.

    Args:
        memory: The store of the documents that the mirror has read.
    """

    def __init__(self, memory: Memory, mirror: ClusterMirror) -> None:
        self._memory = memory
        self._mirror = mirror
        self.create: Refused
        self.create = self.update = self.delete = refuse_change_at(mirror.service, "clusters")
        self.add_nodes = self.remove_nodes = self.create

    async def get(self, cluster_id: str) -> Document:
        await self._mirror.fetch([cluster_id_of(cluster_id, "id")], Allowance())
        return entry_of(self._memory.clusters, cluster_id, "cluster").document

    async def query(self, query: Document) -> list[Document]:
        await self._mirror.fetch(None, Allowance())
        entries = self._memory.clusters
        found = await self._memory.index.clusters(parse_filter(query))
        return answer_documents([entries[name] for name in found if name in entries])


class MirroredMetrics:
    """The metrics of an external service; implements `protocol.registry.Metrics`.

    Args:
        memory: The store of the documents that the mirror has read.
    """

    def __init__(self, memory: Memory, mirror: MetricsMirror) -> None:
        self._memory = memory
        self._mirror = mirror
        self.put: Refused
        self.put = self.update = self.delete = refuse_change_at(mirror.service.service, "metrics")

    async def get(self, cluster_id: str) -> Document:
        name = cluster_id_of(cluster_id, "id")
        if self._memory.knows(name):
            await self._mirror.require(name)
            return entry_of(self._memory.metrics, name, "metrics").document
        # Metrics of unknown clusters are not stored, since their number has no limit.
        read = await self._mirror.service.named([name], {})
        if name not in read.found:
            raise unknown_id_error("metrics", name, self._memory.metrics)
        return read.found[name][0].document

    async def query(self, query: Document | None = None) -> list[Document]:
        """See `Metrics.query`; a query that names one cluster works like `get`."""
        condition = parse_filter(query)  # Refuse an invalid query before a request to the service.
        name = text_at(condition, "clusterId")
        if name and self._memory.knows(name):
            await self._mirror.require(name)
            entry = self._memory.metrics.get(name)
            return [] if entry is None else [entry.document]
        return await self._mirror.service.matching(query or {})

    async def aggregate(self, stages: JsonValue) -> list[Document]:
        documents = await self._mirror.service.matching({})
        return await self._memory.index.run(lambda: aggregate(stages, documents))


class MirroredPolicies:
    """The policies of an external policy store; implements `catalog.ports.Policies`.

    Args:
        memory: The store of the documents that the mirror has read.
        aliases: Names that may stand for a URI.
        sources: The allowed sources of policies' code.
    """

    def __init__(
        self, memory: Memory, mirror: PolicyMirror, aliases: Aliases, sources: CodeSources
    ) -> None:
        self._memory = memory
        self._mirror = mirror
        self._aliases = aliases
        self._sources = sources
        self.register: Refused
        self.register = self.update = self.delete = self.history = refuse_change_at(
            mirror.store.service, "policies"
        )

    async def prepare(self, document: Document) -> PreparedPolicy:
        return await prepare_policy(self._sources, document)

    async def get(self, uri: str) -> Document:
        uri = self._aliases.meaning(uri)
        if is_policy_uri(uri):
            await self._mirror.fetch(uri, Allowance(), 0)
        return entry_of(self._memory.policies, uri, "policy").document

    async def query(self, query: Document | None = None) -> list[Document]:
        compile_filter(query or {})
        return await self._mirror.store.matching(query or {})
