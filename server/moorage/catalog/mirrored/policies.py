"""Copies policies from an external policy store; a copy above its maximal age is not used.

`catalog.opening` makes a mirror if `POLICY_DB_URL` names such a store. The store's policies are
prepared like uploads: only a jail compiles and runs them.

A policy's own examples run here, too, but no request waits for them. If they fail, the policy is
still used, since the store accepted it and other servers use it; each answer then has a warning.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from moorage.catalog.allowances import SPENT, Allowance
from moorage.catalog.limits import STORE_BYTES_MAX
from moorage.catalog.mirrored.batches import Batches
from moorage.catalog.mirrored.envelopes import Denied
from moorage.catalog.mirrored.services import PolicyStore
from moorage.catalog.values import Document, Examine, PolicyRecord
from moorage.model import Code
from moorage.protocol.faults import ServiceError

POLICIES_KEPT_MAX: Final = 1_000
"""Maximum policies in memory; one more replaces the least recently used one."""
POLICIES_BYTES_MAX: Final = STORE_BYTES_MAX
"""Maximum bytes of policies in memory; beyond them the least recently used policy is dropped."""
ROUNDS: Final = 10
"""Number of checks of the policies' ages within `fresh_seconds`."""
ROUND_SECONDS_MIN: Final = 0.05
"""Shortest pause in seconds between two checks of the policies' ages."""
EXAMINED_AGAIN_SECONDS: Final = 1.0
"""Pause in seconds after a policy's examples could not run because no cell was free."""


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class _Remembered:
    """A policy in memory: its content, and the times of its last request and answer.

    `wanted`: an allocation request has used the policy since it was last read. `doubt`: why
    the policy's examples fail.
    """

    record: PolicyRecord
    document: Document
    etag: str
    size: int
    requested_at: float
    read_at: float
    wanted: bool = False
    failure: ServiceError | None = None
    doubt: str = ""


class PolicyMirror:
    """A copy of an external store's policies by URI, each read when a request names it.

    Args:
        store: Client of the policy store.
        prepare: Makes the record of a PolicyRule document, as for an upload.
        keep: Adds a record to memory, or replaces the record with its URI.
        drop: Removes a policy from memory.
        fresh_seconds: Maximal age of a policy; an older one is read again. `run` reads policies in
            use before that, so that requests need not wait.
        stale_seconds_max: How long a known policy is used, with a warning, while the store does not
            answer.
    """

    def __init__(
        self,
        store: PolicyStore,
        *,
        prepare: Callable[[Document], Awaitable[PolicyRecord]],
        keep: Callable[[PolicyRecord], None],
        drop: Callable[[str], None],
        fresh_seconds: float,
        stale_seconds_max: float,
    ) -> None:
        self.store = store
        self._prepare = prepare
        self._keep = keep
        self._drop = drop
        self._unexamined: dict[str, None] = {}
        self._new = asyncio.Event()
        self._fresh_seconds = fresh_seconds
        self._stale_seconds_max = stale_seconds_max
        self._records: dict[str, _Remembered] = {}
        self._bytes = 0
        self._asking: dict[str, Batches] = {}

    async def close(self) -> None:
        """Cancel running requests and close the connections."""
        for asking in tuple(self._asking.values()):
            await asking.close()
        await self.store.service.close()

    async def run(self) -> None:
        """Refresh the policies in use before they are too old, until cancelled."""
        while self._fresh_seconds:  # 0: each use reads the policy again.
            await asyncio.sleep(max(self._fresh_seconds / ROUNDS, ROUND_SECONDS_MIN))
            due = _now() - self._fresh_seconds * (1 - 2 / ROUNDS)
            for uri in [
                u for u, entry in self._records.items() if entry.wanted and entry.requested_at < due
            ]:
                with contextlib.suppress(ServiceError):  # The next request reports the error.
                    await self._read(uri)

    async def examine(self, examine: Examine) -> None:
        """Run the examples of new policies, one after the other, until cancelled."""
        while True:
            await self._new.wait()
            uri = next(iter(self._unexamined))
            del self._unexamined[uri]
            if not self._unexamined:
                self._new.clear()
            before = self._records.get(uri)
            if before is None:
                continue
            try:
                doubt = await examine(before.record)
            except ServiceError:  # No cell was free.
                await asyncio.sleep(EXAMINED_AGAIN_SECONDS)
                self._unexamined[uri] = None
                self._new.set()
                continue
            entry = self._records.get(uri)  # The policy may have been read again.
            if doubt and entry is not None and entry.record is before.record:
                entry.doubt = f"{self._place} has “{uri}”, which fails its own examples: {doubt}"

    def at_hand(self, uri: str) -> list[str] | None:
        """Return warnings if the policy is known and fresh, else None."""
        entry = self._records.get(uri)
        if entry is None or _now() - entry.requested_at > self._fresh_seconds:
            return None
        entry.wanted = True
        return _warnings(entry)

    async def fetch(self, uri: str, allowance: Allowance, reserved: int) -> list[str]:
        """Read a policy whose copy is too old; callers at the same time share one request.

        Args:
            uri: URI of the policy.
            allowance: The remaining external requests of the allocation request.
            reserved: External requests that a refresh of a known policy must leave in `allowance`.

        Raises:
            ServiceError: `unknown_policy`; `unavailable`; `bad_policy`: the store's policy cannot
            be used.
        """
        found = self.at_hand(uri)
        if found is not None:
            return found
        entry = self._records.get(uri)
        if (
            entry is not None
            and allowance.left <= reserved
            and _now() - entry.read_at <= self._stale_seconds_max
        ):
            return _warnings(entry, SPENT)
        if not allowance.spend():
            raise ServiceError(Code.UNAVAILABLE, f"{self._place} got no request. {SPENT}")
        await self._read(uri)
        entry = self._records.get(uri)
        if entry is None:
            return []
        entry.wanted = True
        return _warnings(entry)

    async def _read(self, uri: str) -> None:
        asking = self._asking.get(uri)
        if asking is None:
            asking = self._asking[uri] = Batches(self._ask)
        try:
            await asking.join([uri])
        except ServiceError as error:
            entry = self._records.get(uri)
            if (
                entry is None
                or error.code is not Code.UNAVAILABLE
                or _now() - entry.read_at > self._stale_seconds_max
            ):
                raise
            entry.failure, entry.requested_at = error, _now()
        finally:
            if asking.idle and self._asking.get(uri) is asking:
                del self._asking[uri]

    async def _ask(self, keys: frozenset[str]) -> None:
        (uri,) = keys
        entry = self._records.get(uri)
        answer = await self.store.get(uri, entry.etag if entry else "")
        if isinstance(answer, Denied):
            self._let_go(uri)
            raise self._unknown(uri, answer)
        if answer is not None:
            document, etag = answer
        elif entry is not None:
            document, etag = entry.document, entry.etag
        else:
            text = (
                f"{self._place} says that “{uri}” has not changed, but this server never read it."
            )
            raise ServiceError(Code.UNAVAILABLE, text)
        if entry is None or document != entry.document:
            # Code at a URL is read again only if the document changes.
            record, size = await self._take(uri, document)
            doubt = ""
            self._unexamined[uri] = None
            self._new.set()
        else:
            record, size, doubt = entry.record, entry.size, entry.doubt
        self._bytes += size - (entry.size if entry else 0)
        self._records.pop(uri, None)
        now = _now()
        self._records[uri] = _Remembered(record, document, etag, size, now, now, doubt=doubt)
        while len(self._records) > POLICIES_KEPT_MAX or self._bytes > POLICIES_BYTES_MAX:
            self._let_go(next(iter(self._records)))

    async def _take(self, uri: str, document: Document) -> tuple[PolicyRecord, int]:
        """Prepare a policy for use; return its record and the bytes of memory that it needs."""
        try:
            record = await self._prepare({**document, "policy_rule_uri": uri})
        except ServiceError as error:
            code = Code.UNAVAILABLE if error.code is Code.UNAVAILABLE else Code.BAD_POLICY
            raise ServiceError(
                code,
                f"{self._place} has “{uri}”, but it cannot be used: {error.reason}",
                field="policy_rule_uri",
                details=error.details,
            ) from error
        self._keep(record)
        content = sum(len(data) for data in record.files.values())
        return record, content + len(msgspec.json.encode(record.document))

    @property
    def _place(self) -> str:
        return f"The {self.store.service.name} at {self.store.service.url}"

    def _unknown(self, uri: str, answer: Denied) -> ServiceError:
        return ServiceError(
            Code.UNKNOWN_POLICY,
            f"{self._place} has no policy “{uri}” ({answer.message}).",
            field="policy_rule_uri",
            expected="the URI of a policy that this store has",
        )

    def _let_go(self, uri: str) -> None:
        entry = self._records.pop(uri, None)
        if entry is not None:
            self._bytes -= entry.size
            self._drop(uri)


def _warnings(entry: _Remembered, why: str = "") -> list[str]:
    why = entry.failure.reason if entry.failure is not None else why
    doubts = [entry.doubt] if entry.doubt else []
    if not why:
        return doubts
    age = _now() - entry.read_at
    return [f"{why} The policy is as of {age:.0f} seconds before this request.", *doubts]
