"""Turns the core's facts into entries of the audit log. The commit loop's effects call it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Final, Self, TypeVar, assert_never

from moorage.core.state.facts import (
    ClusterRemoved,
    Cordoned,
    Ended,
    Fact,
    Granted,
    Preempted,
    QuotaSet,
    Refusal,
    Renewed,
    Requeued,
    Reserved,
    Uncordoned,
    Unreserved,
)
from moorage.core.state.reserved import NodeReservation, Place
from moorage.core.state.state import State
from moorage.core.turns.effects import Address, Respond
from moorage.core.turns.events import Event
from moorage.core.turns.turn import Turn
from moorage.daemon.access.audit_log import AuditLog
from moorage.ledger.base import LedgerEntry
from moorage.model import Code, Lease, Placement, Quota, RequestId, Tenant
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.rights import Caller

Origin = tuple[Caller | None, str]
"""The caller who caused a fact, and the caller's network address."""
_UNKNOWN: Origin = (None, "")
_SERVER = "moored"
K = TypeVar("K")
V = TypeVar("V")
NODES_MAX: Final = 32
"""Maximum nodes of a reservation that an entry names; of more nodes, it has only the number."""
REASON_CHARS_MAX: Final = 200


@dataclass(slots=True)
class Standing:
    """The operators' settings before the next fact; entries quote them as the old values."""

    quotas: dict[tuple[Tenant, str | None], Quota] = field(
        default_factory=dict[tuple[Tenant, str | None], Quota]
    )
    cordons: dict[Place, Cordoned] = field(default_factory=dict[Place, Cordoned])
    reservations: dict[RequestId, NodeReservation] = field(
        default_factory=dict[RequestId, NodeReservation]
    )

    @classmethod
    def of(cls, state: State) -> Self:
        """Return the quotas, cordons and reservations of a state."""
        return cls(dict(state.accounts.quotas), dict(state.cordons), dict(state.reserved.by_id))


class AuditTrail:
    """Writes an audit entry for each change, with its caller.

    Args:
        audit: Takes the entries.
        origin: Returns who waits for the answer at an address.
        asker: Returns the address that awaits the answer to a request; None: no address does.
        lease: Finds a lease that holds resources, or was one of the last to end.
        standing: The operators' settings at the start; from then on, the facts change them.
    """

    def __init__(
        self,
        audit: AuditLog,
        origin: Callable[[Address], Origin],
        asker: Callable[[RequestId], Address | None],
        lease: Callable[[RequestId], Lease | None],
        standing: Standing,
    ) -> None:
        self._audit = audit
        self._origin = origin
        self._asker = asker
        self._lease = lease
        self._standing = standing
        self._made: list[AuditEntry] = []
        """Entries of facts that are not durable yet, with the facts' numbers since the start."""
        self._stepped = self._durable = 0
        """Number of facts since the start, and the number of these that are durable."""

    def observe_step(self, event: Event, turn: Turn) -> None:
        """Make the entries of a step before its answer leaves. Runs on the hot path."""
        if not self._audit.is_on:
            return
        if turn.facts:
            number = self._stepped
            for fact in turn.facts:
                number += 1
                if type(fact) is Granted:
                    entry: AuditEntry | None = self._grant(fact.lease)
                else:
                    # Only of these, the event has the caller: a grant's caller has waited longer.
                    entry = self._entry(fact, getattr(event, "to", None))
                if entry is not None:
                    entry.seq = number
                    self._made.append(entry)
            self._stepped = number
        for effect in turn.effects:
            if type(effect) is Respond and type(effect.answer) is Refusal:
                self._note_refusal(effect.to, effect.answer)

    def observe_commit(self, facts: Sequence[Fact], last: int) -> None:
        """Write the entries of durable facts, up to seq `last`. Runs on the hot path."""
        self._durable += len(facts)
        durable, before = self._durable, last - self._durable
        count = 0
        for entry in self._made:
            if entry.seq > durable:
                break  # A fact stepped while these were written.
            entry.seq += before
            count += 1
        if count:
            self._audit.note_all(self._made[:count])
            del self._made[:count]

    def recovered(self, entries: Sequence[LedgerEntry]) -> list[AuditEntry]:
        """Return the entries of facts from before a kill. Their callers are unknown."""
        found = list[AuditEntry]()
        for each in entries:
            if (entry := self._entry(each.fact, None)) is not None:
                entry.at, entry.seq, entry.recovered = each.at, each.seq, True
                found.append(entry)
        return found

    def _note_refusal(self, to: Address, refusal: Refusal) -> None:
        if refusal.code is Code.QUOTA_EXCEEDED:
            caller, remote = self._origin(to)
            if caller is not None:
                self._audit.note_refusal(caller, remote, "quota", refusal.reason)

    def _entry(self, fact: Fact, to: Address | None) -> AuditEntry | None:
        """Return the audit entry of a fact whose kind is logged; its caller is answered at `to`."""
        entry: AuditEntry | None = None
        match fact:
            case Granted():
                entry = self._grant(fact.lease)
            case Ended():
                entry = self._about_lease(to, fact.at, "lease.ended", fact.lease, fact.reason)
            case Renewed():
                pass  # The most frequent fact without an entry.
            case Requeued(name, at, reason):
                entry = self._about_lease(to, at, "lease.requeued", name, reason)
            case Preempted(name, at, by, _, reason):
                entry = self._about_lease(to, at, "lease.preempted", name, f"{reason} (for {by})")
            case QuotaSet() | Cordoned() | Uncordoned() | Reserved() | Unreserved():
                entry = self._about_operators(to, fact)
            case ClusterRemoved(cluster):
                cordons = self._standing.cordons
                for place in [each for each in cordons if each[0] == cluster]:
                    del cordons[place]  # The nodes' cordons ended with it.
            case _:  # Other facts have no author, or are part of these.
                pass
        return entry

    def _about_operators(
        self, to: Address | None, fact: QuotaSet | Cordoned | Uncordoned | Reserved | Unreserved
    ) -> AuditEntry:
        """Return the entry for a setting that an operator changed, with the old value."""
        standing, why = self._standing, ""
        match fact:
            case QuotaSet(tenant, project, after, at, who):
                what = "quota.removed" if after is None else "quota.set"
                about: JsonObject = {"tenant": tenant, "project": project}
                before = _replace(standing.quotas, (tenant, project), after)
                return self._by(to, at, what, who, about, before, after)
            case Cordoned(cluster, node, at, who, why):
                what = "fleet.drained" if fact.drains else "fleet.cordoned"
                about = {"cluster": cluster, "node": node}
                held, holds = _replace(standing.cordons, (cluster, node), fact), fact
                return self._by(to, at, what, who, about, _cordon(held), _cordon(holds), why)
            case Uncordoned(cluster, node, at, who):
                about = {"cluster": cluster, "node": node}
                held = _replace(standing.cordons, (cluster, node), None)
                return self._by(to, at, "fleet.uncordoned", who, about, _cordon(held))
            case Reserved(made):
                about = {"reservation": made.id, "tenant": made.tenant}
                was = _replace(standing.reservations, made.id, made)
                known = was is not None or made.used or made.begun
                what = "reservation.changed" if known else "reservation.made"
                by = _SERVER if known else made.tenant
                return self._by(
                    to, time(), what, by, about, _reservation_fields(was), _reservation_fields(made)
                )
            case Unreserved(name, at, why):
                was = _replace(standing.reservations, name, None)
                about = {"reservation": name}
                what = "reservation.ended"
                return self._by(to, at, what, _SERVER, about, _reservation_fields(was), None, why)
            case _:
                assert_never(fact)

    def _grant(self, lease: Lease) -> AuditEntry:
        """Return the entry of a grant. On the hot path, so it repeats the code of `_by`."""
        to = self._asker(lease.id)
        caller, remote = _UNKNOWN if to is None else self._origin(to)
        who, role, token = (
            (lease.tenant, "", "")
            if caller is None
            else (caller.tenant, caller.role, caller.token_name)
        )
        return AuditEntry(
            lease.granted_at,
            "lease.granted",
            who,
            role,
            token,
            remote,
            {"lease": lease.id},
            None,
            _places(lease.placement),
            lease.policy.uri,
        )

    def _about_lease(
        self, to: Address | None, at: float, what: str, name: RequestId, why: str
    ) -> AuditEntry:
        lease = self._lease(name)
        if lease is None:
            return self._by(to, at, what, _SERVER, {"lease": name}, why=why)
        about: JsonObject = {"lease": name, "tenant": lease.tenant}
        return self._by(to, at, what, _SERVER, about, _places(lease.placement), None, why)

    def _by(
        self,
        to: Address | None,
        at: float,
        what: str,
        who: str,
        about: JsonObject,
        before: JsonValue = None,
        after: JsonValue = None,
        why: str = "",
    ) -> AuditEntry:
        """Return an entry that names the caller who awaits the answer at `to`, else `who`."""
        caller, remote = _UNKNOWN if to is None else self._origin(to)
        if caller is None:
            return AuditEntry(at, what, who, "", "", "", about, before, after, why)
        role, token = caller.role, caller.token_name
        return AuditEntry(at, what, caller.tenant, role, token, remote, about, before, after, why)


def _places(placement: Placement) -> JsonValue:
    """Return the placement of a lease: cluster, node, GPUs and thousandths of each GPU."""
    if len(placement) == 1:
        share = placement[0]
        return ((share.cluster_id, share.node_id, share.gpus, share.gpu_milli),)
    return [(share.cluster_id, share.node_id, share.gpus, share.gpu_milli) for share in placement]


def _replace(standing: dict[K, V], key: K, value: V | None) -> V | None:
    """Set or remove the value of a key; return the previous value."""
    before = standing.pop(key, None)
    if value is not None:
        standing[key] = value
    return before


def _cordon(cordon: Cordoned | None) -> JsonObject | None:
    if cordon is None:
        return None
    who, reason = cordon.who, cordon.reason[:REASON_CHARS_MAX]
    return {"who": who, "reason": reason, "drains": cordon.drains, "until": cordon.until}


def _reservation_fields(made: NodeReservation | None) -> JsonObject | None:
    if made is None:
        return None
    document = {
        "nodes": made.nodes[:NODES_MAX],
        "starts_at": made.starts_at,
        "ends_at": made.ends_at,
        "used": made.used,
    }
    return document | ({"more": more} if (more := len(made.nodes) - NODES_MAX) > 0 else {})
