"""Builds the requests to the four external services, and reads their answers.

`catalog.mirrored.clusters` stores the answers. Envelopes, ids, documents and depth are validated
like those of a client, and one bad document does not affect the others. Source:
docs/reference/allocation-server.md, "Envelope", "Services" and "Decisions".
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from moorage.catalog.documents.clusters import read_cluster_document
from moorage.catalog.documents.encoding import cluster_id_of, pack
from moorage.catalog.documents.metrics import read_metrics_document
from moorage.catalog.embedded.records import DocumentEntry
from moorage.catalog.filters import compile_filter
from moorage.catalog.limits import CLUSTERS_MAX
from moorage.catalog.mirrored.envelopes import (
    UNKNOWN,
    Denied,
    check_depth,
    decode,
    document_of,
    documents_of,
    leave_out,
    object_of,
    payload_of,
)
from moorage.catalog.mirrored.http import (
    ONE_BYTES_MAX,
    SHOWN_CHARS_MAX,
    Service,
    ServiceReply,
    ServiceRequest,
    WrongAnswer,
    quote_body,
)
from moorage.catalog.values import Document, SearchAction
from moorage.model import Cluster, ClusterId, Code
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonValue

LISTING_SECONDS_MAX: Final = 60.0
"""Longest seconds to read a registry's whole list, which may be large; few requests wait for it."""

_NO_POST: Final = frozenset({405, 501})
_NOT_MODIFIED: Final = 304
_NOT_FOUND: Final = 404

Digest = bytes


@dataclass(frozen=True, slots=True)
class ClusterFound:
    """A cluster document that is new or has changed."""

    entry: DocumentEntry
    cluster: Cluster
    live: bool
    digest: Digest


@dataclass(slots=True)
class ClustersRead:
    """The clusters in an answer of the registry.

    Args:
        found: New and changed documents by id.
        same: Ids of unchanged documents.
        left_out: The fault of each ignored document, by its id, or e.g. `document 3` without an id.
        etag: The answer's ETag.
    """

    found: dict[ClusterId, ClusterFound] = field(default_factory=dict[ClusterId, ClusterFound])
    same: set[ClusterId] = field(default_factory=set[ClusterId])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    etag: str = ""


@dataclass(slots=True)
class MetricsRead:
    """The metrics in an answer of the metrics service; for the fields see `ClustersRead`."""

    found: dict[ClusterId, tuple[DocumentEntry, Digest]] = field(
        default_factory=dict[ClusterId, tuple[DocumentEntry, Digest]]
    )
    same: set[ClusterId] = field(default_factory=set[ClusterId])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


class ClusterRegistry:
    """A client of the cluster database, which answers with bare documents or `{"error": text}`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def everything(self, seen: Mapping[Digest, ClusterId], etag: str) -> ClustersRead | None:
        """Return all clusters; None if nothing changed since `etag`.

        Args:
            seen: Cluster ids by digest of the known documents.
            etag: ETag of the last answer, or empty.
        """
        request = ServiceRequest("POST", "/clusters/query", _json({"query": {}}), etag)

        def read(reply: ServiceReply) -> ClustersRead | None:
            if reply.status == _NOT_MODIFIED:
                return None
            if reply.status in UNKNOWN:
                # For a list of all, this means a wrong path or a proxy's error, not an empty fleet.
                raise WrongAnswer(
                    f"answered {reply.status} to the list of all{quote_body(reply.body)}"
                )
            found = _read_clusters(documents_of(reply), seen, None)
            found.etag = reply.etag
            return found

        return await self.service.ask(request, read, LISTING_SECONDS_MAX)

    async def named(self, ids: Collection[str]) -> ClustersRead:
        """Return the named clusters, as far as the registry has them. Ids must be valid."""
        query = {"query": {"id": {"$in": sorted(ids)}}}
        request = ServiceRequest("POST", "/clusters/query", _json(query))
        wanted = frozenset(ids)
        return await self.service.ask(
            request, lambda reply: _read_clusters(documents_of(reply), {}, wanted)
        )


class MetricsService:
    """A client of the cluster metrics service; it sends a GET if the service accepts no POST."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._posts = True

    async def named(self, ids: Collection[str], seen: Mapping[Digest, ClusterId]) -> MetricsRead:
        """Return the metrics of the named clusters that the service has. Ids must be valid."""
        wanted = frozenset(ids)
        if self._posts:
            body = _json({"clusterId": {"$in": sorted(ids)}})
            read = await self._ask(ServiceRequest("POST", "/cluster/query", body), seen, wanted)
            if read is not None:
                return read
        return await self._everything(seen, wanted)

    async def _everything(
        self, seen: Mapping[Digest, ClusterId], wanted: frozenset[str] | None
    ) -> MetricsRead:
        """Read all metrics by GET, as documented, and select the wanted ones.

        The service's documents define no URL with several ids, and the length of a URL is limited.
        """
        self._posts = False
        read = await self._ask(ServiceRequest("GET", "/cluster/query"), seen, wanted)
        if read is None:
            raise ServiceError(
                Code.UNAVAILABLE,
                f"The {self.service.name} at {self.service.url} takes neither POST nor GET at"
                " /cluster/query.",
                details={"service": self.service.name, "url": self.service.url},
            )
        return read

    async def _ask(
        self,
        request: ServiceRequest,
        seen: Mapping[Digest, ClusterId],
        wanted: frozenset[str] | None,
    ) -> MetricsRead | None:
        def read(reply: ServiceReply) -> MetricsRead | None:
            if reply.status in _NO_POST:
                return None
            return _read_metrics(documents_of(reply), seen, wanted)

        return await self.service.ask(request, read)

    async def matching(self, query: Document) -> list[Document]:
        """Return the metrics documents that match a filter, by cluster id."""
        read: MetricsRead | None = None
        if self._posts:
            read = await self._ask(ServiceRequest("POST", "/cluster/query", _json(query)), {}, None)
        if read is None:
            read = await self._everything({}, None)
        matches = compile_filter(query)
        found = [read.found[name][0].document for name in sorted(read.found)]
        return [document for document in found if matches(document)]


class PolicyStore:
    """A client of the policy database."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def get(self, uri: str, etag: str) -> tuple[Document, str] | Denied | None:
        """Return a PolicyRule document and its ETag; None if it is unchanged since `etag`.

        Args:
            uri: A valid URI.
            etag: ETag of the last answer, or empty.
        """

        def read(reply: ServiceReply) -> tuple[Document, str] | Denied | None:
            if reply.status == _NOT_MODIFIED:
                return None
            payload = payload_of(reply)
            if isinstance(payload, Denied):
                return payload
            document = object_of(payload, "a PolicyRule document")
            if document.get("policy_rule_uri", uri) != uri:
                raise WrongAnswer(f"answered with another policy than {uri}")
            return document, reply.etag

        return await self.service.ask(
            ServiceRequest("GET", f"/policy/{_in_url(uri)}", b"", etag, ONE_BYTES_MAX), read
        )

    async def matching(self, query: Document) -> list[Document]:
        """Return the PolicyRule documents that match a filter."""

        def read(reply: ServiceReply) -> list[Document]:
            return [object_of(raw, "a PolicyRule document") for raw in documents_of(reply)]

        return await self.service.ask(ServiceRequest("POST", "/policy/query", _json(query)), read)


class SearchService:
    """A client of the search service; bare bodies and those in an envelope go to other routes."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def find(self, action: SearchAction, body: Document) -> list[ClusterId]:
        """Return the ids of the found clusters, each once, in the service's order.

        Raises:
            ServiceError: `bad_message` with the service's message about the body; `unavailable`.
        """
        enveloped = isinstance(body.get("body"), dict)
        path = {
            ("filter", True): "/api/filter-data",
            ("filter", False): "/api/no-ir/filter",
            ("search", True): "/api/similarity-search",
            ("search", False): "/api/no-ir/similarity-search",
        }[action, enveloped]
        found = await self.service.ask(ServiceRequest("POST", path, _json(body)), _read_ids)
        if isinstance(found, Denied):
            # A 404 is not about the body: the service lacks this endpoint.
            raise ServiceError(
                Code.UNAVAILABLE if found.status == _NOT_FOUND else Code.BAD_MESSAGE,
                f"{action}: the {self.service.name} at {self.service.url} says: {found.message}",
                field=action,
            )
        return found


# Documents ---------------------------------------------------------------------------------------


def _json(value: JsonValue) -> bytes:
    return msgspec.json.encode(value)


def _in_url(name: str) -> str:
    """Return a validated id or URI for use in a URL path; only `+` is escaped."""
    assert name
    assert not set(name) & set("/?#%\\ ")
    return name.replace("+", "%2B")  # Some servers decode a plus as a space.


def _digest(raw: bytes) -> Digest:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _unseen(
    raws: Sequence[msgspec.Raw],
    seen: Mapping[Digest, ClusterId],
    read: "ClustersRead | MetricsRead",
) -> Iterator[tuple[int, bytes, Digest]]:
    """Yield number, content and digest of changed documents; mark the others as unchanged."""
    for number, raw in enumerate(raws):
        content = bytes(raw)
        digest = _digest(content)
        known = seen.get(digest)
        if known is None:
            yield number, content, digest
        elif known not in read.found:
            read.same.add(known)


def _read_clusters(
    raws: Sequence[msgspec.Raw], seen: Mapping[Digest, ClusterId], wanted: frozenset[str] | None
) -> ClustersRead:
    read = ClustersRead()
    for number, content, digest in _unseen(raws, seen, read):
        document: JsonValue = None
        try:
            document = document_of(content)
            check_depth(document)
            checked = read_cluster_document(document)
            entry = DocumentEntry(
                checked.id, checked.document, pack(checked.document), len(content)
            )
        except (ServiceError, WrongAnswer) as error:
            leave_out(read.left_out, document, "id", number, str(error))
            continue
        if wanted is not None and checked.id not in wanted:
            continue  # Not requested.
        if checked.id in read.found or checked.id in read.same:
            leave_out(read.left_out, document, "id", number, "the registry lists it twice")
            continue
        if len(read.found) + len(read.same) >= CLUSTERS_MAX:
            what = f"the registry has more than {CLUSTERS_MAX} clusters"
            leave_out(read.left_out, document, "id", number, what)
            continue
        read.found[checked.id] = ClusterFound(entry, checked.cluster, checked.live, digest)
    return read


def _read_metrics(
    raws: Sequence[msgspec.Raw], seen: Mapping[Digest, ClusterId], wanted: frozenset[str] | None
) -> MetricsRead:
    read = MetricsRead()
    for number, content, digest in _unseen(raws, seen, read):
        document: JsonValue = None
        try:
            document = document_of(content)
            check_depth(document)
            cluster_id = cluster_id_of(document.get("clusterId"), "clusterId")
            if wanted is not None and cluster_id not in wanted:
                continue  # Not requested.
            _, complete = read_metrics_document(document)
            entry = DocumentEntry(cluster_id, complete, pack(complete), len(content))
        except (ServiceError, WrongAnswer) as error:
            leave_out(read.left_out, document, "clusterId", number, str(error))
            continue
        if cluster_id in read.found or cluster_id in read.same:
            what = "the metrics service lists it twice"
            leave_out(read.left_out, document, "clusterId", number, what)
        elif len(read.found) + len(read.same) < CLUSTERS_MAX:
            read.found[cluster_id] = entry, digest
    return read


def _read_ids(reply: ServiceReply) -> list[ClusterId] | Denied:
    payload = payload_of(reply)
    if isinstance(payload, Denied):
        return payload
    value = decode(bytes(payload), JsonValue)
    check_depth(value if isinstance(value, dict | list) else [])
    if value is None:
        return []
    found: dict[ClusterId, None] = {}
    for item in value if isinstance(value, list) else [value]:
        given = item.get("id", item.get("clusterId")) if isinstance(item, dict) else item
        try:
            found[cluster_id_of(given, "id")] = None
        except ServiceError as error:
            shown = repr(given)[:SHOWN_CHARS_MAX]
            raise WrongAnswer(f"found an invalid cluster ({shown}; {error})") from error
    return list(found)
