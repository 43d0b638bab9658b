"""Shadows: a candidate gets the requests of the active version, and no client sees its answers.

The daemon reports each consultation of a live policy, and its outcome. A candidate gets the same
consultation, with the same fleet, in its own cell at low priority. A consultation that it cannot
get at once is dropped, since the fleet would have changed later. At most `IN_FLIGHT_MAX` of a
candidate's answers are awaited at a time. Requests that were not passed to the shadow are counted
as dropped; live requests never wait for a shadow.

The candidate and the requests may belong to different tenants. A candidate's values, errors and
durations may reveal a request, so only the owner of the alias sees all. Other tenants see the
differences at their own requests, and counts of all others in steps of `MANY`.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric

from moorage.catalog.embedded.aliases import Alias
from moorage.catalog.ports import Catalog
from moorage.core.allocator import Allocator
from moorage.core.fit.verification import Unsound, verify
from moorage.core.state.facts import Dequeued, Refusal
from moorage.core.state.state import State
from moorage.core.turns.effects import Consult, Respond
from moorage.core.turns.events import ConsultFailed, Proposed
from moorage.core.turns.turn import Turn
from moorage.daemon.answers import refusal_of
from moorage.daemon.observability.counters import gauges_of
from moorage.daemon.policies.finder import code_of
from moorage.daemon.publishing.version_statistics import FAULTS, MANY, percentiles
from moorage.daemon.tasks import Tasks
from moorage.model import GPU_MILLI, Ask, Code, Placement, RequestId, Share, Tenant
from moorage.policy import ProposalError, parse_proposal
from moorage.protocol.faults import ServiceError
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.policies import ComparedVersion, ShadowComparison
from moorage.sandbox.host.sandbox import PolicyFault, Sandbox

IN_FLIGHT_MAX: Final = 64
"""Maximum requests to one candidate that are not answered or compared yet."""
SAMPLES_MAX: Final = 50
"""Maximum differences in a report: the latest ones."""
LATENCIES_MAX: Final = 1024
"""Number of latest latencies from which percentiles are computed."""
NOT_ASKED: Final = frozenset({Code.BUSY, Code.SHUTTING_DOWN, Code.UNAVAILABLE})
"""Failures that mean that a candidate was not consulted at all."""
_VALUE_CHARS_MAX: Final = 2000
"""Maximum characters that a sample shows of an answer without a placement."""

Key = tuple[RequestId, int]
"""A request, and the number of its consultation."""


@dataclass(slots=True)
class Side:
    """The answer of one of the two versions to a consultation.

    Args:
        seconds: The time from the consultation to the answer.
        refusal: Why the version returned no usable value.
        placement: The proposed placement; empty if it proposed none.
    """

    seconds: float
    value: JsonValue = None
    refusal: Refusal | None = None
    placement: Placement = ()

    @property
    def kind(self) -> str:
        """`placed`, `declined`, or the code of its failure."""
        if self.refusal is not None:
            return self.refusal.code
        return "placed" if self.placement else "declined"

    def shown(self) -> JsonObject:
        """Return the answer in the form for a sample of the report."""
        if self.refusal is not None:
            return {"error": {"code": self.refusal.code, "reason": self.refusal.reason}}
        if not self.placement:
            return {"data": msgspec.json.encode(self.value).decode()[:_VALUE_CHARS_MAX]}
        return {
            "placement": [
                {
                    "cluster_id": share.cluster_id,
                    "node_id": share.node_id,
                    "gpus": list(share.gpus),
                    "gpu_milli": share.gpu_milli,
                }
                for share in self.placement
            ]
        }


@dataclass(slots=True)
class Pair:
    """One request, with the answers of the two versions."""

    ask: Ask
    started_at: float
    alone: bool
    active: Side | None = None
    candidate: Side | None = None


@dataclass(slots=True)
class Tally:
    """The totals of one version, over all pairs."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=LATENCIES_MAX))
    gpus_opened: int = 0
    nodes_opened: int = 0

    def report(self, version: str, *, whole: bool) -> ComparedVersion:
        """Return the totals; unless `whole`, only figures that cover many answers.

        A version controls each of its answers, and could reveal a request by a single one.
        """
        placed = self.kinds["placed"]
        return ComparedVersion(
            policy_rule_uri=version,
            placed=placed,
            refused=self.kinds.total() - placed,
            outcomes=dict(self.kinds) if whole else UNSET,
            gpus_opened=self.gpus_opened if whole else UNSET,
            nodes_opened=self.nodes_opened if whole else UNSET,
            latency_ms=percentiles(self.seconds, whole=whole),
        )


class Shadow:
    """Compares a candidate with the active version of one alias."""

    def __init__(self, alias: str, active: str, candidate: str) -> None:
        self.alias = alias
        self.active = active
        self.candidate = candidate
        self.since = time.time()
        self.pairs: dict[Key, Pair] = {}
        self.asked = self.dropped = self.abandoned = 0
        self.same = self.differ = self.differ_alone = 0
        self.tallies = (Tally(), Tally())
        self.samples: deque[tuple[Tenant, JsonObject]] = deque(maxlen=SAMPLES_MAX)
        self.figures = self._report([], whole=False)

    def compare(self, request: RequestId, pair: Pair, state: State) -> None:
        """Compare the two answers of a finished pair."""
        assert pair.active is not None
        assert pair.candidate is not None
        sides = (pair.active, pair.candidate)
        for side in sides:
            _compare(pair.ask, side, state)
        lease = state.lease(request)
        if lease is not None:
            pair.active.placement = lease.placement
        for tally, side in zip(self.tallies, sides, strict=True):
            tally.kinds[side.kind] += 1
            tally.seconds.append(side.seconds)
        if all(side.placement for side in sides):
            held = lease.placement if lease is not None and lease.state != "ended" else ()
            for tally, side in zip(self.tallies, sides, strict=True):
                gpus, nodes = _count_broken(side.placement, held, state)
                tally.gpus_opened += gpus
                tally.nodes_opened += nodes
        if _gist(pair.active) == _gist(pair.candidate):
            self.same += 1
        else:
            self.differ += 1
            self.differ_alone += pair.alone
            sample = {
                "request": request,
                "at": time.time(),
                "alone": pair.alone,
                "active": pair.active.shown(),
                "candidate": pair.candidate.shown(),
            }
            self.samples.append((pair.ask.tenant, sample))
        if (self.same + self.differ) % MANY == 0:
            self.figures = self._report([], whole=False)

    def _report(self, samples: list[JsonValue], *, whole: bool) -> ShadowComparison:
        """Return the whole report, or the part that other tenants may see."""
        active, candidate = self.tallies
        cost = {"refused": active.kinds["placed"] - candidate.kinds["placed"]}
        if whole:
            cost["gpus_opened"] = candidate.gpus_opened - active.gpus_opened
            cost["nodes_opened"] = candidate.nodes_opened - active.nodes_opened
        return ShadowComparison(
            alias=self.alias,
            since=self.since,
            whole=whole,
            asked=self.asked,
            dropped=self.dropped,
            abandoned=self.abandoned,
            compared=self.same + self.differ,
            same=self.same,
            differ=self.differ,
            differ_alone=self.differ_alone if whole else UNSET,
            active=active.report(self.active, whole=whole),
            candidate=candidate.report(self.candidate, whole=whole),
            cost=cost,
            samples=samples,
        )

    def faults(self, tenant: Tenant, *, whole: bool) -> Counter[str]:
        """Return the candidate's faults by code; unless `whole`, only at requests of `tenant`."""
        if whole:
            kinds = self.tallies[1].kinds
        else:
            own = (sample["candidate"] for owner, sample in self.samples if owner == tenant)
            kinds = Counter(side["error"]["code"] for side in own if "error" in side)
        return Counter({kind: count for kind, count in kinds.items() if kind in FAULTS})

    def report(self, tenant: Tenant, *, whole: bool) -> ShadowComparison:
        """Return the report; unless `whole`, other tenants' requests are hidden."""
        seen = [sample for owner, sample in self.samples if whole or owner == tenant]
        return self._report(seen, whole=True) if whole else replace(self.figures, samples=seen)


class Shadows:
    """Sends consultations to the shadows of all aliases, and compares the answers.

    Args:
        allocator: Knows what is free, and how many asks are being decided; read only.
        tasks: Runs the tasks that wait for answers.
    """

    def __init__(
        self, catalog: Catalog, sandbox: Sandbox, allocator: Allocator, tasks: Tasks
    ) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._allocator = allocator
        self._tasks = tasks
        self._by_alias: dict[str, Shadow] = {}
        self._by_active: dict[str, list[Shadow]] = {}

    def __bool__(self) -> bool:
        """Return whether any shadow exists; the hot path checks this first."""
        return bool(self._by_alias)

    def follow(self, name: str, alias: Alias | None) -> None:
        """Follow a changed alias; a new candidate or active version starts a new report."""
        shadow = self._by_alias.pop(name, None)
        if alias is not None and alias.shadow:
            same = (alias.version, alias.shadow)
            if shadow is None or (shadow.active, shadow.candidate) != same:
                shadow = Shadow(name, alias.version, alias.shadow)
            self._by_alias[name] = shadow
        self._by_active = {}
        for each in self._by_alias.values():
            self._by_active.setdefault(each.active, []).append(each)

    def report(self, name: str, tenant: Tenant, *, whole: bool) -> ShadowComparison | None:
        """Return the report of an alias's shadow for a tenant; None if the alias has no shadow."""
        shadow = self._by_alias.get(name)
        return shadow.report(tenant, whole=whole) if shadow else None

    def refuse_failing(self, name: str, uri: str, who: str) -> None:
        """Refuse to activate a version that fails as this alias's shadow.

        Raises:
            ServiceError: `conflict`, naming the failures that the tenant `who` may see.
        """
        shadow, alias = self._by_alias.get(name), self._catalog.aliases.find(name)
        if shadow is None or alias is None or shadow.candidate != uri:
            return
        faults = shadow.faults(Tenant(who), whole=alias.is_owned_by(who))
        if faults:
            shown = ", ".join(f"{count} {code}" for code, count in sorted(faults.items()))
            raise ServiceError(
                Code.CONFLICT,
                f"policy_rule_uri: {uri} fails as the shadow of {name}: {shown}",
                field="policy_rule_uri",
                expected="a version that does not fail, or `force` (`--force`). `moorage policy"
                f" shadow {name} --report` shows the failures. To count from zero, start the shadow"
                " again",
            )

    # Reports about live policies ----------------------------------------------------------------

    def observe_consultation(self, consult: Consult) -> None:
        """Consult the candidates, too, since a live policy is consulted."""
        ask = consult.ask
        for shadow in self._by_active.get(ask.policy.uri, ()):
            record = self._catalog.memory.policy(shadow.candidate)
            if record is None or len(shadow.pairs) >= IN_FLIGHT_MAX:
                shadow.dropped += 1
                continue
            shadow.asked += 1
            key = (ask.id, consult.consultation)
            pair = shadow.pairs[key] = Pair(ask, time.monotonic(), self._allocator.undecided <= 1)
            question = consult
            try:
                if record.schemas is not None:  # Its schemas may differ from the active version's.
                    question = replace(consult, ask=record.schemas.completed(ask))
            except ServiceError as error:
                pair.candidate = Side(0.0, refusal=refusal_of(error))
                continue
            answer = self._sandbox.ask_aside(question, code_of(record))
            self._tasks.spawn(self._hear(shadow, key, pair, answer))

    def note_decision(self, event: Proposed | ConsultFailed, turn: Turn) -> None:
        """Note a live policy's answer, and the core's decision on it, to compare candidates."""
        key = (event.request, event.consultation)
        for shadow in self._by_alias.values():
            pair = shadow.pairs.get(key)
            if pair is None:
                continue
            seconds = time.monotonic() - pair.started_at
            if isinstance(event, ConsultFailed):
                pair.active = Side(seconds, refusal=event.refusal)
            else:
                pair.active = Side(seconds, event.value, _policy_fault(turn))
            self._finish(shadow, key, pair)

    def forget_consultation(self, request: RequestId, consultation: int) -> None:
        """Drop the pair of a live consultation that was cancelled: there is nothing to compare."""
        for shadow in self._by_alias.values():
            if shadow.pairs.pop((request, consultation), None) is not None:
                shadow.abandoned += 1

    async def _hear(
        self, shadow: Shadow, key: Key, pair: Pair, answer: "asyncio.Future[JsonValue]"
    ) -> None:
        try:
            value = await answer
            pair.candidate = Side(time.monotonic() - pair.started_at, value)
        except PolicyFault as fault:
            if fault.refusal.code in NOT_ASKED:
                if shadow.pairs.pop(key, None) is not None:
                    shadow.asked -= 1
                    shadow.dropped += 1
                return
            pair.candidate = Side(time.monotonic() - pair.started_at, refusal=fault.refusal)
        self._finish(shadow, key, pair)

    def _finish(self, shadow: Shadow, key: Key, pair: Pair) -> None:
        if pair.active is not None and pair.candidate is not None and key in shadow.pairs:
            del shadow.pairs[key]
            shadow.compare(key[0], pair, self._allocator.state)

    def metrics(self) -> Iterable[Metric]:
        """Yield the counts of every shadow that all tenants may see."""
        rows: list[tuple[tuple[str, str, str], float]] = []
        for shadow in self._by_alias.values():
            report = shadow.figures
            names = ("asked", "dropped", "abandoned", "same", "differ")
            counts = {what: getattr(report, what) for what in names}
            counts |= {what: getattr(report.candidate, what) for what in ("placed", "refused")}
            rows += [((shadow.alias, shadow.candidate, w), float(n)) for w, n in counts.items()]
        labels = ("alias", "policy", "what")
        yield gauges_of("moorage_shadow", "Consultations of a shadow, by outcome", labels, rows)


def _policy_fault(turn: Turn) -> Refusal | None:
    """Return the core's refusal if the cause is the policy's answer; None if it is the fleet."""
    answers = [effect.answer for effect in turn.effects if isinstance(effect, Respond)]
    left = [fact.refusal for fact in turn.facts if isinstance(fact, Dequeued)]
    for answer in (*answers, *left):
        if isinstance(answer, Refusal) and answer.code in FAULTS:
            return answer
    return None


def _compare(ask: Ask, side: Side, state: State) -> None:
    """Set the placement of an answer, or its refusal if the core could never grant it.

    The fleet may have changed since the answer, so a place that is taken now is no fault.
    """
    if side.refusal is not None:
        return
    try:
        proposals = parse_proposal(side.value, ask.demand)
    except ProposalError as error:
        side.refusal = Refusal(Code.POLICY_BAD_OUTPUT, f"malformed: {error}", error.field)
        return
    if not proposals:
        return
    verdict = verify(ask, proposals, state.fleet, state.clusters)
    if isinstance(verdict, Unsound):
        side.refusal = verdict.refusal
    elif isinstance(verdict, tuple):
        side.placement = verdict
    else:
        shares = tuple(share for proposed in proposals if (share := proposed.share()) is not None)
        side.placement = shares if len(shares) == len(proposals) else ()


def _gist(side: Side) -> JsonValue:
    """Return the part of an answer by which two answers are compared."""
    if side.refusal is not None:
        return side.refusal.code
    if not side.placement:
        return "declined" if isinstance(side.value, Mapping) else side.value
    return sorted((s.cluster_id, s.node_id, sorted(s.gpus), s.gpu_milli) for s in side.placement)


def _count_broken(placement: Placement, held: Placement, state: State) -> tuple[int, int]:
    """Return the number of whole, free GPUs and of idle nodes that a placement starts to use.

    Args:
        placement: The placement to judge.
        held: The placement that was granted to the active version for the same request.
        state: The present state.
    """
    gpus = nodes = 0
    for share in placement:
        row = state.fleet.row(share.cluster_id, share.node_id)
        if row is None:
            continue
        own = _own(held, share)
        ids = state.fleet.gpu_ids[row]
        free = dict(zip(ids, state.fleet.gpu_free[row].tolist(), strict=False))
        total = dict(zip(ids, state.fleet.gpu_total[row].tolist(), strict=False))
        for gpu, milli in own.items():
            if gpu in free:
                free[gpu] += milli
        gpus += sum(free.get(gpu, 0) >= GPU_MILLI for gpu in share.gpus)
        nodes += bool(ids) and all(free[gpu] >= total[gpu] for gpu in ids)
    return gpus, nodes


def _own(held: Placement, share: Share) -> dict[str, int]:
    place = (share.cluster_id, share.node_id)
    return {
        gpu: each.gpu_milli
        for each in held
        if (each.cluster_id, each.node_id) == place
        for gpu in each.gpus
    }
