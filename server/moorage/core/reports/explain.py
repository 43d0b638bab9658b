"""Answers to `status`, `why`, `queue`, `leases` and `fleet`, as plain JSON values.

Pure functions of the state. The allocator calls them in its turn, so an answer is sent only once
the facts that it shows are durable.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, get_args

import numpy as np
from msgspec import UNSET

from moorage.core.fit import reservations
from moorage.core.fit.feasibility import Candidates, Feasibility
from moorage.core.queue import quotas
from moorage.core.queue.order import WaitingQueue
from moorage.core.reports.estimates import Estimates
from moorage.core.state import refusals
from moorage.core.state.accounts import Column
from moorage.core.state.facts import Refusal
from moorage.core.state.state import State
from moorage.core.state.waiters import Seniority, Waiter
from moorage.core.turns.effects import Advice, Information, LeaseNews, Response
from moorage.core.turns.events import Inquired
from moorage.model import LOST, ClusterId, Code, Demand, Lease, LeaseState, NodeId, RequestId, Share
from moorage.records.json_values import JsonMapping, JsonObject, JsonValue
from moorage.records.leases import Lease as LeaseAnswer
from moorage.records.replies import AwaitedLease, ClusterCapacity, NodeCapacity
from moorage.records.requests import resources_of

_NODE_FILTERS: Final = (
    "node_id",
    "duplicate_of",
    "unavailable",
    "cpu_milli_total",
    "cpu_milli_free",
    "memory_mib_total",
    "memory_mib_free",
)
_FILTERS: Final[dict[str, tuple[str, ...]]] = {
    "why": ("nodes",),
    "leases": (
        "state",
        "cluster",
        "cluster_id",
        "node_id",
        "id",
        "tenant",
        "granted_at",
        "expires_at",
        "fencing",
        "ttl_seconds",
        "policy_rule_uri",
        "reason",
        "retry_at",
    ),
    "queue": ("cluster", "request", "tenant", "policy_rule_uri", "priority", "since", "deadline"),
    "quotas": ("tenant", "project", "weight"),
    "reservations": ("tenant", "reservation"),
    "fleet": (
        "cluster",
        "cluster_id",
        "nodes",
        "nodes_unavailable",
        "gpus",
        "gpu_milli_total",
        "gpu_milli_free",
        *_NODE_FILTERS,
    ),
}
"""Fields by which each list can be filtered; other filters are refused."""
STATES: Final = get_args(LeaseState)
NODE_ORDERS: Final = ("node", "node_ends", "node_gpus")
"""Orders of leases by node: by its name, its first lease's end, or the GPU milli held on it."""
ORDERED_CHARS_MAX: Final = 80
"""Number of characters by which a text sorts leases; the fencing number sorts equal texts."""


def answer(  # noqa: C901  # One case per question.
    inquiry: Inquired,
    state: State,
    queue: WaitingQueue,
    decisions: Mapping[str, JsonObject],
    feasibility: Feasibility,
    estimates: Estimates,
    now: float,
) -> Response | None:
    """Answer a question about the state.

    Returns:
        The answer; None if only the ledger's history can give it.
    """
    refusal = _refuse_filters(inquiry)
    if refusal is not None:
        return refusal
    match inquiry.question:
        case "status":
            return _status(inquiry, state)
        case "why":
            return _why(inquiry, state, decisions, feasibility, estimates, now)
        case "leases":
            pool: Iterable[Lease] = state.leases.values()
            queued = [each.lease for each in state.waiting.values() if each.lease is not None]
            if queued:
                pool = sorted((*pool, *queued), key=lambda lease: lease.fencing)
            if inquiry.filters.get("state") == "ended":
                pool = sorted(state.ended.values(), key=lambda lease: lease.fencing)
            lost = lost_machine_finder(state)
            if inquiry.sort:
                return _sort_leases(inquiry, pool, lost)
            visible = (lease for lease in pool if inquiry.may_see(lease.tenant))
            seen = (LeaseAnswer.of(lease, lost=lost(lease)) for lease in visible)
            return page(inquiry, "leases", seen, lambda row: row.fencing)
        case "queue":
            return _queue(inquiry, state, queue, estimates, now)
        case "quotas":
            listed = sorted(state.accounts.quotas, key=lambda each: (each[0], each[1] or ""))
            rows = [quotas.row(state.accounts, account) for account in listed]
            return page(inquiry, "quotas", rows, lambda row: (row["tenant"], row["project"] or ""))
        case "reservations":
            shown = (
                reservations.row(each)
                for each in state.reserved.by_id.values()
                if inquiry.may_see(each.tenant)
            )
            return page(inquiry, "reservations", sorted(shown, key=_by_start), _by_start)
        case "fleet":
            if (cluster := inquiry.filters.get("cluster")) is not None:
                return _nodes(inquiry, state, str(cluster))
            return page(inquiry, "clusters", _clusters(state), lambda row: row.cluster_id)


def _sort_leases(
    inquiry: Inquired, pool: Iterable[Lease], lost: Callable[[Lease], str]
) -> Response:
    """Return a page of leases in the requested order, and the total number of leases.

    Answers are built only for leases on the page, since consoles refresh every few seconds.
    """
    filters = inquiry.filters.items()
    found = [lease for lease in pool if inquiry.may_see(lease.tenant)]
    if filters:
        answers = ((lease, LeaseAnswer.of(lease)) for lease in found)
        found = [lease for lease, row in answers if all(_matches(row, *each) for each in filters)]
    total = len(found)
    key = _lease_key(inquiry.sort, found)
    if inquiry.after:
        try:
            after = _cursor(("", 0), inquiry.after)
            found = [lease for lease in found if key(lease) > after]
        except (TypeError, ValueError):
            return refusals.no_cursor(inquiry.after)
    shown = heapq.nsmallest(inquiry.limit, found, key=key)
    following = json.dumps(key(shown[-1])) if len(found) > len(shown) else None
    rows = [LeaseAnswer.of(lease, lost=lost(lease)) for lease in shown]
    return Information({"leases": rows, "next": following, "total": total})


def _lease_key(sort: str, leases: Iterable[Lease]) -> Callable[[Lease], tuple[Any, int]]:
    """Return the sort key of leases in a list; among equal leases, the first granted leads."""
    if sort in {"granted_at", "expires_at"}:
        return attrgetter(sort, "fencing")  # The order in open consoles.
    name, falls = sort.lstrip("-"), sort.startswith("-")
    of_node = _by_node(name, leases) if name in NODE_ORDERS else None

    def key(lease: Lease) -> tuple[Any, int]:
        value: Any = _sort_key(lease, name) if of_node is None else of_node(lease)
        return -value if falls else value, lease.fencing

    return key


def _by_node(name: str, leases: Iterable[Lease]) -> Callable[[Lease], list[JsonValue]]:
    """Return the key that orders leases node by node.

    A lease on several nodes is listed with the first of them.
    """
    ends, milli = dict[str, float](), Counter[str]()
    for lease in leases:
        for share in lease.placement:
            node = _node_of(share)
            ends[node] = min(lease.expires_at, ends.get(node, lease.expires_at))
            milli[node] += len(share.gpus) * share.gpu_milli

    def of_node(node: str) -> list[JsonValue]:
        leading = {"node_ends": ends[node], "node_gpus": -milli[node]}
        return [leading.get(name, 0), node[:ORDERED_CHARS_MAX]]

    def key(lease: Lease) -> list[JsonValue]:
        nodes = [of_node(_node_of(share)) for share in lease.placement]
        return min(nodes, default=[lease.expires_at if name == "node_ends" else 0, ""])

    return key


def _node_of(share: Share) -> str:
    return f"{share.cluster_id}/{share.node_id}"


def _sort_key(lease: Lease, name: str) -> JsonValue:
    """Return the key that orders leases; texts are cut to keep cursors short."""
    match name:
        case "gpus":
            return sum(len(share.gpus) * share.gpu_milli for share in lease.placement)
        case "place":
            first = next(iter(lease.placement), None)
            text = "" if first is None else _node_of(first)
            return text[:ORDERED_CHARS_MAX]
        case "project":
            return lease.terms.project[:ORDERED_CHARS_MAX]
        case "policy_rule_uri":
            return lease.policy.uri[:ORDERED_CHARS_MAX]
        case "state" | "tenant":
            return getattr(lease, name)[:ORDERED_CHARS_MAX]
        case _:  # A number of the lease.
            return getattr(lease, name)


def _by_start(row: JsonMapping) -> tuple[float, str]:
    return row["starts_at"], row["reservation"]


def _refuse_filters(inquiry: Inquired) -> Refusal | None:
    """Refuse unknown filters of a list, and states that no lease has."""
    known = _FILTERS.get(inquiry.question, ())
    for name in inquiry.filters:
        if name not in known:
            return refusals.no_filter(name, known)
    state = inquiry.filters.get("state")
    return None if state is None or state in STATES else refusals.no_state(state, STATES)


def _queue(
    inquiry: Inquired, state: State, queue: WaitingQueue, estimates: Estimates, now: float
) -> Response:
    """Return a page of the queue; compute positions only for the waiters on the page."""
    where = inquiry.filters.get("cluster")
    shown = (
        waiter_row(waiter)
        for waiter in queue.by_seniority(_read(inquiry.after))
        if inquiry.may_see(waiter.ask.tenant) and (where is None or _may_go_to(waiter, where))
    )
    answer = page(inquiry, "waiting", shown, _seniority)
    if isinstance(answer, Information) and (rows := answer.data["waiting"]):
        turns = estimates.turns([row["request"] for row in rows], now)
        positions = queue.positions(row["request"] for row in rows)
        for row in rows:
            row["position"] = positions[row["request"]]
            row["expected_at"] = turns.get(row["request"])
            row["overtaken"] = state.overtaken.get(row["request"], 0)
    return answer


def _read(cursor: str) -> object:
    """Return the value of a cursor with several parts; None if it is invalid: `page` refuses it."""
    try:
        found = json.loads(cursor)
    except ValueError:
        return None
    return (
        tuple(found) if isinstance(found, list) and len(found) == len(Seniority._fields) else None
    )


def _may_go_to(waiter: Waiter, cluster: object) -> bool:
    return waiter.ask.candidates is None or cluster in waiter.ask.candidates


def _status(inquiry: Inquired, state: State) -> Response | None:
    request = RequestId(inquiry.subject)
    lease = state.lease(request)
    if lease is not None and inquiry.may_see(lease.tenant):
        return LeaseNews(lease, owner=False, lost=lost_machine_finder(state)(lease))
    waiter = state.waiting.get(request)
    if waiter is not None and inquiry.may_see(waiter.ask.tenant):
        return Information({"state": "waiting", **waiter_row(waiter)})
    reason = f"There is no lease or waiting request {request}, or it ended long ago."
    return Refusal(Code.UNKNOWN_LEASE, reason, "lease", "the id of a lease or waiting request")


def _why(
    inquiry: Inquired,
    state: State,
    decisions: Mapping[str, JsonObject],
    feasibility: Feasibility,
    estimates: Estimates,
    now: float,
) -> Response | None:
    request = RequestId(inquiry.subject)
    record = _read_decision(decisions, request)
    lease = state.lease(request)
    waiter = state.waiting.get(request)
    owner = lease.tenant if lease else waiter.ask.tenant if waiter else record.pop("tenant", "")
    if not owner or not inquiry.may_see(owner):
        return None
    record.pop("tenant", None)
    question = record.pop("asked", None)
    if waiter is not None:
        question = waiter.ask.demand, waiter.ask.candidates
        record["overtaken"] = state.overtaken.get(request, 0)
    if inquiry.filters:
        refusal = _add_nodes(record, inquiry, question, feasibility)
        if refusal is not None:
            return refusal
    if lease is None and question is not None and question[0] is not None:
        leases, room_at = estimates.awaited(question[0], question[1], now)
        if record.get("verdict", "not_now") == "not_now" and leases:
            record["waits_for"] = [_awaited_lease(inquiry, *each) for each in leases]
            record["room_at"] = room_at
    if lease is not None:
        answer = LeaseAnswer.of(lease, lost=lost_machine_finder(state)(lease))
        record |= {"state": lease.state, "lease": answer}
        record["reason"] = answer.reason or record.get("reason") or grant_reason(lease)
        if lease.retry_at:
            record["reason"] += "; it is tried again at retry_at, not before"
        if drift := list(_drift(lease, state)):
            record["drift"] = drift
    return Information({"request": request, **record})


def _read_decision(decisions: Mapping[str, JsonObject], request: RequestId) -> JsonObject:
    """Return a decision record; a grant's reason is not stored, but composed here."""
    record = dict(decisions.get(request, {}))
    record.pop("gist", None)
    granted: Lease | None = record.pop("granted", None)
    if granted is not None:
        record |= {"state": granted.state, "reason": grant_reason(granted)}
    return record


def _awaited_lease(inquiry: Inquired, lease: Lease, share: Share) -> AwaitedLease:
    """Return the awaited lease, with its id only if the caller may see the lease."""
    name = lease.id if inquiry.may_see(lease.tenant) else UNSET
    return AwaitedLease(share.cluster_id, share.node_id, lease.expires_at, name)


def _add_nodes(
    record: JsonObject,
    inquiry: Inquired,
    question: tuple[Demand | None, Candidates] | None,
    feasibility: Feasibility,
) -> Refusal | None:
    """Add the present verdict of each candidate node on the request; null if it is not known."""
    record |= {"node_verdicts": None, "next": None}
    demand, candidates = question or (None, None)
    if demand is None:
        return None
    if not (inquiry.after or "0").isdecimal():
        return refusals.no_cursor(inquiry.after)
    after = int(inquiry.after or "0")
    rows, following = feasibility.nodes(demand, candidates, after, inquiry.limit)
    record |= {"node_verdicts": rows, "next": None if following is None else str(following)}
    return None


def _drift(lease: Lease, state: State) -> Iterable[str]:
    """Yield sentences about parts of a lease that the inventory no longer has."""
    for device in lease.lost:
        yield f"GPU {device.uuid} is gone from its node; no other lease gets it until this one ends"
    for share in lease.placement:
        cluster = state.clusters.get(share.cluster_id)
        nodes = state.offered(cluster).nodes if cluster else ()
        node = next((each for each in nodes if each.id == share.node_id), None)
        place = f"{share.cluster_id}/{share.node_id}"
        if node is None:
            yield f"{place} is no longer in the inventory"
            continue
        if node.unavailable:
            yield f"{place} takes nothing new: {node.unavailable}"
        if gone := set(share.gpus) - {gpu.id for gpu in node.gpus}:
            listed = ", ".join(sorted(gone))
            yield f"GPU {listed} of {place} is gone from the inventory, or in foreign use"


def outcome(given: Advice | Information | Refusal) -> JsonObject:
    """Return the outcome of a request for its decision record, from its answer."""
    if isinstance(given, Refusal):
        return {"state": "refused", **refusal_object(given)}
    reasons = given.reasons if isinstance(given, Advice) else None
    return {"state": "advised", "reason": "Advice: nothing is held.", **(reasons or {})}


def grant_reason(lease: Lease) -> str:
    """Return one sentence on why a lease is at its place."""
    where = ", ".join(f"{share.cluster_id}/{share.node_id}" for share in lease.placement)
    if lease.inherited:
        return f"A similar workload was warm at {where}, where {lease.policy.uri} had put it."
    return f"{lease.policy.uri} proposed {where}; it fitted and was granted."


def refusal_object(refusal: Refusal) -> JsonObject:
    """Return a refusal as JSON values, without its empty parts.

    The value of a policy that declined is left out: the client has received it, it may be a
    megabyte, and there are ten thousand records.
    """
    parts = {
        "code": refusal.code.value,
        "reason": refusal.reason,
        "field": refusal.field,
        "expected": refusal.expected,
    }
    details = {name: part for name, part in refusal.details.items() if name != "data"}
    return {name: part for name, part in parts.items() if part} | details


def waiter_row(waiter: Waiter) -> JsonObject:
    """Return a waiter as JSON values."""
    ask = waiter.ask
    row = {
        "request": ask.id,
        "tenant": ask.tenant,
        "policy_rule_uri": ask.policy.uri,
        "priority": ask.terms.priority if ask.terms else 0,
        "since": waiter.at,
        "deadline": waiter.deadline,
        "resources": None if ask.demand is None else resources_of(ask.demand),
    }
    if ask.alternatives:
        row["alternatives"] = [resources_of(each) for each in ask.alternatives]
    return row if waiter.lease is None else row | {"lease": LeaseAnswer.of(waiter.lease)}


def _clusters(state: State) -> Iterable[ClusterCapacity]:
    fleet = state.fleet

    def sums(column: Column) -> list[int]:
        totals = np.zeros(len(fleet.cluster_ids), np.int64)
        np.add.at(totals, fleet.cluster, column)
        return totals.tolist()

    columns = (  # In the order of the fields of `ClusterCapacity`.
        sums(np.ones(len(fleet), np.int64)),
        sums(fleet.closed),
        sums((fleet.gpu_total > 0).sum(1)),
        sums(fleet.gpu_total.sum(1)),
        sums(fleet.gpu_free.sum(1)),
        sums(fleet.cpu_total),
        sums(np.where(fleet.closed, 0, fleet.cpu_free)),
        sums(fleet.memory_total),
        sums(fleet.memory_free),
    )
    return map(ClusterCapacity, fleet.cluster_ids, *columns)


def _nodes(inquiry: Inquired, state: State, cluster: str) -> Response:
    fleet = state.fleet
    if cluster not in fleet.cluster_ids:
        return refusals.no_such_cluster(cluster, fleet.cluster_ids, fleet.node_ids)

    known = {node.id: node for node in state.offered(state.clusters[ClusterId(cluster)]).nodes}

    def rows() -> Iterable[NodeCapacity]:
        for row in (fleet.cluster == fleet.cluster_ids.index(cluster)).nonzero()[0].tolist():
            name = NodeId(fleet.node_ids[row][1])
            if name <= inquiry.after:
                continue  # Build no rows of earlier pages.
            cpu, memory, gpus = fleet.capacity(row)
            codes = fleet.gpu_model[row].tolist()
            node = known.get(name)
            yield NodeCapacity(
                cluster_id=cluster,
                node_id=name,
                duplicate_of=(node and node.duplicate_of) or UNSET,
                unavailable=(node and node.unavailable) or UNSET,
                models=sorted({fleet.models[code] for code in codes if code >= 0} - {""}),
                gpus=dict(zip(fleet.gpu_ids[row], gpus, strict=False)),
                cpu_milli_total=int(fleet.cpu_total[row]),
                cpu_milli_free=cpu if not fleet.closed[row] else 0,
                memory_mib_total=int(fleet.memory_total[row]),
                memory_mib_free=memory,
            )

    return page(inquiry, "nodes", rows(), lambda row: row.node_id)


def _seniority(row: JsonObject) -> Seniority:
    """Return the key that orders the pages of the queue."""
    return Seniority(-row["priority"], row["since"], row["request"])


def page(
    inquiry: Inquired, name: str, rows: Iterable[JsonValue], key: Callable[[JsonValue], JsonValue]
) -> Response:
    """Return one page of `rows`, sorted by `key`, and the key at which the next page starts.

    The returned key is JSON in the reply: a number, a name, or a list of these.
    """
    # `cluster` selects what is listed; leases are filtered by placement instead.
    wanted = {k: v for k, v in inquiry.filters.items() if k != "cluster" or name == "leases"}
    shown: list[JsonValue] = []
    for row in rows:
        try:
            if inquiry.after and not key(row) > _cursor(key(row), inquiry.after):
                continue
        except (TypeError, ValueError):
            return refusals.no_cursor(inquiry.after)
        if all(_matches(row, k, v) for k, v in wanted.items()):
            if len(shown) == inquiry.limit:
                last = key(shown[-1])
                return Information(
                    {name: shown, "next": last if isinstance(last, str) else json.dumps(last)}
                )
            shown.append(row)
    return Information({name: shown, "next": None})


def _cursor(like: JsonValue, after: str) -> JsonValue:
    """Decode a cursor, the `next` of the previous page; refuse an invalid cursor."""
    if isinstance(like, str):
        return after
    found = json.loads(after)
    if not isinstance(like, tuple):
        return found
    if not isinstance(found, list) or len(found) != len(like):
        raise ValueError(after)
    return tuple(found)


def _matches(row: JsonValue, key: str, value: JsonValue) -> bool:
    if key in {"cluster", "cluster_id", "node_id"} and isinstance(row, LeaseAnswer):
        at = "node_id" if key == "node_id" else "cluster_id"
        return any(getattr(share, at) == value for share in row.placement)
    field = row.get(key) if isinstance(row, dict) else getattr(row, key, None)
    return bool(field == value)


def lost_machine_finder(state: State) -> Callable[[Lease], str]:
    """Return a function that names the lost machine of a lease; "" if no machine is lost."""
    lost: dict[ClusterId, dict[NodeId, str]] = {}

    def of(lease: Lease) -> str:
        found: list[str] = []
        for share in lease.placement:
            row = state.fleet.row(share.cluster_id, share.node_id)
            if row is None or not state.fleet.closed[row]:
                continue
            if share.cluster_id not in lost:
                nodes = state.clusters[share.cluster_id].nodes
                lost[share.cluster_id] = {
                    each.id: each.unavailable.removeprefix(LOST)
                    for each in nodes
                    if each.unavailable.startswith(LOST)
                }
            if why := lost[share.cluster_id].get(share.node_id):
                found.append(f"node {share.cluster_id}/{share.node_id} is lost: {why}")
        return "; ".join(found)

    return of
