"""The interface of a store for ledger, catalog and tokens: its rows and its errors.

All methods are synchronous. Only one thread, which the user of the store owns, calls methods that
write: the ledger's writer, or the catalog's thread.

The exceptions:

    StorageError            the database cannot do this; the message says what to do
    ├── StorageLocked       another process writes the database
    ├── StorageCorrupt      its contents differ from what was written
    └── StorageFailed       writing or reading failed
        └── Deposed         another server writes the database now
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

SECRET_BYTES: Final = 32
FENCING_BLOCK: Final = 10_000
"""Fencing numbers that are reserved at once. A crash leaves the rest of a block unused."""
FENCING_SKIP: Final = 10**12
"""Fencing numbers that a restore skips: three years of leases at 10,000 a second. Numbers granted
after the backup are unknown and must not repeat; every client can count up to 2**53."""
_PAGE_FACTS: Final = 1_000
_PAGE_BYTES: Final = 8 << 20
LEAD_SECONDS: Final = 3.0
"""Seconds that a leader may lead without a heartbeat, by the clock of the database."""
T = TypeVar("T")
SqlValue: TypeAlias = Any
"""The value of one column; its type depends on the SQL statement."""
SqlRow: TypeAlias = tuple[SqlValue, ...]


class StorageError(Exception):
    """The database cannot serve a call; the message gives the remedy."""


class StorageLocked(StorageError):  # noqa: N818  # Named after the event, like asyncio.QueueFull.
    """Another process writes this database.

    Args:
        place: Name of the database in messages.
        pid: The process that holds the lock, from the lock's file; None: the file does not name it.
        reason: The whole message; empty: a message for a lock in a file.
    """

    def __init__(self, place: str, pid: int | None, reason: str = "") -> None:
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(
            reason
            or f"{place} is in use by {holder}. Stop that process, or give this server another "
            "data directory."
        )
        self.place = place
        self.pid = pid


class StorageCorrupt(StorageError):  # noqa: N818  # As StorageLocked.
    """The contents of the database differ from what was written.

    Args:
        place: Name of the database in messages.
        finding: The damage and the place of the damage, in words.
    """

    def __init__(self, place: str, finding: str) -> None:
        super().__init__(
            f"{place} is damaged: {finding}. Nothing was changed. Check the disk, and restore the "
            "data directory from a backup. `moored ledger verify` lists the damage; `moored ledger "
            "repair` removes the damaged parts, once you accept the loss."
        )
        self.place = place
        self.finding = finding


class StorageFailed(StorageError):  # noqa: N818  # As StorageLocked.
    """The database failed. Data that was being written may or may not be stored."""


class Deposed(StorageFailed):  # As StorageLocked.
    """Another server leads and writes this database now."""


class Seat(NamedTuple):
    """A server among those that use one database.

    Args:
        name: The server's machine and process, and the server's roll-out, if it belongs to one.
        ws: URL by which clients reach the server's WebSocket.
        http: URL by which clients reach the server's HTTP services.
    """

    name: str
    ws: str
    http: str

    @property
    def rollout(self) -> str:
        """The part of the name that all servers of its roll-out share; "" without a roll-out."""
        return "".join(self.name.split(" ", 2)[2:])


class Leader(NamedTuple):
    """The server that writes a database.

    Args:
        epoch: A number that grows with each change of the leader.
        since: The time at which the server became the leader, in Unix seconds.
    """

    seat: Seat
    epoch: int
    since: float


class Election(Protocol):
    """Elects the leader: of all servers on one database, the only one that writes."""

    def stand(self, seat: Seat) -> bool:
        """Become the leader if there is none; return whether this server leads.

        If another server leads, note that this server stands by, and read which server leads. The
        call returns after a short while, or as soon as the leader leaves.

        Raises:
            StorageError: The database cannot be used, now or at all.
        """

    @property
    def leader(self) -> Leader | None:
        """The leader that this server last saw; None: no leader, or a leader about to resign."""

    @property
    def standbys(self) -> bool:
        """Whether another server stood by at the last heartbeat."""

    @property
    def epoch(self) -> int:
        """The epoch of this server's leadership; it grows with each change of the leader."""

    def beat(self) -> bool:
        """Renew the leader's heartbeat; return whether an operator wants it to resign.

        Raises:
            Deposed: Another server leads now.
            StorageFailed: The database failed.
        """

    @property
    def is_deposed(self) -> bool:
        """Whether another server took over after this server had led."""

    def announce(self) -> None:
        """Tell the standby servers that this server is about to resign."""

    def resign(self) -> None:
        """Resign as the leader at once; a server that never led stops standing by."""


class FactRow(NamedTuple):
    """One fact as it is stored."""

    seq: int
    at: float
    kind: str
    version: int
    subject: str
    body: bytes
    checksum: int
    chain: int
    """Checksum over the checksums of all facts up to this one, to detect a replaced fact."""


class Checkpoint(NamedTuple):
    """One finished checkpoint.

    Args:
        number: Grows with every checkpoint that is begun; an unfinished checkpoint has only parts.
        seq: Number of the last fact that the checkpoint covers.
        parts: Number of the checkpoint's parts.
        checksum: CRC-32 of the parts' bytes, in order, and then of the other numbers.
    """

    number: int
    seq: int
    parts: int
    checksum: int

    @classmethod
    def of_parts(cls, number: int, seq: int, parts: int, checksum: int) -> "Checkpoint":
        """Return a finished checkpoint, given the CRC-32 of its parts."""
        return cls(number, seq, parts, zlib.crc32(f"{number} {seq} {parts}".encode(), checksum))


def lost_records(place: str) -> str:
    """Return the text for a catalog that is missing beside a ledger with facts."""
    return (
        f"{place} is missing beside the ledger: this server's clusters, policies, aliases and "
        "executors are lost; stop the server and restore the file from a backup, or register and "
        "publish them again"
    )


def run(first: int, last: int) -> str:
    """Return the text that messages use for a range of facts."""
    return f"fact {first}" if first == last else f"facts {first} to {last}"


class Facts(Protocol):
    """The tables of a ledger, within one transaction."""

    def last_seq(self) -> int:
        """Return the seq of the last fact, 0 if there is none."""

    def pruned_seq(self) -> int:
        """Return the seq of the last fact that was pruned; 0 if no fact was pruned."""

    def oldest_at(self) -> float:
        """Return when the oldest fact was appended, in Unix seconds. There is at least one fact."""

    def chain_of(self, seq: int) -> int | None:
        """Return the chain checksum of a fact; 0 before the first fact, None for a missing fact."""

    def lost_ranges(self) -> list[tuple[int, int]]:
        """Return the first and last seq of each run of facts whose loss was accepted, in order."""

    def page(
        self, after: int, limit: int, bytes_max: int, subject: str | None = None
    ) -> list[FactRow]:
        """Return up to `limit` facts after a seq; a page ends with the fact that exceeds the bytes.

        With a subject, the page has only facts about this lease, request or cluster.
        """

    def prune(self, limit: int, before: float, bytes_max: int) -> bool:
        """Delete some of the oldest facts. Return whether more facts are to be deleted.

        Args:
            limit: Facts from this seq on stay.
            before: Facts that were appended before this time, in Unix seconds, are deleted.
            bytes_max: While the database uses more bytes, later facts are deleted, too.
        """

    def checkpoints(self) -> list[Checkpoint]:
        """Return the finished checkpoints, newest first."""

    def checkpoint_parts(self, finished: Checkpoint) -> list[bytes] | None:
        """Return the parts of a checkpoint, or None if a part was changed or is missing."""

    def last_checkpoint_number(self) -> int:
        """Return the highest number of a checkpoint, finished or not; 0 if there is none."""

    def insert_part(self, checkpoint: int, number: int, body: bytes) -> None:
        """Add one part of a checkpoint that is not finished yet."""

    def finish_checkpoint(self, finished: Checkpoint, keep: int) -> None:
        """Mark a checkpoint as finished, and drop all but the newest `keep`."""

    def drop_checkpoint(self, finished: Checkpoint) -> None:
        """Drop a checkpoint; the next sweeps delete its parts."""

    def sweep(self) -> bool:
        """Delete some parts of dropped checkpoints. Return whether there were such parts.

        The caller makes sure that no checkpoint is being written.
        """


class OpenedFacts(NamedTuple):
    """The result of opening a store of facts.

    Args:
        fencing: Highest fencing number that may have been granted.
        warnings: Damage outside the facts that did no harm, each a sentence for the log.
    """

    fencing: int
    warnings: list[str]


class FactReading(Protocol):
    """Reads the facts of one ledger."""

    @property
    def place(self) -> str:
        """Name of the database in messages."""

    def reading(self) -> AbstractContextManager[Facts]:
        """Read all facts as of one moment, also while a server writes. Any thread may call this.

        Raises:
            StorageError: The ledger is not open, is damaged, or cannot be read.
        """

    def close(self) -> None:
        """Close all connections, and release the lock."""


class FollowedFacts(FactReading, Protocol):
    """Reads the facts of a ledger that another process writes; needs no `open`."""

    def last_seq(self) -> int:
        """Return the seq of the last fact, in one statement.

        Raises:
            StorageError: The ledger cannot be read.
        """


class FactStore(FactReading, Protocol):
    """The facts of one ledger, which one process writes."""

    is_local: bool
    """Whether a commit waits only for a disk of this machine."""

    @property
    def is_full(self) -> bool:
        """Whether the disk is full: no new grants are possible, granted leases can end."""

    def open(self) -> OpenedFacts:
        """Take the single-writer lock, verify the data, and create missing tables.

        Raises:
            StorageLocked: Another process has the lock.
            StorageCorrupt: The data is damaged.
            StorageError: The ledger cannot be opened.
        """

    def commit(
        self, rows: Sequence[FactRow], fencing: int, works: Sequence[Callable[[Facts], object]]
    ) -> list[object]:
        """Commit facts and other changes: all of them are durable when this returns, or none is.

        Args:
            rows: Facts, in order.
            fencing: The highest fencing number in the facts; 0 if there is none.
            works: Other changes, made in order after the facts are added.

        Returns:
            The results of the works.

        Raises:
            StorageFailed: The data may or may not be stored; nothing more may be committed.
            StorageError: Another error; the data may or may not be stored.
        """

    def upkeep(self) -> float | None:
        """Do the upkeep that is due; return the seconds until the next upkeep, None: never.

        The writer calls this after commits, and then from time to time.

        Raises:
            StorageFailed: A write failed; nothing more may be committed.
        """

    def end_writing(self, *, clean: bool) -> None:
        """Close the resources that only `commit` uses. `clean`: every commit succeeded."""


class RecordRow(NamedTuple):
    """One record of the catalog as it is stored. A damaged record may hold values of any type."""

    id: SqlValue
    document: SqlValue
    files: SqlValue
    checksum: SqlValue


class RecordTally(NamedTuple):
    """Number of records and sum of checksums of a kind: as stored, and as counted."""

    records: int
    checksums: int
    records_there: int
    checksums_there: int


class RecordTable(Protocol):
    """The records of a catalog, within one transaction."""

    def get(self, kind: str, record_id: str) -> RecordRow | None:
        """Return a record, or None."""

    def has(self, kind: str, record_id: str) -> bool:
        """Return whether a record with this id exists."""

    def ids(self, kind: str) -> list[str]:
        """Return the ids of all records of a kind, in the order in which they were stored."""
        ...

    def rows(self, kind: str) -> list[tuple[int, RecordRow]]:
        """Return all records of a kind, in the order of their ids, each with its number."""

    def put(self, kind: str, row: RecordRow) -> None:
        """Store a record; it replaces a record with the same id."""

    def remove(self, kind: str, record_id: str) -> bool:
        """Delete a record; return whether it existed."""

    def number_of(self, kind: str, record_id: str) -> int:
        """Return the number under which a record is stored; the record must exist."""

    def set_aside(self, number: int, why: str) -> None:
        """Move a record aside, so that its id is free for another record."""

    def count(self, kind: str) -> int:
        """Return the number of records of a kind, by counting them."""

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return the stored number and bytes of the records of each kind, without counting them."""

    def marks(self) -> dict[str, object]:
        """Return, per kind, a value that each change of a record changes; read no records."""

    def checksums(self, kind: str) -> dict[str, int]:
        """Return the checksums of all records of a kind, by id."""

    def tallies(self) -> dict[str, RecordTally]:
        """Return the stored and the counted number of records of each kind."""

    def take_tally(self, kind: str) -> None:
        """Replace the stored number of records of a kind by the counted number."""


class RecordStore(Protocol):
    """The records of one catalog. One thread opens and uses the store."""

    @property
    def place(self) -> str:
        """Name of the database in messages."""

    def open(self) -> list[str]:
        """Verify the data, and create missing tables.

        Returns:
            Damage that did no harm, each a sentence for the log.

        Raises:
            StorageError: The catalog cannot be opened, or records are missing.
        """

    def transact(self, work: Callable[[RecordTable], T], *, durable: bool) -> T:
        """Run `work` in a transaction and return its result; an error undoes all its changes.

        Args:
            work: A function that reads and writes records.
            durable: False: a power cut may undo the change within some seconds.

        Raises:
            StorageError: The database failed.
        """

    def upkeep(self) -> float | None:
        """Do the upkeep that is due; return the seconds until the next upkeep, None: never."""

    def close(self) -> None:
        """Close the store. A second call does nothing."""


class TokenRow(NamedTuple):
    """A named token as it is stored: its digest, never the token."""

    name: str
    digest: str
    role: str
    tenant: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class SharedRows(Protocol):
    """The common part of the tables that commands change while a server reads them."""

    @property
    def place(self) -> str:
        """Name of the database in messages."""

    def version(self) -> object:
        """Return a value that differs after each change; None: there are no rows yet."""

    def close(self) -> None:
        """Close the table."""


class TokenRows(SharedRows, Protocol):
    """The named tokens of one server."""

    def rows(self) -> list[TokenRow]:
        """Return all tokens, by name."""

    def insert(self, row: TokenRow) -> bool:
        """Store a new token; False: another token has its name."""

    def revoke(self, name: str, at: float) -> bool | None:
        """Revoke a token; False: it was revoked before, None: no token has this name."""


class AgentRows(SharedRows, Protocol):
    """Agents and joining tokens, each a document under its key."""

    def rows(self) -> Mapping[str, bytes]:
        """Return all documents by key."""

    def change(self) -> AbstractContextManager[dict[str, bytes]]:
        """Yield all documents in a transaction; at its end, store those that the caller changed."""


class LoginRows(SharedRows, Protocol):
    """Logins to the console, each a document under the digest of its cookie."""

    def rows(self) -> dict[str, bytes]:
        """Return all documents by digest, oldest first."""

    def insert(self, digest: str, document: bytes, gone: Collection[str] = ()) -> None:
        """Store a new login, and delete the logins with the digests `gone`."""

    def delete(self, digests: Collection[str]) -> None:
        """Delete the logins with these digests; digests without a login are ignored."""


class AuditEnd(NamedTuple):
    """The end of an audit log: number and hash of the last line, and the last fact in it."""

    number: int
    hash: str
    seq: int | None


class AuditRows(Protocol):
    """The lines of an audit log, which several servers and commands write."""

    @property
    def place(self) -> str:
        """Name of the database in messages."""

    def append(
        self, now: float, make: Callable[[AuditEnd], tuple[Sequence[bytes], AuditEnd]]
    ) -> None:
        """Append the lines that `make` builds from the log's end, while no other process writes."""

    def lines(self, after: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines after line `after`, with their numbers."""

    def end(self) -> AuditEnd:
        """Return the number, hash and last fact of the log's last line."""

    def prune(self, before: float, bytes_max: int) -> None:
        """Delete lines stored before a time, then the oldest while the log exceeds `bytes_max`.

        `begin` then returns the last deleted line.
        """

    def begin(self) -> bytes | None:
        """Return the line before the first one, or its number and hash; None: none is known."""

    def note_begin(self, line: bytes) -> None:
        """Store the number and hash before the first line, unless `begin` is known."""

    def close(self) -> None:
        """Close the log."""


def diff_rows(
    before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> tuple[list[tuple[str, bytes]], list[tuple[str]]]:
    """Return the rows that a change stores, and the keys that it deletes."""
    put = [(key, document) for key, document in after.items() if before.get(key) != document]
    return put, [(key,) for key in before if key not in after]


class Followed(NamedTuple):
    """A database that another server writes, for reading only."""

    facts: FollowedFacts
    records: RecordStore


class SharedNames(Protocol):
    """Names on which all servers of one database agree.

    Every method raises `StorageError` if the database cannot be reached.
    """

    def agree(self, subject: str, proposal: str) -> str:
        """Return the name that all servers use for a subject: the first server's proposal."""

    def agreed(self, subject: str) -> list[str]:
        """Return the names of all subjects that begin with `subject`."""


class Storage(Protocol):
    """One database with everything that a server must not lose."""

    def facts(self) -> FactStore:
        """Return the store of the ledger."""

    def records(self) -> RecordStore:
        """Return the store of the catalog."""

    def tokens(self) -> TokenRows:
        """Return the named tokens."""

    def agents(self) -> AgentRows:
        """Return the agents and their joining tokens."""

    def logins(self) -> LoginRows:
        """Return the logins to the console."""

    def audit(self) -> AuditRows | None:
        """Return the audit log; None: the audit log is in files of the data folder."""

    def election(self) -> Election | None:
        """Return the election of the server that writes; None: only one server may exist."""

    def followed(self) -> Followed | None:
        """Return a reader of the data that another server writes; None: only one may exist."""

    def names(self) -> SharedNames | None:
        """Return the names that the servers share; None: only one server may exist."""

    def has_records(self) -> bool:
        """Return whether this storage ever had a catalog."""

    def secret(self) -> bytes:
        """Return the secret from which lease tokens are derived; create it if it does not exist.

        Raises:
            StorageError: The secret cannot be read or created.
        """


@dataclass(frozen=True, slots=True)
class Contents:
    """All data of one storage at one moment, while no server uses the storage.

    Args:
        place: Name of the storage in messages.
        agents: The agents and their joining tokens, by key.
        secret: Secret from which the tokens of leases are derived; empty: there is none yet.
        fencing: Highest fencing number that may have been granted.
        audit: Function that yields the lines of the audit log.
        audit_begin: The last line of the audit log that its writer deleted; None: unknown.
    """

    place: str
    facts: Facts
    records: RecordTable
    tokens: list[TokenRow]
    agents: dict[str, bytes]
    secret: bytes
    fencing: int
    audit: Callable[[], Iterator[bytes]]
    audit_begin: AuditEnd | None

    def is_empty(self) -> bool:
        """Return whether nothing was ever stored except a secret."""
        ledger = self.facts.last_seq() or self.facts.pruned_seq() or self.facts.checkpoints()
        records = any(count for count, _ in self.records.usage().values())
        audit = next(self.audit(), None)
        return not (ledger or records or self.tokens or self.agents or audit)

    def fact_pages(self) -> Iterator[list[FactRow]]:
        """Yield all facts, in order, in pages."""
        after = self.facts.pruned_seq()
        while rows := self.facts.page(after, _PAGE_FACTS, _PAGE_BYTES):
            yield rows
            after = rows[-1].seq

    def checkpoints(self) -> Iterator[tuple[Checkpoint, list[bytes]]]:
        """Yield the finished checkpoints and their parts, oldest first.

        Raises:
            StorageCorrupt: A checkpoint is damaged.
        """
        for finished in reversed(self.facts.checkpoints()):
            parts = self.facts.checkpoint_parts(finished)
            if parts is None:
                finding = f"the checkpoint as of fact {finished.seq} does not match its checksum"
                raise StorageCorrupt(self.place, finding)
            yield finished, parts

    def records_by_age(self) -> Iterator[tuple[str, RecordRow]]:
        """Yield all records with their kinds, those of a kind in the order they were made."""
        for kind in sorted(self.records.usage()):
            for _, row in sorted(self.records.rows(kind)):
                yield kind, row
