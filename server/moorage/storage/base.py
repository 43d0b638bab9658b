"""The interface of a store for ledger, catalog and tokens: its rows and its errors.

All of it is synchronous. Only one thread, which the user of the store owns, calls methods that
write: the ledger's writer, or the catalog's thread.

The exceptions:

    StorageError            the database cannot do this; the message says what to do
    ├── StorageLocked       another process writes it
    ├── StorageCorrupt      what is there is not what was written
    └── StorageFailed       writing or reading failed
        └── Deposed         another server writes it since
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

SECRET_BYTES: Final = 32
FENCING_BLOCK: Final = 10_000
"""Fencing numbers reserved at a time. A crash leaves the rest of a block unused."""
FENCING_SKIP: Final = 10**12
"""Numbers that a restore leaves out: three years of leases at 10,000 a second. Those granted after
the backup are unknown, and must not come twice; 2**53, up to which every client counts, is far."""
_PAGE_FACTS: Final = 1_000
_PAGE_BYTES: Final = 8 << 20
LEAD_SECONDS: Final = 3.0
"""How long a leader leads without a sign of life, by the clock of the database."""
T = TypeVar("T")
SqlValue: TypeAlias = Any
"""The value of one column; its statement says which type it has."""
SqlRow: TypeAlias = tuple[SqlValue, ...]


class StorageError(Exception):
    """The database cannot do this; the message says what to do."""


class StorageLocked(StorageError):  # noqa: N818  # It names what happened, like asyncio.QueueFull.
    """Another process writes this database.

    Args:
        place: The database, as its owner calls it.
        pid: The process that holds it, as it wrote down itself; None if it has not yet.
        reason: All of it in words; empty for what a file says.
    """

    def __init__(self, place: str, pid: int | None, reason: str = "") -> None:
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(
            reason
            or f"{place} is in use by {holder}: one ledger has one writer. "
            "Stop that process, or give this one another data directory."
        )
        self.place = place
        self.pid = pid


class StorageCorrupt(StorageError):  # noqa: N818  # As StorageLocked.
    """The contents of the database differ from what was written.

    Args:
        place: The database, as its owner calls it.
        finding: What is wrong, and where.
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
    """The database refused. Data that was being written may or may not be stored."""


class Deposed(StorageFailed):  # As StorageLocked.
    """Another server leads and writes this database now."""


class Seat(NamedTuple):
    """A server among those that use one database.

    Args:
        name: The machine that it runs on, its process, and its roll-out if it has one.
        ws: URL by which clients reach its WebSocket.
        http: Likewise its HTTP services.
    """

    name: str
    ws: str
    http: str

    @property
    def rollout(self) -> str:
        """The part of the server's name that is common to all servers of its roll-out; or ""."""
        return "".join(self.name.split(" ", 2)[2:])


class Leader(NamedTuple):
    """The server that writes a database.

    Args:
        epoch: Grows with each change of the leader.
        since: In seconds since the epoch of the clock.
    """

    seat: Seat
    epoch: int
    since: float


class Election(Protocol):
    """Which of several servers on one database writes it."""

    def stand(self, seat: Seat) -> bool:
        """Become the leader if there is none; return whether this server leads.

        Else note that this server stands by, and learn who leads. It returns after a short while,
        or as soon as the leader leaves.

        Raises:
            StorageError: The database cannot be used, now or at all.
        """

    @property
    def leader(self) -> Leader | None:
        """The leader that this server last saw; None: no leader, or one about to resign."""

    @property
    def standbys(self) -> bool:
        """Whether another server stood by at the last heartbeat."""

    @property
    def epoch(self) -> int:
        """The epoch of this server's leadership; it grows with each change of the leader."""

    def beat(self) -> bool:
        """Renew the leader's heartbeat; return whether an operator wants it to resign.

        Raises:
            Deposed: Another server leads since.
            StorageFailed: The database failed.
        """

    @property
    def is_deposed(self) -> bool:
        """Whether another server has led since this one did."""

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
    """Covers this fact's checksum and all before it: a replaced fact breaks the next chain."""


class Checkpoint(NamedTuple):
    """One finished checkpoint.

    Args:
        number: Grows with every checkpoint that is begun; unfinished ones leave only parts.
        seq: The fact as of which it was taken.
        parts: How many parts it has.
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


def run(first: int, last: int) -> str:
    """Return the name of a range of facts in messages."""
    return f"fact {first}" if first == last else f"facts {first} to {last}"


class Facts(Protocol):
    """The tables of a ledger, within one transaction."""

    def last_seq(self) -> int:
        """Return the seq of the last fact, 0 if there is none."""

    def pruned_seq(self) -> int:
        """Return the seq of the last fact that was pruned; 0 if no fact was."""

    def oldest_at(self) -> float:
        """Return when the oldest fact was appended. Only where there is one."""

    def chain_of(self, seq: int) -> int | None:
        """Return the chain checksum of a fact; 0 before the first fact, None for a missing fact."""

    def lost_ranges(self) -> list[tuple[int, int]]:
        """Return the first and last seq of each run of facts whose loss was accepted, in order."""

    def page(
        self, after: int, limit: int, bytes_max: int, subject: str | None = None
    ) -> list[FactRow]:
        """Return up to `limit` facts after a seq; a page ends with the fact that exceeds the bytes.

        With a subject, only facts about this lease, request or cluster.
        """

    def prune(self, limit: int, before: float, bytes_max: int) -> bool:
        """Delete some of the oldest facts. Return whether there are more to delete.

        Args:
            limit: Only facts before this seq.
            before: Those that were appended before this go, in seconds since the epoch.
            bytes_max: As long as more than this is used, others go, too.
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
        """Delete some parts of dropped checkpoints. Return whether there were any.

        Only to be called while no checkpoint is being written.
        """


class OpenedFacts(NamedTuple):
    """The result of opening a store of facts.

    Args:
        fencing: Fencing numbers up to this one may have been given out.
        warnings: Damage beside the facts that was survived, each a sentence for the log.
    """

    fencing: int
    warnings: list[str]


class FactReading(Protocol):
    """The facts of one ledger, as they can be read."""

    @property
    def place(self) -> str:
        """Its name in messages."""

    def reading(self) -> AbstractContextManager[Facts]:
        """Read all facts as of one moment, also while a server writes. For any thread.

        Raises:
            StorageError: It is not open, damaged, or cannot be read.
        """

    def close(self) -> None:
        """Close all connections, and release the lock."""


class FollowedFacts(FactReading, Protocol):
    """Reads the facts of a ledger that another process writes; needs no `open`."""

    def last_seq(self) -> int:
        """Return the seq of the last fact, in one statement.

        Raises:
            StorageError: It cannot be read.
        """


class FactStore(FactReading, Protocol):
    """The facts of one ledger, which one process writes."""

    is_local: bool
    """A commit waits for a disk of this machine alone."""

    @property
    def is_full(self) -> bool:
        """Whether the disk is full: no new grants are possible, granted leases can end."""

    def open(self) -> OpenedFacts:
        """Take the single-writer lock, verify the data, and create missing tables.

        Raises:
            StorageLocked: Another process has it.
            StorageCorrupt: What is there cannot be trusted.
            StorageError: It cannot be opened.
        """

    def commit(
        self, rows: Sequence[FactRow], fencing: int, works: Sequence[Callable[[Facts], object]]
    ) -> list[object]:
        """Commit facts and other changes: all of them are durable when this returns, or none is.

        Args:
            rows: Facts, in order.
            fencing: The highest fencing number in them; 0 if there is none.
            works: Other changes, done in order after the facts are there.

        Returns:
            What the works returned.

        Raises:
            StorageFailed: It may or may not be there, and nothing more may be committed.
            StorageError: Likewise.
        """

    def upkeep(self) -> float | None:
        """Do due upkeep; return the seconds until more is due, None: never.

        Called after commits, and then from time to time.

        Raises:
            StorageFailed: Nothing more may be committed.
        """

    def end_writing(self, *, clean: bool) -> None:
        """Close what only `commit` uses. `clean`: every commit succeeded."""


class RecordRow(NamedTuple):
    """One record of the catalog as it is stored. A damaged one may hold values of any type."""

    id: SqlValue
    document: SqlValue
    files: SqlValue
    checksum: SqlValue


class RecordTally(NamedTuple):
    """The noted and the counted number of records of a kind."""

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
        """Return the ids of all records of a kind, in the order in which they came."""
        ...

    def rows(self, kind: str) -> list[tuple[int, RecordRow]]:
        """Return all records of a kind, by id, with the number of each."""

    def put(self, kind: str, row: RecordRow) -> None:
        """Store a record, in the place of the one with its id if there is one."""

    def remove(self, kind: str, record_id: str) -> bool:
        """Delete a record; return whether there was one."""

    def number_of(self, kind: str, record_id: str) -> int:
        """Return the number of an existing record."""

    def set_aside(self, number: int, why: str) -> None:
        """Move a record aside, so that its id is free for another record."""

    def count(self, kind: str) -> int:
        """Return the number of records of a kind, by counting them."""

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return the noted number and bytes of the records of each kind, without counting them."""

    def marks(self) -> dict[str, object]:
        """Return, per kind, a value that differs after each change, without reading the records."""

    def checksums(self, kind: str) -> dict[str, int]:
        """Return the checksums of all records of a kind, by id."""

    def tallies(self) -> dict[str, RecordTally]:
        """Return the noted and the counted number of each kind."""

    def take_tally(self, kind: str) -> None:
        """Store the counted number of a kind as the noted one."""


class RecordStore(Protocol):
    """The records of one catalog. One thread opens and uses it."""

    @property
    def place(self) -> str:
        """Its name in messages."""

    def open(self) -> list[str]:
        """Verify the data, and create missing tables.

        Returns:
            Damage that was survived, each a sentence for the log.

        Raises:
            StorageError: It cannot be opened, or is not whole.
        """

    def transact(self, work: Callable[[RecordTable], T], *, durable: bool) -> T:
        """Run `work` in a transaction and return its result; all of it is undone if it raises.

        Args:
            work: Reads and writes records.
            durable: False if the last seconds may be lost with the machine's power.

        Raises:
            StorageError: The database refused.
        """

    def upkeep(self) -> float | None:
        """Do due upkeep; return the seconds until more is due, None: never."""

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
        """Its name in messages."""

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
        """Yield all documents in a transaction; at its end, store those that differ."""


class LoginRows(SharedRows, Protocol):
    """Logins to the console, each a document under the digest of its cookie."""

    def rows(self) -> dict[str, bytes]:
        """Return all documents by digest, the oldest first."""

    def insert(self, digest: str, document: bytes, gone: Collection[str] = ()) -> None:
        """Store a new login, and delete others."""

    def delete(self, digests: Collection[str]) -> None:
        """Delete the logins with these digests, as far as they exist."""


class AuditEnd(NamedTuple):
    """The end of an audit log: number and hash of the last line, and the last fact in it."""

    number: int
    hash: str
    seq: int | None


class AuditRows(Protocol):
    """The lines of an audit log, which several servers and commands write."""

    @property
    def place(self) -> str:
        """Its name in messages."""

    def append(
        self, now: float, make: Callable[[AuditEnd], tuple[Sequence[bytes], AuditEnd]]
    ) -> None:
        """Append the lines that `make` builds from the log's end, while no other process writes."""

    def lines(self, after: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines after line `number`, with their numbers."""

    def end(self) -> AuditEnd:
        """Return the number, hash and last fact of the log's last line."""

    def prune(self, before: float, bytes_max: int) -> None:
        """Delete lines stored before a time, then the oldest while there are more bytes."""

    def close(self) -> None:
        """Close the log."""


def diff_rows(
    before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> tuple[list[tuple[str, bytes]], list[tuple[str]]]:
    """Return the rows that a change puts, and the keys that it deletes."""
    put = [(key, document) for key, document in after.items() if before.get(key) != document]
    return put, [(key,) for key in before if key not in after]


class Followed(NamedTuple):
    """The database of another server's writes, for reading; nothing can be written to it."""

    facts: FollowedFacts
    records: RecordStore


class SharedNames(Protocol):
    """Names that all servers of one database use, of which one leads at a time.

    Every method raises `StorageError` where the database cannot be reached.
    """

    def agree(self, subject: str, proposal: str) -> str:
        """Return the name that all servers use for a subject: what the first one proposed."""

    def agreed(self, subject: str) -> list[str]:
        """Return the names of all subjects that begin with `subject`."""


class Storage(Protocol):
    """One database with everything that a server must not lose."""

    def facts(self) -> FactStore:
        """Return the ledger's part."""

    def records(self) -> RecordStore:
        """Return the catalog's part."""

    def tokens(self) -> TokenRows:
        """Return the named tokens."""

    def agents(self) -> AgentRows:
        """Return the agents and their joining tokens."""

    def logins(self) -> LoginRows:
        """Return the logins to the console."""

    def audit(self) -> AuditRows | None:
        """Return the audit log; None: it is in files of the data folder."""

    def election(self) -> Election | None:
        """Return the election of the server that writes; None if a second server is refused."""

    def followed(self) -> Followed | None:
        """Return a reader beside the server that writes; None if there is only one server."""

    def names(self) -> SharedNames | None:
        """Return the names that its servers share; None if there is only one server."""

    def has_records(self) -> bool:
        """Return whether this storage ever had a catalog."""

    def secret(self) -> bytes:
        """Return the secret from which lease tokens are derived; create it if it does not exist.

        Raises:
            StorageError: It cannot be read or made.
        """


@dataclass(frozen=True, slots=True)
class Contents:
    """All data of one storage at one moment, while no server uses the storage.

    Args:
        place: What the storage is called in messages.
        agents: The agents and their joining tokens, by key.
        secret: Of the tokens of leases; empty if none was made yet.
        fencing: Fencing numbers up to this one may have been given out.
        audit: Yields the lines of the audit log.
    """

    place: str
    facts: Facts
    records: RecordTable
    tokens: list[TokenRow]
    agents: dict[str, bytes]
    secret: bytes
    fencing: int
    audit: Callable[[], Iterator[bytes]]

    def is_empty(self) -> bool:
        """Return whether nothing was ever stored except a secret."""
        ledger = self.facts.last_seq() or self.facts.pruned_seq() or self.facts.checkpoints()
        records = any(count for count, _ in self.records.usage().values())
        audit = next(self.audit(), None)
        return not (ledger or records or self.tokens or self.agents or audit)

    def fact_pages(self) -> Iterator[list[FactRow]]:
        """Yield all facts, in order, some at a time."""
        after = self.facts.pruned_seq()
        while rows := self.facts.page(after, _PAGE_FACTS, _PAGE_BYTES):
            yield rows
            after = rows[-1].seq

    def checkpoints(self) -> Iterator[tuple[Checkpoint, list[bytes]]]:
        """Yield the finished checkpoints and their parts, oldest first.

        Raises:
            StorageCorrupt: One of them is damaged.
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
