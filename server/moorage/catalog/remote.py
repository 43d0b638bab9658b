"""The four external services, as allocation-server.md describes them: what is asked, what it means.

`catalog.mirrors` keeps what they say. Nothing that they say is believed unchecked: envelopes, ids,
documents and depth are validated as those of a client are, and one bad document never costs the
others. Sections 5.6 and 8, with the client's half of section 13.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from moorage.catalog.base import CLUSTERS_MAX, DOCUMENT_BYTES_MAX, Document, SearchAction
from moorage.catalog.clusters import read_cluster_document
from moorage.catalog.documents import cluster_id_of, pack
from moorage.catalog.filters import compile_filter
from moorage.catalog.http import SAID_CHARS_MAX, Question, Reply, Service, WrongAnswer, said
from moorage.catalog.metrics import read_metrics_document
from moorage.catalog.records import DocumentEntry
from moorage.model import Cluster, ClusterId, Code
from moorage.protocol.faults import ServiceError

__all__ = [
    "ClusterRegistry",
    "ClustersRead",
    "MetricsRead",
    "MetricsService",
    "PolicyStore",
    "SearchService",
]

DEPTH_MAX: Final = 64
"""Objects and lists within each other in one document."""
LISTING_SECONDS_MAX: Final = 60.0
"""Time for the whole list of a registry, which may be large; asks rarely wait for it."""

_OK: Final = range(200, 300)
_UNKNOWN: Final = frozenset({400, 404})
_UNAUTHORIZED: Final = frozenset({401, 403})
_NO_POST: Final = frozenset({405, 501})
_NOT_MODIFIED: Final = 304

Digest = bytes


@dataclass(frozen=True, slots=True)
class Denied:
    """The service says no in its own words: nothing there under that name, or a bad question."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class ClusterFound:
    """One cluster document that was read for the first time, or has changed."""

    entry: DocumentEntry
    cluster: Cluster
    live: bool
    digest: Digest


@dataclass(slots=True)
class ClustersRead:
    """What an answer of the registry held.

    Args:
        found: New and changed documents by id.
        same: Ids of documents that are as they were.
        left_out: What is wrong, by the id of the document; `document 3` where it has none.
        etag: What the answer calls itself.

    """

    found: dict[ClusterId, ClusterFound] = field(default_factory=dict[ClusterId, ClusterFound])
    same: set[ClusterId] = field(default_factory=set[ClusterId])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    etag: str = ""


@dataclass(slots=True)
class MetricsRead:
    """What an answer of the metrics service held; as `ClustersRead`."""

    found: dict[ClusterId, tuple[DocumentEntry, Digest]] = field(
        default_factory=dict[ClusterId, tuple[DocumentEntry, Digest]]
    )
    same: set[ClusterId] = field(default_factory=set[ClusterId])
    left_out: dict[str, str] = field(default_factory=dict[str, str])


class ClusterRegistry:
    """The cluster database (8.3): bare documents, errors as `{"error": text}`."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def everything(self, seen: Mapping[Digest, ClusterId], etag: str) -> ClustersRead | None:
        """Return all clusters; None where the service says that nothing changed since `etag`.

        Args:
            seen: Digests of the documents that are known.
            etag: What the last answer called itself, or empty.

        """
        question = Question("POST", "/clusters/query", _json({"query": {}}), etag)

        def read(reply: Reply) -> ClustersRead | None:
            if reply.status == _NOT_MODIFIED:
                return None
            if reply.status in _UNKNOWN:
                # Of a list of all this is a wrong path or a proxy's word: the fleet is still there.
                raise WrongAnswer(f"answered {reply.status} to the list of all{said(reply.body)}")
            found = _read_clusters(_documents(reply), seen, None)
            found.etag = reply.etag
            return found

        return await self.service.ask(question, read, LISTING_SECONDS_MAX)

    async def named(self, ids: Collection[str]) -> ClustersRead:
        """Return those of the named clusters that the registry has. Ids must be valid ones."""
        query = {"query": {"id": {"$in": sorted(ids)}}}
        question = Question("POST", "/clusters/query", _json(query))
        wanted = frozenset(ids)
        return await self.service.ask(
            question, lambda reply: _read_clusters(_documents(reply), {}, wanted)
        )


class MetricsService:
    """The cluster metrics service (8.4): POST with a bare filter, else GET."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._posts = True

    async def named(self, ids: Collection[str], seen: Mapping[Digest, ClusterId]) -> MetricsRead:
        """Return those of the named clusters' metrics that the service has. Ids must be valid."""
        wanted = frozenset(ids)
        if self._posts:
            body = _json({"clusterId": {"$in": sorted(ids)}})
            read = await self._ask(Question("POST", "/cluster/query", body), seen, wanted)
            if read is not None:
                return read
        return await self._everything(seen, wanted)

    async def _everything(
        self, seen: Mapping[Digest, ClusterId], wanted: frozenset[str] | None
    ) -> MetricsRead:
        """Ask as the documents show it: GET, and take from all there are what is wanted.

        What several ids in a URL mean is written nowhere, and a URL holds only so many.
        """
        self._posts = False
        read = await self._ask(Question("GET", "/cluster/query"), seen, wanted)
        if read is None:
            raise ServiceError(
                Code.UNAVAILABLE,
                f"The {self.service.name} at {self.service.url} takes neither POST nor GET at"
                " /cluster/query.",
                details={"service": self.service.name, "url": self.service.url},
            )
        return read

    async def _ask(
        self, question: Question, seen: Mapping[Digest, ClusterId], wanted: frozenset[str] | None
    ) -> MetricsRead | None:
        def read(reply: Reply) -> MetricsRead | None:
            if reply.status in _NO_POST:
                return None
            return _read_metrics(_documents(reply), seen, wanted)

        return await self.service.ask(question, read)

    async def matching(self, query: Document) -> list[Document]:
        """Return the metrics documents that match a filter, by cluster id."""
        read: MetricsRead | None = None
        if self._posts:
            read = await self._ask(Question("POST", "/cluster/query", _json(query)), {}, None)
        if read is None:
            read = await self._everything({}, None)
        matches = compile_filter(query)
        found = [read.found[name][0].document for name in sorted(read.found)]
        return [document for document in found if matches(document)]


class PolicyStore:
    """The policy database (8.1)."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def get(self, uri: str, etag: str) -> tuple[Document, str] | Denied | None:
        """Return a PolicyRule document and its name for the next time, or None: as before.

        Args:
            uri: A valid URI.
            etag: What the last answer called itself, or empty.

        """

        def read(reply: Reply) -> tuple[Document, str] | Denied | None:
            if reply.status == _NOT_MODIFIED:
                return None
            payload = _payload(reply)
            if isinstance(payload, Denied):
                return payload
            document = _object(payload, "a PolicyRule document")
            if document.get("policy_rule_uri", uri) != uri:
                raise WrongAnswer(f"answered another policy than {uri}")
            return document, reply.etag

        return await self.service.ask(Question("GET", f"/policy/{_in_url(uri)}", b"", etag), read)

    async def matching(self, query: Document) -> list[Document]:
        """Return the PolicyRule documents that match a filter."""

        def read(reply: Reply) -> list[Document]:
            return [_object(raw, "a PolicyRule document") for raw in _documents(reply)]

        return await self.service.ask(Question("POST", "/policy/query", _json(query)), read)


class SearchService:
    """The search service (8.2): enveloped bodies and bare ones have routes of their own."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def find(self, action: SearchAction, body: Document) -> list[ClusterId]:
        """Return the ids of the clusters found, each once, in the service's order.

        Raises:
            ServiceError: `bad_message` with what the service said of the body; `unavailable`.

        """
        enveloped = isinstance(body.get("body"), dict)
        path = {
            ("filter", True): "/api/filter-data",
            ("filter", False): "/api/no-ir/filter",
            ("search", True): "/api/similarity-search",
            ("search", False): "/api/no-ir/similarity-search",
        }[action, enveloped]
        found = await self.service.ask(Question("POST", path, _json(body)), _read_found)
        if isinstance(found, Denied):
            raise ServiceError(
                Code.BAD_MESSAGE,
                f"{action}: the {self.service.name} at {self.service.url} says: {found.message}",
                field=action,
            )
        return found


# Envelopes ---------------------------------------------------------------------------------------


def _payload(reply: Reply) -> msgspec.Raw | Denied:
    """Take an answer out of its envelope, whichever it is.

    Success is a bare document or list, or `{"success": true, "data"}`; failure is
    `{"success": false, "message" | "error"}`, `{"error": text}`, or, from the original search
    service, `{"success": true, "data": [false, text]}` (defect D13).
    """
    if reply.status in _UNAUTHORIZED:
        raise WrongAnswer(f"refuses this server's credentials ({reply.status})")
    if reply.status not in _OK and reply.status not in _UNKNOWN:
        raise WrongAnswer(f"answered {reply.status}{said(reply.body)}")
    start = reply.body.lstrip()[:1]
    if start in {b"[", b"n"} and reply.status in _OK:  # A list, or null.
        return msgspec.Raw(reply.body)
    if start != b"{":
        raise WrongAnswer(
            f"answered {reply.status} with what is no JSON document{said(reply.body)}"
        )
    envelope = _decoded(reply.body, dict[str, msgspec.Raw])
    if reply.status in _UNKNOWN:
        return Denied(reply.status, _message(envelope))
    if "success" in envelope:
        return _unwrapped(envelope, reply.status)
    if "error" in envelope and "id" not in envelope:
        return Denied(reply.status, _message(envelope))
    return msgspec.Raw(reply.body)


def _unwrapped(envelope: Mapping[str, msgspec.Raw], status: int) -> msgspec.Raw | Denied:
    if bytes(envelope["success"]).strip() != b"true":
        return Denied(status, _message(envelope))
    if "data" not in envelope:
        raise WrongAnswer("answered `success` without `data`")
    data = bytes(envelope["data"])
    if data[:1] == b"[":
        items = _decoded(data, list[msgspec.Raw])
        if items and bytes(items[0]) == b"false":
            text = _decoded(bytes(items[1]), Any) if len(items) > 1 else "no reason"
            return Denied(status, str(text)[:500])
    return msgspec.Raw(data)


def _documents(reply: Reply) -> list[msgspec.Raw]:
    """Return the documents of a query's answer: of a list, or of one document, or none."""
    payload = _payload(reply)
    if isinstance(payload, Denied):
        if payload.status in _UNKNOWN:
            return []  # "Nothing found" is a 404 to some of them, and a 400 to others.
        raise WrongAnswer(f"failed: {payload.message}")
    raw = bytes(payload).strip()
    if raw == b"null":
        return []
    return _decoded(raw, list[msgspec.Raw]) if raw[:1] == b"[" else [msgspec.Raw(raw)]


def _message(envelope: Mapping[str, msgspec.Raw]) -> str:
    for key in ("message", "error", "reason"):
        if key in envelope:
            value = _decoded(bytes(envelope[key]), Any)
            text = value.get("reason", value) if isinstance(value, dict) else value
            return str(text)[:500]
    return "no reason given"


def _decoded(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WrongAnswer(f"answered what is no JSON of the expected form ({error})") from error


def _object(raw: msgspec.Raw | bytes, expected: str) -> Document:
    document = _decoded(bytes(raw), Any)
    if not isinstance(document, dict):
        raise WrongAnswer(f"answered what is not {expected}")
    _check_depth(document)
    return document


def _check_depth(document: Any) -> None:
    """Refuse nesting that later readers, some of them recursive, should never meet."""
    level = [document]
    for _ in range(DEPTH_MAX):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise WrongAnswer(f"answered a document more than {DEPTH_MAX} levels deep")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _in_url(name: str) -> str:
    """Return a validated id or URI; its characters need no escaping in a path (defect D20)."""
    assert name
    assert not set(name) & set("/?#%\\ ")
    return name.replace("+", "%2B")  # Some servers read a plus as a space.


# Documents ---------------------------------------------------------------------------------------


def _digest(raw: bytes) -> Digest:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _unseen(
    raws: Sequence[msgspec.Raw],
    seen: Mapping[Digest, ClusterId],
    read: "ClustersRead | MetricsRead",
) -> Iterator[tuple[int, bytes, Digest]]:
    """Yield number, content and digest of the documents that changed; note the others as same."""
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
        document: Any = None
        try:
            document = _document_of(content)
            _check_depth(document)
            checked = read_cluster_document(document)
            entry = DocumentEntry(
                checked.id, checked.document, pack(checked.document), len(content)
            )
        except (ServiceError, WrongAnswer) as error:
            _leave_out(read.left_out, document, "id", number, str(error))
            continue
        if wanted is not None and checked.id not in wanted:
            continue  # Nobody asked for it.
        if checked.id in read.found or checked.id in read.same:
            _leave_out(read.left_out, document, "id", number, "the registry lists it twice")
            continue
        if len(read.found) + len(read.same) >= CLUSTERS_MAX:
            what = f"the registry has more than {CLUSTERS_MAX} clusters"
            _leave_out(read.left_out, document, "id", number, what)
            continue
        read.found[checked.id] = ClusterFound(entry, checked.cluster, checked.live, digest)
    return read


def _read_metrics(
    raws: Sequence[msgspec.Raw], seen: Mapping[Digest, ClusterId], wanted: frozenset[str] | None
) -> MetricsRead:
    read = MetricsRead()
    for number, content, digest in _unseen(raws, seen, read):
        document: Any = None
        try:
            document = _document_of(content)
            _check_depth(document)
            cluster_id = cluster_id_of(document.get("clusterId"), "clusterId")
            if wanted is not None and cluster_id not in wanted:
                continue  # Nobody asked for it.
            _, complete = read_metrics_document(document)
            entry = DocumentEntry(cluster_id, complete, pack(complete), len(content))
        except (ServiceError, WrongAnswer) as error:
            _leave_out(read.left_out, document, "clusterId", number, str(error))
            continue
        if cluster_id in read.found or cluster_id in read.same:
            what = "the metrics service lists it twice"
            _leave_out(read.left_out, document, "clusterId", number, what)
        elif len(read.found) + len(read.same) < CLUSTERS_MAX:
            read.found[cluster_id] = entry, digest
    return read


def _document_of(content: bytes) -> Document:
    if len(content) > DOCUMENT_BYTES_MAX:
        raise WrongAnswer(f"a document of more than {DOCUMENT_BYTES_MAX} bytes")
    document = _decoded(content, Any)
    if not isinstance(document, dict):
        raise WrongAnswer("it is no object")
    return document


def _leave_out(
    left_out: dict[str, str], document: Any, id_field: str, number: int, what: str
) -> None:
    name = document.get(id_field) if isinstance(document, dict) else None
    if len(left_out) < CLUSTERS_MAX:
        left_out[name[:253] if isinstance(name, str) and name else f"document {number}"] = what[
            :300
        ]


def _read_found(reply: Reply) -> list[ClusterId] | Denied:
    payload = _payload(reply)
    if isinstance(payload, Denied):
        return payload
    value = _decoded(bytes(payload), Any)
    _check_depth(value if isinstance(value, dict | list) else [])
    if value is None:
        return []
    found: dict[ClusterId, None] = {}
    for item in value if isinstance(value, list) else [value]:
        given = item.get("id", item.get("clusterId")) if isinstance(item, dict) else item
        try:
            found[cluster_id_of(given, "id")] = None
        except ServiceError as error:
            shown = repr(given)[:SAID_CHARS_MAX]
            raise WrongAnswer(f"found what is no cluster ({shown}; {error})") from error
    return list(found)
