"""Copies clusters and metrics from external services; a copy above its maximal age is not used.

`catalog.opening` makes a mirror for each configured service. A mirror has the time of its last read
and the missing ids. The documents are in the catalog's memory, which all other parts read; mirrors
change this memory by `keep` and `drop`.

A service gets one bulk request at a time, however many callers need data; further ids go into the
next bulk request (`catalog.mirrored.batches`).
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from moorage.catalog.allowances import SPENT, Allowance
from moorage.catalog.documents.encoding import cluster_id_of
from moorage.catalog.embedded.memory import Memory
from moorage.catalog.limits import CLUSTERS_MAX
from moorage.catalog.mirrored.batches import Batches
from moorage.catalog.mirrored.services import ClusterRegistry, ClustersRead, Digest, MetricsService
from moorage.model import ClusterId, Code
from moorage.protocol.faults import ServiceError

NAMED_MAX: Final = 20
"""Maximum ids that a warning lists; further ones are only counted."""
RETRY_SECONDS: Final = 1.0
"""Pause in seconds after a failed refresh; the pause doubles up to the refresh interval."""
FIRST_SECONDS_MAX: Final = 10.0
"""Seconds that a server's start, or a request without clusters, waits for the registry's list."""

_NEVER: Final = float("-inf")
_CHANCE: Final = random.SystemRandom()


def _now() -> float:
    return asyncio.get_running_loop().time()


def short_list(names: Sequence[str]) -> str:
    """Return ids for a warning: the first few, and the number of the others."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


# Clusters ----------------------------------------------------------------------------------------


class ClusterMirror:
    """A copy of all clusters of an external registry, read again every `refresh_seconds`.

    Args:
        registry: Client of the registry.
        refresh_seconds: Longest time until a change in the registry is seen here, while the
            registry answers.
        stale_seconds_max: How long known clusters are served, with a warning, while the registry
            does not answer.
        first_read: Called when the registry is read for the first time.
    """

    def __init__(
        self,
        registry: ClusterRegistry,
        memory: Memory,
        *,
        refresh_seconds: float,
        stale_seconds_max: float,
        first_read: Callable[[], None],
    ) -> None:
        self.service = registry.service
        self._registry = registry
        self._memory = memory
        self._refresh_seconds = refresh_seconds
        self._stale_seconds_max = stale_seconds_max
        self._first_read = first_read
        self._listing = Batches(self._list)
        self._naming = Batches(self._name)
        self._digests: dict[Digest, ClusterId] = {}
        self._digest_of: dict[ClusterId, Digest] = {}
        self._left_out: dict[str, str] = {}
        self._etag = ""
        self._failure: ServiceError | None = None
        self.read_at: float | None = None
        """Time when the whole list was last read; None if never."""

    async def run(self) -> None:
        """Read the registry periodically, until cancelled."""
        failures = 0
        pause = self._refresh_seconds if self.read_at is not None else RETRY_SECONDS
        while True:
            # Random, so that many servers do not ask in step; never longer than `pause`.
            await asyncio.sleep(pause * (0.9 + _CHANCE.random() / 10))
            try:
                await self.read_all()
                failures, pause = 0, self._refresh_seconds
            except ServiceError:  # `_failure` has the error, for the warnings of requests.
                pause = min(RETRY_SECONDS * 2 ** min(failures, 16), self._refresh_seconds)
                failures += 1

    async def read_all(self) -> None:
        """Read the whole registry now; raise `unavailable` if that fails."""
        await self._listing.join(())

    async def read_soon(self) -> None:
        """Read the registry; after `FIRST_SECONDS_MAX`, raise `unavailable`, but go on reading."""
        try:
            async with asyncio.timeout(FIRST_SECONDS_MAX):
                await self.read_all()
        except TimeoutError as error:
            raise self._not_read() from error

    def _not_read(self) -> ServiceError:
        service = self._registry.service
        return ServiceError(
            Code.UNAVAILABLE,
            f"The {service.name} at {service.url} is still being read; ask again in a moment.",
            details={"service": service.name, "url": service.url},
        )

    async def close(self) -> None:
        """Cancel running requests and close the connections."""
        await self._listing.close()
        await self._naming.close()
        await self._registry.service.close()

    def at_hand(self, ids: Sequence[str] | None) -> list[str] | None:
        """Return warnings about these clusters; None: the registry must be read first."""
        if not self._is_fresh():
            return None
        if ids is not None and any(name not in self._left_out for name in self._unknown(ids)):
            return None
        return self._warnings(ids)

    async def fetch(self, ids: Sequence[str] | None, allowance: Allowance) -> list[str]:
        """Look up clusters that `at_hand` missed; raise `unavailable` if none can be read."""
        if not self._is_fresh():
            if not allowance.spend():
                raise self._not_read()
            await self.read_soon()
        unknown = [] if ids is None else self._unknown(ids)
        if all(name in self._left_out for name in unknown):
            return self._warnings(ids)
        if not allowance.spend():
            what = f"Clusters were not looked up and were left out: {short_list(unknown)}."
            return [*self._warnings(ids), f"{what} {SPENT}"]
        try:
            await self._naming.join(unknown)
        except ServiceError as error:
            if ids is not None and len(unknown) == len(ids):
                raise
            what = f"Clusters could not be looked up and were left out: {short_list(unknown)}."
            return [*self._warnings(ids), f"{what} {error.reason}"]
        return self._warnings(ids)

    def _unknown(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that the copy lacks; these clusters may be new in the registry."""
        known = self._memory.knows
        return [name for name in ids if not known(name) and _is_cluster_id(name)]

    def _is_fresh(self) -> bool:
        return self.read_at is not None and _now() - self.read_at <= self._stale_seconds_max

    def _warnings(self, ids: Sequence[str] | None) -> list[str]:
        warnings: list[str] = []
        if self._failure is not None and self.read_at is not None:
            age = _now() - self.read_at
            as_of = f"Its clusters are as of {age:.0f} seconds before this request."
            warnings.append(f"{self._failure.reason} {as_of}")
        bad = self._left_out if ids is None else {n for n in ids if n in self._left_out}
        if bad:
            first = next(iter(bad))
            warnings.append(
                f"Cluster documents that cannot be used were left out: {short_list(list(bad))}"
                f" ({first}: {self._left_out[first]})."
            )
        return warnings

    async def _list(self, keys: frozenset[str]) -> None:
        del keys  # A list is a list of all.
        before = self._memory.cluster_ids()
        try:
            read = await self._registry.everything(dict(self._digests), self._etag)
        except ServiceError as error:
            self._failure = error
            raise
        first = self.read_at is None
        self._failure = None
        self.read_at = _now()
        if read is None:
            return
        self._etag = read.etag
        self._left_out = read.left_out
        self._keep(read)
        # Keep clusters that were read after the list was requested, and the former documents of
        # clusters whose new ones are unusable.
        for cluster_id in before - read.found.keys() - read.same - read.left_out.keys():
            self._drop(cluster_id)
        if first:
            self._first_read()

    async def _name(self, keys: frozenset[str]) -> None:
        read = await self._registry.named(keys)
        space = CLUSTERS_MAX - len(self._memory.cluster_ids())
        for cluster_id in list(read.found)[max(space, 0) :]:
            del read.found[cluster_id]
            read.left_out[cluster_id] = f"at most {CLUSTERS_MAX} clusters are held"
        self._keep(read)
        self._left_out.update((name, what) for name, what in read.left_out.items() if name in keys)

    def _keep(self, read: ClustersRead) -> None:
        for cluster_id, found in read.found.items():
            self._forget(cluster_id)
            self._digests[found.digest] = cluster_id
            self._digest_of[cluster_id] = found.digest
            self._memory.keep_cluster(found.entry, found.cluster, live=found.live)

    def _drop(self, cluster_id: ClusterId) -> None:
        self._forget(cluster_id)
        self._memory.drop_cluster(cluster_id)

    def _forget(self, cluster_id: ClusterId) -> None:
        old = self._digest_of.pop(cluster_id, None)
        if old is not None:
            del self._digests[old]


def _is_cluster_id(name: str) -> bool:
    try:
        cluster_id_of(name, "id")
    except ServiceError:
        return False
    return True


# Metrics -----------------------------------------------------------------------------------------


class MetricsMirror:
    """A copy of metrics of an external service, read when a request needs them.

    Args:
        service: Client of the metrics service.
        fresh_seconds: Maximal age of metrics; older ones are read again, and never used.

    While the service fails, no request waits for it: requests continue without metrics, with a
    warning, and the mirror probes the service in the background.
    """

    def __init__(self, service: MetricsService, memory: Memory, *, fresh_seconds: float) -> None:
        self.service = service
        self._memory = memory
        self._fresh_seconds = fresh_seconds
        self._asking = Batches(self._ask)
        self._read_at: dict[str, float] = {}
        self._digests: dict[Digest, ClusterId] = {}
        self._digest_of: dict[str, Digest] = {}
        self._left_out: dict[str, str] = {}
        self._nameless = ""
        self._all: tuple[Sequence[str], float] = ((), _NEVER)
        self._failure: ServiceError | None = None
        self._probe: asyncio.Task[None] | None = None
        self._probe_at = _NEVER

    async def close(self) -> None:
        """Cancel running requests and close the connections."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._asking.close()
        await self.service.service.close()

    def at_hand(self, ids: Sequence[str]) -> list[str] | None:
        """Return warnings if the metrics of these clusters are fresh, else None."""
        oldest = _now() - self._fresh_seconds
        # Requests without named clusters share one set of ids, which is checked once.
        everything, read_at = self._all
        if not (ids is everything and read_at >= oldest):
            missing = [name for name in ids if self._read_at.get(name, _NEVER) < oldest]
            if missing:
                return None if self._failure is None else self._without(ids, missing)
            if len(ids) > NAMED_MAX:
                self._all = (ids, min(self._read_at[name] for name in ids))
        return self._warnings(ids)

    async def fetch(self, ids: Sequence[str], allowance: Allowance) -> list[str]:
        """Read metrics that are not fresh; unreadable ones become null, with a warning."""
        oldest = _now() - self._fresh_seconds
        missing = [name for name in ids if self._read_at.get(name, _NEVER) < oldest]
        if not missing:
            return self._warnings(ids)
        if self._failure is None:
            if not allowance.spend():
                return self._null(ids, missing, "were not read", SPENT)
            try:
                await self._asking.join(missing)
            except ServiceError as error:
                self._failure, self._probe_at = error, _now() + RETRY_SECONDS
            else:
                return self._warnings(ids)
        return self._without(ids, missing)

    async def require(self, cluster_id: str) -> None:
        """Read the metrics of a known cluster if they are not fresh, or raise `unavailable`."""
        if self._read_at.get(cluster_id, _NEVER) < _now() - self._fresh_seconds:
            await self._asking.join([cluster_id])

    def _without(self, ids: Sequence[str], missing: Sequence[str]) -> list[str]:
        """Set missing metrics to null, probe a failed service, and return warnings."""
        assert self._failure is not None
        if self._probe is None and _now() >= self._probe_at:
            self._probe = asyncio.create_task(self._ask_again(missing))
        return self._null(ids, missing, "could not be read", self._failure.reason)

    def _null(self, ids: Sequence[str], missing: Sequence[str], what: str, why: str) -> list[str]:
        for name in missing:
            self.forget(name)
        sentence = (
            f"The metrics of {len(missing)} clusters {what} and are null: {short_list(missing)}."
        )
        return [*self._warnings(ids), f"{sentence} {why}"]

    async def _ask_again(self, ids: Sequence[str]) -> None:
        try:
            await self._asking.join(ids)
            self._failure = None
        except ServiceError as error:
            self._failure = error
        finally:
            self._probe, self._probe_at = None, _now() + RETRY_SECONDS

    def forget(self, cluster_id: str) -> None:
        """Drop the metrics of a cluster that is deleted, or whose metrics are too old."""
        self._read_at.pop(cluster_id, None)
        self._left_out.pop(cluster_id, None)
        self._forget(cluster_id)
        self._memory.drop_metrics(ClusterId(cluster_id))

    def _warnings(self, ids: Sequence[str]) -> list[str]:
        warnings = [self._nameless] if self._nameless else []
        bad = [name for name in ids if name in self._left_out] if self._left_out else []
        if bad:
            what = f"Metrics documents that cannot be used count as none: {short_list(bad)}"
            warnings.append(f"{what} ({bad[0]}: {self._left_out[bad[0]]}).")
        return warnings

    async def _ask(self, keys: frozenset[str]) -> None:
        read = await self.service.named(keys, dict(self._digests))
        now = _now()
        nameless = [name for name in read.left_out if not _is_cluster_id(name)]
        self._nameless = (
            f"The {self.service.service.name} at {self.service.service.url} answered with documents"
            f" that name no cluster, which count as none ({nameless[0]}: "
            f"{read.left_out[nameless[0]]})."
            if nameless
            else ""
        )
        for name in keys:
            cluster_id = ClusterId(name)
            self._read_at[name] = now
            self._left_out.pop(name, None)
            if name in read.left_out:
                self._left_out[name] = read.left_out[name]
            found = read.found.get(cluster_id)
            if found is not None:
                entry, digest = found
                self._forget(name)
                self._digests[digest] = cluster_id
                self._digest_of[name] = digest
                self._memory.keep_metrics(entry)
            elif cluster_id not in read.same:
                self._forget(name)
                self._memory.drop_metrics(cluster_id)

    def _forget(self, name: str) -> None:
        old = self._digest_of.pop(name, None)
        if old is not None:
            del self._digests[old]
