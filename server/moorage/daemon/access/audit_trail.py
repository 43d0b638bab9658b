"""From what the core did to entries of the audit log. The commit loop's effects call it."""

from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Any, assert_never

import msgspec

from moorage.core.state.facts import (
    Cordoned,
    Ended,
    Fact,
    Granted,
    Preempted,
    QuotaSet,
    Refusal,
    Requeued,
    Reserved,
    Uncordoned,
    Unreserved,
)
from moorage.core.turns.effects import Address, Respond
from moorage.core.turns.events import Event
from moorage.core.turns.turn import Turn
from moorage.daemon.access.audit_log import AuditLog
from moorage.model import Code, Lease, Placement, Quota, RequestId, Tenant
from moorage.records.audit import AuditEntry
from moorage.records.rights import Caller

__all__ = ["AuditTrail"]

_Audited = (
    Granted
    | Ended
    | Requeued
    | Preempted
    | QuotaSet
    | Cordoned
    | Uncordoned
    | Reserved
    | Unreserved
)
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
        self._origins: dict[int, Origin] = {}
        """By the identity of facts that are not durable yet."""

    def stepped(self, event: Event, turn: Turn) -> None:
        """Note who caused the facts of a step, before its answer leaves. On the hot path."""
        for fact in turn.facts:
            if isinstance(fact, _Audited):
                to = getattr(event, "to", None)
                if isinstance(fact, Granted):
                    to = self._asker(fact.lease.id)
                if to is not None:
                    self._origins[id(fact)] = self._origin(to)
        for effect in turn.effects:
            if isinstance(effect, Respond) and isinstance(effect.answer, Refusal):
                self._note_refusal(effect.to, effect.answer)

    def durable(self, facts: Sequence[Fact]) -> None:
        """Note facts that are on the disk. On the hot path."""
        for fact in facts:
            if isinstance(fact, _Audited):
                self._audit.note(self._entry(fact, *self._origins.pop(id(fact), _UNKNOWN)))

    def _note_refusal(self, to: Address, refusal: Refusal) -> None:
        if refusal.code is Code.QUOTA_EXCEEDED:
            caller, remote = self._origin(to)
            if caller is not None:
                self._audit.note_refusal(caller, remote, "quota", refusal.reason)

    def _entry(  # noqa: C901  # One case per fact.
        self, fact: _Audited, caller: Caller | None, remote: str
    ) -> AuditEntry:
        match fact:
            case Granted(lease):
                about: dict[str, Any] = {"lease": lease.id}
                entry = AuditEntry(
                    lease.granted_at,
                    "lease.granted",
                    lease.tenant,
                    about=about,
                    after=_places(lease.placement),
                    why=lease.policy.uri,
                )
            case Ended(name, at, reason):
                entry = self._about_lease("lease.ended", name, at, reason)
            case Requeued(name, at, reason):
                entry = self._about_lease("lease.requeued", name, at, reason)
            case Preempted(name, at, by, _, reason):
                entry = self._about_lease("lease.preempted", name, at, f"{reason} (for {by})")
            case QuotaSet():
                entry = self._about_quota(fact)
            case Cordoned(cluster, node, at, who, reason):
                what = "drained" if fact.drains else "cordoned"
                about = {"cluster": cluster, "node": node}
                entry = AuditEntry(at, f"fleet.{what}", who, about=about, why=reason)
            case Uncordoned(cluster, node, at, who):
                about = {"cluster": cluster, "node": node}
                entry = AuditEntry(at, "fleet.uncordoned", who, about=about)
            case Reserved(made):
                about = {"reservation": made.id, "tenant": made.tenant}
                after = {"nodes": made.nodes, "starts_at": made.starts_at, "ends_at": made.ends_at}
                entry = AuditEntry(
                    time(), "reservation.made", made.tenant, about=about, after=after
                )
            case Unreserved(name, at, reason):
                about = {"reservation": name}
                entry = AuditEntry(at, "reservation.ended", _SERVER, about=about, why=reason)
            case _:
                assert_never(fact)
        if caller is None:
            return entry
        return msgspec.structs.replace(
            entry, who=caller.tenant, role=caller.role, token=caller.token_name, remote=remote
        )

    def _about_lease(self, what: str, name: RequestId, at: float, why: str) -> AuditEntry:
        lease = self._lease(name)
        about: dict[str, Any] = {"lease": name}
        if lease is not None:
            about["tenant"] = lease.tenant
        before = None if lease is None else _places(lease.placement)
        return AuditEntry(at, what, _SERVER, about=about, before=before, why=why)

    def _about_quota(self, fact: QuotaSet) -> AuditEntry:
        account = fact.tenant, fact.project
        before = self._quotas.pop(account, None)
        if fact.quota is not None:
            self._quotas[account] = fact.quota
        return AuditEntry(
            fact.at,
            "quota.removed" if fact.quota is None else "quota.set",
            fact.who,
            about={"tenant": fact.tenant, "project": fact.project},
            before=before,
            after=fact.quota,
        )


def _places(placement: Placement) -> list[list[Any]]:
    """Return where a lease is: cluster, node, GPUs and thousandths of each of them."""
    return [
        [share.cluster_id, share.node_id, list(share.gpus), share.gpu_milli] for share in placement
    ]
