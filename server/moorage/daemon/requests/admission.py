"""Admission: what a client sent becomes an event of the core, or is refused at the door.

Both front doors end here: the gateway's messages and `POST /allocate`. Everything an ask needs
from outside the core (its policy, its candidates, a token, a seed) is settled before it is posted.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never

from msgspec import structs

from moorage.catalog.allowances import Allowance
from moorage.catalog.ports import Catalog
from moorage.catalog.values import SearchAction
from moorage.config.settings import Config
from moorage.core.effects import Address, Information, LeaseNews, Response
from moorage.core.events import (
    Asked,
    CancelAsked,
    Event,
    FlushAsked,
    Inquired,
    ReleaseAsked,
    RenewAsked,
    SessionLost,
)
from moorage.core.facts import Refusal
from moorage.daemon.publishing.aliases import Noting, Publishing
from moorage.daemon.requests.answers import MessageId, encode, refusal_of, refuse
from moorage.daemon.requests.finder import Finder
from moorage.daemon.requests.lease_tokens import LeaseTokens, digest
from moorage.daemon.requests.reading import (
    is_described,
    outranked,
    size_of,
    unknown_policy,
)
from moorage.daemon.requests.watchers import Watchers
from moorage.daemon.workloads.control import WorkloadControl
from moorage.daemon.workloads.reach import within_reach
from moorage.gateway.deliver import Request
from moorage.model import Ask, ClusterId, Code, Lease, RequestId, SessionId, Tenant
from moorage.policy import Fleet
from moorage.protocol import messages as wire
from moorage.protocol.faults import ServiceError
from moorage.protocol.messages import AllocationRequest, BlockRequest

WARNED_MAX: Final = 20
"""Unknown clusters named one by one in a warning; the rest are counted."""
_NONE: Final = RequestId("")


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What the reply to a message needs beside the answer.

    Args:
        message_id: The message's own `id`.
        request: The ask it became; empty for an operation.
        token: Of the lease that the ask may be granted.
        shown: The reply names the ask.
        warnings: For the reply.
        version: The version that was chosen; empty where the message named it itself.
        note: Takes the outcome, where an alias was named.
        admitted_at: By the monotonic clock; for `note`.

    """

    message_id: MessageId
    request: RequestId = _NONE
    token: str = ""
    shown: bool = False
    warnings: list[str] = field(default_factory=list[str])
    version: str = ""
    note: Noting | None = None
    admitted_at: float = 0.0


class Admission:
    """The daemon's side of the gateway's `Deliver`.

    Args:
        config: Bounds and defaults.
        catalog: Knows policies and clusters.
        finder: Finds the clusters that a request describes.
        publishing: Chooses the version that an alias means.
        backends: Knows what can be started.
        tokens: Makes the tokens of leases.
        post: Posts an event to the core.
        reply: Sends a finished reply to an address.
        manage: Runs a policy's `management` and answers at the address.
        inside: Looks into a lease's workload and answers at the address.
        place: Finds the place of a block and answers at the address.
        watchers: Sessions that watch.
        fleet: As it is at any moment; read only.
        failed: Learns of a defect.

    """

    def __init__(
        self,
        *,
        config: Config,
        catalog: Catalog,
        finder: Finder,
        publishing: Publishing,
        backends: WorkloadControl,
        tokens: LeaseTokens,
        post: Callable[[Event], None],
        reply: Callable[[Address, bytes], None],
        manage: Callable[[Address, Tenant, wire.Manage], None],
        inside: Callable[[Address, wire.Logs | wire.Exec], None],
        place: Callable[[Address, Tenant, BlockRequest, Sequence[str]], None],
        watchers: Watchers,
        fleet: Fleet,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._finder = finder
        self._publishing = publishing
        self._aliases = catalog.aliases
        self._backends = backends
        self._tokens = tokens
        self._post = post
        self._reply = reply
        self._manage = manage
        self._inside = inside
        self._place = place
        self._watchers = watchers
        self._fleet = fleet
        self._failed = failed
        self._open: dict[Address, ReplyContext] = {}
        self._askers: dict[RequestId, Address] = {}
        self._numbers: dict[SessionId, set[Address]] = {}

    # Deliver (see gateway.deliver) -----------------------------------------------------------

    def opened(self, session: SessionId, tenant: Tenant) -> None:
        """Note that a session exists."""
        del tenant  # Every request brings it along.
        self._numbers[session] = set()

    def lost(self, session: SessionId) -> None:
        """Note that a session is over: nobody reads its answers any more."""
        for to in tuple(self._numbers.pop(session, ())):
            self.forget(to)
        self._watchers.lost(session)
        self._post(SessionLost(session))

    def failed(self, error: BaseException) -> None:
        """Learn of a defect in a room that calls this one."""
        self._failed(error)

    async def request(
        self, to: Address, tenant: Tenant, message: Request, warnings: Sequence[str] = ()
    ) -> None:
        """Take a request that needs a search, or something of an external service, first."""
        if not isinstance(message, AllocationRequest):
            self.request_nowait(to, tenant, message, warnings)
            return
        alias, message = self._versioned(tenant, message)
        uri, allowance = message.policy_rule_uri, Allowance()
        warnings = [*warnings, *outranked(message)]
        try:
            if is_described(message):
                # The policy first: where it is not there, nothing needs to be searched.
                warnings += await self._catalog.freshness.fetch(uri, (), allowance, searching=True)
                message, found = await self._searched(tenant, message, allowance)
                warnings += found
                uri = ""
            warnings += await self._catalog.freshness.fetch(uri, self._wanted(message), allowance)
        except ServiceError as error:
            refusal = refusal_of(error)
            self._reply(to, refuse(refusal, message_id=message.id, warnings=warnings))
        else:
            self._admit(to, tenant, message, list(dict.fromkeys(warnings)), alias)

    def request_nowait(
        self, to: Address, tenant: Tenant, message: Request, warnings: Sequence[str] = ()
    ) -> bool:
        """Take a request; it is answered at `to`, now or later. False: `request` has to."""
        if isinstance(message, AllocationRequest):
            if is_described(message):
                return False
            alias, message = self._versioned(tenant, message)
            uri, wanted = message.policy_rule_uri, self._wanted(message)
            found = self._catalog.freshness.at_hand(uri, wanted)
            if found is None:
                return False
            self._admit(to, tenant, message, [*warnings, *outranked(message), *found], alias)
            return True
        if isinstance(message, BlockRequest):
            # The gateway keeps the order of the replies.
            self._place(to, tenant, message, warnings)
            return True
        self._operation(to, tenant, message)
        return True

    def _versioned(
        self, tenant: Tenant, message: AllocationRequest
    ) -> tuple[str, AllocationRequest]:
        """Return the alias that a request names, or "", and the request with a version in it."""
        alias = message.policy_rule_uri
        if alias not in self._aliases:
            return "", message
        version = self._publishing.choose(tenant, message)
        return alias, structs.replace(message, policy_rule_uri=version)

    def _admit(
        self,
        to: Address,
        tenant: Tenant,
        message: AllocationRequest,
        warnings: list[str],
        alias: str,
    ) -> None:
        verdict = self._ask(tenant, message, warnings)
        version = message.policy_rule_uri if alias else ""
        if isinstance(verdict, Refusal):
            reply = refuse(verdict, message_id=message.id, warnings=warnings, version=version)
            self._reply(to, reply)
            return
        # Existing clients get the two documented keys; whoever asks for more gets the id.
        shown = message.id is not None or message.explain or message.lease is not None
        ask, token = verdict
        context = ReplyContext(message.id, ask.id, token, shown, warnings)
        if alias:
            note = self._publishing.statistics(alias, version, tenant)
            context = replace(context, version=version, note=note, admitted_at=time.monotonic())
        self._remember(to, context)
        self._post(Asked(to, ask))

    def _wanted(self, message: AllocationRequest) -> tuple[ClusterId, ...] | None:
        """Return the clusters to have at hand: None for all; none where it is refused anyway."""
        named = message.candidates()
        too_many = named is not None and len(named) > self._config.candidates_max
        return () if too_many else named

    async def _searched(
        self, tenant: Tenant, message: AllocationRequest, allowance: Allowance
    ) -> tuple[AllocationRequest, list[str]]:
        """Name the candidates that a request describes; return it, and warnings for its reply."""
        body = message.filter or message.search
        assert body is not None
        action: SearchAction = "filter" if message.filter else "search"
        named = await self._catalog.search.ask(action, body, allowance)
        if named is None:
            found = await self._finder.find(
                action, body, tenant, allowance, at=action, candidates=True
            )
            ids, matched = tuple(map(ClusterId, found.ids)), found.matched
            warnings = found.warnings
        else:
            ids, matched, warnings = tuple(named), len(named), list[str]()
        if not ids:
            what = f"{matched} clusters match, but none is live" if matched else ""
            reason = f"{action}: {what or 'no cluster matches'}."
            expected = "a description that live clusters meet"
            raise ServiceError(Code.UNKNOWN_CLUSTERS, reason, field=action, expected=expected)
        limit = self._config.candidates_max
        if len(ids) > limit:
            warnings.append(f"Only the first {limit} of {len(ids)} clusters found were considered.")
        return structs.replace(message, clusters=ids[:limit], filter=None, search=None), warnings

    # ---------------------------------------------------------------------------------------

    def answer(self, to: Address, answer: Response) -> bytes | None:
        """Write the reply for an address, or return None where nobody listens any more."""
        context = self._open.get(to)
        if context is None:
            return None
        self.forget(to)
        if context.note is not None:
            now, waited = time.monotonic(), context.admitted_at == 0.0
            context.note(answer, None if waited else now - context.admitted_at, now)
        told = answer.lease if isinstance(answer, LeaseNews) else None
        return encode(
            answer,
            message_id=context.message_id,
            request=context.request if context.shown else "",
            warnings=context.warnings,
            version=context.version,
            workload=self._backends.seen(told) if told else None,
            token=self._token(context, told) if told else "",
        )

    def _token(self, context: ReplyContext, lease: Lease) -> str:
        """Return the token of a lease: as it was made for this ask, or made anew."""
        return context.token if lease.id == context.request else self._tokens.of(lease)

    def parked(self, to: Address) -> None:
        """Note that an ask waits in the queue: how long it takes says nothing of its policy."""
        context = self._open.get(to)
        if context is not None and context.note is not None:
            self._open[to] = replace(context, admitted_at=0.0)

    def forget(self, to: Address) -> None:
        """Note that an address was answered, or that nobody listens there any more."""
        context = self._open.pop(to, None)
        if context is not None:
            self._askers.pop(context.request, None)
        self._numbers.get(to.session, set()).discard(to)

    def asker(self, request: RequestId) -> Address | None:
        """Return where the answer to `request` is awaited, if anywhere."""
        return self._askers.get(request)

    def _remember(self, to: Address, context: "ReplyContext") -> None:
        self._open[to] = context
        if context.request:
            self._askers[context.request] = to
        self._numbers.get(to.session, set()).add(to)

    def _named(self, to: Address, name: str) -> RequestId:
        """Return the request that `name` means: its server's id, or its message's own `id`."""
        for other in self._numbers.get(to.session, ()):
            context = self._open[other]
            own = context.message_id
            if context.request and own is not None and str(own) == name:
                return context.request
        return RequestId(name)

    def _ask(
        self, tenant: Tenant, message: AllocationRequest, warnings: list[str]
    ) -> tuple[Ask, str] | Refusal:
        """Return what a message asks for, and the token of the lease that it may be granted."""
        record = self._catalog.memory.policy(message.policy_rule_uri)
        if record is None:
            return unknown_policy(message.policy_rule_uri, self._catalog.memory.policy_uris())
        refusal = self._refuse_unserved(message)
        if refusal is not None:
            return refusal
        demand, provision = message.demand(), message.provisioning()
        if provision is not None:
            settled = self._backends.settled(provision, 1 if demand is None else demand.nodes)
            if isinstance(settled, Refusal):
                return settled
            provision = settled
        candidates = self._candidates(message, warnings)
        if isinstance(candidates, Refusal):
            return candidates
        nodes = self._backends.nodes(provision)
        candidates, avoid = within_reach(self._fleet, nodes, candidates, demand)
        inputs = message.inputs
        parameters: Mapping[str, Any] = message.parameters or {}
        settings: Mapping[str, Any] = message.settings or {}
        if record.schemas is not None:
            try:
                inputs = record.schemas.given(inputs)
                parameters, settings = record.schemas.overrides(parameters, settings)
            except ServiceError as error:
                return refusal_of(error)
        drawn = secrets.token_bytes(16)  # One call to the system for both.
        request = RequestId(drawn[:8].hex())
        token = self._tokens.make(request)
        ask = Ask(
            id=request,
            tenant=tenant,
            policy=record.ref,
            candidates=candidates,
            demand=demand,
            terms=message.terms(),
            provision=provision,
            inputs=inputs,
            parameters=parameters,
            settings=settings,
            token_digest=digest(token),
            seed=int.from_bytes(drawn[8:]) >> 1,
            explain=message.explain,
            dry_run=message.dry_run,
            size=size_of(message),
            avoid=avoid,
        )
        return ask, token

    def _refuse_unserved(self, message: AllocationRequest) -> Refusal | None:
        if message.lease is not None:
            longest = self._config.lease_ttl_seconds_max
            if message.lease.ttl_seconds > longest:
                reason = f"lease.ttl_seconds: expected at most {longest:g}; renew it for longer."
                expected = f"at most {longest:g}"
                return Refusal(Code.BAD_MESSAGE, reason, "lease.ttl_seconds", expected)
        if message.provision is not None:
            if message.lease is None:
                reason = "provision: expected a `lease` beside it; only a lease starts anything."
                return Refusal(Code.BAD_MESSAGE, reason, "lease", "a lease to start it under")
            asked = message.provision
            if asked.attempts_max is not None and asked.on_failure != "requeue":
                expected = '`on_failure` "requeue" beside it; else there is one start'
                reason = f"provision.attempts_max: expected {expected}."
                return Refusal(Code.BAD_MESSAGE, reason, "provision.attempts_max", expected)
            longest = self._config.keep_warm_seconds_max
            if asked.keep_warm_seconds > longest:
                reason = f"provision.keep_warm_seconds: expected at most {longest:g}."
                field_name, expected = "provision.keep_warm_seconds", f"at most {longest:g}"
                return Refusal(Code.BAD_MESSAGE, reason, field_name, expected)
        return None

    def _candidates(
        self, message: AllocationRequest, warnings: list[str]
    ) -> tuple[ClusterId, ...] | Refusal | None:
        limit, memory = self._config.candidates_max, self._catalog.memory
        named = message.candidates()
        if named is None:
            live = memory.live_ids()
            if len(live) <= limit:
                return None
            what = f"only the first {limit} of {len(live)} live clusters were considered"
            warnings.append(f"No clusters, filter or search was given: {what}.")
            return live[:limit]
        if len(named) > limit:
            reason = f"clusters: expected at most {limit} ids, got {len(named)}."
            return Refusal(Code.BAD_MESSAGE, reason, "clusters", f"at most {limit} ids")
        missing = [name for name in named if not memory.is_live(name)]
        if not missing:
            return named
        gone = [name for name in missing if not memory.known(name)]
        asleep = [name for name in missing if memory.known(name)]
        for names, what in ((gone, "Unknown clusters"), (asleep, "Clusters that are not live")):
            if names:
                more = f" and {len(names) - WARNED_MAX} more" if len(names) > WARNED_MAX else ""
                listed = ", ".join(names[:WARNED_MAX])
                warnings.append(f"{what} were left out: {listed}{more}.")
        candidates = tuple(name for name in named if memory.is_live(name))
        if not candidates:
            reason = f"clusters: none of those named ({len(named)}) is registered and live."
            expected = "ids of live clusters"
            details = {"unknown": missing[:WARNED_MAX]}
            return Refusal(Code.UNKNOWN_CLUSTERS, reason, "clusters", expected, details)
        return candidates

    def _operation(  # noqa: C901, PLR0912  # One case per operation.
        self, to: Address, tenant: Tenant, message: wire.Operation
    ) -> None:
        self._remember(to, ReplyContext(message.id))
        match message:
            case wire.Release():
                self._post(ReleaseAsked(to, RequestId(message.lease), digest(message.token)))
            case wire.Renew():
                ttl, longest = message.ttl_seconds, self._config.lease_ttl_seconds_max
                if ttl is not None and ttl > longest:
                    reason = f"ttl_seconds: expected at most {longest:g}; renew again for longer."
                    refusal = Refusal(
                        Code.BAD_MESSAGE, reason, "ttl_seconds", f"at most {longest:g}"
                    )
                    self._tell(to, refusal)
                else:
                    shown = digest(message.token)
                    self._post(RenewAsked(to, RequestId(message.lease), shown, ttl))
            case wire.Flush():
                self._post(FlushAsked(to, tenant, ClusterId(message.cluster) or None))
            case wire.Cancel():
                self._post(CancelAsked(to, self._named(to, message.request), tenant))
            case wire.Status():
                self._post(Inquired(to, "status", tenant, message.subject))
            case wire.Why():
                self._post(Inquired(to, "why", tenant, message.subject))
            case wire.QueueListing():
                self._list(to, "queue", tenant, message)
            case wire.LeaseListing():
                self._list(to, "leases", tenant, message)
            case wire.FleetListing():
                self._list(to, "fleet", tenant, message)
            case wire.Manage():
                self._manage(to, tenant, message)
            case wire.Logs() | wire.Exec():
                self._inside(to, message)
            case wire.WatchTopics():
                self._tell(to, self._watch(to, tenant, message))
            case wire.WhatIf() | wire.Resume():
                name = type(message).__struct_config__.tag
                reason = f"The operation “{name}” is not served yet."
                self._tell(to, Refusal(Code.UNSUPPORTED, reason, "op"))
            case _:
                assert_never(message)

    def _watch(self, to: Address, tenant: Tenant, message: wire.WatchTopics) -> Response:
        try:
            return Information({"topics": self._watchers.add(to.session, tenant, message.topics)})
        except ServiceError as error:
            return refusal_of(error)

    def _list(
        self,
        to: Address,
        question: Any,
        tenant: Tenant,
        message: "wire.QueueListing | wire.LeaseListing | wire.FleetListing",
    ) -> None:
        filters = message.equalities()
        self._post(Inquired(to, question, tenant, "", filters, message.cursor, message.limit))

    def _tell(self, to: Address, answer: Response) -> None:
        reply = self.answer(to, answer)
        if reply is not None:
            self._reply(to, reply)
