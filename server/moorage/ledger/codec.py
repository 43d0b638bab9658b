"""Converts facts to JSON and back, with kinds, versions and checksums, for all ledgers.

Every fact is stored with the name of its kind and the version of that kind's shape. Leases and
requests are stored without the fields that have their default values. Any change
of a shape, an added field included, is a new version: an older release then refuses the fact
instead of dropping what it does not know. `UPGRADES` brings older versions up to date.
`tests/ledger/shapes.json` pins the shapes, so that each change needs a new version.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, assert_never

import msgspec

from moorage.core.state.facts import (
    Carried,
    ClockMoved,
    ClusterRemoved,
    ClusterSet,
    Cordoned,
    Counted,
    Dequeued,
    DurationsCarried,
    Ended,
    Ending,
    Fact,
    Finished,
    Granted,
    HalfLifeSet,
    Moved,
    Overtaken,
    Paused,
    Preempted,
    Queued,
    QuotaSet,
    Renewed,
    Requeued,
    Reserved,
    Resumed,
    Spared,
    Started,
    Uncordoned,
    Unreserved,
    UsageCarried,
    WaitExtended,
    Warmed,
)
from moorage.ledger.base import FactUnknown, FactUnwritable, LedgerCorrupt, LedgerEntry
from moorage.model import DEVICE
from moorage.records.json_values import JsonObject
from moorage.storage.base import FactRow

Upgrade = Callable[[JsonObject], JsonObject]
"""Turns the JSON object of one version into that of the next version."""


@dataclass(frozen=True, slots=True)
class FactKind:
    """One kind of fact on disk.

    Args:
        name: The kind's permanent name on disk, even if the class is renamed.
        version: The current version of the kind's shape, from 1.
    """

    name: str
    version: int
    record: type[Any]


KINDS: Final = (
    FactKind("cluster_set", 2, ClusterSet),
    FactKind("cluster_removed", 1, ClusterRemoved),
    FactKind("cordoned", 1, Cordoned),
    FactKind("uncordoned", 1, Uncordoned),
    FactKind("reserved", 2, Reserved),
    FactKind("unreserved", 1, Unreserved),
    FactKind("quota_set", 1, QuotaSet),
    FactKind("half_life_set", 1, HalfLifeSet),
    FactKind("usage_carried", 1, UsageCarried),
    FactKind("durations_carried", 1, DurationsCarried),
    FactKind("queued", 1, Queued),
    FactKind("overtaken", 1, Overtaken),
    FactKind("wait_extended", 1, WaitExtended),
    FactKind("dequeued", 1, Dequeued),
    FactKind("granted", 2, Granted),
    FactKind("renewed", 1, Renewed),
    FactKind("started", 1, Started),
    FactKind("finished", 1, Finished),
    FactKind("requeued", 1, Requeued),
    FactKind("paused", 1, Paused),
    FactKind("resumed", 1, Resumed),
    FactKind("preempted", 1, Preempted),
    FactKind("spared", 1, Spared),
    FactKind("moved", 1, Moved),
    FactKind("ending", 1, Ending),
    FactKind("warmed", 1, Warmed),
    FactKind("ended", 1, Ended),
    FactKind("carried", 2, Carried),
    FactKind("clock_moved", 1, ClockMoved),
    FactKind("counted", 1, Counted),
)


def _same(record: JsonObject) -> JsonObject:
    """Return the record unchanged: the newer version only added fields with defaults."""
    return record


def _with_devices(record: JsonObject) -> JsonObject:
    """Return a cluster of the first version with the UUIDs of devices that its `identity` implies.

    `identity` has the UUIDs of all devices in order, and of GPUs divided into MIG instances. Nodes
    with MIG instances are left unchanged.
    """
    for node in record["cluster"]["nodes"]:
        keys = [key for key in node.get("identity", ()) if key.startswith(DEVICE)]
        uuids = [key.removeprefix(DEVICE) for key in keys]
        if len(uuids) == len(node.get("gpus", ())) and not any(x.startswith("mig") for x in uuids):
            node["devices"] = [[uuid, ""] for uuid in uuids]
    return record


UPGRADES: Final[Mapping[tuple[str, int], Upgrade]] = {
    ("cluster_set", 1): _with_devices,
    ("reserved", 1): _same,
    ("granted", 1): _same,
    ("carried", 1): _same,
}
"""The steps from each old version of a kind to the next version. Decoding runs
all later steps, too, so no step is ever removed."""


class _Line(msgspec.Struct):
    """A fact that carries its own kind and version: one line of a checkpoint."""

    kind: str
    version: int
    fact: msgspec.Raw


class Codec:
    """Encodes and decodes records of a closed set of kinds.

    Args:
        upgrades: The upgrades of old facts, as `UPGRADES`.

    Raises:
        ValueError: `upgrades` lacks the upgrade from an older version of a kind.
    """

    def __init__(
        self, kinds: Iterable[FactKind], upgrades: Mapping[tuple[str, int], Upgrade]
    ) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        self._of_record = {kind.record: kind for kind in self._kinds.values()}
        self._decoders = {
            kind.name: msgspec.json.Decoder(kind.record) for kind in self._kinds.values()
        }
        self._encode = msgspec.json.Encoder().encode
        self._upgrades = upgrades
        for kind in self._kinds.values():
            for version in range(1, kind.version):
                if (kind.name, version) not in upgrades:
                    raise ValueError(
                        f"{kind.name} has version {kind.version} but no upgrade from {version}"
                    )

    def encode(self, fact: object) -> tuple[FactKind, bytes]:
        """Return the kind and the JSON of a fact.

        The encoded fact is decoded again at once. A fact that could not be decoded is refused now,
        while the request that caused it can be named, not at the next start.

        Raises:
            FactUnwritable: The fact is of no known kind, or JSON cannot hold the fact.
        """
        name = type(fact).__name__
        kind = self._of_record.get(type(fact))
        if kind is None:
            raise FactUnwritable(name, "it is not a member of `Fact` with an entry in `KINDS`")
        try:
            body = self._encode(fact)
            same = self._decoders[kind.name].decode(body) == fact
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as no:
            raise FactUnwritable(name, str(no)) from no
        if not same:
            raise FactUnwritable(
                name, "it would be read back as another value (tuple, NaN, infinity?)"
            )
        return kind, body

    def decode(self, kind: str, version: int, body: bytes, place: str, where: str) -> Any:
        """Return a fact from its JSON. Errors name the ledger (`place`) and the fact (`where`).

        Raises:
            FactUnknown: The kind or the version is newer than this release.
            LedgerCorrupt: The fact does not match its version's shape.
        """
        known = self._kinds.get(kind)
        if known is None or not 1 <= version <= known.version:
            newest = None if known is None else known.version
            raise FactUnknown(f"{where} of {place}", kind, version, newest)
        try:
            if version == known.version:
                return self._decoders[kind].decode(body)
            record = msgspec.json.decode(body)
            for step in range(version, known.version):
                record = self._upgrades[kind, step](record)
            return msgspec.convert(record, known.record)
        except (msgspec.MsgspecError, RecursionError, LookupError, TypeError) as no:
            finding = f"{where} is not a {kind!r} of version {version}: {no}"
            raise LedgerCorrupt(place, finding) from no

    def pack(self, facts: Iterable[object]) -> bytes:
        """Return facts as lines of JSON that carry their kinds and versions.

        Raises:
            FactUnwritable: JSON cannot hold one of the facts.
        """
        return b"\n".join(
            self._encode(_Line(kind.name, kind.version, msgspec.Raw(body)))
            for kind, body in map(self.encode, facts)
        )

    def unpack(self, part: bytes, place: str, where: str) -> Iterator[Any]:
        """Return the facts that `pack` wrote; parameters and errors are those of `decode`."""
        for line in part.split(b"\n"):
            try:
                read = _decode_line(line)
            except msgspec.MsgspecError as no:
                raise LedgerCorrupt(place, f"{where} holds a line that is not a fact: {no}") from no
            yield self.decode(read.kind, read.version, bytes(read.fact), place, where)


_decode_line: Final = msgspec.json.Decoder(_Line).decode

FACTS: Final = Codec(KINDS, UPGRADES)
"""The codec of every ledger."""


def seal(seq: int, at: float, fact: Fact, chain: int) -> FactRow:
    """Return a fact in its stored form; see `seal_all`."""
    return seal_all(seq, at, [fact], chain)[0]


def seal_all(first: int, at: float, facts: Iterable[Fact], chain: int) -> list[FactRow]:
    """Return facts in their stored form. Runs on the hot path.

    Args:
        first: The position of the first of these facts.
        at: The time at which the facts are appended.
        facts: The facts, in order.
        chain: The chain value of the fact before the first one; 0 if there is none.

    Raises:
        FactUnwritable: JSON cannot hold a fact.
    """
    rows = list[FactRow]()
    at = float(at)
    shown = repr(at)  # Once, since digits of a number cost more than the rest of a checksum.
    for seq, fact in enumerate(facts, first):
        kind, body = FACTS.encode(fact)
        subject = subject_of(fact)
        checksum = _checksum(seq, shown, kind.name, kind.version, subject, body)
        chain = link(checksum, chain)
        rows.append(FactRow(seq, at, kind.name, kind.version, subject, body, checksum, chain))
    return rows


def link(checksum: int, chain: int) -> int:
    """Return the chain checksum of a fact, from its own checksum and the chain before it."""
    return zlib.crc32(checksum.to_bytes(4), chain)


def is_sealed(row: FactRow) -> bool:
    """Return whether a stored fact is unchanged since it was written."""
    return _checksum(row.seq, repr(row.at), *row[2:-2]) == row.checksum


def unseal(row: FactRow, place: str) -> LedgerEntry:
    """Return the fact in a stored row.

    Raises:
        LedgerCorrupt: The row is not as it was written.
        FactUnknown: A newer release wrote the fact.
    """
    if not is_sealed(row):
        raise LedgerCorrupt(place, f"fact {row.seq} does not match its checksum")
    fact = FACTS.decode(row.kind, row.version, row.body, place, f"fact {row.seq}")
    return LedgerEntry(row.seq, row.at, fact)


def subject_of(fact: Fact) -> str:  # noqa: C901, PLR0912  # One case per fact.
    """Return the id of the only lease, request or cluster that a fact is about; empty: none."""
    match fact:
        case Granted(lease=lease) | Carried(lease=lease):
            return lease.id
        case Renewed() | Started() | Finished() | Requeued() | Ending() | Warmed() | Ended():
            return fact.lease
        case Paused() | Resumed() | Preempted() | Spared() | Moved():
            return fact.lease
        case Queued(ask=ask):
            return ask.id
        case Dequeued() | Overtaken() | WaitExtended():
            return fact.request
        case ClusterSet(cluster=cluster):
            return cluster.id
        case ClusterRemoved(cluster=cluster_id):
            return cluster_id
        case Cordoned() | Uncordoned():
            return fact.cluster
        case Reserved(reservation=reservation):
            return reservation.id
        case Unreserved(reservation=request):
            return request
        case QuotaSet() | UsageCarried():
            return fact.tenant
        case Counted() | HalfLifeSet() | DurationsCarried() | ClockMoved():
            return ""
        case _:
            assert_never(fact)


def _checksum(seq: int, at: str, kind: str, version: int, subject: str, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(f"{seq} {at} {kind} {version} {subject}".encode()))
