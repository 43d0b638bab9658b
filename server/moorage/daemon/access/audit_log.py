"""The audit log of a running server: takes entries at once, writes them in a thread of its own.

The thread gets the entries as text: objects that two threads share would cost more processor time
than the encoding.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

import structlog

from moorage.daemon.access.audit_chain import encode_entries
from moorage.daemon.access.audit_files import AuditFiles
from moorage.daemon.access.audit_table import AuditTable
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject
from moorage.records.rights import Caller
from moorage.storage.base import AuditRows, StorageError

PENDING_MAX: Final = 100_000
"""Maximum entries that wait for the disk; further entries are dropped, and the log has their
number."""
GATHER_SECONDS: Final = 0.02
"""Seconds in which entries are gathered, to be written together."""
GATHER_SECONDS_MAX: Final = 0.5
"""Seconds in which entries are gathered under load: each wake-up of the thread takes the
interpreter's lock from the event loop several times, which costs more than the entries."""
BATCH_MANY: Final = 4
"""Number of entries in one write that counts as load."""
FAILED_A_MINUTE_MAX: Final = 60
"""Maximum failed logins per minute and address that get an entry; others are only counted."""
LOGIN_DOORS: Final = ("websocket", "http", "console")
"""Where logins fail."""
SURPLUS_MAX: Final = 10_000
"""Maximum pairs of a tenant and a limit whose last entry is remembered."""
RETRY_SECONDS: Final = 1.0
MINUTE_SECONDS: Final = 60.0
LOST_FILE: Final = "audit.lost"
"""Name of the file in the data folder with the number of entries that a stop could not write."""
_REMEDY: Final = "free space on the disk, or repair it; entries wait in memory until then"

log = structlog.get_logger("moored")


def open_lines(
    folder: Path, keep_days: int, keep_mib: int, rows: AuditRows | None
) -> AuditFiles | AuditTable:
    """Return the log's store: a table of the database, or files of a data folder."""
    bounds = keep_days * 86_400.0, keep_mib << 20
    return AuditFiles(folder, *bounds) if rows is None else AuditTable(rows, *bounds)


class AuditLog:
    """Queues entries of the audit log, and writes them in a thread.

    Args:
        folder: The data folder.
        keep_days: Days that the log goes back; 0: nothing is logged.
        keep_mib: The largest size of the log in MiB; beyond this, the oldest entries are deleted.
        rows: The rows of the log in a database; None: files of the folder.
    """

    def __init__(
        self, folder: Path, keep_days: int, keep_mib: int, rows: AuditRows | None = None
    ) -> None:
        self.lost = 0
        self._lines = open_lines(folder, keep_days, keep_mib, rows)
        self.is_on = keep_days > 0
        self._pending: list[bytes] = []
        """JSON lines to be written; only the thread removes them."""
        self._queued = self._written = 0
        """Numbers of queued and written entries so far; only the thread changes the number of
        written ones."""
        self._held: list[AuditEntry] | None = None
        """Entries to be written after the recovered ones; None: entries are not held back."""
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._bell = threading.Event()
        self._hurry = threading.Event()
        """While this is set, the thread writes queued entries at once."""
        self._closing = threading.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self.failed_logins: Counter[str] = Counter(dict.fromkeys(LOGIN_DOORS, 0))
        """Number of failed logins by port; see `LOGIN_DOORS`."""
        self._failures: Counter[str] = Counter()
        self._failures_since = 0.0
        self._minute_end: asyncio.TimerHandle | None = None
        """Ends the minute of `_failures`, once an address has failed logins without an entry."""
        self.surplus: Counter[str] = Counter()
        """Number of requests that exceeded the limit of a tenant, by the name of the setting."""
        self._surplus: dict[tuple[str, str], tuple[float, int]] = {}
        """Time of the last entry of a tenant and setting, and the number of refusals since."""
        self._lost_file = folder / LOST_FILE
        if self.is_on:
            with suppress(OSError, ValueError):
                self.lost = int(self._lost_file.read_text())
        self._unsaid = self.lost
        """Number of dropped entries that the log does not mention yet."""
        self._waits_since: float | None = None
        """When the thread began to write the entries that are not written yet; None: none wait."""
        self._thread: threading.Thread | None = None
        if keep_days:
            self._thread = threading.Thread(target=self._write_forever, name="audit", daemon=True)
            self._thread.start()

    def waiting_seconds(self) -> float:
        """Return the seconds for which entries have been waiting for the disk; 0: none wait."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def note(self, entry: AuditEntry) -> None:
        """Queue an entry; it is written soon."""
        self.note_all([entry])

    async def flush(self) -> None:
        """Wait until all entries queued so far are written, or the attempt has failed."""
        await self._goes_on.wait()
        if self._thread is not None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self._hurry.set()
            self._bell.set()
            await waiter

    def last_seq(self) -> int | None:
        """Return the number of the last fact with an audit entry; None: no fact has an entry."""
        return self._lines.last_seq()

    def note_all(self, entries: Sequence[AuditEntry]) -> None:
        """Queue entries, in order. Runs on the hot path."""
        if self._thread is None or not entries:
            return
        held = self._held
        waiting = self._queued - self._written if held is None else len(held)
        if (lost := waiting + len(entries) - PENDING_MAX) > 0:
            entries = entries[:-lost]
            self.lost += lost
            self._unsaid += lost
        if held is None:
            self._queued += len(entries)
            self._pending.append(encode_entries(entries))
        else:
            held += entries
        if not self._bell.is_set():
            self._bell.set()

    def hold(self) -> None:
        """Hold back all entries from now on, until `let_go`."""
        self._held = []
        self._goes_on.clear()

    def let_go(self, before: Sequence[AuditEntry], seq: int) -> None:
        """Write the recovered entries, the start's entry, and the entries held back since `hold`.

        Args:
            before: Entries recovered from the time before the start.
            seq: The last fact of the ledger at the start.
        """
        held, self._held = self._held or [], None
        self._goes_on.set()
        self.note_all(before)
        self.note_server("started", seq)
        self.note_all(held)

    def note_server(self, what: str, seq: int = 0) -> None:
        """Queue the entry of a start, with the last fact in the ledger, or the entry of a stop.

        Two starts without a stop between them show that the server was killed.
        """
        about = {"version": version("moorage")}
        self.note(AuditEntry(time.time(), f"server.{what}", "moored", about=about, seq=seq))

    def note_refusal(self, caller: Caller, remote: str, what: str, reason: str) -> None:
        """Queue the entry of a request that was refused for lack of a right."""
        self.note(
            AuditEntry(
                time.time(),
                "right.refused",
                caller.tenant,
                caller.role,
                caller.token_name,
                remote,
                {"what": what},
                why=reason,
            )
        )

    def note_failed_login(self, remote: str, door: str, why: str) -> None:
        """Queue the entry of a failed login (wrong or no token); beyond a limit, only count it.

        Args:
            remote: Address of the caller, without its port.
            door: The port of the failed login; one of `LOGIN_DOORS`.
            why: What is wrong with the token.
        """
        self.failed_logins[door] += 1
        now = time.time()
        if now - self._failures_since >= MINUTE_SECONDS:
            self._note_more_failures()
            self._failures_since = now
        self._failures[remote] += 1
        if self._failures[remote] <= FAILED_A_MINUTE_MAX:
            about: JsonObject = {"door": door}
            self.note(AuditEntry(now, "login.failed", remote=remote, about=about, why=why))
            self._hurry.set()
        elif self._minute_end is None:
            with suppress(RuntimeError):  # Without an event loop, the next failure ends the minute.
                loop, left = asyncio.get_running_loop(), self._failures_since + MINUTE_SECONDS - now
                self._minute_end = loop.call_later(left, self._note_more_failures)

    def _note_more_failures(self) -> None:
        """Queue the numbers of failed logins without an entry, and count from 0 again."""
        if self._minute_end is not None:
            self._minute_end.cancel()
            self._minute_end = None
        for address, count in self._failures.items():
            if count > FAILED_A_MINUTE_MAX:
                about: JsonObject = {"more": count - FAILED_A_MINUTE_MAX}
                self.note(AuditEntry(time.time(), "login.failed", remote=address, about=about))
        self._failures.clear()

    def note_surplus(self, tenant: str, remote: str, setting: str) -> None:
        """Count a request beyond a limit of its tenant; queue at most one entry a minute.

        Args:
            tenant: The tenant.
            remote: Address of the caller.
            setting: Name of the limit.
        """
        self.surplus[setting] += 1
        now, key = time.time(), (tenant, setting)
        last, more = self._surplus.get(key, (-math.inf, 0))
        if now - last < MINUTE_SECONDS:
            self._surplus[key] = last, more + 1
            return
        self._surplus.pop(key, None)  # The oldest are first.
        self._surplus[key] = now, 0
        if len(self._surplus) > SURPLUS_MAX:
            del self._surplus[next(iter(self._surplus))]
        about: JsonObject = {"setting": setting} | ({"more": more} if more else {})
        self.note(AuditEntry(now, "rate.refused", tenant, remote=remote, about=about))

    def close(self) -> None:
        """Write pending entries, for a bounded time, and end the thread."""
        if self._thread is not None:
            self._note_more_failures()
            # The next start restores the entries of facts, after older ones.
            held, self._held = self._held or [], None
            self.note_all([each for each in held if not each.seq])
            self._closing.set()
            self._hurry.set()
            self._bell.set()
            self._thread.join(10.0)
            if not self._thread.is_alive():
                self._lines.close()
            self._thread = None
            self._report_lost()

    def _report_lost(self) -> None:
        """Report entries that could not be written; the next start notes their number."""
        lines = b"".join(self._pending).splitlines()
        # The next start restores the entries of facts.
        lost = self._unsaid + sum(b',"seq":' not in line for line in lines)
        if lost:
            finding = "the server stopped before these entries of the audit log could be written"
            log.error("audit_lost", entries=lost, finding=finding)
            with suppress(OSError):
                self._lost_file.write_text(str(lost))

    def _write_forever(self) -> None:
        gather_seconds = GATHER_SECONDS
        while not self._closing.is_set():
            self._bell.wait()
            self._hurry.wait(gather_seconds)
            self._bell.clear()
            self._hurry.clear()
            is_load = self._queued - self._written >= BATCH_MANY
            gather_seconds = GATHER_SECONDS_MAX if is_load else GATHER_SECONDS
            if not self._write_all():
                self._closing.wait(RETRY_SECONDS)  # The disk may have room again.
                self._bell.set()
        self._write_all()

    def _write_all(self) -> bool:
        """Write pending entries; return whether that succeeded."""
        now, unsaid, waiters = time.time(), self._unsaid, len(self._waiters)
        chunks = self._pending[:]
        encoded = b"".join(chunks)
        count = encoded.count(b"\n")
        if unsaid:
            dropped = AuditEntry(now, "audit.dropped", "moored", about={"entries": unsaid})
            encoded += encode_entries([dropped])
        if encoded and self._waits_since is None:
            self._waits_since = time.monotonic()
        try:
            if encoded:
                self._lines.append_lines(encoded, now)
        except (OSError, ValueError, StorageError) as error:
            reason = f"{error}; {_REMEDY}" if isinstance(error, OSError) else str(error)
            log.error("audit_failed", reason=reason, waiting=count)  # noqa: TRY400  # A traceback says no more.
            return False
        finally:
            self._let_go(waiters)
        del self._pending[: len(chunks)]
        self._written += count
        self._unsaid -= unsaid
        self._waits_since = None
        if unsaid:
            with suppress(OSError):
                self._lost_file.unlink()
        return True

    def _let_go(self, count: int) -> None:
        """Wake the waiters whose entries are written."""
        for waiter in self._waiters[:count]:
            with suppress(RuntimeError):  # The event loop has closed, so nothing waits any more.
                waiter.get_loop().call_soon_threadsafe(_end_wait, waiter)
        del self._waiters[:count]


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
