"""In-memory entries of the embedded catalog's records, and functions for the store's thread.

The embedded catalog calls this module; `catalog.embedded.memory` stores the entries. The functions
run in the store's thread within a transaction; an error undoes the transaction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from moorage.catalog.documents.clusters import read_cluster_document
from moorage.catalog.documents.encoding import decode, encode, pack, snapshot
from moorage.catalog.documents.metrics import read_metrics_document
from moorage.catalog.documents.policies import digest_of, pack_files, record_from, unpack_files
from moorage.catalog.documents.updates import apply_change
from moorage.catalog.embedded.aliases import Alias, read_alias
from moorage.catalog.embedded.store import Database, DocumentStore, Kind, StoredRow
from moorage.catalog.limits import RESULT_BYTES_MAX
from moorage.catalog.values import BlockKind, Document, PolicyRecord
from moorage.core.state.refusals import closest_policies, nearest_or_known
from moorage.model import Cluster, ClusterId, Code, PolicyRef
from moorage.protocol.faults import ServiceError
from moorage.query import QueryError, parse_pipeline
from moorage.records.json_values import JsonValue


class CatalogEntry(Protocol):
    """The fields that entries of all kinds have."""

    @property
    def id(self) -> str:
        """The id of the record, unique within its kind."""

    @property
    def document(self) -> Document:
        """The complete document, for readers."""

    @property
    def size(self) -> int:
        """The size of the document as JSON, in bytes."""


T = TypeVar("T", bound=CatalogEntry)
R = TypeVar("R")
BLOCK_KINDS: Final[tuple[BlockKind, ...]] = ("block", "block_metrics")


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """A cluster or metrics document: completed, packed for the cells, with its size as JSON.

    The document also has an owner; empty: unknown. Metrics are parsed only when read: the parsed
    form takes three times as much memory, and most metrics are replaced unread.
    """

    id: ClusterId
    parsed: Document | None
    packed: bytes
    size: int
    owner: str = ""

    @property
    def document(self) -> Document:
        """The complete document, for readers."""
        if self.parsed is not None:
            return self.parsed
        return msgspec.msgpack.decode(self.packed, type=Document)


def blob_of(entry: DocumentEntry, metrics: Mapping[str, DocumentEntry]) -> bytes:
    """Return the part of a cluster that policies read, packed; see `Memory.blobs`."""
    observed = metrics.get(entry.id)
    return msgspec.msgpack.encode(
        {
            "data": msgspec.Raw(entry.packed),
            "cluster_metrics": msgspec.Raw(observed.packed) if observed else None,
        }
    )


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy, and the size of its document as JSON."""

    record: PolicyRecord
    size: int

    @property
    def id(self) -> str:
        """The URI of the policy."""
        return self.record.ref.uri

    @property
    def document(self) -> Document:
        """The PolicyRule document."""
        return self.record.document


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """All records of the store at its opening. Each cluster also says whether it is live."""

    clusters: list[tuple[DocumentEntry, bool, Cluster]]
    metrics: list[DocumentEntry]
    policies: list[PolicyEntry]
    aliases: list[Alias]
    blocks: dict[BlockKind, list[DocumentEntry]]


def load(database: Database) -> StoredRecords:
    """Return all records of the store; move unreadable ones away."""
    return StoredRecords(
        clusters=_read(database, "cluster", _cluster),
        metrics=_read(database, "metrics", _metrics),
        policies=_read(database, "policy", _policy),
        aliases=_read(database, "alias", read_alias),
        blocks={kind: _read(database, kind, _block) for kind in BLOCK_KINDS},
    )


def _read(database: Database, kind: Kind, read: Callable[[StoredRow], R]) -> list[R]:
    found: list[R] = []
    for row in database.rows(kind):
        try:
            found.append(read(row))
        except (ServiceError, msgspec.MsgspecError, KeyError) as error:
            database.set_aside(kind, row.id, f"it cannot be read: {error}")
    return found


def _cluster(row: StoredRow) -> tuple[DocumentEntry, bool, Cluster]:
    read = read_cluster_document(decode(row.document))
    packed, owner = pack(read.document), owner_of(row)
    entry = DocumentEntry(read.id, read.document, packed, len(row.document), owner)
    return entry, read.live, read.cluster


def _metrics(row: StoredRow) -> DocumentEntry:
    cluster_id, document = read_metrics_document(decode(row.document))
    return DocumentEntry(cluster_id, None, pack(document), len(row.document), owner_of(row))


def _block(row: StoredRow) -> DocumentEntry:
    document = decode(row.document)
    owner = owner_of(row)
    return DocumentEntry(ClusterId(row.id), document, pack(document), len(row.document), owner)


def _policy(row: StoredRow) -> PolicyEntry:
    document = decode(row.document)
    return PolicyEntry(
        record_from(PolicyRef(row.id, document["digest"]), read_files(row, document), document),
        len(row.document),
    )


READERS: Final[dict[Kind, Callable[[StoredRow], object]]] = {
    "cluster": _cluster,
    "metrics": _metrics,
    "policy": _policy,
    "alias": read_alias,
    "block": _block,
    "block_metrics": _block,
}
"""The function that makes the in-memory entry of a stored record, by kind."""


def read_files(row: StoredRow, document: Document) -> dict[str, bytes]:
    """Return the files of a stored policy, after a check of its digest.

    Raises:
        ServiceError: `unavailable`: the files do not match the digest.
    """
    files = unpack_files(row.files)
    if digest_of(files, document) != document["digest"]:
        reason = f"the stored policy {row.id} does not match its digest"
        raise ServiceError(Code.UNAVAILABLE, reason)
    return files


def write(
    database: Database,
    kind: Kind,
    record_id: ClusterId,
    encoded: bytes,
    document: Document,
    owner: str = "",
) -> DocumentEntry:
    """Store `encoded`, the document as given; return an entry of `document`, with all defaults."""
    owner = database.put(kind, StoredRow(record_id, encoded, owner.encode()))
    parsed = None if kind == "metrics" else document
    return DocumentEntry(record_id, parsed, pack(document), len(encoded), owner)


def write_policy(database: Database, record: PolicyRecord) -> PolicyEntry:
    """Store a policy and return its entry."""
    encoded = encode(record.document)
    database.put("policy", StoredRow(record.ref.uri, encoded, pack_files(record.files)))
    return PolicyEntry(record, len(encoded))


class ChangedRow(NamedTuple):
    """A changed document as JSON and as a value, and its owner."""

    encoded: bytes
    document: Document
    owner: str


def change_document(
    database: Database,
    kind: Kind,
    record_id: str,
    change: Document,
    id_field: str,
    *,
    upsert: bool = False,
) -> ChangedRow:
    """Return a stored document with a change applied; its id cannot change.

    With `upsert`, a missing document counts as empty.
    """
    row = database.get(kind, record_id)
    if row is None and not upsert:
        raise unknown_id_error(kind, record_id, database.ids(kind))
    changed = apply_change({} if row is None else decode(row.document), change)
    if changed.setdefault(id_field, record_id) != record_id:
        raise ServiceError.wrong_field(
            id_field, f"{record_id}; the id of a document cannot be changed"
        )
    return ChangedRow(*snapshot(changed), "" if row is None else owner_of(row))


def owner_of(row: StoredRow) -> str:
    """Return the owner of a cluster, block or executor; empty: unknown."""
    return row.files.decode(errors="replace")


async def remove(
    store: DocumentStore,
    kind: Kind,
    record_id: str,
    entries: Mapping[str, T],
    drop: Callable[[str], None],
    also: Callable[[Database], None] = lambda _: None,
) -> Document:
    """Delete a record, call `also` in the same job, and return the document; refuse unknown ids."""
    removed: list[T] = []

    def work(database: Database) -> None:
        if not database.remove(kind, record_id):
            raise unknown_id_error(kind, record_id, database.ids(kind))
        also(database)

    def publish(_: None) -> None:
        removed.append(entries[record_id])
        drop(record_id)

    entry_of(entries, record_id, kind)
    await store.run(work, publish)
    return removed[0].document


def entry_of(entries: Mapping[str, T], record_id: object, kind: Kind) -> T:
    """Return the entry with this id; refuse an unknown id. Policies may pass ids of any type."""
    entry = entries.get(record_id) if isinstance(record_id, str) else None
    if entry is None:
        raise unknown_id_error(kind, record_id, entries)
    return entry


def unknown_id_error(kind: Kind, record_id: object, known: Iterable[str]) -> ServiceError:
    """Return the refusal of an unknown id, with the nearest known ids."""
    name = record_id if isinstance(record_id, str) else ""
    shown = repr(record_id)[:300]
    if kind == "policy":
        near = closest_policies(name, known, 1)
        meant = f" (did you mean {near[0]}?)" if near else "; GET /policy lists those that are"
        reason = f"no policy {shown} is registered{meant}"
        return ServiceError(Code.UNKNOWN_POLICY, reason, field="policy_rule_uri")
    what = {"metrics": "metrics of a cluster", "block_metrics": "metrics of a block"}.get(
        kind, kind
    )
    return ServiceError(
        Code.NOT_FOUND, f"no {what} {shown}{nearest_or_known(name, known)}", field="id"
    )


def refuse_differences(uri: str, fields: Sequence[str]) -> None:
    """Refuse a document that differs from the one registered under its URI."""
    if fields:
        raise ServiceError(
            Code.ALREADY_EXISTS,
            f"policy_rule_uri: {uri} is registered with another content ({', '.join(fields)});"
            " publish yours under a new version",
            field="policy_rule_uri",
            expected="a URI that is not registered yet",
            details={"differing": list(fields)},
        )


def aggregate(stages: JsonValue, documents: Sequence[Document]) -> list[Document]:
    """Return the result of a pipeline over documents; refuse a result that is too large.

    Raises:
        QueryError: The pipeline is wrong, or its result is too large.
    """
    rows = [dict(row) for row in parse_pipeline(stages).run(documents)]
    if len(msgspec.json.encode(rows)) > RESULT_BYTES_MAX:
        expected = f"at most {RESULT_BYTES_MAX} bytes of documents"
        raise QueryError("pipeline", expected, "makes more", Code.TOO_LARGE)
    return rows


def with_metrics(
    found: Sequence[CatalogEntry], metrics: Mapping[str, "DocumentEntry"]
) -> list[Document]:
    """Return documents with their `metrics`; refuse an answer that would be too large."""
    answer_documents([*found, *(metrics[entry.id] for entry in found if entry.id in metrics)])
    return [
        # `{}`, not null: existing policies call `.get`.
        {**each.document, "metrics": metrics[each.id].document if each.id in metrics else {}}
        for each in found
    ]


def answer_documents(found: Sequence[CatalogEntry]) -> list[Document]:
    """Return the documents of a query's answer; refuse an answer that would be too large."""
    if sum(entry.size for entry in found) > RESULT_BYTES_MAX:
        raise ServiceError(
            Code.TOO_LARGE,
            f"the {len(found)} documents found have more than {RESULT_BYTES_MAX} bytes:"
            " narrow the filter",
        )
    return [entry.document for entry in found]
