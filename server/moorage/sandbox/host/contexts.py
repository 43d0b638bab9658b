"""The `context` of policies, stored on the host per policy version and tenant, for `channel`.

The host never reads a context: it keeps the packed bytes and a version. A cell gets the bytes only
if it lacks that version. A change is accepted only if it was made from the current version (compare
and swap), so of two cells that changed the same context, only one succeeds.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from moorage.sandbox.wire import frames
from moorage.sandbox.wire.limits import CONTEXT_BYTES_MAX, CONTEXTS_MAX

CONFLICT_STATUS: Final = 409
"""Status of the answer to a swap from a version that is not the current one."""
TOTAL_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of all contexts together; beyond it, the least recently changed context is
forgotten."""

Key = tuple[str, str]
"""Policy version (URI and digest) and tenant."""
ContextEntry = tuple[Key, int, bytes]
"""A context as it is on the disk: its key, version and packed value."""


class Contexts:
    """All contexts of this server, in memory; the daemon also stores them on the disk.

    Attributes:
        changed: Contexts that changed since the daemon last took them.
        conflicts: Number of changes that were dropped, since another process made one first.
    """

    def __init__(self) -> None:
        self.changed: dict[Key, None] = {}
        self.conflicts = 0
        self._entries: OrderedDict[Key, tuple[int, bytes]] = OrderedDict()
        self._bytes = 0
        self._version = 0

    def version(self, key: Key) -> int:
        """Return the version of a context; 0 if there is none."""
        entry = self._entries.get(key)
        return entry[0] if entry else 0

    def packed(self, key: Key) -> bytes:
        """Return a context; empty if there is none."""
        entry = self._entries.get(key)
        return entry[1] if entry else b""

    def swap(self, key: Key, expected: int, packed: bytes) -> int | None:
        """Replace version `expected`; return the new version, or None if another one is current."""
        if self.version(key) != expected or len(packed) > CONTEXT_BYTES_MAX:
            self.conflicts += 1
            return None
        self._keep(key, packed)
        self.changed[key] = None
        return self._version

    def restore(self, contexts: Iterable[ContextEntry], beyond: int) -> None:
        """Load the contexts from the disk, each with its version.

        Args:
            contexts: All contexts; version 0 if none was noted.
            beyond: Changes from now on get higher versions than this. Clients may know versions
                that a crash lost before they were on the disk; no other context may get such a
                version.
        """
        taken = [each for each in contexts if len(each[2]) <= CONTEXT_BYTES_MAX]
        self._version = max([self._version, beyond, *(version for _, version, _ in taken)])
        for key, version, packed in taken:
            self._keep(key, packed, version)

    def take_changes(self, bytes_max: int) -> list[ContextEntry]:
        """Return changed contexts, the earliest change first; empty bytes: the context is deleted.

        Args:
            bytes_max: Most bytes together; the first context is returned even if it is longer.
        """
        taken: list[ContextEntry] = []
        size = 0
        for key in list(self.changed):
            version, packed = self._entries.get(key, (0, b""))
            size += len(packed)
            if taken and size > bytes_max:
                break
            taken.append((key, version, packed))
            del self.changed[key]
        return taken

    def forget_policy(self, uri: str) -> None:
        """Delete the contexts of all versions of a URI that is no longer registered."""
        for key in [key for key in self._entries if key[0].startswith(f"{uri} ")]:
            self._forget(key)
            self.changed[key] = None

    def _keep(self, key: Key, packed: bytes, version: int = 0) -> None:
        self._forget(key)
        # Versions never repeat, so a forgotten context cannot come back under an old number.
        self._version += not version
        self._entries[key] = (version or self._version, packed)
        self._bytes += len(packed)
        while len(self._entries) > CONTEXTS_MAX or self._bytes > TOTAL_BYTES_MAX:
            oldest = next(iter(self._entries))
            self._forget(oldest)
            self.changed[oldest] = None

    def _forget(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry:
            self._bytes -= len(entry[1])


@dataclass(slots=True, eq=False)
class Chain:
    """Evaluations of one tenant in one cell; each starts from the context of the previous one.

    Args:
        version: The version that the latest evaluation left, or started from.
        broken: Whether a change was refused, so that the cell has a context that no other cell has.
    """

    version: int
    broken: bool = False


class SentContexts:
    """The contexts that one cell has, and which of its changes are still valid.

    Args:
        version: The policy version of the cell.
        limit: Tenants a cell remembers at most; beyond it the cell must forget all of them.
    """

    def __init__(self, contexts: Contexts, version: str, limit: int) -> None:
        self._contexts = contexts
        self._version = version
        self._limit = limit
        self._chains: dict[str, Chain] = {}

    def tell(self, tenant: str) -> tuple[bytes | None, bool, Chain]:
        """Return what an evaluation's frame says about contexts, and the evaluation's chain.

        The first value is the context, None if the cell needs none; the second is whether the cell
        must forget all other contexts.
        """
        key = (self._version, tenant)
        current = self._contexts.version(key)
        chain = self._chains.get(tenant)
        if chain is not None and chain.version == current and not chain.broken:
            return None, False, chain
        forget = chain is None and len(self._chains) >= self._limit
        if forget:
            self._chains.clear()
        sent_nothing = chain is None and not current
        chain = self._chains[tenant] = Chain(current)
        return None if sent_nothing else self._contexts.packed(key), forget, chain

    def accept(self, tenant: str, chain: Chain, packed: bytes) -> bool:
        """Store a change by the cell; return False if another process changed the context first."""
        version = None
        if not chain.broken:
            version = self._contexts.swap((self._version, tenant), chain.version, packed)
        if version is None:
            chain.broken = True
            return False
        chain.version = version
        return True

    def answer(self, tenant: str, chain: Chain | None, call: frames.Call) -> frames.CallAnswer:
        """Answer `context_client`: the context as it is now, or the version after a swap.

        Args:
            tenant: The owner of the context.
            chain: The chain of the calling evaluation; None for `management`.
            call: `read` without arguments, or `swap` with a version and the packed context.

        Raises:
            ValueError: The call is malformed, as no call of an honest cell is.
        """
        key = (self._version, tenant)
        if call.method == "read":
            now = (self._contexts.version(key), self._contexts.packed(key))
            return frames.CallAnswer(call.nonce, msgspec.msgpack.encode(now), "", 0)
        if call.method != "swap":
            raise ValueError(f"context_client has no {call.method[:40]!r}")
        expected, packed = msgspec.msgpack.decode(call.arguments, type=tuple[int, bytes])
        version = self._contexts.swap(key, expected, packed)
        if version is None:
            now_at = msgspec.msgpack.encode((self._contexts.version(key), b""))
            return frames.CallAnswer(call.nonce, now_at, "", CONFLICT_STATUS)
        if chain is not None:
            chain.version, chain.broken = version, False  # The cell now has exactly this context.
        elif (other := self._chains.get(tenant)) is not None:
            other.broken = (
                True  # A management call's cell gets the context with its next evaluation.
            )
        return frames.CallAnswer(call.nonce, msgspec.msgpack.encode((version, b"")), "", 0)
