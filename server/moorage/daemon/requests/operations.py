"""Operations: handles messages that carry `op`.

The router passes these messages; `admission` handles requests for a placement.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Literal, assert_never

import structlog
from msgspec.structs import replace

from moorage.core.state.accounts import EVERYONE
from moorage.core.state.facts import Refusal
from moorage.core.state.refusals import no_such_cluster
from moorage.core.state.state import State
from moorage.core.turns.effects import Address, Information, Response
from moorage.core.turns.events import (
    CancelAsked,
    CordonAsked,
    DryRun,
    FlushAsked,
    Inquired,
    QuotaAsked,
    ReleaseAsked,
    RenewAsked,
    ReserveAsked,
    SessionLost,
    UnreserveAsked,
)
from moorage.daemon.access.audit_log import AuditLog
from moorage.daemon.access.lease_tokens import digest
from moorage.daemon.access.rates import WATCHERS
from moorage.daemon.agents.roster import AgentRoster
from moorage.daemon.answers import refusal_of
from moorage.daemon.history.decisions import Decisions
from moorage.daemon.history.recalled_fleets import RecalledFleets
from moorage.daemon.inbox import Inbox
from moorage.daemon.news.watchers import Watchers
from moorage.daemon.publishing.management import Management
from moorage.daemon.requests.http_calls import HttpCalls
from moorage.daemon.requests.replies import Replies, ReplyContext
from moorage.daemon.requests.whatif import WhatIfs
from moorage.daemon.workloads.access import WorkloadAccess
from moorage.model import ClusterId, Code, NodeId, RequestId, SessionId, Tenant
from moorage.protocol import messages as wire
from moorage.protocol.faults import ServiceError
from moorage.records.audit import AuditEntry
from moorage.records.json_values import JsonObject
from moorage.records.rights import Caller, Right

log = structlog.get_logger("moored")


@dataclass(frozen=True, slots=True)
class Lookups:
    """The services for operations that are answered without the core.

    Args:
        access: Reads output and files of workloads, and runs commands in them.
        whatifs: Predicts the effects of a change.
    """

    agents: AgentRoster
    access: WorkloadAccess
    decisions: Decisions
    fleets: RecalledFleets
    whatifs: WhatIfs

    async def answer(
        self,
        message: wire.DecisionListing | wire.DecisionFleet | wire.PastFleet | wire.WhatIf,
        caller: Caller,
    ) -> Response:
        """Answer an operation that needs no event of the core."""
        if isinstance(message, wire.WhatIf):
            return await self.whatifs.answer(message, caller)
        if isinstance(message, wire.DecisionListing):
            return await self.decisions.page(message, caller)
        if isinstance(message, wire.PastFleet):
            return await self.fleets.at(message.at, caller)
        return await self.fleets.recall(message.request, caller)


@dataclass(frozen=True, slots=True)
class Operations:
    """Carries out operations.

    Args:
        management: Runs `management` of policies.
        lookups: Answers operations that do not need the core.
        ttl_seconds_max: Longest time that a lease may be renewed for.
        state: The core's state, which has the clusters; read only.
        watchers_max: Maximum sessions of one tenant that watch; 0: any number.
        audit: The audit log.
        cluster_owner: Returns the owner of a cluster; empty if unknown.
    """

    inbox: Inbox
    replies: Replies
    watchers: Watchers
    management: Management
    lookups: Lookups
    ttl_seconds_max: float
    state: State
    watchers_max: int
    audit: AuditLog
    cluster_owner: Callable[[str], str]

    def drop_session(self, session: SessionId, tenant: Tenant) -> None:
        """Handle the end of a tenant's session: stop its watches, reads and waiting requests."""
        self.watchers.drop_session(session)
        self.lookups.access.drop_session(session)
        self.inbox.leave(session, tenant)

    def leave(self, to: Address, tenant: Tenant) -> None:
        """Handle the disconnection of an HTTP caller, whose session has only this call."""
        self.inbox.post(SessionLost(to.session), tenant)

    def take(  # noqa: C901, PLR0912, PLR0915  # One case per operation.
        self, to: Address, caller: Caller, message: wire.Operation
    ) -> None:
        """Carry out the operation of a message; send the answer to `to`, now or later."""
        tenant = caller.tenant
        self.replies.expect(to, ReplyContext(message.id))
        match message:
            case wire.Release():
                self._release(to, caller, message)
            case wire.Renew():
                ttl, longest = message.ttl_seconds, self.ttl_seconds_max
                if ttl is not None and ttl > longest:
                    reason = f"ttl_seconds: expected at most {longest:g}; renew again for longer."
                    refusal = Refusal(
                        Code.BAD_MESSAGE, reason, "ttl_seconds", f"at most {longest:g}"
                    )
                    self.replies.answer(to, refusal)
                else:
                    shown = digest(message.token)
                    self.inbox.post(RenewAsked(to, RequestId(message.lease), shown, ttl), tenant)
            case wire.Flush():
                self._flush(to, tenant, message)
            case wire.Cordon() | wire.Uncordon():
                self._cordon(to, caller, message)
            case wire.ForgetMachine():
                self.replies.answer_later(to, self._forget(to, caller, message))
            case wire.ReserveNodes() | wire.UnreserveNodes():
                self._reserve(to, tenant, message)
            case wire.ReservationListing():
                self._list(to, "reservations", caller, message)
            case wire.SetQuota() | wire.RemoveQuota():
                self._set_quota(to, tenant, message)
            case wire.QuotaListing():
                self._list(to, "quotas", caller, message)
            case wire.Cancel():
                cancel = CancelAsked(to, self.replies.named(to, message.request), tenant)
                self._post(cancel, tenant, dry_run=message.dry_run)
            case wire.Status():
                self._inquire(to, "status", caller, message)
            case wire.Why():
                self._inquire(to, "why", caller, message)
            case wire.QueueListing():
                self._list(to, "queue", caller, message)
            case wire.LeaseListing():
                self._list(to, "leases", caller, message)
            case wire.FleetListing():
                self.replies.expect(to, ReplyContext(message.id, complete=self._add_owners))
                self._list(to, "fleet", caller, message)
            case wire.Manage():
                self.replies.answer_later(to, self._manage(to, caller, message))
            case wire.DecisionListing() | wire.DecisionFleet() | wire.PastFleet() | wire.WhatIf():
                self.replies.answer_later(to, self.lookups.answer(message, caller))
            case wire.Logs() | wire.Exec() | wire.Files():
                self._look_into(to, tenant, message)
            case wire.WatchTopics():
                self.replies.answer(to, self._watch(to, caller, message))
            case wire.Resume():
                topics = {"topics": self.watchers.resumed(to.session, caller)}
                left = self.replies.resumed(to, self.watchers.lease)
                self.replies.answer(to, Information(left | topics))
            case _:
                assert_never(message)

    def _cordon(self, to: Address, caller: Caller, message: wire.Cordon | wire.Uncordon) -> None:
        tenant = caller.tenant
        cluster, node = ClusterId(message.cluster), NodeId(message.node)
        match message:
            case wire.Drain(reason=reason, seconds=seconds):
                event = CordonAsked(to, tenant, cluster, node, "drain", reason, seconds)
            case wire.Cordon(reason=reason):
                event = CordonAsked(to, tenant, cluster, node, "cordon", reason)
            case wire.Uncordon():
                event = CordonAsked(to, tenant, cluster, node, "uncordon")
        sees_all = caller.may(Right.READ_ALL)
        self._post(event, tenant, dry_run=message.dry_run, sees_all=sees_all)
        if not message.dry_run:
            about = {"what": event.mode, "cluster": cluster, "node": node}
            _note(tenant, self.replies.remote(to), about)

    async def _forget(self, to: Address, caller: Caller, message: wire.ForgetMachine) -> Response:
        place = ClusterId(message.cluster), NodeId(message.node)
        leases = list(self.state.places.get(place, {}))
        remote = self.replies.remote(to)
        try:
            reason = await self.lookups.agents.forget(place, caller, remote)
        except ServiceError as error:
            return refusal_of(error)
        about = {"what": "forget", "cluster": message.cluster, "node": message.node}
        _note(caller.tenant, remote, about)
        answer = {"cluster_id": message.cluster, "node_id": message.node, "leases": leases}
        return Information(answer | {"unavailable": reason})

    def _flush(self, to: Address, tenant: Tenant, message: wire.Flush) -> None:
        cluster, state = ClusterId(message.cluster), self.state
        # Leases on a deleted cluster end like all others.
        known = not cluster or cluster in state.clusters
        if not known and all(place[0] != cluster for place in state.places):
            warning = no_such_cluster(cluster, state.clusters, state.fleet.node_ids).reason
            self.replies.expect(to, ReplyContext(message.id, warnings=[warning]))
        event = FlushAsked(to, tenant, cluster or None)
        self._post(event, tenant, dry_run=message.dry_run)
        if not message.dry_run:
            about = {"what": "flush", "cluster": message.cluster}
            _note(tenant, self.replies.remote(to), about)

    def _release(self, to: Address, caller: Caller, message: wire.Release) -> None:
        """End a lease; without its token, the caller must be of its tenant."""
        lease, tenant = RequestId(message.lease), caller.tenant
        if message.token:
            event = ReleaseAsked(to, lease, digest(message.token))
        else:
            event = ReleaseAsked(to, lease, "", tenant)
            if not message.dry_run:
                about = {"what": "release", "lease": lease}
                _note(tenant, self.replies.remote(to), about)
        if not message.dry_run:
            self.inbox.post(event, tenant)
            return
        beside = tuple(map(RequestId, message.beside))
        found = (self.state.leases.get(each) for each in (lease, *beside))
        known = (self.lookups.access.stop_seconds(each) for each in found if each is not None)
        stops = max((each for each in known if each is not None), default=None)
        sees_all = caller.may(Right.READ_ALL)
        self.inbox.post(DryRun(to, event, sees_all, beside, stops), tenant)

    def _look_into(
        self, to: Address, tenant: Tenant, message: wire.Logs | wire.Exec | wire.Files
    ) -> None:
        """Read or enter a workload; without the lease's token, the caller must be of its tenant."""
        if message.token is None and isinstance(message, wire.Exec):
            _note(tenant, self.replies.remote(to), {"what": "exec", "lease": message.lease})
        self.replies.answer_later(to, self.lookups.access.answer(message, tenant, to.session))

    def _post(
        self,
        event: CancelAsked | FlushAsked | CordonAsked,
        tenant: Tenant,
        *,
        dry_run: bool,
        sees_all: bool = False,
    ) -> None:
        self.inbox.post(DryRun(event.to, event, sees_all) if dry_run else event, tenant)

    def _reserve(
        self, to: Address, who: Tenant, message: wire.ReserveNodes | wire.UnreserveNodes
    ) -> None:
        if isinstance(message, wire.UnreserveNodes):
            name = RequestId(message.reservation)
            self.inbox.post(UnreserveAsked(to, who, name), who)
            about = {"what": "unreserve", "reservation": name}
        else:
            name, tenant = RequestId(f"reservation-{token_hex(8)}"), Tenant(message.tenant or who)
            event = ReserveAsked(
                to,
                name,
                tenant,
                message.resources.demand(),
                message.starts_at,
                message.ends_at,
                message.lapse_seconds,
                message.candidates(),
                message.dry_run,
            )
            self.inbox.post(event, who)
            about = {"what": "reserve", "tenant": tenant, "reservation": name}
        if isinstance(message, wire.UnreserveNodes) or not message.dry_run:
            _note(who, self.replies.remote(to), about)

    def _set_quota(
        self, to: Address, who: Tenant, message: wire.SetQuota | wire.RemoveQuota
    ) -> None:
        tenant = Tenant(message.tenant)
        if tenant == EVERYONE and message.project is not None:
            expected = "no project for the tenant `*`, whose quota is for whole tenants"
            reason = f"project: expected {expected}."
            self.replies.answer(to, Refusal(Code.BAD_MESSAGE, reason, "project", expected))
            return
        quota = message.quota() if isinstance(message, wire.SetQuota) else None
        self.inbox.post(QuotaAsked(to, who, tenant, message.project, quota), who)
        done = "set_quota" if quota else "remove_quota"
        about = {"what": done, "tenant": tenant, "project": message.project or ""}
        if not HttpCalls.has(to):  # `web.notes` logs changes over HTTP.
            _note(who, self.replies.remote(to), about)

    def _watch(self, to: Address, caller: Caller, message: wire.WatchTopics) -> Response:
        most = self.watchers_max
        if most and self.watchers.others(to.session, caller.tenant) >= most:
            self.audit.note_surplus(caller.tenant, self.replies.remote(to), WATCHERS)
            reason = f"{most} sessions of tenant “{caller.tenant}” watch (`{WATCHERS}`)"
            return Refusal(
                Code.BUSY, reason, "topics", "fewer watching sessions; close one of them"
            )
        try:
            return Information({"topics": self.watchers.add(to.session, caller, message.topics)})
        except ServiceError as error:
            return refusal_of(error)

    def _list(
        self,
        to: Address,
        question: Literal["queue", "leases", "fleet", "quotas", "reservations"],
        caller: Caller,
        message: "wire.QueueListing | wire.LeaseListing | wire.FleetListing | wire.QuotaListing "
        "| wire.ReservationListing",
    ) -> None:
        filters, tenant = message.equalities(), caller.tenant
        sees_all = caller.may(Right.READ_ALL)
        if question == "quotas" and not sees_all:
            filters["tenant"] = tenant
        page = (filters, message.cursor, message.limit)
        sort = message.sort if isinstance(message, wire.LeaseListing) else ""
        self.inbox.post(Inquired(to, question, tenant, "", *page, sees_all, sort), tenant)

    def _add_owners(self, answer: Response) -> None:
        """Add to each cluster of an answer the tenant that registered it."""
        if isinstance(answer, Information):
            for row in answer.data.get("clusters", ()):
                row.owner = self.cluster_owner(row.cluster_id) or None

    def _inquire(
        self,
        to: Address,
        question: Literal["status", "why"],
        caller: Caller,
        message: "wire.Status | wire.Why",
    ) -> None:
        tenant, sees_all = caller.tenant, caller.may(Right.READ_ALL)
        inquiry = Inquired(to, question, tenant, message.subject, sees_all=sees_all)
        if isinstance(message, wire.Why) and message.nodes:
            wanted = {"nodes": True}
            inquiry = replace(inquiry, filters=wanted, after=message.after, limit=message.limit)
        self.inbox.post(inquiry, tenant)

    async def _manage(self, to: Address, caller: Caller, message: wire.Manage) -> Response:
        uri, action, tenant = message.policy_rule_uri, message.action, caller.tenant
        remote = self.replies.remote(to)  # It is unknown once the session is over.
        data = await self.management.run(uri, tenant, action, message.data)
        by = tenant, caller.role, caller.token_name, remote
        about: JsonObject = {"uri": uri, "action": action}
        self.audit.note(AuditEntry(time.time(), "policy.managed", *by, about))
        _note(tenant, remote, {"what": "manage", "policy_rule_uri": uri, "action": action})
        return Information(data)


def _note(tenant: Tenant, remote: str, about: Mapping[str, str]) -> None:
    """Log the caller who changed an object, as `web.notes` does for HTTP."""
    log.info("changed", who=tenant, **about, remote=remote)
