"""History of the last day, one sample per minute, for `GET /history` and the console's first view.

Grants do no work for the history: a sample reads the state, and the counts of `counters` and
`durations`. A file has the same samples for the next start; for longer times there is Prometheus.
"""

import asyncio
import heapq
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np
import structlog
from msgspec import convert
from msgspec.structs import replace

from moorage.core.state.state import State
from moorage.daemon.observability.counters import Measures
from moorage.daemon.observability.durations import OTHER, DurationMetrics, quantile
from moorage.model import ClusterId
from moorage.records.history import (
    AgentsNow,
    ClusterOut,
    EndingSoon,
    GpuHistory,
    GpuUse,
    History,
    HistoryNow,
    NewsEvent,
    OldestWaiter,
    Quantiles,
)
from moorage.records.requests import Resources, resources_of
from moorage.records.rights import Caller, Right

log = structlog.get_logger("moored")

SAMPLE_SECONDS: Final = 60.0
SAMPLES_MAX: Final = 24 * 60
"""Number of samples of one day."""
DAY_SECONDS: Final = SAMPLES_MAX * SAMPLE_SECONDS
SERIES_MAX: Final = 20
"""Maximum models, tenants and codes with own series in a sample; all others count as `other`."""
OLDEST_MAX: Final = 5
ANSWERS_MAX: Final = 200
"""Maximum answers that are cached until the next sample."""
SOON_SECONDS: Final = 3600.0
ENDING_SECONDS: Final = 5.0
"""Seconds between two counts of leases that end soon, which visit all leases."""
CLUSTERS_OUT_MAX: Final = 20
LOOK_SECONDS: Final = 1.0
"""Seconds between two measurements of the event loop's delay."""
WARM: Final = "warm"
OTHERS: Final = "others"
_STATM: Final = Path("/proc/self/statm")


MODE: Final = 0o600
Sample = TypeVar("Sample")


class HistoryFile(Generic[Sample]):
    """A file of JSON lines, one sample each; at most twice as many lines as wanted samples.

    The methods use the disk, so call them in a thread, not on the event loop. Lines that cannot be
    read are left out, such as a line that a crash cut short, or a line of another release.

    Args:
        path: The path of the file, which need not exist.
        kind: The type of a line.
        most: Number of wanted samples.
    """

    def __init__(self, path: Path, kind: type[Sample], most: int) -> None:
        self._path = path
        self._most = most
        self._decoder = msgspec.json.Decoder(kind)
        self._lines = 0

    def read(self) -> list[Sample]:
        """Return the last samples, oldest first; drop all older ones from the file.

        Raises:
            OSError: The file cannot be read or written.
        """
        found = list(self._readable())[-self._most :]
        self._write(found)
        return found

    def append(self, sample: Sample) -> None:
        """Add a sample.

        Raises:
            OSError: The file cannot be written.
        """
        if self._lines >= 2 * self._most:
            self._write(list(self._readable())[-self._most :])
        self._path.touch(MODE)
        with self._path.open("ab") as file:
            file.write(_line(sample))
        self._lines += 1

    def _readable(self) -> Iterator[Sample]:
        lines = self._path.read_bytes().splitlines() if self._path.exists() else ()
        for line in lines:
            try:
                yield self._decoder.decode(line)
            except msgspec.DecodeError:
                continue

    def _write(self, samples: Iterable[Sample]) -> None:
        lines = list(map(_line, samples))
        beside = self._path.with_suffix(".new")
        beside.touch(MODE)
        beside.write_bytes(b"".join(lines))
        beside.replace(self._path)
        self._lines = len(lines)


def _line(sample: object) -> bytes:
    return msgspec.json.encode(sample) + b"\n"


@dataclass(frozen=True, slots=True)
class _Counts:
    """Running totals; a sample stores the differences between two of them."""

    refusals: Mapping[str, int]
    grants: tuple[int, ...]
    evaluations: tuple[int, ...]
    commits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    now: HistoryNow
    counts: _Counts
    loop_seconds: float


class HistoryRing:
    """Takes a sample per minute, and answers queries from the samples of the last day.

    Args:
        state: The core's state; read only.
        measures: Counts refusals.
        durations: Measure grants, evaluations and commits.
        sessions: Returns how many WebSockets are open.
        events: Returns the last news that a tenant may see; for None, all.

    Attributes:
        agents: Returns the states of agents; the daemon sets it once they are known.
        path: The path of the file that has the samples for the next start; None: the samples end
            with the process.
    """

    def __init__(
        self,
        state: State,
        measures: Measures,
        durations: DurationMetrics,
        sessions: Callable[[], int],
        events: Callable[[str | None], list[NewsEvent]],
    ) -> None:
        self._state = state
        self._measures = measures
        self._durations = durations
        self._sessions = sessions
        self._events = events
        self.agents: Callable[[], AgentsNow] = AgentsNow
        self.path: Path | None = None
        self._ending: dict[str, EndingSoon] = {}
        self._ending_at = 0.0
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._taken = 0
        self._late = 0.0
        self._before = self._count()
        self._answers: dict[tuple[str | None, int, int], History] = {}
        """Answers since the last sample, cached by viewer, minutes and step."""

    async def run(self) -> None:
        """Take a sample at once, then one a minute, and store each. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        file = None if self.path is None else HistoryFile(self.path, _Sample, SAMPLES_MAX)
        if file is not None:
            with _noting():
                self._resume(await asyncio.to_thread(file.read), time.time())
        due = loop.time()
        while True:
            begun = loop.time()
            if begun >= due:
                due = begun + SAMPLE_SECONDS
                self.take(time.time())
                if file is not None:
                    with _noting():
                        await asyncio.to_thread(file.append, self._samples[-1])
            before = loop.time()
            await asyncio.sleep(LOOK_SECONDS)
            self._late = max(self._late, loop.time() - before - LOOK_SECONDS)

    def take(self, at: float) -> None:
        """Take a sample.

        Args:
            at: The time of the sample, in seconds since the epoch.
        """
        now = self._count()
        self._samples.append(_Sample(self._now(at), _difference(self._before, now), self._late))
        self._before, self._late = now, 0.0
        self._taken += 1
        self._answers.clear()

    def _resume(self, samples: Iterable[_Sample], at: float) -> None:
        """Load the samples of the last day that the previous process stored."""
        for each in samples:
            if at - DAY_SECONDS < each.now.at <= at and _alike(each.counts, self._before):
                self._samples.append(each)
                self._taken += 1

    def answer(self, caller: Caller, minutes: int, step: int) -> History:
        """Return the history, as a caller may see it.

        Args:
            caller: Without the right to see all, the caller gets only the sum of other tenants.
            minutes: Minutes to go back.
            step: Minutes per point; points begin at multiples of this.
        """
        viewer = None if caller.may(Right.READ_ALL) else caller.tenant
        key = viewer, minutes, step
        answer = self._answers.get(key)
        if answer is None:
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.clear()
            answer = self._answers[key] = self._put_together(viewer, minutes, step)
        now = self._now(time.time())
        now.tenants = _visible(now.tenants, viewer)
        now.oldest = self._oldest(viewer)
        now.ending = self._ending_soon(viewer, now.at)
        now.agents = self.agents() if viewer is None else None
        now.clusters_out = self._clusters_out()
        return replace(answer, now=now, events=self._events(viewer))

    def _ending_soon(self, viewer: str | None, at: float) -> EndingSoon:
        if at - self._ending_at >= ENDING_SECONDS:
            self._ending_at, self._ending = at, {}
            for lease in self._state.leases.values():
                if lease.expires_at < at + SOON_SECONDS:
                    found = self._ending.setdefault(lease.tenant, EndingSoon())
                    found.leases += 1
                    found.gpu_milli += sum(len(s.gpus) * s.gpu_milli for s in lease.placement)
        if viewer is not None:
            return self._ending.get(viewer, EndingSoon())
        all_ = self._ending.values()
        return EndingSoon(sum(e.leases for e in all_), sum(e.gpu_milli for e in all_))

    def _clusters_out(self) -> list[ClusterOut]:
        state, fleet = self._state, self._state.fleet
        length = len(fleet.cluster_ids)
        nodes = np.bincount(fleet.cluster, minlength=length)
        open_ = np.bincount(fleet.cluster, fleet.closed == 0, length)
        out = np.flatnonzero((nodes > 0) & (open_ == 0))[:CLUSTERS_OUT_MAX].tolist()
        found = []
        for number in out:
            cluster = ClusterId(fleet.cluster_ids[number])
            known = state.clusters.get(cluster)
            first = known.nodes[0] if known is not None and known.nodes else None
            reason = "" if first is None else first.unavailable
            if first is not None:
                cordon = state.cordons.get((cluster, first.id), state.cordons.get((cluster, "")))
                reason = reason if cordon is None else cordon.why
            found.append(ClusterOut(cluster, int(nodes[number]), reason))
        return found

    def _oldest(self, viewer: str | None) -> list[OldestWaiter]:
        shown = (
            each
            for each in self._state.waiting.values()
            if viewer is None or each.ask.tenant == viewer
        )
        return [
            OldestWaiter(
                each.ask.id,
                each.ask.tenant,
                each.at,
                None
                if each.ask.demand is None
                else convert(resources_of(each.ask.demand), Resources),
            )
            for each in heapq.nsmallest(OLDEST_MAX, shown, key=lambda each: each.at)
        ]

    def _put_together(self, viewer: str | None, minutes: int, step: int) -> History:
        first = self._taken - len(self._samples)
        points: dict[int, list[_Sample]] = {}
        for number, sample in enumerate(self._samples, first):
            if number >= self._taken - minutes:
                points.setdefault(number // step, []).append(sample)
        whole = list(points.values())
        last = [point[-1].now for point in whole]
        models = _largest(each.models for each in last)
        tenants = [_visible(each.tenants, viewer) for each in last]
        refusals = [_sum(each.counts.refusals for each in point) for point in whole]
        return History(
            now=whole[-1][-1].now if whole else self._now(0.0),  # `answer` sets the present one.
            at=[each.at for each in last],
            minutes=[len(point) for point in whole],
            models={name: _gpus(name, last) for name in models},
            tenants={
                name: [each.get(name, 0) for each in tenants] for name in _largest_use(tenants)
            },
            waiting=[each.waiting for each in last],
            longest_wait_seconds=[
                max(each.now.longest_wait_seconds for each in point) for point in whole
            ],
            failing=[each.failing for each in last],
            grants=[sum(sum(each.counts.grants) for each in point) for point in whole],
            grant=self._quantiles(whole, "grants"),
            evaluation=self._quantiles(whole, "evaluations"),
            commit=self._quantiles(whole, "commits"),
            loop_seconds=[round(max(each.loop_seconds for each in point), 4) for point in whole],
            memory_mib=[each.memory_mib for each in last],
            sessions=[each.sessions for each in last],
            refusals={
                name: [each.get(name, 0) for each in refusals] for name in _largest_use(refusals)
            },
        )

    def _quantiles(self, points: Sequence[Sequence[_Sample]], what: str) -> Quantiles:
        bounds = self._durations.bounds(what)
        sums = [_add_columns([getattr(each.counts, what) for each in point]) for point in points]
        p50, p99 = ([quantile(bounds, each, q) for each in sums] for q in (0.5, 0.99))
        return Quantiles(p50, p99)

    def _count(self) -> _Counts:
        durations = self._durations
        grants, evaluations, commits = map(durations.buckets, ("grants", "evaluations", "commits"))
        return _Counts(self._measures.refusals(), grants, evaluations, commits)

    def _now(self, at: float) -> HistoryNow:
        state = self._state
        held = state.accounts.usages().items()
        tenants = {tenant or WARM: amounts[0] for (tenant, part), amounts in held if part is None}
        since = min((each.at for each in state.waiting.values()), default=at)
        return HistoryNow(
            at,
            self._by_model(),
            _bound({name: many for name, many in tenants.items() if many}),
            len(state.waiting),
            round(max(0.0, at - since), 3),
            sum(each.state == "failing" for each in state.leases.values()),
            len(state.fleet),
            int((state.fleet.closed > 0).sum()),
            len(state.leases),
            self._sessions(),
            _memory_mib(),
        )

    def _by_model(self) -> dict[str, GpuUse]:
        state, fleet = self._state, self._state.fleet
        devices = fleet.gpu_model >= 0
        models, length = fleet.gpu_model[devices], len(fleet.models)
        total, free = (
            np.bincount(models, column[devices], length).astype(np.int64).tolist()
            for column in (fleet.gpu_total, fleet.gpu_free)
        )
        closed = np.bincount(
            models, np.where(fleet.closed[:, None] > 0, fleet.gpu_total, 0)[devices], length
        ).astype(np.int64)
        # A node out of service has nothing free, but its leases still hold their amounts.
        for row in np.flatnonzero(fleet.closed).tolist():
            ids = fleet.gpu_ids[row]
            for share in state.places.get(fleet.node_ids[row], {}).values():
                for gpu in share.gpus:
                    if gpu in ids:
                        closed[fleet.gpu_model[row, ids.index(gpu)]] -= share.gpu_milli
        idle = closed.tolist()
        largest, empty = self._whole()
        return {
            name or "no model": GpuUse(
                total[n], total[n] - free[n] - idle[n], idle[n], largest[n], empty[n]
            )
            for n, name in enumerate(fleet.models)
            if total[n]
        }

    def _whole(self) -> tuple[list[int], list[int]]:
        """Return, per model, the most wholly free GPUs on one node, and the nodes without a lease.

        A node belongs to the model of its first GPU.
        """
        fleet = self._state.fleet
        length = len(fleet.models)
        largest, empty = np.zeros(length, np.int64), np.zeros(length, np.int64)
        if fleet.gpu_total.shape[1]:
            there = (fleet.gpu_total[:, 0] > 0) & (fleet.closed == 0) & (fleet.gpu_model[:, 0] >= 0)
            whole = ((fleet.gpu_free == fleet.gpu_total) & (fleet.gpu_total > 0)).sum(1)[there]
            model = fleet.gpu_model[there, 0]
            np.maximum.at(largest, model, whole)
            all_free = whole == (fleet.gpu_total[there] > 0).sum(1)
            np.add.at(empty, model[all_free], 1)
        return largest.tolist(), empty.tolist()


@contextmanager
def _noting() -> Iterator[None]:
    """Log an error of the disk and continue without the file."""
    try:
        yield
    except OSError as error:
        log.warning("history_not_stored", error=str(error))


def _alike(one: _Counts, other: _Counts) -> bool:
    """Return whether both totals have the same buckets: another release may have others."""
    return all(
        len(getattr(one, name)) == len(getattr(other, name))
        for name in ("grants", "evaluations", "commits")
    )


def _difference(before: _Counts, now: _Counts) -> _Counts:
    def less(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a - b for a, b in zip(one, other, strict=True))

    refused = {name: n - before.refusals.get(name, 0) for name, n in now.refusals.items()}
    return _Counts(
        _bound({name: n for name, n in refused.items() if n}),
        less(now.grants, before.grants),
        less(now.evaluations, before.evaluations),
        less(now.commits, before.commits),
    )


def _bound(found: dict[str, int]) -> dict[str, int]:
    """Return the largest entries, and the sum of the others as one entry."""
    if len(found) <= SERIES_MAX:
        return found
    order = sorted(found, key=found.__getitem__, reverse=True)
    rest = sum(found[name] for name in order[SERIES_MAX - 1 :])
    shown = {name: found[name] for name in order[: SERIES_MAX - 1]}
    return {**shown, OTHER: shown.get(OTHER, 0) + rest}


def _visible(tenants: Mapping[str, int], viewer: str | None) -> dict[str, int]:
    """Return the amounts that tenants hold; a viewer sees its own, and the sum of the others."""
    if viewer is None:
        return dict(tenants)
    own = tenants.get(viewer, 0)
    return {viewer: own, OTHERS: sum(tenants.values()) - own}


def _sum(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in parts:
        found.update(each)
    return found


def _largest_use(points: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names that get a series: those with the largest sum over all points."""
    return [name for name, _ in _sum(points).most_common(SERIES_MAX)]


def _largest(points: Iterable[Mapping[str, GpuUse]]) -> list[str]:
    most: dict[str, int] = {}
    for point in points:
        for name, each in point.items():
            most[name] = max(most.get(name, 0), each.total)
    return sorted(most, key=most.__getitem__, reverse=True)[:SERIES_MAX]


def _gpus(name: str, points: Sequence[HistoryNow]) -> GpuHistory:
    none = GpuUse(0, 0, 0)
    uses = [each.models.get(name, none) for each in points]
    return GpuHistory([each.total for each in uses], [each.used for each in uses])


def _add_columns(rows: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _memory_mib() -> int:
    """Return the memory of this process in MiB; 0 if unknown."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
