"""The language of transcripts: a command per block, a line of dashes, and the core's answers.

Commands, each optionally after `@SECONDS`, which moves the clock:

    cluster harbour n1:4xA100 n2:2xT4,cpu=8000,mem=4096,rack=r1,exclusive    (`links=2`: pairs)
    gone harbour
    ask r1 s1 gpus=2 [milli= models= cpu= mem= nodes= topology= ttl= wait= priority= key= in=]
              [tenant=] [policy=] [bare] [advice] [provision] [requeue=ATTEMPTS] [keep=SECONDS]
              [dry-run] [explain]
    propose r1[#NUMBER] harbour/n1[0,1][@MILLI] …    or JSON instead of nodes
    policy-failed r1 CODE
    release r1 s1 [TOKEN]     renew r1 s1 [TTL]     cancel r1 s1 [TENANT]
    status|why|queue|leases|fleet s1 [SUBJECT]
    flush s1 [CLUSTER]     lose s1     tick
    workload-started|workload-stopped|workload-kept r1[#FENCING]
    workload-failed|workload-finished r1[#FENCING] REASON
    pause SECONDS     before the second start of a workload; default 1
    restart [lost=FACTS]      the process died; this many of its last facts were not durable
    event KIND JSON           any event, as the simulation writes it

`ask` has a default `ttl` of 60 and the token `token-ID`; the default tenant is `ann`.
"""

import json
import re
from typing import Any

import msgspec
from msgspec.structs import replace

from moorage.core.allocator import Allocator
from moorage.core.state.facts import (
    Carried,
    ClusterRemoved,
    ClusterSet,
    Counted,
    Dequeued,
    Ended,
    Ending,
    Fact,
    Finished,
    Granted,
    Paused,
    Queued,
    Refusal,
    Renewed,
    Requeued,
    Resumed,
    Started,
    Warmed,
)
from moorage.core.state.invariants import check
from moorage.core.turns.effects import (
    Address,
    Advice,
    Consult,
    Effect,
    Forget,
    Information,
    KeepWarm,
    LeaseNews,
    Look,
    Recall,
    Respond,
    Response,
    Start,
    Stop,
)
from moorage.core.turns.events import (
    Asked,
    CancelAsked,
    ClusterGone,
    ClusterSeen,
    ConsultFailed,
    Event,
    FlushAsked,
    Inquired,
    Proposed,
    ReleaseAsked,
    RenewAsked,
    Restarted,
    SessionLost,
    Tick,
    WorkloadEnded,
    WorkloadFailed,
    WorkloadKept,
    WorkloadStarted,
    WorkloadStopped,
)
from moorage.core.turns.turn import Turn
from moorage.model import (
    REQUEUE_PAUSE_SECONDS,
    Ask,
    Cluster,
    ClusterId,
    Code,
    Demand,
    Gpu,
    LeaseTerms,
    Node,
    NodeId,
    PolicyRef,
    Provision,
    RequestId,
    SessionId,
    Share,
    Tenant,
)

EVENTS: dict[str, Any] = {kind.__name__: kind for kind in Event.__args__}
GRACE_SECONDS = 10.0


class Story:
    """An allocator that plays a transcript line by line."""

    def __init__(self) -> None:
        self.pause = REQUEUE_PAUSE_SECONDS
        self.allocator = Allocator()
        self.now = 100.0
        self.ledger: list[Fact] = []
        self.consulted: dict[str, int] = {}
        self.numbers: dict[str, int] = {}

    def tell(self, command: str) -> list[str]:
        """Play one command; return the core's answers, line by line."""
        if command.startswith("@"):
            clock, _, command = command.partition(" ")
            set_back = command.startswith("event ClockSet ")
            assert float(clock[1:]) >= self.now or set_back, "the clock never goes back"
            self.now = float(clock[1:])
        if command.split()[0] == "pause":
            assert not self.ledger, "a setting must precede all facts"
            self.pause = float(command.split()[1])
            self.allocator = Allocator(self.pause)
            return []
        if command.split()[0] == "restart":
            lost = int(dict(_pairs(command.split()[1:])).get("lost", 0))
            del self.ledger[len(self.ledger) - lost :]
            self.allocator = Allocator(self.pause)
            self.allocator.replay(self.ledger)
            event: Event = Restarted(GRACE_SECONDS)
        else:
            event = self._event(command)
        turn = self.allocator.step(event, self.now)
        check(self.allocator.state)
        self.ledger += turn.facts
        for effect in turn.effects:
            if isinstance(effect, Consult):
                self.consulted[effect.ask.id] = effect.consultation
        return render(turn)

    def _event(self, command: str) -> Event:
        match command.split():
            case ["cluster", name, *nodes]:
                return ClusterSeen(Cluster(ClusterId(name), tuple(map(_node, nodes))))
            case ["gone", name]:
                return ClusterGone(ClusterId(name))
            case ["ask", request, session, *options]:
                return Asked(self._address(session), _ask(request, options))
            case ["propose", request, *_]:
                name, _, number = request.partition("#")
                rest = command.split(maxsplit=2)[2]
                reply = int(number or self.consulted[name])
                return Proposed(RequestId(name), reply, _value(rest))
            case ["policy-failed", name, code]:
                refusal = Refusal(Code(code), f"The policy failed: {code}.")
                return ConsultFailed(RequestId(name), self.consulted[name], refusal)
            case ["release", lease, session, *token]:
                secret = token[0] if token else f"token-{lease}"
                return ReleaseAsked(self._address(session), RequestId(lease), secret)
            case ["renew", lease, session, *ttl]:
                seconds = float(ttl[0]) if ttl else None
                to = self._address(session)
                return RenewAsked(to, RequestId(lease), f"token-{lease}", seconds)
            case ["cancel", request, session, *tenant]:
                owner = Tenant(tenant[0] if tenant else "ann")
                return CancelAsked(self._address(session), RequestId(request), owner)
            case [("status" | "why" | "queue" | "leases" | "fleet") as question, session, *subject]:
                to = self._address(session)
                return Inquired(to, question, Tenant("ann"), subject[0] if subject else "")
            case ["lose", session]:
                return SessionLost(SessionId(session))
            case ["tick"]:
                return Tick()
            case ["workload-started", lease]:
                return WorkloadStarted(*self._find_engaged(lease), "10.0.0.1:80")
            case ["workload-failed", lease, *reason]:
                reported = self._find_engaged(lease)
                return WorkloadFailed(*reported, " ".join(reason), 1, ("its last line",))
            case ["workload-ended", lease, ("succeeded" | "failed") as phase, *reason]:
                code, tail = (0, ()) if phase == "succeeded" else (7, ("its last line",))
                return WorkloadEnded(
                    *self._find_engaged(lease), phase, " ".join(reason), code, tail
                )
            case ["workload-kept", lease]:
                return WorkloadKept(*self._find_engaged(lease))
            case ["flush", session, *cluster]:
                to = self._address(session)
                return FlushAsked(to, Tenant("ann"), ClusterId(cluster[0]) if cluster else None)
            case ["workload-stopped", lease]:
                return WorkloadStopped(*self._find_engaged(lease))
            case ["event", kind, *_]:
                body = command.split(maxsplit=2)[2]
                event: Event = msgspec.json.decode(body, type=EVENTS[kind])
                return event
        raise AssertionError(f"not a command: {command}")

    def _find_engaged(self, text: str) -> tuple[RequestId, int]:
        """Return the lease of a backend's report, and the number of its grant."""
        name, _, reply = text.partition("#")
        lease = self.allocator.state.lease(RequestId(name))
        return RequestId(name), int(reply or (lease.fencing if lease else 0))

    def _address(self, session: str) -> Address:
        self.numbers[session] = self.numbers.get(session, 0) + 1
        return Address(SessionId(session), self.numbers[session])


def _pairs(options: list[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (option.partition("=") for option in options)]


def _node(text: str) -> Node:
    name, _, rest = text.partition(":")
    gpus, *options = rest.split(",")
    count, _, model = gpus.partition("x")
    given = dict(_pairs(options))
    size = int(given.get("links", 0))
    return Node(
        id=NodeId(name),
        cpu_milli=int(given.get("cpu", 64_000)),
        memory_mib=int(given.get("mem", 262_144)),
        gpus=tuple(
            Gpu(
                str(number),
                model,
                81_920,
                link_group=f"link-{number // size}" if size else "",
                exclusive="exclusive" in given,
            )
            for number in range(int(count))
        ),
        rack=given.get("rack", ""),
    )


def _ask(request: str, options: list[str]) -> Ask:
    given = dict(_pairs(options))
    demand = Demand(
        gpus=int(given.get("gpus", 0)),
        gpu_milli=int(given.get("milli", 1000)),
        models=tuple(given["models"].split(",")) if "models" in given else (),
        cpu_milli=int(given.get("cpu", 0)),
        memory_mib=int(given.get("mem", 0)),
        nodes=int(given.get("nodes", 1)),
        topology=given.get("topology", ""),  # type: ignore[arg-type]  # The story knows them.
    )
    terms = LeaseTerms(
        ttl_seconds=float(given.get("ttl", 60)),
        wait_seconds=float(given.get("wait", 0)),
        priority=int(given.get("priority", 0)),
        idempotency_key=given.get("key", ""),
    )
    provision = Provision("memory") if "provision" in given else None
    if "requeue" in given:
        attempts = int(given["requeue"])
        provision = Provision("memory", on_failure="requeue", attempts_max=attempts)
    if "keep" in given:
        provision = replace(
            provision or Provision("memory"), keep_warm_seconds=float(given["keep"])
        )
    policy = given.get("policy", "first_fit:1")
    clusters = given["in"].split(",") if "in" in given else None
    return Ask(
        id=RequestId(request),
        tenant=Tenant(given.get("tenant", "ann")),
        policy=PolicyRef(policy, f"digest of {policy}"),
        candidates=None if clusters is None else tuple(map(ClusterId, clusters)),
        demand=None if "bare" in given else demand,
        terms=None if "advice" in given else terms,
        provision=provision,
        token_digest=f"token-{request}",
        explain="explain" in given,
        dry_run="dry-run" in given,
    )


def _value(text: str) -> Any:
    """Read a placement such as `harbour/n1[0,1]@500 …`, or JSON."""
    if not re.match(r"\w+(/\w+)?(\[|$| )", text) or text in {"null", "true", "false"}:
        return json.loads(text)
    shares = []
    for word in text.split():
        found = re.fullmatch(r"(\w+)(?:/(\w+))?(?:\[([\w,]*)\])?(?:@(\d+))?", word)
        assert found, word
        cluster, node, gpus, milli = found.groups()
        share: dict[str, Any] = {"cluster_id": cluster}
        if node is not None:
            share["node_id"] = node
        if gpus is not None:
            share["gpus"] = [gpu for gpu in gpus.split(",") if gpu]
        if milli is not None:
            share["gpu_milli"] = int(milli)
        shares.append(share)
    return shares if len(shares) > 1 else shares[0]


def render(turn: Turn) -> list[str]:
    """Print a turn: one line for each fact and each effect."""
    facts = [f"fact   {type(fact).__name__} {_fact(fact)}".rstrip() for fact in turn.facts]
    effects = [f"effect {type(e).__name__} {_effect(e)}".rstrip() for e in turn.effects]
    return facts + effects


def _fact(fact: Fact) -> str:
    match fact:
        case ClusterSet(cluster):
            return f"{cluster.id} {' '.join(node.id for node in cluster.nodes)}"
        case ClusterRemoved(cluster_id):
            return cluster_id
        case Queued(ask, _, deadline):
            return f"{ask.id} until={deadline:g}"
        case Dequeued(request, _, refusal):
            return f"{request} {refusal.code}"
        case Granted(lease) | Carried(lease):
            return _lease(lease)
        case Renewed(lease_id, expires_at) | Warmed(lease_id, _, expires_at):
            return f"{lease_id} until={expires_at:g}"
        case Started(lease_id, _, endpoint):
            return f"{lease_id} at {endpoint}"
        case Finished(lease_id, outcome):
            return f"{lease_id} {outcome.phase}: {outcome.detail}"
        case Paused(lease_id, _, retry_at):
            return f"{lease_id} until={retry_at:g}"
        case Resumed(lease_id):
            return lease_id
        case Requeued(lease_id, _, reason):
            return f"{lease_id} {reason}"
        case Ending(lease_id, _, reason) | Ended(lease_id, _, reason):
            return f"{lease_id} {reason}"
        case Counted(fencing):
            return f"{fencing}"


def _effect(effect: Effect) -> str:
    match effect:
        case Respond(to, answer):
            return f"{to.session}#{to.number} {_answer(answer)}"
        case Consult(ask, number, reserved):
            reserving = (
                f" keeping {' '.join('/'.join(pair) for pair in reserved)}" if reserved else ""
            )
            return f"{ask.id}#{number}{reserving}"
        case Forget(request, number):
            return f"{request}#{number}"
        case Look(lease) | Start(lease) | Stop(lease) | KeepWarm(lease):
            return lease.id
        case Recall(to, tenant, subject):
            return f"{to.session}#{to.number} {tenant} {subject}"


def _answer(answer: Response) -> str:
    match answer:
        case Advice(data, reasons):
            return f"advice {_plain(data)}" + (f" reasons {_plain(reasons)}" if reasons else "")
        case LeaseNews(lease, _, reasons, owner):
            shown = "" if owner else " (without its token)"
            return f"lease {_lease(lease)}{shown}" + (f" {_plain(reasons)}" if reasons else "")
        case Information(data):
            return f"told {_plain(data)}"
        case Refusal(code, reason, field):
            return f"refused {code}" + (f" [{field}]" if field else "") + f": {reason}"


def _lease(lease: Any) -> str:
    where = " ".join(map(_share, lease.placement))
    over = f" ({lease.reason})" if lease.reason else ""
    until = f"until={lease.expires_at:g}"
    again = f" attempt={lease.attempt}" if lease.attempt > 1 else ""
    warm = f" workload={lease.inherited}" if lease.inherited else ""
    state = f"{lease.id} {lease.state}{over}{again}{warm}"
    return f"{state} fencing={lease.fencing} {until} {where}".rstrip()


def _share(share: Share) -> str:
    text = f"{share.cluster_id}/{share.node_id}[{','.join(share.gpus)}]"
    if share.gpu_milli != 1000:
        text += f"@{share.gpu_milli}"
    amounts = {"cpu": share.cpu_milli, "mem": share.memory_mib}
    return text + "".join(f",{name}={amount}" for name, amount in amounts.items() if amount)


def _plain(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


def event_line(event: Event) -> str:
    """Return any event as a command, for stored transcripts."""
    return f"event {type(event).__name__} {msgspec.json.encode(event).decode()}"
