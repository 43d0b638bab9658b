"""The contract of a ledger: its records, its limits and its errors.

The daemon opens one ledger, rebuilds the core's state from its recovery, appends the facts of
every batch before any effect leaves, and writes checkpoints of the core's state from time to time,
so that a start stays quick however long the history has grown.

The exceptions:

    LedgerError             the ledger cannot do this; the message says what to do
    ├── LedgerLocked        another process writes this ledger
    ├── LedgerCorrupt       what is on the disk is not what was written
    ├── FactUnknown         a newer release wrote a fact that this one cannot read
    ├── FactUnwritable      a fact would not come back from the disk as it is
    └── LedgerFailed        writing or reading failed; the process must end and start again
"""

from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from moorage.core.state.facts import Fact
from moorage.storage.base import StorageCorrupt, StorageError, StorageFailed, StorageLocked

PENDING_FACTS_MAX: Final = 50_000
"""Maximum facts handed over but not durable; with more, calls of `append` wait, in their order."""
PAGE_FACTS_MAX: Final = 1_000
"""Maximum entries of one page of `read` and `history`; a larger `limit` is reduced to it."""
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of encoded facts after which a page ends."""
EXIT_BROKEN: Final = 70
"""Exit code: a broken invariant or a failed ledger; the last line on stderr tells which."""
COMMIT_SECONDS_MAX: Final = 60.0
"""Seconds after which a commit that is not done counts as a failure of the disk."""
CHECKPOINTS_KEPT: Final = 2
"""Number of stored checkpoints: the newest, and the one before in case the newest is damaged."""


class LedgerError(Exception):
    """The ledger cannot serve a call; the message gives the remedy."""


class LedgerLocked(LedgerError):  # noqa: N818  # It names what happened, like asyncio.QueueFull.
    """Another process writes this ledger.

    Args:
        place: The ledger, as its owner calls it.
        pid: Id of the process that holds the ledger; None: the process has not noted it yet.
        reason: The whole message; empty: the usual message about a file.
    """

    def __init__(self, place: str, pid: int | None, reason: str = "") -> None:
        super().__init__(reason or str(StorageLocked(place, pid)))
        self.place = place
        self.pid = pid


class LedgerCorrupt(LedgerError):  # noqa: N818  # As LedgerLocked.
    """The data on the disk is not the data that was written.

    Args:
        place: The ledger, as its owner calls it.
        finding: The damage and its place, in words.
    """

    def __init__(self, place: str, finding: str) -> None:
        super().__init__(str(StorageCorrupt(place, finding)))
        self.place = place
        self.finding = finding


class FactUnknown(LedgerError):  # noqa: N818  # As LedgerLocked.
    """A newer release wrote a fact that this one cannot read.

    Args:
        where: The fact's place, e.g. `fact 17`.
        kind: The kind that is stored.
        version: The version that is stored.
        known: The newest version of that kind that this release reads; None if it reads no version.
    """

    def __init__(self, where: str, kind: str, version: int, known: int | None) -> None:
        ours = f"knows no kind {kind!r}" if known is None else f"reads {kind!r} up to {known}"
        super().__init__(
            f"{where} is of kind {kind!r}, version {version}; this release {ours}. Facts are "
            "never skipped. Start the release that wrote it, or restore the data directory "
            "from before that release first started."
        )
        self.kind = kind
        self.version = version


class FactUnwritable(LedgerError):  # noqa: N818  # As LedgerLocked.
    """A fact would be read back changed, so the ledger did not write it.

    Args:
        kind: Name of the fact's class.
        finding: The value that JSON cannot represent.
    """

    def __init__(self, kind: str, finding: str) -> None:
        super().__init__(
            f"a {kind} cannot be stored: {finding}. Facts hold plain JSON values: text, whole and "
            "finite numbers, lists, and objects with text keys. The code that made this fact must "
            "refuse other values."
        )


class LedgerFailed(LedgerError):  # noqa: N818  # As LedgerLocked.
    """A write to the disk failed. The facts of that write may or may not be there.

    There is no retry: after a failed sync the kernel may have dropped the unwritten pages, and a
    second sync would succeed without them. The process must end; the next process reads what the
    disk really holds.
    """


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One fact as it was stored.

    Args:
        seq: The fact's number in the history, from 1, without gaps.
        at: The time at which the fact was appended, in seconds since the epoch.
    """

    seq: int
    at: float
    fact: Fact


class Position(NamedTuple):
    """A place in one history of facts.

    Args:
        seq: The last fact before this place; 0: none.
        chain: The checksum over all facts up to this fact.
    """

    seq: int
    chain: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """The contents of a ledger when it was opened.

    Args:
        facts: The newest good checkpoint's facts, then every fact after it. Iterate it once, before
            the ledger is closed. Raises `LedgerCorrupt` or `FactUnknown` at the first fact that
            cannot be read.
        last_seq: The last fact of the history; 0 if it is empty.
        checkpoint_seq: The last fact that the checkpoint covers; 0: no checkpoint.
        warnings: Damage that recovery worked around, each a sentence for the log.
        fencing: Fencing numbers up to this one may be in use, even if no fact has them.
        goes_on: Whether the facts are only those after the position given at `open`.
    """

    facts: Iterator[Fact]
    last_seq: int
    checkpoint_seq: int
    warnings: tuple[str, ...] = ()
    fencing: int = 0
    goes_on: bool = False


class LedgerHistory(Protocol):
    """Reads the facts of a ledger, in order, in one event loop. The oldest facts may be pruned."""

    @property
    def last_seq(self) -> int:
        """Seq of the last durable fact that this process knows; 0 without facts."""

    async def history(
        self, subject: str, after: int = 0, limit: int = PAGE_FACTS_MAX
    ) -> list[LedgerEntry]:
        """Return the facts about one lease, request or cluster, oldest first.

        Args:
            subject: The id of the lease, request or cluster.
            after: Seq of the last entry of the page before; 0 for the first page.
            limit: Entries on the page, at most `PAGE_FACTS_MAX`. Only an empty page means that
                there are no more: a page also ends at `PAGE_BYTES_MAX`.

        Raises:
            LedgerCorrupt: A fact is not as it was written.
            FactUnknown: A newer release wrote a fact.
            LedgerFailed: The disk could not be read.
            LedgerError: The ledger is not open.
        """

    async def read(
        self, after: int = 0, limit: int = PAGE_FACTS_MAX, kind: str | None = None
    ) -> list[LedgerEntry]:
        """Return the facts after a seq, oldest first; errors as in `history`.

        Args:
            after: The position to read from, as in `history`.
            limit: The largest number of facts, as in `history`.
            kind: The kind to return. Facts of other kinds may be left out, but not the first and
                the last of the page. None: all kinds.
        """

    async def history_start(self) -> float | None:
        """Return when the oldest remaining fact was appended; None: no fact was pruned.

        Raises:
            LedgerFailed: The disk could not be read.
            LedgerError: The ledger is not open.
        """


class Ledger(LedgerHistory, Protocol):
    """A ledger that this process writes; there is one writer."""

    @property
    def checkpoint_seq(self) -> int:
        """Seq of the last fact in the newest checkpoint; 0 without a checkpoint."""

    @property
    def is_full(self) -> bool:
        """Whether the disk is full: no new lease may be granted, but leases can end."""
        ...

    def check(self) -> None:
        """Raise an error after a failure, even if nothing is being written.

        Raises:
            LedgerFailed: Writing failed, or another server writes.
        """

    async def open(self) -> Recovery:
        """Lock the ledger, verify it, and return its contents.

        The cost depends on the checkpoint and the facts after it, not on the whole history.

        Raises:
            LedgerLocked: Another process has the ledger open.
            LedgerCorrupt: The stored data is damaged.
            FactUnknown: A newer release wrote the checkpoint. (Later facts are read as
                `Recovery.facts` is iterated.)
            LedgerError: The ledger cannot be opened, or is open already.
        """

    def append(
        self, facts: Sequence[Fact], at: float, *, lone: bool = False
    ) -> Coroutine[Any, Any, int]:
        """Store facts; they are durable when this call is awaited to its end.

        Several calls may be under way. Facts are stored in the order of the calls, those of one
        call all or not at all. One transaction stores the facts of all waiting calls. A call that
        is cancelled may have stored its facts.

        Args:
            facts: The facts, in order. Empty: only wait for earlier calls.
            at: Now, in seconds since the epoch.
            lone: Whether the facts are few, and the caller has no other work to do. On a quick
                disk, they are then durable before `append` returns.

        Returns:
            The seq of the last fact.

        Raises:
            FactUnwritable: A fact is not plain JSON; no fact was stored.
            LedgerFailed: The disk could not be written. Every later call raises the same error.
            LedgerError: The ledger is not open.
        """

    async def checkpoint(self, seq: int, facts: Iterable[Fact]) -> None:
        """Store facts that rebuild the state as of `seq`; durable when this returns.

        The checkpoint is encoded and written in pieces, so that appends continue. The
        newest two checkpoints stay. A crash in the middle leaves the older checkpoints as they
        were.

        Args:
            seq: The seq of an appended fact, not older than the last checkpoint's.
            facts: The facts that a replay needs instead of the facts 1 to `seq`.

        Raises:
            FactUnwritable: A fact is not plain JSON; no checkpoint was made.
            LedgerFailed: The disk could not be written.
            LedgerError: `seq` is out of range, or the ledger is not open.
        """

    async def prune(self, before: float, bytes_max: int) -> bool:
        """Delete some of the oldest facts, between two commits; no start needs them.

        Facts after the older of the two checkpoints stay. The file does not shrink: new facts
        take the room.

        Args:
            before: Facts appended before this time may go, in seconds since the epoch.
            bytes_max: While the ledger is larger, other facts may go, too, the oldest first.

        Returns:
            Whether there are more facts to delete.

        Raises:
            LedgerFailed: The disk could not be written.
            LedgerError: The ledger is not open.
        """

    async def close(self) -> None:
        """Wait until all appended facts are durable, and close. A second call does nothing.

        Raises:
            LedgerFailed: The disk could not be written.
        """


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the storage's errors into the ledger's errors."""
    try:
        yield
    except StorageLocked as no:
        raise LedgerLocked(no.place, no.pid, str(no)) from no
    except StorageCorrupt as no:
        raise LedgerCorrupt(no.place, no.finding) from no
    except StorageFailed as no:
        raise LedgerFailed(str(no)) from no
    except StorageError as no:
        raise LedgerError(str(no)) from no
