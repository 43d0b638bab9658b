"""The `context` of rules, kept on the host per policy version and tenant. Used by `channel`.

The host never reads one: it keeps packed bytes and a version. A cell is sent the bytes only when
it does not hold that version, and a change is accepted only if it was made from the version that
is current (compare and swap), so of two cells that changed the same context one wins whole.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from moorage.sandbox.limits import CONTEXT_BYTES_MAX, CONTEXTS_MAX

TOTAL_BYTES_MAX: Final = 64 << 20
"""All contexts together; the least recently changed one is forgotten."""

Key = tuple[str, str]
"""Policy version (URI and digest) and tenant."""


class Contexts:
    """All contexts of this server; they do not survive a restart."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, tuple[int, bytes]] = OrderedDict()
        self._bytes = 0
        self._version = 0

    def version(self, key: Key) -> int:
        """Return the version of a context; 0 where there is none."""
        kept = self._kept.get(key)
        return kept[0] if kept else 0

    def packed(self, key: Key) -> bytes:
        """Return a context; empty where there is none."""
        kept = self._kept.get(key)
        return kept[1] if kept else b""

    def swap(self, key: Key, expected: int, packed: bytes) -> int | None:
        """Replace version `expected` and return the new version, or None if it is not current."""
        if self.version(key) != expected or len(packed) > CONTEXT_BYTES_MAX:
            return None
        self._forget(key)
        # Versions never repeat, so a forgotten context cannot come back under an old number.
        self._version += 1
        self._kept[key] = (self._version, packed)
        self._bytes += len(packed)
        while len(self._kept) > CONTEXTS_MAX or self._bytes > TOTAL_BYTES_MAX:
            self._forget(next(iter(self._kept)))
        return self._version

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept:
            self._bytes -= len(kept[1])


@dataclass(slots=True, eq=False)
class Chain:
    """Evaluations of one tenant in one cell, each starting from what the one before it left.

    Args:
        version: The version that the latest of them left, or started from.
        broken: A change was refused: the cell holds something that nobody else has.

    """

    version: int
    broken: bool = False


class ToldContexts:
    """Which contexts one cell holds, and which of its changes still count.

    Args:
        contexts: The host's.
        version: The policy version of the cell.
        limit: Tenants a cell remembers at most; beyond it it is told to forget all of them.

    """

    def __init__(self, contexts: Contexts, version: str, limit: int) -> None:
        self._contexts = contexts
        self._version = version
        self._limit = limit
        self._chains: dict[str, Chain] = {}

    def tell(self, tenant: str) -> tuple[bytes | None, bool, Chain]:
        """Return what an evaluation's frame must carry: bytes or None, forget-all; its chain."""
        key = (self._version, tenant)
        current = self._contexts.version(key)
        chain = self._chains.get(tenant)
        if chain is not None and chain.version == current and not chain.broken:
            return None, False, chain
        forget = chain is None and len(self._chains) >= self._limit
        if forget:
            self._chains.clear()
        told_nothing = chain is None and not current
        chain = self._chains[tenant] = Chain(current)
        return None if told_nothing else self._contexts.packed(key), forget, chain

    def accept(self, tenant: str, chain: Chain, packed: bytes) -> bool:
        """Take a change made in the cell; False: somebody else was faster, and it is void."""
        version = None
        if not chain.broken:
            version = self._contexts.swap((self._version, tenant), chain.version, packed)
        if version is None:
            chain.broken = True
            return False
        chain.version = version
        return True
