"""Turns the core's facts into entries of the audit log. The commit loop's effects call it."""

from collections.abc import Callable, Mapping, Sequence
from time import time

from moorage.core.state.facts import (
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
from moorage.core.turns.effects import Address, Respond
from moorage.core.turns.events import Event
from moorage.core.turns.turn import Turn
from moorage.daemon.access.audit_log import AuditLog
from moorage.ledger.base import LedgerEntry
from moorage.model import Code, Lease, Placement, Quota, RequestId, Tenant
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject, JsonValue
from moorage.records.rights import Caller

__all__ = ["AuditTrail"]

Origin = tuple[Caller | None, str]
"""Who caused a fact, and from which address."""
_UNKNOWN: Origin = (None, "")
_SERVER = "moored"


class AuditTrail:
    """Notes what became true, with who caused it.

    Args:
        audit: Takes the entries.
        origin: Returns who waits for the answer at an address.
        asker: Returns where the answer to a request goes, while it is awaited.
        lease: Finds a lease, also one of the last that ended.
        quotas: By tenant and project, as they are at the start.

    """

    def __init__(
        self,
        audit: AuditLog,
        origin: Callable[[Address], Origin],
        asker: Callable[[RequestId], Address | None],
        lease: Callable[[RequestId], Lease | None],
        quotas: Mapping[tuple[Tenant, str | None], Quota],
    ) -> None:
        self._audit = audit
        self._origin = origin
        self._asker = asker
        self._lease = lease
        self._quotas = dict(quotas)
        self._made: dict[int, AuditEntry] = {}
        """By the identity of facts that are not durable yet."""

    def stepped(self, event: Event, turn: Turn) -> None:
        """Make the entries of a step, before its answer leaves. On the hot path."""
        if not self._audit.is_on:
            return
        for fact in turn.facts:
            entry = self._entry(fact, getattr(event, "to", None))
            if entry is not None:
                self._made[id(fact)] = entry
        for effect in turn.effects:
            if isinstance(effect, Respond) and isinstance(effect.answer, Refusal):
                self._note_refusal(effect.to, effect.answer)

    def committed(self, facts: Sequence[Fact], last: int) -> None:
        """Note the entries of facts that are on the disk, up to the `last` seq. On the hot path."""
        made = self._made
        if made:
            entries = list[AuditEntry]()
            for seq, fact in enumerate(facts, last - len(facts) + 1):
                if (entry := made.pop(id(fact), None)) is not None:
                    entry.seq = seq
                    entries.append(entry)
            self._audit.note_all(entries)

    def recovered(self, entries: Sequence[LedgerEntry]) -> list[AuditEntry]:
        """Return the entries of facts of before a kill. Who caused them is unknown."""
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

    def _entry(  # noqa: C901  # One case per fact.
        self, fact: Fact, to: Address | None
    ) -> AuditEntry | None:
        """Return the entry of a fact, where it has one; an answer to what caused it goes `to`."""
        entry: AuditEntry | None = None
        match fact:
            case Granted(lease):
                about: JsonObject = {"lease": lease.id}
                places = _places(lease.placement)
                uri, asker = lease.policy.uri, self._asker(lease.id)
                entry = self._by(
                    asker, lease.granted_at, "lease.granted", lease.tenant, about, None, places, uri
                )
            case Ended(name, at, reason):
                entry = self._about_lease(to, at, "lease.ended", name, reason)
            case Renewed():
                pass  # The most frequent of those without an entry.
            case Requeued(name, at, reason):
                entry = self._about_lease(to, at, "lease.requeued", name, reason)
            case Preempted(name, at, by, _, reason):
                entry = self._about_lease(to, at, "lease.preempted", name, f"{reason} (for {by})")
            case QuotaSet(tenant, project, quota, at, who):
                what = "quota.removed" if quota is None else "quota.set"
                about = {"tenant": tenant, "project": project}
                before = self._quotas.pop((tenant, project), None)
                if quota is not None:
                    self._quotas[tenant, project] = quota
                entry = self._by(to, at, what, who, about, before, quota)
            case Cordoned(cluster, node, at, who, reason):
                what = "fleet.drained" if fact.drains else "fleet.cordoned"
                about = {"cluster": cluster, "node": node}
                entry = self._by(to, at, what, who, about, why=reason)
            case Uncordoned(cluster, node, at, who):
                about = {"cluster": cluster, "node": node}
                entry = self._by(to, at, "fleet.uncordoned", who, about)
            case Reserved(made):
                about = {"reservation": made.id, "tenant": made.tenant}
                after = {"nodes": made.nodes, "starts_at": made.starts_at, "ends_at": made.ends_at}
                entry = self._by(to, time(), "reservation.made", made.tenant, about, after=after)
            case Unreserved(name, at, reason):
                about = {"reservation": name}
                entry = self._by(to, at, "reservation.ended", _SERVER, about, why=reason)
            case _:  # Others are no one's doing, or part of these.
                pass
        return entry

    def _about_lease(
        self, to: Address | None, at: float, what: str, name: RequestId, why: str
    ) -> AuditEntry:
        lease = self._lease(name)
        if lease is None:
            return self._by(to, at, what, _SERVER, {"lease": name}, why=why)
        about: JsonObject = {"lease": name, "tenant": lease.tenant}
        return self._by(to, at, what, _SERVER, about, _places(lease.placement), why=why)

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
        """Return an entry of the one who awaits an answer `to`, or where none does, of `who`."""
        caller, remote = _UNKNOWN if to is None else self._origin(to)
        if caller is None:
            return AuditEntry(at, what, who, "", "", "", about, before, after, why)
        role, token = caller.role, caller.token_name
        return AuditEntry(at, what, caller.tenant, role, token, remote, about, before, after, why)


def _places(placement: Placement) -> list[list[JsonValue]]:
    """Return the placement of a lease: cluster, node, GPUs and thousandths of each of them."""
    return [
        [share.cluster_id, share.node_id, list(share.gpus), share.gpu_milli] for share in placement
    ]
