"""The answers to clients, and the laws: functions that find wrong answers.

The laws do no I/O, so that tests can pass wrong answers to them. All times are of the monotonic
clock of the clients' process.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

Gpu = tuple[str, str, str]


class AcknowledgedGrant(NamedTuple):
    """A lease whose grant a client received.

    Args:
        key: Idempotency key of the request.
        gpus: Cluster, node and number of each of its GPUs.
        server: The process that answered; empty if unknown.
        sent_at: When the request was first sent.
        answered_at: When the answer arrived.
    """

    key: str
    lease: str
    fencing: int
    gpus: tuple[Gpu, ...]
    server: str
    sent_at: float
    answered_at: float


class AcknowledgedRelease(NamedTuple):
    """An acknowledged release; its fields have the meanings of those of `AcknowledgedGrant`."""

    lease: str
    server: str
    sent_at: float
    answered_at: float


@dataclass
class FaultHistory:
    """The requests and answers of all clients, and the state of the server that leads at the end.

    Args:
        sent: When each request was first sent, by its key.
        grants: The grants, in the order of the answers; a request that is sent again has several.
        released_at: When the release of each lease was first sent.
        releases: Answered releases.
        refusals: Refusals that must not happen, as sentences.
        leases: The leases that the last server has at the end, each with its fencing number.
        waiting: Requests that wait at the last server at the end.
        committed: Fencing numbers of grants in the order in which they were committed.
    """

    sent: dict[str, float] = field(default_factory=dict)
    grants: list[AcknowledgedGrant] = field(default_factory=list)
    released_at: dict[str, float] = field(default_factory=dict)
    releases: list[AcknowledgedRelease] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    leases: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def first_grants(self) -> list[AcknowledgedGrant]:
        """Return the first answer about each lease."""
        first: dict[str, AcknowledgedGrant] = {}
        for each in self.grants:
            first.setdefault(each.lease, each)
        return list(first.values())

    def answers(self) -> list[AcknowledgedGrant | AcknowledgedRelease]:
        """Return all answers, in the order in which they came."""
        return sorted([*self.grants, *self.releases], key=lambda each: each.answered_at)


def longest_pause(times: Sequence[float], begin: float, end: float) -> float:
    """Return the longest time without an answer between `begin` and `end`; `times` are sorted.

    The last answer before `begin` and the first answer after `end` count, as clients see them.
    """
    first = max(0, bisect_right(times, begin) - 1)
    among = times[first : bisect_left(times, end) + 1]
    return max((after - before for before, after in itertools.pairwise(among)), default=0.0)


def gpus_in_two_leases(history: FaultHistory) -> list[str]:
    """Find GPUs that two clients could use at the same time according to their answers."""
    found = []
    spans: defaultdict[Gpu, list[tuple[float, float, str]]] = defaultdict(list)
    for each in history.first_grants():
        end = history.released_at.get(each.lease, float("inf"))
        for gpu in each.gpus:
            spans[gpu].append((each.answered_at, end, each.lease))
    for gpu, those in spans.items():
        for (_, end, before), (begin, _, after) in itertools.pairwise(sorted(those)):
            if end > begin:
                found.append(f"{'/'.join(gpu)} is in {before} and in {after}")
    return found


def find_lost_leases(history: FaultHistory) -> list[str]:
    """Find acknowledged leases that are missing although no client released them."""
    return [
        f"{each.lease} with number {each.fencing} is {history.leases.get(each.lease, 'not there')}"
        for each in history.first_grants()
        if each.lease not in history.released_at and history.leases.get(each.lease) != each.fencing
    ] + history.refusals


def undone_releases(history: FaultHistory) -> list[str]:
    """Find leases that still exist although their release was acknowledged."""
    return [each.lease for each in history.releases if each.lease in history.leases]


def find_unanswered_leases(history: FaultHistory) -> list[str]:
    """Find leases that no answer to a client names."""
    return sorted(history.leases.keys() - {each.lease for each in history.grants})


def fencing_out_of_order(history: FaultHistory) -> list[str]:
    """Find fencing numbers that repeat, or that are below one answered before the request."""
    first = history.first_grants()
    found = []
    by_number: dict[int, str] = {}
    for each in first:
        other = by_number.setdefault(each.fencing, each.lease)
        if other != each.lease:
            found.append(f"{other} and {each.lease} have the number {each.fencing}")
    highest, replies = 0, iter(sorted(first, key=lambda each: each.answered_at))
    before = next(replies, None)
    for each in sorted(first, key=lambda each: each.sent_at):
        while before is not None and before.answered_at < each.sent_at:
            highest = max(highest, before.fencing)
            before = next(replies, None)
        if each.fencing < highest:
            found.append(f"{each.lease} has {each.fencing}, and {highest} was answered before it")
    return found


def commits_out_of_order(history: FaultHistory) -> list[str]:
    """Find fencing numbers that do not grow from one grant in the ledger to the next."""
    return [
        f"{after} was committed after {before}"
        for before, after in itertools.pairwise(history.committed)
        if after <= before
    ]


def find_forgotten_requests(history: FaultHistory) -> list[str]:
    """Find requests without an answer, and requests that still wait after their clients ended."""
    granted = {each.key for each in history.grants}
    return [key for key in history.sent if key not in granted] + history.waiting


def leases_beside_keys(history: FaultHistory) -> list[str]:
    """Find idempotency keys that got two leases, and leases that belong to two keys."""
    pairs = {(each.key, each.lease) for each in history.grants}
    return [*_repetitions(key for key, _ in pairs), *_repetitions(lease for _, lease in pairs)]


def find_late_acknowledgements(history: FaultHistory) -> list[str]:
    """Find servers that acknowledged a message that was sent after their successor had answered."""
    answers = [each for each in history.answers() if each.server]
    begun: dict[str, float] = {}
    for each in answers:
        begun.setdefault(each.server, each.answered_at)
    followers = dict(itertools.pairwise(begun))
    return [
        f"{each.server} answered about {each.lease} after {follower} led"
        for each in answers
        if (follower := followers.get(each.server)) and begun[follower] < each.sent_at
    ]


LAWS: Final[dict[str, Callable[[FaultHistory], list[str]]]] = {
    "GPUs in two leases": gpus_in_two_leases,
    "acknowledged leases lost": find_lost_leases,
    "releases undone": undone_releases,
    "leases without an answer": find_unanswered_leases,
    "fencing numbers not above those before": fencing_out_of_order,
    "fencing numbers not in the order of commits": commits_out_of_order,
    "requests forgotten": find_forgotten_requests,
    "keys with two leases": leases_beside_keys,
    "answers of a deposed server": find_late_acknowledgements,
}


def violations(history: FaultHistory) -> dict[str, list[str]]:
    """Return the violations of each law."""
    return {name: law(history) for name, law in LAWS.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of all values."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def _repetitions(values: Iterable[str]) -> list[str]:
    return [each for each, times in Counter(values).items() if times > 1]
